"""From single steps to chunks in replay, for programs that act by themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from troupe.common.data.accumulators.n_step import NStepAccumulator
from troupe.common.data.schema import Chunk, FieldSpec, Items, SlotStep, as_array
from troupe.common.errors import ConfigError, PeerError
from troupe.common.wire.replay.client import ReplayClient
from troupe.common.wire.replay.outbox import Outbox
from troupe.common.wire.replay.sharded import ShardedReplayClient


@dataclass
class _Item:
    """A window of the episode's steps `[begin, end)`, to be stored."""

    begin: int
    end: int
    priority: float
    table: str


class _Sender:
    """Sends chunks, and waits where replay takes none."""

    def __init__(self, client: ReplayClient | ShardedReplayClient, table: str, timeout_s: float) -> None:
        self._client = client
        self._outbox = Outbox(client, table)
        self._timeout_s = timeout_s

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Wait until all items that are complete are stored; False where some are not after `timeout_s`."""
        self._send(self._complete())
        return self._client.flush(timeout_s)

    def _complete(self) -> list[Chunk]:
        """What can be sent of the present episode."""
        raise NotImplementedError

    def _send(self, chunks: list[Chunk]) -> None:
        """Raises PeerError where replay does not take them in time; they stay, and go first the next time."""
        if (chunks or self._outbox.waiting) and not self._outbox.put(chunks, self._timeout_s):
            raise PeerError(f"replay has taken no chunk for {self._timeout_s:g} s: {self._outbox.reason}")


class _Form:
    """Dtype and shape of the entries of each field, which its first entry decides where nothing else does."""

    def __init__(self, specs: Sequence[FieldSpec] = ()) -> None:
        self._known = {spec.name: (spec.dtype, spec.shape) for spec in specs}

    def checked(self, name: str, value: ArrayLike) -> NDArray:
        """A copy of `value` as an array. Raises ConfigError where it differs from those before."""
        dtype, shape = self._known.get(name, (None, ()))
        # A copy: environments reuse their arrays, and the chunk is cut steps later.
        entry = np.array(as_array(name, value, dtype))
        if dtype is None:
            self._known[name] = (entry.dtype.name, entry.shape)
        elif entry.dtype.name != dtype or entry.shape != shape:
            raise ConfigError(f"field {name} is {entry.dtype}{entry.shape}, expected {dtype}{shape}")
        return entry


class Writer(_Sender):
    """Takes the steps of one environment one by one, cuts items from them, and inserts them.

    Append a step, then cut items from the newest ones::

        writer = Writer(client, item_steps=20)
        writer.append({"obs": obs, "action": action, "reward": reward})
        if writer.steps % 10 == 0 and writer.steps >= 20:
            writer.item(20)  # the last 20 steps

    Steps in no item are not stored. Items never cross the end of an episode. Several items that share steps
    are sent in one chunk, where they are stored once.

    Fields are inferred from the first step, and have one entry a step. Where the client was made with
    `specs`, these say what further entries an item has: `FieldSpec("obs", "float32", (4,), after=1)`
    gives each item the observation that follows it, which is stored once all the same. Where an episode has
    no entries before its first step, or too few after its last, the first or last one is repeated.
    """

    def __init__(
        self,
        client: ReplayClient | ShardedReplayClient,
        *,
        table: str = "default",
        item_steps: int = 1,
        chunk_steps: int = 50,
        timeout_s: float = 60.0,
    ) -> None:
        """Prepare to write; nothing has to be there yet.

        Args:
            client: of the shard, or shards. Several writers, one an environment, may share it.
            table: of items for which none is named.
            item_steps: steps of the longest item.
            chunk_steps: items are sent once they cover as many steps, or the episode ends.
            timeout_s: how long `append` and `end_episode` may wait for replay, until PeerError.
        """
        if item_steps < 1 or chunk_steps < 1:
            raise ConfigError("item_steps and chunk_steps should be at least 1")
        self._table = table
        self._item_steps = item_steps
        self._chunk_steps = max(chunk_steps, item_steps)
        super().__init__(client, table, timeout_s)
        self._specs = tuple(client.specs or ())
        self._form = _Form(self._specs)
        self._entries: dict[str, list[NDArray]] = {}
        self._versions: list[int] = []
        self._dropped = 0  # steps at the beginning of the episode that are not kept any more
        self._items: list[_Item] = []

    @property
    def steps(self) -> int:
        """Steps of the present episode."""
        return self._dropped + len(self._versions)

    def append(self, step: Mapping[str, ArrayLike], *, version: int = 0) -> None:
        """Take the entry of every field at one step; copied.

        `version` is that of the parameters that acted; a chunk carries that of its first step. Raises
        ConfigError for a step that differs from those before, which is not taken, and PeerError where replay
        takes nothing; then the step has been taken nevertheless.
        """
        entries = self._checked(step)
        if not self._specs:
            self._specs = tuple(
                FieldSpec(name, each.dtype.name, each.shape) for name, each in entries.items()
            )
        first = not self._versions
        for spec in self._specs:
            kept = self._entries.setdefault(spec.name, [])
            # As in a stack of frames at reset: what was before the episode looks like its first step.
            kept += [entries[spec.name]] * (1 + (spec.before if first else 0))
        self._versions.append(version)
        self._send(self._cut(self._chunk_steps))
        self._drop()

    def item(self, steps: int = 1, priority: float = 1.0, table: str | None = None) -> None:
        """Have the last `steps` steps stored as an item, in `table`. Raises ConfigError."""
        if not 1 <= steps <= min(self._item_steps, self.steps):
            limit = f"of {self.steps} in the episode, and item_steps is {self._item_steps}"
            raise ConfigError(f"an item of {steps} steps, {limit}")
        if not 0 <= priority < np.inf:
            raise ConfigError(f"a priority of {priority}: it should be finite, and not below 0")
        end = self.steps
        self._items.append(_Item(end - steps, end, priority, self._table if table is None else table))

    def end_episode(self, last: Mapping[str, ArrayLike] | None = None) -> None:
        """Send what is left, and begin a new episode with the next step.

        `last` has what follows the last step, of fields with entries `after`: the last observation.
        """
        if self._versions:
            entries = self._checked(last or {}, partly=True)
            for spec in self._specs:
                kept = self._entries[spec.name]
                kept += [entries.get(spec.name, kept[-1])] * spec.after
        chunks = self._cut(0, ended=True)
        self._entries.clear()
        self._versions.clear()
        self._dropped = 0
        self._send(chunks)

    def _complete(self) -> list[Chunk]:
        return self._cut(0)

    def _checked(self, step: Mapping[str, ArrayLike], *, partly: bool = False) -> dict[str, NDArray]:
        names = {spec.name for spec in self._specs} or set(step)
        if not set(step) <= names or not (partly or set(step) == names):
            raise ConfigError(f"a step with the fields {sorted(step)} instead of {sorted(names)}")
        return {name: self._form.checked(name, value) for name, value in step.items()}

    def _cut(self, after_steps: int, *, ended: bool = False) -> list[Chunk]:
        """A chunk of the items that are complete, once the first of them is older than this many steps."""
        # An item needs entries after its last step, which only the next steps, or the end, bring.
        margin = 0 if ended else max((spec.after for spec in self._specs), default=0)
        ready = [item for item in self._items if item.end + margin <= self.steps]
        if not ready:
            return []
        begin, end = min(item.begin for item in ready), max(item.end for item in ready)
        # By the first item's age: a chunk gathers as many items as will share its steps, and none waits
        # longer.
        if after_steps and self.steps - margin - begin <= after_steps:
            return []
        self._items = [item for item in self._items if item.end + margin > self.steps]
        by_table: dict[str, list[_Item]] = {}
        for item in ready:
            by_table.setdefault(item.table, []).append(item)
        more = {table: _windows(items, begin) for table, items in by_table.items()}
        own = more.pop(self._table, _windows([], begin))
        at = begin - self._dropped
        return [
            Chunk(
                {
                    spec.name: np.stack(self._entries[spec.name][at : at + spec.entries(end - begin)])
                    for spec in self._specs
                },
                end - begin,
                own.offsets,
                own.lengths,
                own.priorities,
                self._versions[at],
                more,
            )
        ]

    def _drop(self) -> None:
        """Forget the steps that no item has, and none that comes can have."""
        needed = min([self.steps - self._item_steps, *(item.begin for item in self._items)])
        surplus = needed - self._dropped
        if surplus > 0:
            for entries in self._entries.values():
                del entries[:surplus]
            del self._versions[:surplus]
            self._dropped += surplus


def _windows(items: Sequence[_Item], begin: int) -> Items:
    return Items(
        np.asarray([item.begin - begin for item in items], np.int32),
        np.asarray([item.end - item.begin for item in items], np.int32),
        np.asarray([item.priority for item in items], np.float64),
    )


class NStepWriter(_Sender):
    """Takes the steps of one environment, and inserts items for n-step Q-learning: see `n_step_fields`.

    Attributes:
        priority: of items from now on. The largest so far has each item sampled soon (Schaul et al. 2016).
    """

    def __init__(
        self,
        client: ReplayClient | ShardedReplayClient,
        *,
        n_steps: int,
        gamma: float,
        stack: int = 0,
        table: str = "default",
        chunk_steps: int = 50,
        priority: float = 1.0,
        timeout_s: float = 60.0,
    ) -> None:
        """Prepare to write; nothing has to be there yet.

        Args:
            client: of the shard, or shards. Several writers, one an environment, may share it.
            n_steps: rewards that are summed up.
            gamma: discount of a step.
            stack: frames of a stacked-pixel observation `[stack, H, W]`, of which the newest is stored; 0
                for observations that are stored whole.
            table: where the items go.
            chunk_steps: steps that are sent together, or fewer where an episode ends.
            priority: see above.
            timeout_s: how long `append` may wait for replay, until PeerError.
        """
        if n_steps < 1 or chunk_steps < 1:
            raise ConfigError("n_steps and chunk_steps should be at least 1")
        self.priority = priority
        self._steps = NStepAccumulator(n_steps, gamma, chunk_steps, stack, action_dtype=None)
        self._form = _Form()
        super().__init__(client, table, timeout_s)
        self._started = False

    def start(self, obs: ArrayLike) -> None:
        """Begin an episode at `obs`. Complete items of one that has not ended are kept."""
        obs = self._form.checked("obs", obs)
        self._send(self._complete())
        self._steps.start(obs)
        self._started = True

    def append(
        self,
        action: ArrayLike,
        reward: float,
        next_obs: ArrayLike,
        terminated: bool,
        truncated: bool = False,
        *,
        version: int = 0,
    ) -> None:
        """Take one step. After `terminated` (no bootstrap) or `truncated`, `start` begins the next one.

        `action` is a number or an array, and `next_obs` the true observation that followed, the last one
        at an episode's end. Raises ConfigError before `start` and for what differs from the steps before,
        and PeerError where replay takes nothing; the step has been taken nevertheless.
        """
        if not self._started:
            raise ConfigError("an episode begins with start(obs), also after one that has ended")
        if not math.isfinite(reward):
            raise ConfigError(f"a reward of {reward}: it should be finite")
        action, next_obs = self._form.checked("action", action), self._form.checked("obs", next_obs)
        self._started = not (terminated or truncated)
        values = {"value_taken": 0.0, "value_max": 0.0}  # priorities are given otherwise
        chunks = self._steps.add(
            SlotStep(action, reward, values, next_obs, terminated, truncated, version=version)
        )
        self._send(self._with_priority(chunks))

    def _complete(self) -> list[Chunk]:
        return self._with_priority(self._steps.flush())

    def _with_priority(self, chunks: list[Chunk]) -> list[Chunk]:
        for chunk in chunks:
            chunk.priorities[:] = self.priority
        return chunks
