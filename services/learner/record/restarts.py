"""How often each service has been started again, also where the learner itself was."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from troupe.common.runtime.files import read_status


class Restarts:
    """Counts since the run was started or resumed by somebody.

    Attributes:
        of_learner: how often this learner has come after one that died.
    """

    def __init__(self, run_dir: Path, *, is_resumed: bool) -> None:
        """Take up what a learner that died has left in the status; one that ended in order begins anew."""
        before = read_status(run_dir) if is_resumed else {}
        died = before.get("ended") is False
        self.of_learner = max(0, before.get("restarts", 0)) + 1 if died else 0
        # A roster counts from the learner's own start.
        self._before = {peer["name"]: _count(peer) for peer in before.get("peers", [])} if died else {}

    def add_to(self, peers: Sequence[dict[str, Any]]) -> None:
        """Have each of a roster's peers say what was counted before, too."""
        for peer in peers:
            peer["restarts"] += self._before.get(peer["name"], 0)


def _count(peer: dict[str, Any]) -> int:
    """What a status says of a peer, which may be of another version."""
    count = peer.get("restarts", 0)
    return max(0, count) if isinstance(count, int) else 0
