"""Keeps sampled batches ready: one thread that talks to the replay shards."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import zmq
from torch import Tensor

from troupe.common import system
from troupe.common.data.schema import FieldSpec
from troupe.common.runtime import watchdog
from troupe.common.wire.link import new_incarnation
from troupe.common.wire.replay.batch_reader import ArrayPool
from troupe.common.wire.replay.codec import SampleBatch
from troupe.common.wire.replay.sharded import ShardedReplayClient
from troupe.common.wire.sockets import Security
from troupe.services.learner.batches.staging import Staging

# Short, since priorities of the learner wait for this as well.
IDLE_POLL_S = 0.01


class Prefetcher:
    """Requests batches ahead of the learner, unpacks them, and returns priorities.

    `depth` batches are requested or ready at any time. All sockets belong to the thread; the learner sees two
    queues.

    Attributes:
        wait_reason: why there is no batch.
        waited_s: how long the learner has waited for batches in all.
        unpacked_s: how long the thread has read and unpacked batches, or waited for that, in all.
        links: what has come from each shard, by its address; see `ShardedReplayClient.links`.
    """

    def __init__(
        self,
        context: zmq.Context,
        shards: Callable[[], list[str]],
        *,
        kept: Collection[str],
        depth: int,
        name: str = "learner",
        fields: Sequence[FieldSpec] | None = None,
        staging: Staging | None = None,
        security: Security | None = None,
    ) -> None:
        """Prepare; nothing is asked for before `share`. `kept` are the tables that are told priorities.

        Where `fields` are given, a shard with others is left out; with `staging` batches go on to a GPU. See
        `Learner` for the rest.
        """
        self._staging = staging
        self._shards = shards
        self._wanted: Mapping[str, int] = {}
        self._kept = kept
        self._depth = depth
        self._replay = ShardedReplayClient(
            pool=ArrayPool(np.empty if staging is None else staging.allocate),
            ctx=context,
            name=name,
            incarnation=new_incarnation(),
            security=security,
            tolerate_refusals=True,  # a shard that cannot prove itself, or misbehaves, must not end the run
            expected=fields,
        )
        # Unbounded, yet never long: no more batches are asked for than `depth`.
        self._ready: system.Queue[SampleBatch] = system.Queue()
        self._done: system.Queue[tuple[SampleBatch, np.ndarray | None]] = system.Queue()
        # Of candidates, what was chosen: the batch, the rows of it that are learned from, and how near they
        # are.
        self._choices: system.Queue[tuple[SampleBatch, SampleBatch, np.ndarray]] = system.Queue()
        self._undecided: set[int] = set()  # batches of candidates that nobody has chosen from yet
        self._stop = system.Event()
        self._thread = system.Thread(target=self._run, name="prefetch", daemon=True)
        self._failure: BaseException | None = None
        self.wait_reason = "no replay shard has joined"
        self.waited_s = 0.0
        self.unpacked_s = 0.0
        self.links: dict[str, dict[str, float]] = {}
        self._came = 0
        self._allowed: int | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Send what priorities are left and end the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def get(self, timeout_s: float) -> SampleBatch | None:
        """The next batch, or None after `timeout_s`; `wait_reason` then says what is missing."""
        if self._failure is not None:
            raise self._failure
        began = system.monotonic()
        try:
            return self._ready.get(timeout=timeout_s)
        except queue.Empty:
            return None
        finally:
            self.waited_s += system.monotonic() - began

    def share(self, shares: Mapping[str, int], *, ahead: int | None, held: bool) -> None:
        """From now on ask for batches of these rows; none where `shares` is empty.

        At most `ahead` are on their way, ready or `held` by the learner, and one more after each `permit`.
        None: as many as there is room for.
        """
        self._wanted = shares
        self._allowed = None if ahead is None else self._came + ahead - self._ready.qsize() - held

    def permit(self) -> None:
        """Allow one more batch, where `share` has limited them."""
        if self._allowed is not None:
            self._allowed += 1

    def placed(self, batch: SampleBatch) -> dict[str, Tensor]:
        """The fields of `batch` on the GPU, before whatever this thread computes next; none without one."""
        return {} if self._staging is None else self._staging.take(batch)

    def put_priorities(self, batch: SampleBatch, priorities: np.ndarray | None) -> None:
        """Send new priorities `[B]` float64 of a batch's items, if any, back to its shard; never blocks.

        The batch is done with: its fields are written over by later ones.
        """
        self._done.put((batch, priorities))

    def put_choice(self, batch: SampleBatch, chosen: SampleBatch, priorities: np.ndarray) -> None:
        """Tell the shard which of a batch of candidates are learned from; never blocks.

        `batch` is done with, as in `put_priorities`, which comes for `chosen` later.
        """
        self._choices.put((batch, chosen, priorities))

    def _run(self) -> None:
        replay = self._replay
        loop = watchdog.Loop("the learner's prefetch thread")
        try:
            while not self._stop.is_set():
                loop.turn()
                replay.set_shards(self._shards())
                self._send_priorities()
                # Ready ones count as well, or a learner that pauses would have memory filled with batches
                # that age.
                # And candidates until they are chosen from: a shard draws by how often items were sampled.
                held = max(self._ready.qsize(), len(self._undecided))
                room = self._depth - held - replay.outstanding_samples
                if not self._wanted:
                    room = 0
                if self._allowed is not None:
                    room = min(room, self._allowed - self._came - replay.outstanding_samples)
                for _ in range(room):
                    replay.request_sample(self._wanted)
                batch = replay.receive(IDLE_POLL_S)
                if batch is None:
                    self.wait_reason = replay.wait_reason
                else:
                    self._came += 1
                    if batch.candidates:
                        self._undecided.add(id(batch))
                    if self._staging is not None:
                        self._staging.put(batch)
                    self._ready.put(batch)
                    # New objects, for the learner's thread looks at them.
                    self.links, self.unpacked_s = replay.links(), replay.counters["unpack_us"] / 1e6
            self._send_priorities()
        except BaseException as error:
            self._failure = error  # for the learner's loop: a silent death would look like starvation
        finally:
            loop.close()
            replay.close()

    def _send_priorities(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                batch, chosen, priorities = self._choices.get_nowait()
                self._replay.update(chosen, priorities, batch.candidates, chosen=True)
                self._drop(batch)
        with contextlib.suppress(queue.Empty):
            while True:
                batch, told = self._done.get_nowait()
                if told is not None:
                    self._replay.update(batch, told, self._kept)
                if not batch.chosen:  # whose fields are copies
                    self._drop(batch)

    def _drop(self, batch: SampleBatch) -> None:
        """Let later batches use the arrays of this one."""
        self._undecided.discard(id(batch))
        if self._staging is not None:
            self._staging.drop(batch)
        # Here and not by the learner: the pool belongs to this thread.
        self._replay.recycle(batch)
