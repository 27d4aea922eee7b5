"""Central inference: a thread beside training that chooses actions for all actors and keeps their chunks."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import zmq
from msgspec import UNSET

from troupe.common import system
from troupe.common.agents import Agent
from troupe.common.agents.hindsight import hindsight_of
from troupe.common.agents.pace import HELD_LIMIT_S, Pace
from troupe.common.config import Config
from troupe.common.data.schema import Chunk
from troupe.common.envs import EnvSpec
from troupe.common.errors import RefusedError, TroupeError
from troupe.common.runtime import watchdog
from troupe.common.wire import messages, sockets
from troupe.common.wire.body import Body
from troupe.common.wire.codec import Limits
from troupe.common.wire.replay.outbox import Outbox
from troupe.common.wire.replay.sharded import ShardedReplayClient
from troupe.common.wire.server import Envelope, Server
from troupe.services.learner.inference.batching import BatchQueue, Request
from troupe.services.learner.inference.groups import Group, Groups, Key

_log = logging.getLogger(__name__)

LIMITS = Limits(arrays=16, array_bytes=1 << 28, total_bytes=1 << 28)
SWEEP_S = 0.5
"""How often leases, shards and rates are looked at."""
# Short enough for acknowledgements to be read as they come: they are what ends the wait.
BLOCKED_POLL_MS = 50
FLUSH_TIMEOUT_S = 3.0


@dataclass
class Totals:
    """Running totals."""

    requests: int = 0
    batches: int = 0
    rows: int = 0
    forward_s: float = 0.0
    queue_s: float = 0.0
    """Waiting of requests, added up."""
    blocked_s: float = 0.0
    """Time without answers because replay took no more."""
    chunks: int = 0
    pack_s: float = 0.0


class CentralInference:
    """The learner's inference service.

    One thread owns the socket, the network and everything of the slots. Requests are batched over all actors
    as `BatchQueue` says; one more rule is that nothing waits once every group has asked. While replay does
    not take the chunks that are complete, no actor gets an answer: so the actors pause, and nothing piles up.
    Where the agent limits staleness, a group gets none either at the end of its unrolls, until the parameters
    are new enough.

    Args:
        ctx: ZeroMQ context.
        config: of the run.
        agent: acts, and is used by nothing else.
        spec: of the environment.
        leases: the slots of every live actor process, by its incarnation.
        shards: endpoints of the live replay shards.
        replay: takes the chunks, from the thread on which it is used.
        seed: of exploration.
        security: keys.
    """

    def __init__(
        self,
        ctx: sockets.Context,
        config: Config,
        agent: Agent,
        spec: EnvSpec,
        *,
        leases: Callable[[], dict[int, set[int]]],
        shards: Callable[[], list[str]],
        replay: ShardedReplayClient,
        seed: int,
        security: sockets.Security | None = None,
    ) -> None:
        self.endpoint = config.net.inference
        section = config.inference
        self._ctx = ctx
        self._agent = agent
        self._shards = shards
        self._security = security
        self._device = config.learner.device
        self._rng = system.generator(seed)
        self._groups = Groups(
            agent,
            spec,
            config.actor.chunk_steps,
            section.max_batch,
            leases,
            config.total_slots,
            make_pace=lambda slots: Pace.of(config, slots),
            hindsight=hindsight_of(config, spec),
        )
        self._held: dict[Key, tuple[Group, float]] = {}  # and since when
        self._queue: BatchQueue[Group] = BatchQueue(
            section.min_batch, section.max_batch, section.timeout_ms / 1000
        )
        self._replay = replay
        self._outbox = Outbox(replay, *config.replay.shares())
        self._totals = Totals()
        self._measured = (system.monotonic(), Totals())
        self._version = -1
        self._newest: tuple[int, dict[str, np.ndarray]] | None = None
        self._offered = threading.Lock()
        self._waker = sockets.Waker()
        self._stop = system.Event()
        self._failure: BaseException | None = None
        self._thread: system.Thread | None = None
        self._bound = False
        self._wait_log: sockets.WaitLog | None = None
        self._blocked_at_s = 0.0

    # -- for the learner's main thread --

    def bind(self) -> None:
        """Bind; who connects waits for `start`. Raises `ConfigError` where the address cannot be bound."""
        router = sockets.make_router(
            self._ctx, self.endpoint, self._security, max_message_bytes=LIMITS.array_bytes
        )
        self.endpoint = sockets.bound_endpoint(router)
        self._server = Server("inference", router, {messages.Infer: self._infer}, limits=LIMITS)
        self._server.open(self._waker.fd)
        self._bound = True

    def start(self) -> None:
        """Serve, and bind first where `bind` has not. Raises `ConfigError` as that does."""
        if not self._bound:
            self.bind()
        self._thread = system.Thread(target=self._run, name="inference", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = FLUSH_TIMEOUT_S + 5.0) -> None:
        """Hand complete chunks to replay and end the thread. May be called twice."""
        self._stop.set()
        self._waker.wake()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def offer(self, version: int, params: dict[str, np.ndarray]) -> None:
        """Use a copy of these parameters from the next batch on."""
        # The arrays may be views of live weights, which the next update changes.
        copied = {name: array.copy() for name, array in params.items()}
        with self._offered:
            self._newest = (version, copied)
        self._waker.wake()

    def check(self) -> None:
        """Raise what ended the thread, if anything did."""
        if self._failure is not None:
            raise self._failure

    def metrics(self) -> dict[str, float]:
        """What happened since the last call; empty where that was a moment ago."""
        now_s, (then_s, last) = system.monotonic(), self._measured
        elapsed_s = now_s - then_s
        if elapsed_s < 2 * SWEEP_S:
            return {}
        totals = replace(self._totals)
        self._measured = (now_s, totals)
        batches = max(1, totals.batches - last.batches)
        return {
            "inference/steps_per_s": (totals.rows - last.rows) / elapsed_s,
            "inference/batches_per_s": (totals.batches - last.batches) / elapsed_s,
            "inference/busy_share": min(1.0, (totals.forward_s - last.forward_s) / elapsed_s),
            "inference/pack_share": min(1.0, (totals.pack_s - last.pack_s) / elapsed_s),
            "inference/batch_slots": (totals.rows - last.rows) / batches,
            "inference/forward_ms": (totals.forward_s - last.forward_s) / batches * 1e3,
            "inference/queue_ms": (totals.queue_s - last.queue_s)
            / max(1, totals.requests - last.requests)
            * 1e3,
            "inference/insert_blocked_share": min(1.0, (totals.blocked_s - last.blocked_s) / elapsed_s),
            "inference/chunks_total": float(totals.chunks),
            "inference/rejected_total": float(sum(self.rejected.values())),
        }

    @property
    def rejected(self) -> Counter[str]:
        """How many messages could not be served, by kind."""
        return self._server.rejections.by_kind + self._server.handshakes

    @property
    def rows_total(self) -> int:
        """Actions chosen so far."""
        return self._totals.rows

    # -- the thread --

    def _run(self) -> None:
        try:
            with _stream_of(self._device):
                self._serve()
        except zmq.ContextTerminated:
            return
        except BaseException as error:
            self._failure = error  # for the learner's loop: a silent death would look like waiting actors
        finally:
            self._server.close()
            self._replay.close()
            self._server.socket.close()
            self._waker.close()

    def _serve(self) -> None:
        sweep_s = 0.0
        loop = watchdog.Loop("the learner's inference thread")
        while not self._stop.is_set():
            loop.turn()
            if system.monotonic() >= sweep_s:
                sweep_s = system.monotonic() + SWEEP_S
                self._sweep()
            self._turn(sweep_s)
            # Also without chunks of its own: acknowledgements come in, and what waits may leave now.
            self._put([])
            # While replay is full nobody is answered: the actors stand still, and no more than one step of
            # each piles up here.
            if not self._is_blocked():
                self._choose()
        loop.close()
        for group in self._groups.all():
            self._put(group.slots.flush())
        lost = self._outbox.finish(FLUSH_TIMEOUT_S)
        if lost:
            _log.info(
                "inference stops with %d chunks that replay did not accept (%s)", lost, self._outbox.reason
            )

    def _turn(self, until_s: float) -> None:
        """Sleep until there is something to do, and take in what has come."""
        also: list[sockets.Socket] = []
        wait_s = max(0.0, until_s - system.monotonic())
        if self._outbox.waiting:
            also = list(self._replay.sockets)
            wait_s = min(wait_s, BLOCKED_POLL_MS / 1000)
        elif self._version >= 0 and (due_s := self._queue.due_in_s()) is not None:
            wait_s = min(wait_s, due_s)
        self._server.turn(wait_s, also=also)
        self._waker.clear()

    def _is_blocked(self) -> bool:
        """Whether replay has to take chunks first; says who waits."""
        now_s = system.monotonic()
        if not self._outbox.waiting:
            self._wait_log = None
            return False
        if self._wait_log is None:
            self._wait_log = sockets.WaitLog()
        else:
            self._totals.blocked_s += now_s - self._blocked_at_s
        self._blocked_at_s = now_s
        if self._wait_log.due():
            waited_s, reason = self._wait_log.waited_s, self._outbox.reason
            _log.info(
                "the actors, and inference for them, wait for replay, %.0f s so far (%s)", waited_s, reason
            )
        return True

    def _due(self) -> list[Request[Group]]:
        # Nobody else can ask before an answer goes out, so to wait for a fuller batch would be in vain.
        everybody_waits = len(self._queue) + len(self._held) == len(self._groups)
        return self._queue.take_now() if everybody_waits else self._queue.take()

    def _take_params(self) -> None:
        """Use the newest parameters."""
        with self._offered:
            newest, self._newest = self._newest, None
        if newest is not None:
            self._version = newest[0]
            self._agent.load_params(newest[1])

    def _sweep(self) -> None:
        self._replay.set_shards(self._shards())
        for group in self._groups.gone():
            self._forget(group)

    def _forget(self, group: Group) -> None:
        held = self._held.pop(group.key, None)
        if self._queue.drop(group.key) or held:
            detail = "its slots have begun again, or are no longer its own"
            # Told at once: otherwise its actor would ask again and again until it gave the connection up.
            error = messages.Error(kind=messages.UNKNOWN_GROUP, detail=detail, about=messages.Infer.TYPE)
            self._server.send(group.identity, error, group.number)
        self._put(group.slots.flush())

    def _put(self, chunks: list[Chunk]) -> None:
        """Hand over chunks, and send what can be sent."""
        self._totals.chunks += len(chunks)
        try:
            self._outbox.put(chunks)
            if chunks:
                self._totals.pack_s = self._replay.counters["pack_us"] / 1e6
        except TroupeError as error:
            # Made of what an actor sent: numbers that no network can bear. Or the shard misbehaves. It costs
            # this chunk, not the run.
            self._server.rejections.count(b"replay", getattr(error, "kind", "refused"), str(error))

    def _choose(self) -> None:
        """Serve the batches that are due, all of them if everybody has asked."""
        self._take_params()
        if self._version < 0:
            return
        self._go_on_held()
        while batch := self._due():
            self._take_params()
            began_s = system.monotonic()
            groups = [request.payload for request in batch]
            self._groups.choose(groups, self._version, self._rng)
            for group in groups:
                # An actor that has gone does not get it; one that has lost it asks again.
                self._server.send(group.identity, group.answer(), group.number)
            totals = self._totals
            totals.forward_s += system.monotonic() - began_s
            totals.queue_s += sum(began_s - request.since_s for request in batch)
            totals.batches += 1
            totals.requests += len(batch)
            totals.rows += sum(request.rows for request in batch)

    # -- one message --

    def _infer(self, envelope: Envelope, body: messages.Infer) -> Body | None:
        if not envelope.number:
            raise RefusedError("bad_field", "the request ids of INFER grow from 1")
        group = self._groups.find(body)
        # Numbers of a group only grow, so this has been taken before: the same step must not get into a chunk
        # twice.
        if group is not None and envelope.number <= group.number:
            return self._repeated(group, envelope)
        if body.slots is not UNSET:
            group, taken = self._groups.begin(envelope.peer, envelope.number, body)
            for other in taken:
                self._forget(other)
        else:
            self._put(self._groups.go_on(group, envelope.number, body))
            assert group is not None
            group.identity = envelope.peer
        if group.slots.holds(self._version):
            self._held[group.key] = group, system.monotonic()
        else:
            self._queue.put(group.key, len(group.slots), group)
        return None

    def _go_on_held(self) -> None:
        """Have those act on that waited for parameters, if these are new enough or none came for long."""
        for key, (group, since_s) in list(self._held.items()):
            pace = group.slots.pace
            if pace is not None and system.monotonic() - since_s > HELD_LIMIT_S:
                _log.info(
                    "actor %x keeps acting with version %d: no newer one arrived", key[0], self._version
                )
                pace.release()
            if not group.slots.holds(self._version):
                del self._held[key]
                self._queue.put(key, len(group.slots), group)

    def _repeated(self, group: Group, envelope: Envelope) -> Body | None:
        """What has come before: late, or again because the answer did not come."""
        if envelope.number < group.number:
            return None
        group.identity = envelope.peer
        return messages.Wait(reason=self._reason(group)) if group.asked else group.answer()

    def _reason(self, group: Group) -> str:
        if self._outbox.waiting:
            return f"replay takes no more: {self._outbox.reason}"
        if group.key in self._held:
            return f"it has to learn first: agent.max_staleness bars more steps with version {self._version}"
        return "no parameters yet" if self._version < 0 else "it is in the next batch"


def _stream_of(device: str) -> contextlib.AbstractContextManager[object]:
    """A stream of its own on a GPU, so that inference does not stand in line behind updates."""
    if device == "cpu":
        return contextlib.nullcontext()
    # Before the rest of an update: actors wait for this, and nobody waits for one update.
    stream = torch.cuda.Stream(device, priority=-1)
    stream.wait_stream(torch.cuda.default_stream(device))  # on which the network was made
    return torch.cuda.stream(stream)
