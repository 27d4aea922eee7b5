"""What a learner takes over from another: parameters, optimiser, statistics, generators and counters."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from troupe.common.agents import Agent
from troupe.common.errors import TroupeError
from troupe.services.learner.peers.group import GroupLostError, ProcessGroup
from troupe.services.learner.saving.counters import RunCounters

MOST_TIMES_OWN = 16
"""A state is at most so many times as large as that of a learner that has not learned yet."""


class StateDiffersError(TroupeError):
    """Two learners have different states after one has copied the other's."""


def equalize(group: ProcessGroup, agent: Agent, counters: RunCounters) -> bool:
    """Give all learners the state of the furthest, of several the lowest rank; whether ours changed.

    Raises:
        StateDiffersError: where hashes differ afterwards.
        GroupLostError: where a learner is lost.
    """
    own = packed(agent, counters)
    table = group.gather(torch.tensor([counters.updates, counters.version, len(own)]))
    updates = [int(row[0]) for row in table]
    source = updates.index(max(updates))
    # Versions are the owner's to count, and never go back: services would take newer weights for old ones.
    counters.version = max(int(row[1]) for row in table)
    hashes = _hashes(group, own)
    if len(set(hashes)) == 1:
        return False
    size = int(table[source][2])
    if size > MOST_TIMES_OWN * (len(own) + (1 << 20)):
        raise StateDiffersError(
            f"the state of another learner has {size:,} bytes, and this one's {len(own):,}"
        )
    buffer = own if group.rank == source else torch.empty(size, dtype=torch.uint8)
    group.broadcast(buffer, source)
    changed = hashes[group.rank] != hashes[source]
    if changed:
        unpack(buffer, agent, counters)
    hashes = _hashes(group, packed(agent, counters))
    if hashes[group.rank] != hashes[source]:
        raise StateDiffersError("this learner has copied the state of another and has a different one")
    if len(set(hashes)) > 1:  # whoever has it ends: the others must not
        raise GroupLostError("a learner has copied a state and has a different one")
    return changed


def packed(agent: Agent, counters: RunCounters) -> Tensor:
    """All of it, uint8 `[bytes]`: the length of a JSON header, the header, the arrays."""
    arrays, meta = agent.state()
    head = {
        "arrays": [[name, array.dtype.name, array.shape] for name, array in sorted(arrays.items())],
        "agent": meta,
        "updates": counters.updates,
        "learned_steps": counters.learned_steps,
    }
    text = json.dumps(head).encode()
    parts = [len(text).to_bytes(8, "little"), text]
    parts += [np.ascontiguousarray(array).tobytes() for _, array in sorted(arrays.items())]
    return torch.from_numpy(np.frombuffer(b"".join(parts), np.uint8).copy())


def unpack(buffer: Tensor, agent: Agent, counters: RunCounters) -> None:
    """Take over what `packed` gave. Raises CheckpointError where it is of another agent."""
    data = buffer.numpy()
    begin = 8 + int.from_bytes(data[:8].tobytes(), "little")
    head: dict[str, Any] = json.loads(data[8:begin].tobytes())
    arrays = {}
    for name, dtype, shape in head["arrays"]:
        array = np.empty(shape, np.dtype(dtype))
        array.reshape(-1).view(np.uint8)[:] = data[begin : begin + array.nbytes]
        arrays[name] = array
        begin += array.nbytes
    agent.load_state(arrays, head["agent"])
    counters.updates = int(head["updates"])
    counters.learned_steps = float(head["learned_steps"])


def state_hash(agent: Agent, counters: RunCounters) -> str:
    """Of all that learners have alike."""
    return hashlib.sha256(packed(agent, counters).numpy().data).hexdigest()


def _hashes(group: ProcessGroup, own: Tensor) -> list[bytes]:
    digest = torch.frombuffer(bytearray(hashlib.sha256(own.numpy().data).digest()), dtype=torch.uint8)
    return [each.numpy().tobytes() for each in group.gather(digest)]
