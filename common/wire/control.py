"""The learner's end of the control connection: who is in the run, parameters out, metrics in.

One thread owns the sockets. Everything public may be called from any other thread.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zmq

from common.wire import messages, sockets
from common.wire.codec import Message, WireError, decode, encode
from common.wire.handshakes import HandshakeMonitor
from common.wire.params import encode_params
from common.wire.roster import Peer, RefusedError, Roster, ranges

_log = logging.getLogger(__name__)

_MESSAGES_PER_TURN = 256  # then the clock is looked at again, however busy the peers are
_TELEMETRY_QUEUE = 10_000


@dataclass(slots=True)
class Telemetry:
    """One report of a service.

    Attributes:
        source: name of the service.
        role: its role.
        incarnation: random number of its process: counters start at zero where it changes.
        metrics: numbers by name.
        fields: what is not a number, such as `episodes`, a list of [return, steps].
        blobs: arrays by name, such as `video`, uint8 [T, H, W, 3].
    """

    source: str
    role: str
    incarnation: int
    metrics: dict[str, float] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    blobs: dict[str, np.ndarray] = field(default_factory=dict)


class ControlServer:
    """The ROUTER that every service joins, and the PUB that announces parameter versions.

    Attributes:
        telemetry: reports in the order of arrival; the learner drains it.
        session: random number of this learner process.
        params_sent: how many times parameters have been sent to a peer.
        inference_endpoint: told to whoever joins; empty where there is no central inference.
    """

    def __init__(
        self,
        ctx: sockets.Context,
        control_endpoint: str,
        announce_endpoint: str,
        *,
        config_dict: dict[str, Any],
        structural_hash: str,
        total_slots: int,
        spread_slots: bool = False,
        heartbeat_s: float = 1.0,
        liveness_s: float = 15.0,
        bfloat16: bool = False,
        security: sockets.Security | None = None,
        run: str = "",
    ) -> None:
        self.telemetry: queue.Queue[Telemetry] = queue.Queue(_TELEMETRY_QUEUE)
        self.params_sent = 0
        self.session = int.from_bytes(os.urandom(8), "little") >> 1
        self.inference_endpoint = ""
        self._ctx = ctx
        self._endpoints = (control_endpoint, announce_endpoint)
        self._config = config_dict
        self._hash = structural_hash
        self._run = run
        self._heartbeat_s = heartbeat_s
        self._liveness_s = liveness_s
        self._bfloat16 = bfloat16
        self._security = security
        self._roster = Roster(total_slots, heartbeat_s, liveness_s, spread=spread_slots)
        self._changed = threading.Condition()  # guards everything below, and the roster
        self._state: dict[str, Any] = {
            "session": self.session,
            "version": -1,
            "steps": 0,
            "updates": 0,
            "stopping": False,
        }
        self._params: tuple[list[list[Any]], np.ndarray] | None = None
        self._rejected: Counter[str] = Counter()
        self._announce_due = True
        self._stop = threading.Event()
        self._waker = sockets.Waker()
        self._thread: threading.Thread | None = None
        self._handlers: dict[str, Callable[[bytes, Peer, Message], Message | None]] = {
            messages.HEARTBEAT: self._on_heartbeat,
            messages.PARAMS_GET: self._on_params_get,
            messages.TELEMETRY: self._on_telemetry,
            messages.BYE: self._on_bye,
        }

    # -- for the learner's threads --

    @property
    def control_endpoint(self) -> str:
        """The bound control address, after `start` with the real port."""
        return self._endpoints[0]

    @property
    def announce_endpoint(self) -> str:
        """The bound announce address, after `start` with the real port."""
        return self._endpoints[1]

    def start(self) -> None:
        """Bind both sockets and serve. Raises `ConfigError` where an address cannot be bound."""
        router = sockets.make_router(
            self._ctx,
            self._endpoints[0],
            self._security,
            max_message_bytes=messages.CONTROL_LIMITS.array_bytes,
            hwm=256,
        )
        try:
            pub = sockets.make_pub(self._ctx, self._endpoints[1], self._security)
        except BaseException:
            router.close(linger=0)
            raise
        self._endpoints = (sockets.bound_endpoint(router), sockets.bound_endpoint(pub))
        self._thread = threading.Thread(
            target=self._serve, args=(router, pub), name="control-server", daemon=True
        )
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Stop serving and close the sockets. May be called twice."""
        self._stop.set()
        self._waker.wake()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                _log.error("the control thread did not stop within %.0f s", timeout_s)
                return
        self._waker.close()

    def publish(self, version: int, params: dict[str, np.ndarray]) -> None:
        """Encode `params` once, offer them to everyone, and announce `version` (not negative)."""
        encoded = encode_params(params, bfloat16=self._bfloat16)
        with self._changed:
            self._params = encoded
            self._state["version"] = version
            self._announce_due = True
        self._waker.wake()

    def set_state(
        self, *, steps: int | None = None, updates: int | None = None, stopping: bool | None = None
    ) -> None:
        """Change the counters that every heartbeat answer carries. `stopping` is announced at once."""
        changes = {"steps": steps, "updates": updates, "stopping": stopping}
        with self._changed:
            self._state.update({name: value for name, value in changes.items() if value is not None})
            self._announce_due |= stopping is not None
        if stopping is not None:
            self._waker.wake()

    def shards(self) -> list[str]:
        """Endpoints of the live replay shards, in the order of their names."""
        with self._changed:
            return self._roster.shards()

    def leases(self) -> dict[int, set[int]]:
        """The slots of every live actor process, by its incarnation."""
        with self._changed:
            return self._roster.leases()

    def wait_until_empty(self, timeout_s: float) -> list[str]:
        """Wait until all peers have left, for at most `timeout_s`; returns the names that remain."""
        with self._changed:
            self._changed.wait_for(lambda: not self._roster.names(), timeout_s)
            return self._roster.names()

    def peers(self) -> list[dict[str, Any]]:
        """A snapshot of all peers: role, name, slots, seen_s_ago, version, error, endpoint, host, pid, ..."""
        with self._changed:
            return self._roster.snapshot(time.monotonic())

    def rejected(self) -> dict[str, int]:
        """How many messages could not be served, by kind. What a port scanner sends counts as a handshake."""
        with self._changed:
            return dict(self._rejected)

    # -- the thread --

    def _serve(self, router: sockets.Socket, pub: sockets.Socket) -> None:
        monitor = HandshakeMonitor(router)
        poller = zmq.Poller()
        for readable in (router, monitor.socket, self._waker.fd):
            poller.register(readable, zmq.POLLIN)
        announce_s = 0.0
        try:
            while not self._stop.is_set():
                try:
                    now_s = time.monotonic()
                    if self._announce_due or now_s >= announce_s:
                        # Repeated although nothing is new: a PUB may have lost the newest for a slow peer.
                        self._announce(pub)
                        announce_s = now_s + self._heartbeat_s
                    poller.poll(max(0, math.ceil((announce_s - now_s) * 1000)))
                    self._waker.clear()
                    with self._changed:
                        monitor.drain(self._rejected)
                    self._receive(router)
                    self._expire()
                except zmq.ContextTerminated:
                    return
                except Exception:
                    _log.exception("the control thread carries on after an error of its own")
                    self._count("internal")
                    self._stop.wait(0.1)
            self._announce(pub)
        finally:
            monitor.close()
            router.close()
            pub.close()

    def _announce(self, pub: sockets.Socket) -> None:
        with self._changed:
            self._announce_due = False
            frames = encode(Message(messages.ANNOUNCE, dict(self._state)))
        sockets.send_frames(pub, frames)

    def _expire(self) -> None:
        with self._changed:
            for peer in self._roster.expire(time.monotonic()):
                _log.warning(
                    "%s is silent for %.0f s: given up, slots %s are free",
                    *(peer.name, self._liveness_s, ranges(peer.slots)),
                )
                self._changed.notify_all()

    def _receive(self, router: sockets.Socket) -> None:
        for _ in range(_MESSAGES_PER_TURN):
            frames = sockets.receive_frames(router)
            if frames is None:
                return
            identity = frames[0].bytes
            answer = self._answer(identity, frames[1:], sockets.peer_role(frames[0]))
            if answer is not None and not sockets.send(router, answer, identity):
                self._count("unreachable")

    def _answer(self, identity: bytes, frames: list[zmq.Frame], key_role: str) -> Message | None:
        """Serve one message of a peer with a key of `key_role`; whatever is wrong with it ends here."""
        message = Message("")
        try:
            message = decode(frames, limits=messages.CONTROL_LIMITS)
            with self._changed:
                if message.type == messages.HELLO:
                    answer: Message | None = self._on_hello(identity, message, key_role)
                else:
                    peer = self._roster.seen(identity, time.monotonic())
                    handler = self._handlers.get(message.type)
                    if handler is None:
                        raise WireError("bad_type", f"the learner does not know {message.type}")
                    if peer is None:
                        raise RefusedError(messages.UNKNOWN_PEER, "say HELLO first")
                    answer = handler(identity, peer, message)
        except RefusedError as refusal:
            return self._refuse(message, refusal)
        except WireError as error:
            self._count(error.kind, identity, error.detail)
            # Garbage gets no answer: its sender would not understand, or is not one that waits.
            if message.request_id == 0 and error.kind != messages.REFUSED_VERSION:
                return None
            fields = {"kind": error.kind, "detail": error.detail, "about": message.type}
            return Message(messages.ERROR, fields, {}, message.request_id)
        if answer is not None:
            answer.request_id = message.request_id
        return answer

    def _refuse(self, message: Message, refusal: RefusedError) -> Message:
        self._count(refusal.kind, detail=refusal.detail)
        fields: dict[str, Any] = {"kind": refusal.kind, "detail": refusal.detail, "about": message.type}
        if refusal.kind == messages.REFUSED_HASH:
            fields["config"] = self._config
        return Message(messages.ERROR, fields, {}, message.request_id)

    def _count(self, kind: str, identity: bytes = b"", detail: str = "") -> None:
        with self._changed:
            self._rejected[kind] += 1
            count = self._rejected[kind]
            peer = self._roster.seen(identity, time.monotonic())
            if peer is not None:
                peer.rejected += 1
        if count in (1, 10, 100) or count % 1000 == 0:
            who = peer.name if peer is not None else "a peer"
            _log.warning("could not serve %s: %s, %s (%d so far)", who, kind, detail or "no detail", count)

    # -- one method per message, all called under the lock --

    def _on_hello(self, identity: bytes, message: Message, key_role: str) -> Message:
        role, name = message.text("role", max_chars=32), message.text("name", max_chars=64)
        if role not in messages.ROLES or not name or not name.isprintable():
            detail = f"no service called {name!r} of the role {role!r}; roles are {', '.join(messages.ROLES)}"
            raise RefusedError(messages.REFUSED_BAD_HELLO, detail)
        if key_role not in ("", role) and role != "viewer":
            detail = f"{name} says that its role is {role}; its key is one of {key_role}"
            raise RefusedError(messages.REFUSED_KEY, detail)
        theirs = message.text("hash", "", max_chars=256)
        if theirs and theirs != self._hash:
            detail = f"{name} has another structural config (hash {theirs}) than the run (hash {self._hash})"
            raise RefusedError(messages.REFUSED_HASH, detail)
        former = message.text("run", "", max_chars=64)
        if former and former != self._run:
            raise RefusedError(
                messages.REFUSED_RUN,
                f"{name} is in run {former}, and this learner has begun run {self._run}: start {name} again",
            )
        peer = Peer(
            identity,
            role,
            name,
            message.integer("incarnation"),
            endpoint=message.text("replay_endpoint", ""),
            host=message.text("host", ""),
            pid=message.integer("pid", 0),
        )
        wanted = message.integer("slots_wanted", 0, high=1 << 20)
        held = message.sequence("slots_held", [], of=int)
        previous = self._roster.join(peer, wanted, held, time.monotonic())
        again = previous is not None and previous.incarnation == peer.incarnation
        how = " again" if again else ""
        _log.log(_level(peer), "%s joins%s (%s, slots %s)", name, how, peer.host, ranges(peer.slots))
        self._changed.notify_all()
        return Message(
            messages.WELCOME,
            {
                "config": self._config,
                "run": self._run,
                "slots": peer.slots,
                "total_slots": self._roster.total_slots,
                "announce": self.announce_endpoint,
                "inference": self.inference_endpoint,
                "shards": self._roster.shards(),
                "heartbeat_s": self._heartbeat_s,
                "liveness_s": self._liveness_s,
                **self._state,
            },
        )

    def _on_heartbeat(self, identity: bytes, peer: Peer, message: Message) -> Message:
        peer.version = message.integer("version", -1, low=-1)
        peer.error = message.text("error", "")
        return Message(messages.HEARTBEAT_OK, {"shards": self._roster.shards(), **self._state})

    def _on_params_get(self, identity: bytes, peer: Peer, message: Message) -> Message:
        answer = Message(messages.PARAMS, {"manifest": [], **self._state})
        if self._params is not None and message.integer("version", -1, low=-1) != self._state["version"]:
            answer.fields["manifest"], answer.arrays["blob"] = self._params
            self.params_sent += 1
        return answer

    def _on_telemetry(self, identity: bytes, peer: Peer, message: Message) -> None:
        metrics = message.mapping("metrics", {})
        if not all(isinstance(value, int | float) for value in metrics.values()):
            raise WireError("bad_field", "TELEMETRY.metrics holds something that is no number")
        numbers = {name: float(value) for name, value in metrics.items()}
        report = Telemetry(
            peer.name, peer.role, peer.incarnation, numbers, message.mapping("fields", {}), message.arrays
        )
        try:
            self.telemetry.put_nowait(report)
        except queue.Full:
            self._count("telemetry_full", identity, "the learner does not drain its telemetry")

    def _on_bye(self, identity: bytes, peer: Peer, message: Message) -> None:
        self._roster.leave(identity)
        reason = message.text("reason", "") or "no reason given"
        _log.log(_level(peer), "%s leaves (%s)", peer.name, reason)
        self._changed.notify_all()


def _level(peer: Peer) -> int:
    """How much the log cares about a peer: one that only looks is no part of the run."""
    return logging.DEBUG if peer.role == "viewer" else logging.INFO
