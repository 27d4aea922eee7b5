"""Games between two policies, in environments of several agents: who plays which side, and how it ends.

A side is what wins or loses together: all agents of a role, or each agent where all have the same role
(`EnvSpec.sides`). One side of each copy is at home, the others are away.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from troupe.common.envs.base import EnvSpec, Step
from troupe.common.errors import ConfigError

if TYPE_CHECKING:
    from troupe.common.config import Config


def check_sides(spec: EnvSpec, field: str) -> None:
    """Raise ConfigError, which names the configuration's `field`, where nobody plays against anybody."""
    if len(set(spec.sides)) < 2:
        raise ConfigError(
            f"{field} needs an environment of several agents, such as pettingzoo:classic/rps-v2; {spec.id} "
            f"has {spec.agents}: leave it out"
        )


def check_opponents(config: Config, spec: EnvSpec) -> None:
    """Raise ConfigError where a run wants opponents, and its environment has none."""
    if config.actor.opponents != "none":
        check_sides(spec, "actor.opponents")
    if config.evaluator.elo_games:
        check_sides(spec, "evaluator.elo_games")


def score(returns: Sequence[float | None], home: int) -> float | None:
    """What a game came to for the side at home: 1 for a win, 0.5 for a draw, 0 for a loss.

    A side wins against another if the sum of its agents' returns is larger. Of more than two sides, the score
    is the mean over all others. So of equal players each expects 0.5, however many play, and nothing is
    assumed of the sum over all of them.

    Args:
        returns: of each side; None for one that took no part.
        home: the number of that side.

    Returns:
        The score; None where either took no part.
    """
    own = returns[home]
    others = [each for side, each in enumerate(returns) if side != home and each is not None]
    if own is None or not others:
        return None
    # Sums of fractions that should be equal may differ in their last bits.
    draws = [math.isclose(own, each, rel_tol=1e-9, abs_tol=1e-9) for each in others]
    return float(np.mean([0.5 if draw else own > each for draw, each in zip(draws, others, strict=True)]))


class Sides:
    """The sides of every copy in `slots` slots, and the returns of the games that they are in.

    Attributes:
        count: sides of a copy.
        copies: of the environment.
    """

    def __init__(self, spec: EnvSpec, slots: int) -> None:
        self._of = np.asarray(spec.sides)
        self._agents = spec.agents
        self.count, self.copies = len(set(spec.sides)), slots // spec.agents
        self._returns: list[list[float | None]] = []
        for _ in range(self.copies):
            self._returns.append([None] * self.count)

    def away(self, copy: int, home: int) -> list[int]:
        """The slots of a copy whose agents are not of the side at home."""
        return (np.flatnonzero(self._of != home) + copy * self._agents).tolist()

    def take(self, step: Step) -> dict[int, list[float | None] | None]:
        """The copies whose game is over, with the return of each side; None where it has failed.

        A game in which an agent comes in the very step in which the last one leaves counts as two.
        """
        for episode in step.episodes:
            copy, agent = divmod(episode.slot, self._agents)
            side = self._of[agent]
            self._returns[copy][side] = (self._returns[copy][side] or 0.0) + episode.return_raw
        out = step.terminated | step.truncated
        out[step.idle + step.discarded] = True
        over: dict[int, list[float | None] | None] = {}
        for copy in np.flatnonzero(out.reshape(self.copies, self._agents).all(1)).tolist():
            failed = copy * self._agents in step.discarded
            over[copy] = None if failed else self._returns[copy]
            self._returns[copy] = [None] * self.count
        return over
