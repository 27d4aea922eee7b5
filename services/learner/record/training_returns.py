"""What the games say that actors have finished: a row of means, and of several levels a score over all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from troupe.common.stats.played import Result
from troupe.common.stats.scores import human_normalized
from troupe.common.wire.control.messages import TelemetryFields


class TrainingReturns:
    """Collects games until the next row is due.

    Few levels of many end a game between two rows, and others in the next one: their mean would tell which
    ones, not how well they are played. The score over all levels is written when each has had a game, and the
    next one begins anew, as Espeholt et al. 2018 do.
    """

    def __init__(self, env_id: str, tasks: Sequence[str] = ()) -> None:
        """`tasks` are those of the environment, `EnvSpec.tasks`; other names in reports do not count."""
        self._env_id = env_id
        self._tasks = frozenset(tasks)
        self._games: list[tuple[float, float]] = []
        self._scores: list[float] = []
        self._named: list[tuple[str, float]] = []
        self._of_round: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))

    def take(self, fields: TelemetryFields) -> None:
        """Take in the games of a report, and their levels."""
        self._games += [(game.episode_return, float(game.steps)) for game in fields.episodes]
        self._scores += [game.score for game in fields.episodes if game.score is not None]
        # An actor without levels sends none; a forged list may be longer or shorter.
        for game, task in zip(fields.episodes, fields.tasks, strict=False):
            if task in self._tasks:
                self._named.append((task, game.episode_return))
                total, count = self._of_round[task]
                self._of_round[task] = total + game.episode_return, count + 1

    def row(self) -> dict[str, float]:
        """Metrics of the games since the last call; none where there were none."""
        if not self._games:
            return {}
        count = len(self._games)
        score = sum(game[0] for game in self._games) / count
        lengths = [game[1] for game in self._games]
        row = {
            "train/episode_return": score,
            "train/episode_length": sum(lengths) / count,
            "train/episode_length_min": min(lengths),
            "train/episode_length_max": max(lengths),
            "train/episodes": float(count),
        }
        normalized = human_normalized(self._env_id, score)
        if normalized is not None:
            row["train/human_normalized"] = normalized
        if self._scores:
            row["train/score"] = sum(self._scores) / len(self._scores)
        played = Result([game[1] for game in self._named], [], [game[0] for game in self._named])
        row |= played.task_metrics(self._env_id, "train") | self._over_all_levels()
        for each in (self._games, self._scores, self._named):
            each.clear()
        return row

    def _over_all_levels(self) -> dict[str, float]:
        """The score of the round that is complete; none while a level waits for its first game."""
        if not self._tasks or len(self._of_round) < len(self._tasks):
            return {}
        means = {task: total / count for task, (total, count) in self._of_round.items()}
        self._of_round.clear()
        scores = Result(list(means.values()), [], list(means)).human_normalized(self._env_id)
        return {f"train/{name}": value for name, value in scores.items()}
