"""What a number of finished games says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from troupe.common.stats.scores import human_normalized

LEVELS_PLAYED, LEVELS = "eval/levels_played", "eval/levels"
"""Metrics of an evaluation: how many of an environment's levels had a game, of how many that it has."""


def levels_missed(metrics: Mapping[str, float]) -> str:
    """`12 of 30 levels` where the evaluation in `metrics` played some only; else empty."""
    played, levels = metrics.get(LEVELS_PLAYED), metrics.get(LEVELS)
    if played is None or levels is None or played >= levels:
        return ""
    return f"{played:.0f} of {levels:.0f} levels"


@dataclass(frozen=True)
class Result:
    """Finished games, by number: the first of every slot, then the second ones, and so on."""

    returns: list[float]
    steps: list[int]
    tasks: list[str] = field(default_factory=list)
    """Which of several each was; empty where an environment is but one."""
    told: dict[str, float] = field(default_factory=dict)
    """Means of what the environment says of its episodes, such as `is_success`."""
    levels: int = 0
    """Tasks that the environment has; 0 where it is but one. Not all of them need have been played."""
    failures: int = 0
    """Further games that the environment did not finish; others were played in their place."""
    first_failure: str = ""

    @property
    def mean_return(self) -> float:
        """Mean unclipped return."""
        return float(np.mean(self.returns))

    def by_task(self) -> dict[str, float]:
        """Mean return of each task that was played."""
        found: dict[str, list[float]] = {}
        # `tasks` is empty where the environment is one: then nothing is to be told apart.
        for task, score in zip(self.tasks, self.returns, strict=False):
            found.setdefault(task, []).append(score)
        return {task: float(np.mean(scores)) for task, scores in sorted(found.items())}

    def human_normalized(self, env_id: str) -> dict[str, float]:
        """`human_normalized`; of several tasks its mean, and `human_normalized_capped`, with none above 1.

        Empty where no scores of humans are known. Espeholt et al. 2018 report the capped mean of DMLab-30.
        """
        if not self.tasks:
            one = human_normalized(env_id, self.mean_return)
            return {} if one is None else {"human_normalized": one}
        known = list(self.human_normalized_by_task(env_id).values())
        if not known:
            return {}
        capped = [min(1.0, score) for score in known]
        return {
            "human_normalized": float(np.mean(known)),
            "human_normalized_capped": float(np.mean(capped)),
        }

    def human_normalized_by_task(self, env_id: str) -> dict[str, float]:
        """The score of each task that was played, as far as those of humans are known."""
        family = env_id.partition(":")[0]
        each = {task: human_normalized(f"{family}:{task}", mean) for task, mean in self.by_task().items()}
        return {task: score for task, score in each.items() if score is not None}

    def task_metrics(self, env_id: str, prefix: str) -> dict[str, float]:
        """Mean return and score of each task: `PREFIX/return/TASK`, `PREFIX/human_normalized/TASK`."""
        scores = self.human_normalized_by_task(env_id)
        return {f"{prefix}/return/{task}": mean for task, mean in self.by_task().items()} | {
            f"{prefix}/human_normalized/{task}": score for task, score in scores.items()
        }

    @property
    def std_return(self) -> float:
        """Standard deviation of the unclipped returns (of the sample, n - 1); 0 for one game."""
        return float(np.std(self.returns, ddof=1)) if len(self.returns) > 1 else 0.0

    @property
    def mean_steps(self) -> float:
        """Mean length in agent steps."""
        return float(np.mean(self.steps))

    def metrics(self, env_id: str, version: int, seconds: float) -> dict[str, float]:
        """What the record of a run has of an evaluation: `eval/...`; `seconds` were spent on playing."""
        metrics = {
            "eval/episode_return": self.mean_return,
            "eval/episode_return_std": self.std_return,
            "eval/episode_return_min": min(self.returns),
            "eval/episode_return_max": max(self.returns),
            "eval/episode_length": self.mean_steps,
            "eval/episodes": float(len(self.returns)),
            "eval/version": float(version),
            "eval/duration_s": seconds,
        }
        metrics |= {f"eval/{name}": value for name, value in self.human_normalized(env_id).items()}
        metrics |= {f"eval/env/{name}": value for name, value in self.told.items()}
        if self.tasks:
            metrics |= {LEVELS_PLAYED: float(len(self.by_task())), LEVELS: float(self.levels)}
        return metrics | self.task_metrics(env_id, "eval")
