"""Central inference: a thread beside training that chooses actions for all actors and keeps their chunks."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import zmq

from common.agents import Agent
from common.config import Config
from common.data.fields import Chunk
from common.envs import EnvSpec
from common.envs.transfer import TransferError
from common.runtime.batching import BatchQueue, Request
from common.runtime.logging import Throttle
from common.wire import messages, sockets
from common.wire.codec import Limits, Message, WireError, decode
from common.wire.handshakes import HandshakeMonitor
from common.wire.inserter import Inserter, ShardClient
from common.wire.replay_client import ReplayRefusedError
from common.wire.roster import RefusedError
from services.learner.groups import Group, Groups

log = logging.getLogger(__name__)

LIMITS = Limits(arrays=16, array_bytes=1 << 28, total_bytes=1 << 28)
SWEEP_S = 0.5
"""How often leases, shards and rates are looked at."""
BLOCKED_POLL_MS = 50
FLUSH_TIMEOUT_S = 3.0
MESSAGES_PER_TURN = 256
GARBAGE_LOG_PERIOD_S = 60.0


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


class CentralInference:
    """The learner's inference service.

    One thread owns the socket, the network and everything of the slots. Requests are batched over all actors
    as `BatchQueue` says; one more rule is that nothing waits once every group has asked. While replay does
    not take the chunks that are complete, nobody gets an answer: so the actors pause, and nothing piles up.

    Args:
        ctx: ZeroMQ context.
        config: of the run.
        agent: acts, and is used by nothing else.
        spec: of the environment.
        leases: the slots of every live actor process, by its incarnation.
        shards: endpoints of the live replay shards.
        connect: makes the connection to a shard.
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
        connect: Callable[[str], ShardClient],
        seed: int,
        security: sockets.Security | None = None,
    ) -> None:
        self.endpoint = config.net.inference
        self.rejected: Counter[str] = Counter()
        section = config.inference
        self._ctx = ctx
        self._agent = agent
        self._shards = shards
        self._security = security
        self._device = config.learner.device
        self._rng = np.random.default_rng(seed)
        self._groups = Groups(
            agent, spec, config.actor.chunk_steps, section.max_batch, leases, config.total_slots
        )
        self._queue: BatchQueue[Group] = BatchQueue(
            section.min_batch, section.max_batch, section.timeout_ms / 1000
        )
        self._inserter = Inserter(connect)
        self._totals = Totals()
        self._measured = (time.monotonic(), Totals())
        self._version = -1
        self._newest: tuple[int, dict[str, np.ndarray]] | None = None
        self._offered = threading.Lock()
        self._waker = sockets.Waker()
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._wait_log: sockets.WaitLog | None = None
        self._blocked_at_s = 0.0
        self._throttle = Throttle(GARBAGE_LOG_PERIOD_S)

    # -- for the learner's main thread --

    def start(self) -> None:
        """Bind and serve. Raises `ConfigError` where the address cannot be bound."""
        self._router = sockets.make_router(
            self._ctx, self.endpoint, self._security, max_message_bytes=LIMITS.array_bytes
        )
        self.endpoint = sockets.bound_endpoint(self._router)
        self._thread = threading.Thread(target=self._run, name="inference", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = FLUSH_TIMEOUT_S + 5.0) -> None:
        """Hand complete chunks to replay and end the thread. May be called twice."""
        self._stop.set()
        self._waker.wake()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def offer(self, version: int, params: dict[str, np.ndarray]) -> None:
        """Use a copy of these parameters from the next batch on."""
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
        now_s, (then_s, last) = time.monotonic(), self._measured
        elapsed_s = now_s - then_s
        if elapsed_s < 2 * SWEEP_S:
            return {}
        totals = replace(self._totals)
        self._measured = (now_s, totals)
        batches = max(1, totals.batches - last.batches)
        return {
            "inference/steps_per_s": (totals.rows - last.rows) / elapsed_s,
            "inference/batches_per_s": (totals.batches - last.batches) / elapsed_s,
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
    def rows_total(self) -> int:
        """Actions chosen so far."""
        return self._totals.rows

    # -- the thread --

    def _run(self) -> None:
        monitor = HandshakeMonitor(self._router)
        try:
            with _stream_of(self._device):
                self._serve(monitor)
        except zmq.ContextTerminated:
            return
        except BaseException as error:
            self._failure = error  # for the learner's loop: a silent death would look like waiting actors
        finally:
            monitor.close()
            self._inserter.close()
            self._router.close()
            self._waker.close()

    def _serve(self, monitor: HandshakeMonitor) -> None:
        sweep_s = 0.0
        while not self._stop.is_set():
            if time.monotonic() >= sweep_s:
                sweep_s = time.monotonic() + SWEEP_S
                self._sweep()
            self._wait(monitor, sweep_s)
            monitor.drain(self.rejected)
            self._receive()
            self._put([])
            if not self._is_blocked():
                self._choose()
        for group in self._groups.all():
            self._put(group.slots.flush())
        lost = self._inserter.finish(FLUSH_TIMEOUT_S)
        if lost:
            log.info(
                "inference ends with %d chunks that replay did not take (%s)", lost, self._inserter.reason()
            )

    def _wait(self, monitor: HandshakeMonitor, until_s: float) -> None:
        """Sleep until there is something to do."""
        poller = zmq.Poller()
        for readable in (self._router, monitor.socket, self._waker.fd):
            poller.register(readable, zmq.POLLIN)
        wait_s = max(0.0, until_s - time.monotonic())
        if self._inserter.waiting:
            for socket in self._inserter.sockets:
                poller.register(socket, zmq.POLLIN)
            wait_s = min(wait_s, BLOCKED_POLL_MS / 1000)
        elif self._version >= 0 and (due_s := self._queue.due_in_s()) is not None:
            wait_s = min(wait_s, due_s)
        poller.poll(math.ceil(wait_s * 1000))
        self._waker.clear()

    def _is_blocked(self) -> bool:
        """Whether replay has to take chunks first; says who waits."""
        now_s = time.monotonic()
        if not self._inserter.waiting:
            self._wait_log = None
            return False
        if self._wait_log is None:
            self._wait_log = sockets.WaitLog()
        else:
            self._totals.blocked_s += now_s - self._blocked_at_s
        self._blocked_at_s = now_s
        if self._wait_log.due():
            waited_s, reason = self._wait_log.waited_s, self._inserter.reason()
            log.info(
                "the actors, and inference for them, wait for replay since %.0f s (%s)", waited_s, reason
            )
        return True

    def _due(self) -> list[Request[Group]]:
        everybody_waits = len(self._queue) == len(self._groups)
        return self._queue.take_now() if everybody_waits else self._queue.take()

    def _take_params(self) -> bool:
        """Use the newest parameters; whether there were any that are newer."""
        with self._offered:
            newest, self._newest = self._newest, None
        if newest is not None:
            self._version = newest[0]
            self._agent.load_params(newest[1])
        return newest is not None

    def _sweep(self) -> None:
        self._inserter.set_shards(self._shards())
        for group in self._groups.gone():
            self._forget(group)

    def _forget(self, group: Group) -> None:
        if self._queue.drop(group.key):
            detail = "its slots have begun again, or are no longer its own"
            sockets.send(self._router, _error(messages.UNKNOWN_GROUP, detail, group.number), group.identity)
        self._put(group.slots.flush())

    def _put(self, chunks: list[Chunk]) -> None:
        """Hand over chunks, and send what can be sent."""
        self._totals.chunks += len(chunks)
        try:
            self._inserter.put(chunks)
        except ReplayRefusedError as error:
            # Made of what an actor sent: numbers that no network can bear. It costs this chunk, not the run.
            self._count(error.kind, str(error))

    def _choose(self) -> None:
        """Serve the batches that are due, all of them if everybody has asked."""
        if self._version < 0 and not self._take_params():
            return
        while batch := self._due():
            self._take_params()
            began_s = time.monotonic()
            groups = [request.payload for request in batch]
            self._groups.choose(groups, self._version, self._rng)
            for group in groups:
                # An actor that has gone does not get it; one that has lost it asks again.
                sockets.send(self._router, group.answer(), group.identity)
            totals = self._totals
            totals.forward_s += time.monotonic() - began_s
            totals.queue_s += sum(began_s - request.since_s for request in batch)
            totals.batches += 1
            totals.requests += len(batch)
            totals.rows += sum(request.rows for request in batch)

    # -- one message --

    def _receive(self) -> None:
        for _ in range(MESSAGES_PER_TURN):
            frames = sockets.receive_frames(self._router)
            if frames is None:
                return
            identity = frames[0].bytes
            answer = self._answer(identity, frames[1:], sockets.peer_role(frames[0]))
            if answer is not None:
                sockets.send(self._router, answer, identity)

    def _answer(self, identity: bytes, frames: list[zmq.Frame], key_role: str) -> Message | None:
        """Take in one message; whatever is wrong with it ends here."""
        message = Message("")
        try:
            message = decode(frames, limits=LIMITS)
            if message.type != messages.INFER or not message.request_id:
                raise WireError("bad_type", f"{message.type or 'nothing'} is no request for actions")
            if key_role not in ("", "actor"):
                raise RefusedError(
                    messages.REFUSED_KEY, f"INFER comes from actors; this key is of {key_role}"
                )
            return self._infer(identity, message)
        except RefusedError as refusal:
            kind, detail = refusal.kind, refusal.detail
        except WireError as error:
            kind, detail = error.kind, error.detail
        except TransferError as error:
            kind, detail = "bad_field", str(error)
        self._count(kind, detail)
        # Garbage gets no answer: its sender would not understand, or is not one that waits.
        if not message.request_id and kind != messages.REFUSED_VERSION:
            return None
        return _error(kind, detail, message.request_id, message.type)

    def _infer(self, identity: bytes, message: Message) -> Message | None:
        group = self._groups.find(message)
        if group is not None and message.request_id <= group.number:
            return self._repeated(group, identity, message)
        if "slots" in message.fields:
            group, taken = self._groups.begin(identity, message)
            for other in taken:
                self._forget(other)
        else:
            self._put(self._groups.go_on(group, message))
            assert group is not None
            group.identity = identity
        self._queue.put(group.key, len(group.slots), group)
        return None

    def _repeated(self, group: Group, identity: bytes, message: Message) -> Message | None:
        """What has come before: late, or again because the answer did not come."""
        if message.request_id < group.number:
            return None
        group.identity = identity
        if not group.asked:
            return group.answer()
        return Message(messages.WAIT, {"reason": self._reason()}, {}, message.request_id)

    def _reason(self) -> str:
        if self._inserter.waiting:
            return f"replay takes no more: {self._inserter.reason()}"
        return "no parameters yet" if self._version < 0 else "it is in the next batch"

    def _count(self, kind: str, detail: str) -> None:
        self.rejected[kind] += 1
        if self._throttle(kind):
            log.warning(
                "inference: could not serve a peer: %s, %s (%d so far)", kind, detail, self.rejected[kind]
            )


def _error(kind: str, detail: str, request_id: int, about: str = messages.INFER) -> Message:
    return Message(messages.ERROR, {"kind": kind, "detail": detail, "about": about}, {}, request_id)


def _stream_of(device: str) -> contextlib.AbstractContextManager[object]:
    """A stream of its own on a GPU, so that inference does not stand in line behind updates."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device != "cpu" else contextlib.nullcontext()
