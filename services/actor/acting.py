"""What an actor does in every round, wherever its actions are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from troupe.common.envs import VectorEnv
from troupe.common.wire.control.client import ControlClient, Welcome
from troupe.common.wire.sockets import Context, Security
from troupe.services.actor.timing import Timing

# Short enough for signals and lost leases to be noticed, long enough to cost nothing while nothing comes.
ROUND_S = 0.2
"""Longest wait of a round: then the actor looks at everything else."""


@dataclass(frozen=True)
class Place:
    """Where an actor is in the run.

    Attributes:
        ctx: ZeroMQ context.
        learner: the learner's control address.
        name: of the actor.
        security: keys.
    """

    ctx: Context
    learner: str
    name: str
    security: Security | None = None


class Acting(Protocol):
    """Steps the environments of one actor process."""

    waits_for: str
    """What it needs of the learner before it can begin."""
    timing: Timing
    version: int
    """Of the parameters that chose last; -1 for none."""

    @property
    def envs(self) -> Sequence[VectorEnv]:
        """What is stepped now."""

    def prepare(self, slots: int) -> None:
        """Make the environments, which may take long, before there is a lease to keep."""

    def begin(self, control: ControlClient, welcome: Welcome) -> None:
        """Act in the slots that were granted, which may be fewer than there are environments."""

    def ready(self) -> bool:
        """Whether that is there; to be asked again until it is."""

    def round(self) -> None:
        """Do what can be done now; returns within about `ROUND_S`."""

    def rejoin(self, welcome: Welcome, before: list[int]) -> None:
        """The learner has been away: go on in the slots of `welcome`; they were those of `before`."""

    def finish(self) -> None:
        """Hand over what is complete, within a limit of time."""

    def close(self) -> None:
        """Close environments and sockets."""
