"""The learner's end of the control connection: who is in the run, parameters out, metrics in.

One thread owns the ROUTER, one the PUB. Everything public may be called from any other thread.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import zmq

from troupe.common import system
from troupe.common.runtime import watchdog
from troupe.common.wire import messages, sockets
from troupe.common.wire.codec import fits
from troupe.common.wire.control.params import Published, encode_params
from troupe.common.wire.security import claims
from troupe.common.wire.server import Server
from troupe.services.learner.control.announcer import Announcer
from troupe.services.learner.control.budget import StepBudget
from troupe.services.learner.control.epochs import Epochs
from troupe.services.learner.control.evaluations import Evaluations
from troupe.services.learner.control.requests import RequestHandlers, Terms
from troupe.services.learner.control.seating import Seating
from troupe.services.learner.control.slots import SlotRules

_log = logging.getLogger(__name__)

BURST = 256
"""Messages served before those that are silent are looked for."""
MANY_MEMBERS, GATHER_S, MAX_GATHER_S = 32, 0.00015, 0.02
"""With more members, messages are left to gather after some were served, for so long times the members, and
at most so long: to be woken for each costs more than to serve it. With fewer, an answer sooner is worth
more."""


class ControlServer:
    """The ROUTER that every service joins, and the PUB that announces parameter versions.

    Attributes:
        telemetry: reports in the order of arrival; the learner drains it.
        session: random number of this learner process.
        seating: where the learner gets its seats in epochs with others.
    """

    def __init__(
        self,
        ctx: sockets.Context,
        control_endpoint: str,
        announce_endpoint: str,
        terms: Terms,
        slots: SlotRules,
        *,
        shard_sockets: str = "",
        bfloat16: bool = False,
        security: sockets.Security | None = None,
        budget: StepBudget | None = None,
        evaluations: Evaluations | None = None,
        epochs: Epochs | None = None,
    ) -> None:
        """Prepare to serve; `start` binds.

        Args:
            ctx: of ZeroMQ.
            control_endpoint: to bind the ROUTER to.
            announce_endpoint: to bind the PUB to.
            terms: what services are told when they join.
            slots: how many exploration slots there are, and who may hold them.
            shard_sockets: an address beside which shards may have ipc sockets, in addition to the two above.
            bfloat16: send parameters as bfloat16.
            security: keys; None for none.
            budget: counts the steps of the run.
            evaluations: hands out the parts of evaluations; None where nothing is evaluated by this learner.
            epochs: hands out seats to the learners that share batches; None where none may.
        """
        # Tells services that another process counts versions now; below 2^63, for languages with signed
        # integers.
        self.session = system.random.getrandbits(63)
        self._ctx = ctx
        self._endpoints = (control_endpoint, announce_endpoint)
        self._terms = terms
        self._bfloat16 = bfloat16
        self._security = security
        self._budget = budget or StepBudget()
        epochs = epochs or Epochs("this server has no learner")
        # Where a shard may have an ipc socket: beside our own, or where this run is told to look for one.
        directories = claims.ipc_directories((*self._endpoints, shard_sockets))
        self._handlers = RequestHandlers(
            terms, slots, self._budget, epochs, evaluations, directories, self.session
        )
        self._roster, self._offer = self._handlers.roster, self._handlers.offer
        self.telemetry = self._handlers.reports.queue
        self._lock = threading.RLock()  # guards the handlers, and all that is theirs
        self.seating = Seating(epochs, self._roster, self._lock, terms.heartbeat_s)
        self._server: Server | None = None
        self._announcer: Announcer | None = None
        self._stop = system.Event()
        self._waker = sockets.Waker()
        self._thread: system.Thread | None = None

    # -- for the learner's threads --

    @property
    def control_endpoint(self) -> str:
        """The bound control address, after `start` with the real port."""
        return self._endpoints[0]

    @property
    def announce_endpoint(self) -> str:
        """The bound announce address, after `start` with the real port."""
        return self._endpoints[1]

    @property
    def inference_endpoint(self) -> str:
        """Told to all who join; empty where there is no central inference."""
        return self._handlers.inference_endpoint

    @inference_endpoint.setter
    def inference_endpoint(self, endpoint: str) -> None:
        self._handlers.inference_endpoint = endpoint

    def bind(self) -> None:
        """Bind both sockets; who connects waits for `start`. Raises `ConfigError` where that cannot be."""
        router = sockets.make_router(
            self._ctx,
            self._endpoints[0],
            self._security,
            # libzmq closes the connection of a peer that sends a larger frame, before the frame is in memory.
            max_message_bytes=messages.CONTROL_LIMITS.array_bytes,
            hwm=256,
        )
        try:
            pub = sockets.make_pub(self._ctx, self._endpoints[1], self._security)
        except BaseException:
            router.close(linger=0)
            raise
        self._endpoints = (sockets.bound_endpoint(router), sockets.bound_endpoint(pub))
        self._announcer = Announcer(pub, self._announcement, self._announced_again_s, self._count_cut)
        self._server = Server(
            "learner",
            router,
            self._handlers.by_message(),
            limits=messages.CONTROL_LIMITS,
            lock=self._lock,
            heard=self._handlers.heard,
        )
        self._handlers.rejections = self._server.rejections
        self._handlers.announce_endpoint = self.announce_endpoint
        # Before anybody hears of the address: whom a key keeps out comes once, and is to be told in the log.
        self._server.open(self._waker.fd)

    def start(self) -> None:
        """Serve, and bind first where `bind` has not. Raises `ConfigError` as that does."""
        if self._server is None:
            self.bind()
        assert self._announcer is not None
        self._thread = system.Thread(
            target=self._serve, args=(self._server,), name="control-server", daemon=True
        )
        self._thread.start()
        self._announcer.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Stop serving and close the sockets. May be called twice."""
        self._stop.set()
        self._waker.wake()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                _log.error("the control thread did not stop within %.0f s", timeout_s)
                return
        elif self._server is not None:
            _close(self._server)
        if self._announcer is not None:
            self._announcer.stop(timeout_s)
        self._waker.close()

    def publish(self, version: int, params: dict[str, np.ndarray]) -> None:
        """Encode `params` once, offer them to everyone, and announce `version` (not negative)."""
        # Outside the lock, in the learner's thread: encoding takes milliseconds, in which heartbeats are
        # answered.
        manifest, blob = encode_params(params, bfloat16=self._bfloat16)
        with self._lock:
            steps, updates = self._budget.steps, self._handlers.state["updates"]
            self._offer.newest = Published(version, manifest, blob, steps, updates, system.monotonic())
            self._handlers.state["version"] = version
        self._announce()

    @property
    def params_sent(self) -> int:
        """How many times parameters have been sent to a peer."""
        return self._offer.sent

    def play_against(self, opponent: Published | None) -> None:
        """Have the evaluations that begin from now on also play against this earlier version."""
        with self._lock:
            self._offer.opponent = opponent

    def set_state(self, *, updates: int | None = None, stopping: bool | None = None) -> None:
        """Change what every heartbeat answer carries beside the steps. `stopping` is announced at once."""
        changes = {"updates": updates, "stopping": stopping}
        with self._lock:
            self._handlers.state.update({name: value for name, value in changes.items() if value is not None})
        if stopping is not None:
            self._announce()

    def tell(self, status: dict[str, Any]) -> None:
        """Answer STATUS with this from now on, without what a message has no room for."""
        fitting = next(
            (each for each in _shorter(status) if fits(messages.StatusOk(values=each).message())), {}
        )
        with self._lock:
            self._handlers.status = fitting

    def shards(self) -> list[str]:
        """Endpoints of the live replay shards, in the order of their names."""
        with self._lock:
            return self._roster.shards()

    def leases(self) -> dict[int, set[int]]:
        """The slots of every live actor process, by its incarnation."""
        with self._lock:
            return self._roster.leases()

    def has(self, *roles: str) -> bool:
        """Whether a peer of one of these roles is in the run."""
        with self._lock:
            return self._roster.has(*roles)

    def untold(self, *roles: str) -> bool:
        """Whether a peer of one of these roles has not been told yet that the run is done."""
        with self._lock:
            return any(self._roster.untold(role) for role in roles)

    def peers(self) -> list[dict[str, Any]]:
        """A snapshot of all peers: role, name, slots, seen_s_ago, version, error, endpoint, host, pid, ..."""
        with self._lock:
            peers = self._roster.snapshot(system.monotonic())
            for peer in peers:
                identity = peer.pop("identity")
                peer["rejected"] = self._server.rejections.of(identity) if self._server else 0
            return peers

    def rejected(self) -> dict[str, int]:
        """How many messages could not be served, by kind. What a port scanner sends counts as a handshake."""
        with self._lock:
            if self._server is None:
                return {}
            return dict(self._server.rejections.by_kind + self._server.handshakes)

    # -- the thread --

    def _serve(self, server: Server) -> None:
        loop = watchdog.Loop("the learner's control thread")
        try:
            while not self._stop.is_set():
                loop.turn()
                try:
                    served = server.turn(self._terms.heartbeat_s, BURST)
                    self._waker.clear()
                    with self._lock:
                        self._handlers.expire()
                    if 0 < served < BURST and (members := self._roster.members) > MANY_MEMBERS:
                        system.sleep(min(GATHER_S * members, MAX_GATHER_S))
                except zmq.ContextTerminated:
                    return
                except Exception:
                    _log.exception("error in the control thread; it carries on")
                    self._stop.wait(0.1)
        finally:
            loop.close()
            _close(server)

    def _announce(self) -> None:
        if self._announcer is not None:
            self._announcer.announce()

    def _announcement(self) -> messages.Announce:
        with self._lock:
            return messages.Announce(**self._handlers.run_state())

    def _announced_again_s(self) -> float:
        """How long until an announcement is repeated: answers to HEARTBEAT say the same."""
        with self._lock:
            # The end is waited for.
            return (
                self._terms.heartbeat_s if self._handlers.state["stopping"] else self._roster.beat_s("actor")
            )

    def _count_cut(self, cut: Counter[str]) -> None:
        with self._lock:
            assert self._server is not None
            self._server.rejections.by_kind.update(cut)


def _close(server: Server) -> None:
    server.close()
    server.socket.close()


def _shorter(status: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What others may see of a status: neither curves nor what names processes; then less and less."""
    secret = {"incarnation", "pid"}
    peers = [{k: v for k, v in peer.items() if k not in secret} for peer in status.get("peers", [])]
    shown = {name: value for name, value in status.items() if name != "returns"} | {"peers": peers}
    yield shown
    yield shown | {"services": {}}
    yield shown | {"services": {}, "peers": []}
