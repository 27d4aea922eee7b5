"""Step sizes that change in the course of a run: with how much of it is done, or how far the policy moves."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from troupe.common.config.fields import AgentConfig, tunable


class LearningRateConfig(AgentConfig):
    """Fields of agents whose step size follows the progress of the run."""

    learning_rate: float = tunable(3e-4, "Initial learning rate of the optimiser.", gt=0)
    learning_rate_schedule: Literal["constant", "linear", "polynomial"] = tunable(
        "constant", "linear and polynomial: towards learning_rate_final at run.total_steps."
    )
    learning_rate_final: float = tunable(0.0, "Final value of the linear and polynomial schedules.", ge=0)
    learning_rate_power: float = tunable(1.0, "Exponent of the polynomial schedule.", gt=0)


class AdaptiveRateConfig(LearningRateConfig):
    """Fields of agents whose step size may also follow how far their policy moves."""

    learning_rate_schedule: Literal["constant", "linear", "polynomial", "kl"] = tunable(  # type: ignore[assignment]
        "constant",
        "kl: divide by 1.5 after a pass that moved the policy by more than twice kl_target, multiply by "
        "1.5 if by less than half; linear and polynomial: towards learning_rate_final at run.total_steps.",
    )
    kl_target: float = tunable(
        0.01, "Target for the KL(mu || pi) of a pass, in nats, for the schedule kl.", gt=0
    )
    learning_rate_min: float = tunable(1e-6, "Lower limit of the kl schedule.", gt=0)
    learning_rate_max: float = tunable(1e-2, "Upper limit of the kl schedule.", gt=0)


class LearningRate:
    """The step size of an optimiser, as `agent.learning_rate_schedule` says.

    With lr_0 and lr_1 `learning_rate` and `learning_rate_final`, and p the share of the run that is done, it
    is `lr_1 + (lr_0 - lr_1) (1 - p) ** power`; `linear` has the power 1.
    """

    def __init__(self, config: LearningRateConfig, optimizer: torch.optim.Optimizer) -> None:
        self._config = config
        self._adaptive = config if isinstance(config, AdaptiveRateConfig) else None
        self._optimizer = optimizer

    @property
    def value(self) -> float:
        """Of the next step."""
        return float(self._optimizer.param_groups[0]["lr"])

    @value.setter
    def value(self, value: float) -> None:
        for group in self._optimizer.param_groups:
            if isinstance(group["lr"], Tensor):  # a graph reads it where it lies
                group["lr"].fill_(value)
            else:
                group["lr"] = value

    @property
    def follows_kl(self) -> bool:
        """Whether it depends on `follow_kl`, and is therefore part of a checkpoint."""
        return self._adaptive is not None and self._adaptive.learning_rate_schedule == "kl"

    def follow_progress(self, progress: float) -> None:
        """Sets it for a run of which the share `progress` is done, if it depends on that."""
        config = self._config
        if config.learning_rate_schedule in ("linear", "polynomial"):
            power = config.learning_rate_power if config.learning_rate_schedule == "polynomial" else 1.0
            # A run may overshoot its total by a round of slots: a negative base would make a power complex.
            share = max(0.0, 1.0 - progress) ** power
            self.value = (
                config.learning_rate_final + (config.learning_rate - config.learning_rate_final) * share
            )

    def follow_kl(self, kl: Tensor) -> None:
        """Adapts it to how far a pass has moved the policy, in nats, if it depends on that."""
        config = self._adaptive
        if config is None or not self.follows_kl:
            return
        for group in self._optimizer.param_groups:
            rate = torch.as_tensor(group["lr"], dtype=torch.float64)
            kl = kl.to(rate.device)
            # As in rl_games and RSL-RL. PPO's adaptive penalty has the two numbers the other way round
            # (Schulman et al. 2017, section 4).
            down = (rate / 1.5).clamp(min=config.learning_rate_min)
            up = (rate * 1.5).clamp(max=config.learning_rate_max)
            rate = torch.where(kl < 0.5 * config.kl_target, up, rate)
            rate = torch.where(kl > 2.0 * config.kl_target, down, rate)
            if isinstance(group["lr"], Tensor):
                group["lr"].copy_(rate)  # nothing is read: this may be part of a graph
            else:
                group["lr"] = float(rate)
