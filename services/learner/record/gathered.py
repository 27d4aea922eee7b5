"""Puts the parts of an evaluation together, which several evaluators may have played."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from troupe.common import system
from troupe.common.config import Config
from troupe.common.stats.played import Result
from troupe.common.stats.ratings import OPPONENT_GAMES, OPPONENT_VERSION, OPPONENT_WIN_RATE
from troupe.common.wire.control.member import games_of_part
from troupe.common.wire.control.messages import Game
from troupe.common.wire.control.params import Published
from troupe.services.learner.control.reports import Report

_log = logging.getLogger(__name__)

TOLD = "eval/env/"
OF_A_MATCH = (OPPONENT_VERSION, OPPONENT_GAMES, OPPONENT_WIN_RATE)


@dataclass(frozen=True)
class Evaluation:
    """The games of one version, from every evaluator.

    Attributes:
        version: of the parameters.
        metrics: what the games say together, by name.
        games: each of them.
        tasks: the level of each, where the environment has several.
        played: the parameters; None where the learner has never published any.
    """

    version: int
    metrics: dict[str, float]
    games: list[Game]
    tasks: list[str]
    played: Published | None = None


class Gathered:
    """The parts of the newest evaluation that have come. The control server has checked whose each was.

    Attributes:
        given_up: the newest version of which no game could be played.
        trouble: why games of the evaluation that ended last could not be played; empty where all were.
    """

    def __init__(self, config: Config, tasks: Sequence[str] = ()) -> None:
        """`tasks` are those of the environment, `EnvSpec.tasks`; other names in reports do not count."""
        self.episodes, self._timeout_s = config.evaluator.episodes, config.evaluator.timeout_s
        self._part_games = config.evaluator.part_games
        self._env_id = config.env.id
        self.given_up, self.trouble = -1, ""
        self._version = -1
        self._parts: dict[int, Report] = {}
        self._begun_s = 0.0
        self._tasks = frozenset(tasks)

    def add(self, report: Report, part: int, *, complete: bool = False) -> list[Evaluation]:
        """Take in a part, and give back what is an evaluation now.

        With `complete`, the run has all of its steps, which cuts the evaluation of an older version short:
        what has come of it is let go, and else returned, for its time is over.
        """
        version = int(report.metrics["eval/version"])
        if version < self._version or (version == self._version and not self._parts):
            return []  # it was given up
        before: list[Evaluation] = []
        if version > self._version:
            before = [] if complete else self.end()
            self._parts = {}
            self._version, self._begun_s = version, system.monotonic()
        self._parts[part] = report
        come = sum(games_of_part(each, self.episodes, self._part_games) for each in self._parts)
        return before + (self.end() if come >= self.episodes else [])

    def expired(self) -> list[Evaluation]:
        """What has come of an evaluation whose time is over."""
        late = bool(self._parts) and system.monotonic() - self._begun_s > self._timeout_s
        return self.end() if late else []

    def end(self) -> list[Evaluation]:
        """What has come of the newest evaluation: none, or all of one; later parts of it count no more."""
        # In the order of the parts, not of their arrival, so that the same games are listed the same way.
        parts = [part for _, part in sorted(self._parts.items())]
        self._parts = {}
        if not parts:
            return []
        games = [game for part in parts for game in part.fields.episodes]
        is_news = not self.trouble
        self.trouble = next((part.fields.trouble for part in parts if part.fields.trouble), "")
        if not games:
            self.given_up = self._version
            if is_news:
                _log.warning("version %d cannot be evaluated: %s", self._version, self.trouble)
            return []
        tasks = [task for part in parts for task in part.fields.tasks]
        # All or none: a mean by level over some of the games would look like one over all.
        if len(tasks) < len(games) or not self._tasks.issuperset(tasks):
            tasks = []
        if len(games) < self.episodes:
            _log.warning(
                "the evaluation of version %d has %d of %d episodes: %s",
                self._version,
                len(games),
                self.episodes,
                self.trouble or "the others did not arrive",
            )
        returns = [game.episode_return for game in games]
        result = Result(returns, [game.steps for game in games], tasks, _told(parts), len(self._tasks))
        seconds = sum(part.metrics.get("eval/duration_s", 0.0) for part in parts)
        metrics = result.metrics(self._env_id, self._version, seconds)
        for part in parts:
            metrics |= {name: value for name, value in part.metrics.items() if name in OF_A_MATCH}
        return [Evaluation(self._version, metrics, games, tasks, parts[0].played)]


def _told(parts: list[Report]) -> dict[str, float]:
    """What the environment says of its episodes, over all parts that say it: each weighs as its games."""
    sums: dict[str, tuple[float, int]] = {}
    for part in parts:
        games = len(part.fields.episodes)
        for name, value in part.metrics.items():
            if name.startswith(TOLD):
                total, count = sums.get(name, (0.0, 0))
                sums[name] = total + value * games, count + games
    return {name.removeprefix(TOLD): total / count for name, (total, count) in sums.items()}
