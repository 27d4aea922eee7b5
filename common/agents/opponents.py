"""Opponents in training: in some games, earlier versions of the policy play against the one that learns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from troupe.common import system
from troupe.common.agents import make_agent
from troupe.common.agents.base import Act, Agent, Inputs
from troupe.common.envs.sides import Sides, check_sides, score
from troupe.common.stats.ratings import win_rate_weights

if TYPE_CHECKING:
    from troupe.common.config import Config
    from troupe.common.config.schema import ActorConfig
    from troupe.common.envs import EnvSpec, Step

KEEP = 0.99
"""Of what earlier games count with each new one, since the policy changes: as in AlphaStar's pseudocode."""


def with_others(
    act: Act,
    others: Iterable[tuple[Agent, list[int]]],
    inputs: Inputs,
    epsilons: np.ndarray,
    rng: np.random.Generator,
) -> Act:
    """What all slots do: `act`, but for the slots of `others`, each with who acts there instead.

    Who acts in a slot from the beginning of an episode to its end remembers what it has seen itself: the
    memory of a slot is that of its player.
    """
    action = np.array(act.action)
    memory = None if act.memory is None else np.array(act.memory)
    for agent, slots in others:
        done = agent.act(inputs.rows(slots), epsilons[slots], rng)
        action[slots] = done.action
        if memory is not None and done.memory is not None:
            memory[slots] = done.memory
    return Act(action, act.extras, memory)


@dataclass(eq=False)
class Frozen:
    """An earlier version, and what was scored against it.

    Attributes:
        version: of the parameters.
        agent: acts with them.
        games: against it, of which older ones count less.
        points: in these: 1 for a win of the policy that learned, 0.5 for a draw.
    """

    version: int
    agent: Agent
    games: float = 0.0
    points: float = 0.0

    @property
    def win_rate(self) -> float:
        """Of the policy that learned, with one drawn game more: a lucky first one must not decide."""
        return (self.points + 0.5) / (self.games + 1)


class Opponents:
    """Chooses who plays in the slots of one vector of environments, and acts for earlier versions.

    In a share of the games, one side learns, and all others are played by one earlier version. The side that
    learns changes from one of these games of a copy to the next. Everything else is a game of the newest
    parameters with themselves, in which all learn.

    Attributes:
        slots: played by earlier versions now: nothing is learned from them.
    """

    def __init__(self, config: ActorConfig, spec: EnvSpec, make: Callable[[], Agent], seed: int) -> None:
        """`make` makes an agent of the run. Raises ConfigError where the environment has no sides."""
        check_sides(spec, "actor.opponents")
        self._config, self._spec, self._make = config, spec, make
        self._rng = system.generator(seed)
        self._kept: list[Frozen] = []
        self._games, self._points = 0, 0.0

    @staticmethod
    def of(config: Config, spec: EnvSpec, seed: int) -> Opponents | None:
        """Those of a run; None where it has none."""
        if config.actor.opponents == "none":
            return None
        make = partial(make_agent, config.agent, spec, seed=config.run.seed)
        return Opponents(config.actor, spec, make, seed)

    def begin(self, slots: int) -> None:
        """New games begin in so many slots; what was kept of earlier versions stays."""
        self._sides = Sides(self._spec, slots)
        # Not all alike, or a first short game would always be that of the same side.
        self._home = [copy % self._sides.count for copy in range(self._sides.copies)]
        self._away: list[Frozen | None] = [None] * self._sides.copies
        self._undrawn = set(range(self._sides.copies))
        self._others: list[tuple[Agent, list[int]]] = []
        self.slots: list[int] = []

    def act(self, act: Act, inputs: Inputs, epsilons: np.ndarray, agent: Agent, version: int) -> Act:
        """What all slots do: `act`, which `agent` has chosen with parameters `version`, but for `slots`.

        An earlier version explores as the slot does.
        """
        self._keep(agent, version)
        self._draw()
        return with_others(act, self._others, inputs, epsilons, self._rng) if self.slots else act

    def take(self, step: Step) -> None:
        """Take in what all slots did: games that are over count, and others begin."""
        for copy, returns in self._sides.take(step).items():
            self._undrawn.add(copy)
            frozen, home = self._away[copy], self._home[copy]
            if frozen is None:
                continue
            self._home[copy] = (home + 1) % self._sides.count
            points = None if returns is None else score(returns, home)
            if points is not None:
                frozen.games = KEEP * frozen.games + 1
                frozen.points = KEEP * frozen.points + points
                self._games, self._points = self._games + 1, self._points + points

    def metrics(self) -> dict[str, float]:
        """The score since the last call, and that against each version that is kept, the newest first."""
        metrics = {"actor/opponent_games": float(self._games)}
        if self._games:
            metrics["actor/opponent_win_rate"] = self._points / self._games
        self._games, self._points = 0, 0.0
        for place, frozen in enumerate(reversed(self._kept), start=1):
            metrics[f"actor/opponent_version/{place}"] = float(frozen.version)
            metrics[f"actor/opponent_win_rate/{place}"] = frozen.win_rate
        return metrics

    def _keep(self, agent: Agent, version: int) -> None:
        """Keep a copy of the parameters that act now, if enough versions have come since the last one."""
        # A learner that was restarted may go on from an earlier one.
        self._kept = [frozen for frozen in self._kept if frozen.version <= version]
        if self._kept and version - self._kept[-1].version < self._config.opponents_period_versions:
            return
        frozen = Frozen(version, self._make())
        frozen.agent.load_params(agent.params())
        self._kept = [*self._kept, frozen][-self._config.opponents_kept :]

    def _draw(self) -> None:
        """Say who plays in the games that begin."""
        if not self._undrawn:
            return
        exponent = self._config.opponents_exponent if self._config.opponents == "win_rate" else 0.0
        weights = win_rate_weights([frozen.win_rate for frozen in self._kept], exponent)
        for copy in sorted(self._undrawn):
            against = self._rng.random() < self._config.opponents_share
            chosen = self._kept[self._rng.choice(len(weights), p=weights)] if against else None
            self._away[copy] = chosen
        self._undrawn.clear()
        self._others = []
        # In a fixed order, on which the draws of their actions depend.
        for frozen in dict.fromkeys(each for each in self._away if each is not None):
            copies = [copy for copy, each in enumerate(self._away) if each is frozen]
            slots = [slot for copy in copies for slot in self._sides.away(copy, self._home[copy])]
            self._others.append((frozen.agent, slots))
        self.slots = [slot for _, slots in self._others for slot in slots]
