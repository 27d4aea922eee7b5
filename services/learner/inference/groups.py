"""Central inference's book-keeping, without sockets: groups of slots, and what they asked last."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from msgspec import UNSET

from troupe.common.agents import Act, Agent, Inputs
from troupe.common.agents.base import check_returned
from troupe.common.agents.hindsight import Hindsight
from troupe.common.agents.pace import Pace
from troupe.common.agents.slots import Slots
from troupe.common.data.schema import Chunk
from troupe.common.envs import EnvSpec
from troupe.common.envs.transfer import unpack_start, unpack_step
from troupe.common.errors import RefusedError
from troupe.common.wire import messages
from troupe.services.learner.control.slots import ranges

_log = logging.getLogger(__name__)

Key = tuple[int, int]
"""Incarnation of the actor, and which of its groups."""


@dataclass
class Group:
    """Slots that step together. Exactly one of `asked` and "its actions are being carried out" is true.

    Attributes:
        key: see there.
        identity: routing identity that asked last.
        number: request id of that.
        indices: the slots of the run, one a row.
        slots: inputs, memory and open chunks.
        act: what was chosen last, and not yet reported as done; None before the first.
        version: of the parameters that chose it.
        asked: whether it waits for actions.
    """

    key: Key
    identity: bytes
    number: int
    indices: list[int]
    slots: Slots
    act: Act | None = None
    version: int = -1
    asked: bool = True

    def answer(self) -> messages.Actions:
        """What it was told last."""
        assert self.act is not None
        return messages.Actions(version=self.version, actions=self.act.action)


class Groups:
    """All groups of all actors.

    A group belongs to one process (incarnation) from its beginning to its end. Where a slot is leased to
    another process, or begins again, the old group is dropped: what is complete of its chunks is kept, and
    nothing ever links the two.

    Args:
        agent: acts.
        spec: of the environment.
        chunk_steps: see `Agent.accumulator`.
        max_rows: of one group.
        leases: the slots of every live actor process, by its incarnation.
        total_slots: of the run.
        make_pace: the pace of a new group from its number of slots.
        hindsight: see `Slots`.
    """

    def __init__(
        self,
        agent: Agent,
        spec: EnvSpec,
        chunk_steps: int,
        max_rows: int,
        leases: Callable[[], dict[int, set[int]]],
        total_slots: int,
        make_pace: Callable[[int], Pace | None] = lambda slots: None,
        hindsight: Hindsight | None = None,
    ) -> None:
        self._hindsight = hindsight
        self._agent = agent
        self._spec = spec
        self._chunk_steps = chunk_steps
        self._max_rows = max_rows
        self._leases = leases
        self._total_slots = total_slots
        self._make_pace = make_pace
        self._groups: dict[Key, Group] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def find(self, body: messages.Infer) -> Group | None:
        """The group that an INFER is about, if it has begun."""
        return self._groups.get((body.incarnation, body.group))

    def begin(self, identity: bytes, number: int, body: messages.Infer) -> tuple[Group, list[Group]]:
        """The group that begins with this INFER, and those whose slots it takes.

        Raises RefusedError or TransferError.
        """
        key, indices = (body.incarnation, body.group), [] if body.slots is UNSET else body.slots
        if not 0 < len(indices) <= self._max_rows:
            detail = f"{len(indices)} slots in a group, inference.max_batch allows {self._max_rows}"
            raise RefusedError(messages.TOO_MANY_ROWS, detail)
        # The roster decides whose slots they are, not the message: an old process may still believe that it
        # has them.
        leased = self._leases().get(key[0])
        if leased is None:
            raise RefusedError(messages.UNKNOWN_PEER, "no actor of this incarnation is in the run")
        if len(set(indices)) != len(indices) or not leased.issuperset(indices):
            raise RefusedError(messages.NOT_LEASED, f"not all of the slots {indices[:8]} are leased to it")
        obs = unpack_start(_arrays(body), len(indices), self._spec)
        pace = self._make_pace(len(indices))
        slots = Slots(self._agent, obs, self._chunk_steps, self._hindsight, pace)
        slots.explore(indices, self._total_slots)
        group = Group(key, identity, number, indices, slots)
        taken = [
            other
            for other in self._groups.values()
            # A slot belongs to one group: two would cut chunks of one slot from two games.
            if other.key == key or not set(other.indices).isdisjoint(indices)
        ]
        for other in taken:
            del self._groups[other.key]
        self._groups[key] = group
        return group, taken

    def go_on(self, group: Group | None, number: int, body: messages.Infer) -> list[Chunk]:
        """Take in what a group did; the chunks that are complete now. Raises as `begin` does."""
        # A step that does not follow the answer it claims to would leave a hole in a chunk, or count twice.
        if group is None or group.asked or group.act is None or body.after != group.number:
            raise RefusedError(messages.UNKNOWN_GROUP, "begin again: the steps before these are unknown")
        step = unpack_step(_arrays(body), group.slots.inputs.obs, self._spec)
        chunks = group.slots.take(group.act, step, group.version)
        group.number, group.asked = number, True
        return chunks

    def gone(self) -> list[Group]:
        """Take out, and return, the groups whose slots are no longer leased to their actor."""
        leases = self._leases()
        gone = [g for g in self._groups.values() if not leases.get(g.key[0], set()).issuperset(g.indices)]
        for group in gone:
            del self._groups[group.key]
            _log.info("slots %s are no longer those of actor %x", ranges(sorted(group.indices)), group.key[0])
        return gone

    def all(self) -> list[Group]:
        """Every group."""
        return list(self._groups.values())

    def choose(self, groups: list[Group], version: int, rng: np.random.Generator) -> None:
        """One forward pass for all of these with the agent's parameters, number `version`."""
        inputs = Inputs.joined([group.slots.inputs for group in groups])
        act = self._agent.act(inputs, np.concatenate([group.slots.epsilons for group in groups]), rng)
        check_returned(self._agent, "act", act, Act)
        start = 0
        for group in groups:
            group.act = act.rows(slice(start, start + len(group.slots)))
            group.version, group.asked = version, False
            start += len(group.slots)


def _arrays(body: messages.Infer) -> dict[str, np.ndarray]:
    """Those that are there."""
    arrays = {"first": body.first, "obs": body.obs, "reward": body.reward, "ended": body.ended}
    return {name: array for name, array in arrays.items() if array is not UNSET}
