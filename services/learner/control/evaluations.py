"""Which evaluator plays which games: the learner's book-keeping of one evaluation, without sockets."""

from __future__ import annotations

import math
from collections.abc import Collection

from troupe.common.errors import RefusedError
from troupe.common.wire import messages
from troupe.common.wire.control.member import games_of_part


class Evaluations:
    """Divides the games of an evaluation into parts, and hands each out until its games have come.

    What a part is follows from the configuration alone, and its seed from version and number, so every
    evaluation has the same games, whichever and however many evaluators play them. A part whose
    evaluator has left the run is handed out again.

    Args:
        episodes: games of an evaluation.
        part_games: games of a part, but for the last, which may have fewer.
        period_s: least seconds between the beginnings of two evaluations.
        timeout_s: after which an evaluation is given up, even if some still play.
    """

    def __init__(self, episodes: int, part_games: int, period_s: float, timeout_s: float) -> None:
        self.version = -1
        self._episodes, self._part_games = episodes, part_games
        self._period_s, self._timeout_s = period_s, timeout_s
        self._parts = math.ceil(episodes / part_games)
        self._begun_s = -math.inf
        self._holders: dict[int, int] = {}
        self._done: set[int] = set()

    def games(self, part: int) -> int:
        """How many games a part has."""
        return games_of_part(part, self._episodes, self._part_games)

    def next(
        self, asker: int, live: Collection[int], newest: int, stopping: bool, now_s: float
    ) -> int | None:
        """The part that a process shall play with `self.version`; None where there is nothing for it now.

        Args:
            asker: incarnation of the evaluator. What it has, and has not handed in, it is told again.
            live: incarnations of the evaluators in the run.
            newest: parameter version published last.
            stopping: the run is complete: its last version comes at once, in the place of an older one.
            now_s: monotonic time.
        """
        # One evaluation at a time, always of the newest version: a queue of them would only fall behind.
        if newest > self.version and self._may_begin(stopping, now_s):
            self.version, self._begun_s = newest, now_s
            self._holders, self._done = {}, set()
        if self._ended(now_s):
            return None
        # The answer may have been lost, or the evaluator may have a new socket: it plays on what it was
        # given.
        for part, holder in self._holders.items():
            if holder == asker:
                return part
        for part in range(self._parts):
            # Of a holder that has left, the games are lost; the seed of the part makes them the same ones
            # again.
            if part not in self._done and self._holders.get(part) not in live:
                self._holders[part] = asker
                return part
        return None

    def over(self, newest: int, stopping: bool, now_s: float) -> bool:
        """Whether nothing more will be evaluated in this run."""
        return stopping and self.version == newest and self._ended(now_s)

    def hand_in(self, holder: int, version: int, part: int, games: int | None) -> None:
        """Take note that a part has been played; None: that it cannot be.

        Raises `RefusedError` where it was another's to play.
        """
        if version != self.version or self._holders.get(part) != holder:
            raise RefusedError(
                messages.REFUSED_CLAIM,
                f"part {part} of the evaluation of version {version} is not its to play",
            )
        if games is not None and games != self.games(part):
            raise RefusedError(
                messages.REFUSED_CLAIM,
                f"{games} episodes in part {part} of an evaluation, which has {self.games(part)}",
            )
        del self._holders[part]
        self._done.add(part)

    def _may_begin(self, stopping: bool, now_s: float) -> bool:
        return stopping or (self._ended(now_s) and now_s >= self._begun_s + self._period_s)

    def _ended(self, now_s: float) -> bool:
        return len(self._done) == self._parts or now_s > self._begun_s + self._timeout_s
