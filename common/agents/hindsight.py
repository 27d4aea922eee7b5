"""Hindsight for agents that store transitions: which accumulators relabel goals, and which cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from troupe.common.agents.base import Accumulator
from troupe.common.data.accumulators.hindsight import HindsightAccumulator
from troupe.common.data.accumulators.n_step import NStepAccumulator
from troupe.common.envs.base import EnvSpec
from troupe.common.envs.goals import EnvGoals
from troupe.common.errors import ConfigError

if TYPE_CHECKING:
    from troupe.common.config import Config


class Hindsight:
    """Makes accumulators of a run store steps again with goals that were reached later."""

    def __init__(self, config: Config, spec: EnvSpec) -> None:
        """Raises ConfigError where the environment has no goals."""
        self._goals = EnvGoals(config.env, spec)
        self._copies = config.actor.hindsight_copies
        self._window_steps = config.actor.hindsight_window_steps
        self._seeds = np.random.SeedSequence(config.run.seed)
        self._algorithm = config.agent.algorithm

    def around(self, accumulator: Accumulator, chunk_steps: int) -> Accumulator:
        """One that relabels what this one takes; raises ConfigError where it takes no transitions."""
        if not isinstance(accumulator, NStepAccumulator):
            raise ConfigError(
                f"actor.hindsight_copies needs single transitions, which {self._algorithm} does not store "
                "as it is configured: take apex, or sac without memory, or set it to 0"
            )
        return HindsightAccumulator(
            accumulator,
            self._goals,
            copies=self._copies,
            window_steps=self._window_steps,
            chunk_steps=chunk_steps,
            # A stream for each slot: with one for all, goals would depend on the order in which episodes end.
            rng=np.random.default_rng(self._seeds.spawn(1)[0]),
        )


def hindsight_of(config: Config, spec: EnvSpec) -> Hindsight | None:
    """What a run's accumulators need to relabel goals; None where it does not."""
    return Hindsight(config, spec) if config.actor.hindsight_copies else None
