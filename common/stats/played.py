"""What a number of finished games says."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from troupe.common.stats.scores import human_normalized


@dataclass(frozen=True)
class Result:
    """Finished games, by number: the first of every slot, then the second ones, and so on."""

    returns: list[float]
    steps: list[int]
    tasks: list[str] = field(default_factory=list)
    """Which of several each was; empty where an environment is but one."""
    told: dict[str, float] = field(default_factory=dict)
    """Means of what the environment says of its episodes, such as `is_success`."""

    @property
    def mean_return(self) -> float:
        """Mean unclipped return."""
        return float(np.mean(self.returns))

    def by_task(self) -> dict[str, float]:
        """Mean return of each task that was played."""
        found: dict[str, list[float]] = {}
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
        family = env_id.partition(":")[0]
        each = [human_normalized(f"{family}:{task}", score) for task, score in self.by_task().items()]
        known = [score for score in each if score is not None]
        if not known:
            return {}
        capped = [min(1.0, score) for score in known]
        return {
            "human_normalized": float(np.mean(known)),
            "human_normalized_capped": float(np.mean(capped)),
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
        return metrics | {f"eval/return/{task}": mean for task, mean in self.by_task().items()}
