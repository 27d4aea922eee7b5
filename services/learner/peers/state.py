"""What a learner takes over from another: parameters, optimiser, statistics, generators and counters."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from troupe.common.agents import Agent
from troupe.common.agents.learners.hearsay import MisledError, check_all, is_count
from troupe.common.errors import CheckpointError, TroupeError
from troupe.services.learner.peers.group import GroupLostError, ProcessGroup
from troupe.services.learner.saving.counters import RunCounters

MAX_TIMES_OWN = 16
"""A state is at most so many times as large as that of a learner that has not learned yet."""
MAX_COUNTED = 1 << 53
"""Updates, versions and steps of a run."""


class StateDiffersError(TroupeError):
    """Two learners have different states after one has copied the other's."""


def equalize(group: ProcessGroup, agent: Agent, counters: RunCounters) -> bool:
    """Give all learners the state of the furthest, of several the lowest rank; whether ours changed.

    Raises:
        StateDiffersError: where this learner cannot have the state of rank 0.
        MisledError: where another rank tells of a state that cannot be; ours is as before.
        GroupLostError: where a learner is lost.
    """
    own = packed(agent, counters)
    digest = _digest(own)
    told = torch.tensor([counters.updates, counters.version, len(own)])
    table = torch.stack(group.gather(torch.cat([told, digest])))
    counted = is_count(table[:, :2].numpy(), MAX_COUNTED)
    check_all(np.all(counted, axis=1), "sent an impossible number of updates")
    source = int(table[:, 0].argmax())  # the first of them
    # Versions are the owner's to count, and never go back: services would take newer weights for old ones.
    counters.version = int(table[:, 1].max())
    size, wanted = int(table[source, 2]), table[source, 3:]
    if bool((table[:, 3:] == wanted).all()):
        return False
    most = MAX_TIMES_OWN * (len(own) + (1 << 20))
    if not 0 < size <= most:
        raise _refused(source, f"has a state of {size:,} bytes, and this one has {len(own):,}")
    buffer = own if group.rank == source else torch.empty(size, dtype=torch.uint8)
    group.broadcast(buffer, source)
    changed = not torch.equal(digest, wanted)
    if changed:
        _take_over(buffer, wanted, source, own, agent, counters)
        digest = _digest(packed(agent, counters))
    digests = torch.stack(group.gather(digest))
    if not torch.equal(digest, digests[source]):
        _restore(own, agent, counters)
        raise _refused(source, "announced a hash that this learner does not get from a copy of its state")
    if not bool((digests == digest).all()):  # whoever has it ends: the others must not
        raise GroupLostError("a learner has copied a state and has a different one")
    return changed


def packed(agent: Agent, counters: RunCounters) -> Tensor:
    """All of it, uint8 `[bytes]`: the length of a JSON header, the header, the arrays."""
    state, meta = agent.state()
    arrays = sorted(state.items())
    head = {
        "arrays": [[name, array.dtype.name, array.shape] for name, array in arrays],
        "agent": meta,
        "updates": counters.updates,
        "learned_steps": counters.learned_steps,
    }
    text = json.dumps(head).encode()
    parts = [np.frombuffer(part, np.uint8) for part in (len(text).to_bytes(8, "little"), text)]
    parts += [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for _, array in arrays]
    return torch.from_numpy(np.concatenate(parts))


def unpack(buffer: Tensor, agent: Agent, counters: RunCounters) -> None:
    """Take over what `packed` gave.

    Raises CheckpointError where it is of another agent, or cannot be: the agent may have part of it then.
    """
    try:
        head, arrays = _parsed(buffer.numpy())
        updates, learned_steps = _count(head["updates"]), _count(head["learned_steps"])
        _count(head["agent"].get("updates", 0))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"a state that cannot be: {error!r:.200}") from None
    own, _ = agent.state()
    for name, array in arrays.items():
        if name in own and own[name].shape != array.shape:
            raise CheckpointError(f"the array {name:.100} has the shape {array.shape}, not {own[name].shape}")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise CheckpointError(f"the array {name:.100} is not finite")
    agent.load_state(arrays, head["agent"])
    counters.updates, counters.learned_steps = int(updates), learned_steps


def _parsed(data: np.ndarray) -> tuple[Mapping[str, Any], dict[str, np.ndarray]]:
    """Header and arrays. Raises ValueError, among others, for what `packed` cannot have given."""
    begin = 8 + int.from_bytes(data[:8].tobytes(), "little")
    head = json.loads(data[8:begin].tobytes())
    arrays = {}
    for name, dtype, shape in head["arrays"]:
        kind = np.dtype(dtype)
        size = math.prod(shape) * kind.itemsize
        # Before memory is asked for.
        if kind.kind not in "biuf" or min(shape, default=0) < 0 or not 0 <= size <= len(data) - begin:
            raise ValueError(f"array {name!r:.100}")
        arrays[str(name)] = data[begin : begin + size].copy().view(kind).reshape(shape)
        begin += size
    return head, arrays


def _count(number: Any) -> float:
    if not isinstance(number, int | float) or not 0 <= number <= MAX_COUNTED:
        raise ValueError(f"the number {number!r:.100}")
    return number


def _take_over(
    buffer: Tensor, digest: Tensor, source: int, own: Tensor, agent: Agent, counters: RunCounters
) -> None:
    """Unpack what rank `source` has sent, which said that its hash is `digest`; or stay as before."""
    if not torch.equal(_digest(buffer), digest):
        raise _refused(source, "announced another hash than that of the state it sent")
    try:
        unpack(buffer, agent, counters)
    except CheckpointError as error:
        _restore(own, agent, counters)
        raise _refused(source, f"sent an impossible state: {error}") from None


def _restore(own: Tensor, agent: Agent, counters: RunCounters) -> None:
    head, arrays = _parsed(own.numpy())
    agent.load_state(arrays, head["agent"])
    counters.updates, counters.learned_steps = head["updates"], head["learned_steps"]


def _refused(source: int, what: str) -> TroupeError:
    """The error of a learner that cannot take over the state of another.

    Who shares the batches of rank 0 ends, since it would be in everybody's way; rank 0 goes on without
    whoever else has it.
    """
    if source == 0:
        line = "this learner cannot share batches with the one that has the run, which "
        return StateDiffersError(line + what)
    return MisledError(what, [source])


def _digest(state: Tensor) -> Tensor:
    """The hash of what is packed, int64 `[4]`."""
    return torch.frombuffer(bytearray(hashlib.sha256(state.numpy().data).digest()), dtype=torch.int64)
