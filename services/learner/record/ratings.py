"""Elo of the versions that are evaluated, by games against earlier ones, which outlast the learner."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from troupe.common import system
from troupe.common.errors import CheckpointError
from troupe.common.runtime.checkpoint import RATED, CheckpointWriter, load_newest, newest_first
from troupe.common.stats.ratings import (
    OPPONENT_GAMES,
    OPPONENT_VERSION,
    OPPONENT_WIN_RATE,
    Match,
    elo_ratings,
)
from troupe.common.wire import types
from troupe.common.wire.codec import WireError
from troupe.common.wire.control.params import Published, decode_params

_log = logging.getLogger(__name__)

MAX_KEPT = 8
"""Earlier versions: of more, every second one goes, and from then on they are taken half as often."""
RECENT = 4
"""The newest of these are played in turn: games against much weaker ones would tell little."""
MAX_GAMES = 1 << 20
MAX_MATCHES = 1 << 10
"""Of a saved file. A run has about half of `MAX_KEPT` more each time that its evaluations have doubled."""


class _Saved(msgspec.Struct):
    """What a file says beside the parameters."""

    kept: list[tuple[types.Version, list[types.Tensor], types.StepsMade, types.StepsMade]]
    matches: Annotated[list[Match], msgspec.Meta(max_length=MAX_MATCHES)]
    evaluations: types.StepsMade
    spacing: Annotated[int, msgspec.Meta(ge=1)]


class Ratings:
    """Rates each version by one match, and chooses whom the next one plays.

    The first version that was evaluated has the rating 0. Of the matches, those between versions that are
    or were kept are remembered: all others tell of one version only, whose rating is already written.
    """

    def __init__(
        self,
        checkpoints: Path,
        known: int,
        offer: Callable[[Published | None], None],
    ) -> None:
        """Go on with what an earlier process has saved.

        Args:
            checkpoints: `RUN/checkpoints`.
            known: the newest version of the run so far; later ones were of parameters that are lost.
            offer: is told whom the next version plays.
        """
        self._directory = checkpoints / RATED
        self._offer = offer
        self._writer = CheckpointWriter(self._directory, keep=1)
        self._kept: list[Published] = []
        self._matches: list[Match] = []
        self._evaluations, self._spacing = 0, 1
        if known >= 0 and next(newest_first(self._directory), None) is not None:
            self._restore(known)
        self._choose()

    def evaluated(self, played: Published, metrics: dict[str, float]) -> dict[str, float]:
        """The rating of a version by what its evaluation says; none where it has played nobody."""
        version = played.version
        match = self._match(version, metrics)
        if self._kept and match is None:
            return {}
        matches = self._matches if match is None else [*self._matches, match]
        oldest = min([version, *(each.other for each in matches)])
        rating = elo_ratings(matches, oldest)[version]
        if self._evaluations % self._spacing == 0:
            self._matches = matches
            self._keep(played)
        self._evaluations += 1
        self._choose()
        return {"eval/elo": rating.elo, "eval/elo_error": rating.error}

    def _match(self, version: int, metrics: dict[str, float]) -> Match | None:
        """What was played, as far as an evaluator can be believed: it may say any number, or none (nan)."""
        opponent, games = metrics.get(OPPONENT_VERSION, -1.0), metrics.get(OPPONENT_GAMES, 0.0)
        rate = metrics.get(OPPONENT_WIN_RATE, -1.0)
        # Also one that is kept no more: evaluations begin before the one before them is taken in.
        known = {*(kept.version for kept in self._kept), *(match.one for match in self._matches)}
        earlier = opponent in known and opponent < version
        if not earlier or not 0 < games <= MAX_GAMES or not 0 <= rate <= 1:
            return None
        return Match(version, int(opponent), games, rate * games)

    def _keep(self, published: Published) -> None:
        self._kept.append(published)
        if len(self._kept) > MAX_KEPT:
            self._kept, self._spacing = self._kept[::2], 2 * self._spacing
        if not self._writer.wait(0.0):
            return  # the next one that is kept is saved together with this one
        meta = {
            "steps": published.steps,
            "kept": [[each.version, each.manifest, each.steps, each.updates] for each in self._kept],
            "matches": self._matches,
            "evaluations": self._evaluations + 1,
            "spacing": self._spacing,
        }
        arrays = {str(each.version): each.blob for each in self._kept}
        self._writer.begin(arrays, meta, lambda path: _log.debug("saved the rated versions: %s", path))

    def _choose(self) -> None:
        """Say whom the next version plays."""
        if self._kept:
            recent = self._kept[-RECENT:]
            self._offer(recent[-1 - self._evaluations % len(recent)])

    def _restore(self, known: int) -> None:
        try:
            arrays, meta, _ = load_newest(self._directory)
            saved = msgspec.convert(meta, _Saved)
            kept = []
            for version, manifest, steps, updates in saved.kept:
                blob = arrays[str(version)]
                decode_params(manifest, blob)
                kept.append(Published(version, manifest, blob, steps, updates, system.monotonic()))
            _check_matches(saved.matches, [each.version for each in kept])
        except (CheckpointError, WireError, KeyError, ValueError) as error:
            _log.warning("cannot read the rated versions, ratings start again at 0: %s", error)
            return
        self._evaluations, self._spacing = saved.evaluations, saved.spacing
        self._kept = [each for each in kept if each.version <= known]
        self._matches = [match for match in saved.matches if match.one <= known]

    def wait(self, timeout_s: float) -> None:
        """Wait, within a limit, for what is being written."""
        self._writer.wait(timeout_s)


def _check_matches(matches: Sequence[Match], kept: Sequence[int]) -> None:
    """Raise ValueError where matches of a file cannot be, or do not lead from every version to the first."""
    for one, other, games, points in matches:
        if not (other < one and 0 < games <= MAX_GAMES and 0 <= points <= games):
            raise ValueError(f"version {one} cannot have {points} points of {games} games against {other}")
    # Each leads to an earlier version, so that a chain ends only at one that has played none.
    ends = {*kept, *(match.other for match in matches)} - {match.one for match in matches}
    if ends != {*kept[:1]}:
        raise ValueError("not all versions are connected by matches")
