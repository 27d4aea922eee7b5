"""The learner's end of the control connection: who is in the run, parameters out, metrics in.

One thread owns the ROUTER, one the PUB. Everything public may be called from any other thread.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import zmq
from msgspec import UNSET

from troupe.common import system, timing
from troupe.common.errors import RefusedError
from troupe.common.runtime import watchdog
from troupe.common.runtime.logging import Throttle, peer_text
from troupe.common.wire import messages, sockets
from troupe.common.wire.body import Body
from troupe.common.wire.codec import fits
from troupe.common.wire.control.messages import Seat
from troupe.common.wire.control.params import Published, encode_params
from troupe.common.wire.rejections import GARBAGE_LOG_PERIOD_S
from troupe.common.wire.security import claims
from troupe.common.wire.server import Envelope, Handler, Server
from troupe.common.wire.types import FieldEntry
from troupe.services.learner.control.announcer import Announcer
from troupe.services.learner.control.budget import StepBudget
from troupe.services.learner.control.epochs import Epochs
from troupe.services.learner.control.evaluations import Evaluations
from troupe.services.learner.control.offer import Offer
from troupe.services.learner.control.reports import Reports
from troupe.services.learner.control.roster import Peer, Roster, SlotRules, ranges

_log = logging.getLogger(__name__)

BURST = 256
"""Messages served before those that are silent are looked for."""
GONE_S = 5.0
"""A learner that was to come to an epoch, and has not been heard for so long, is waited for no more."""
NEWS_AT_ONCE, NEWS_PER_S = 512, 0.2
"""Lines about who comes and goes, for each key."""
MANY_MEMBERS, GATHER_S, MOST_GATHER_S = 32, 0.00015, 0.02
"""With more members, messages are left to gather after some were served, for so long times the members, and
at most so long: to be woken for each costs more than to serve it. With fewer, an answer sooner is worth
more."""


@dataclass(frozen=True)
class Terms:
    """What every service is told when it joins, and what does not change while the learner runs.

    Attributes:
        config: the run's whole configuration.
        structural_hash: of its structural fields; a service with another one is turned down.
        run: random name of the run, the same for all of its learner processes.
        heartbeat_s: how often services send HEARTBEAT and are told what is new, actors only while there are
            few of them.
        liveness_s: silence after which either side gives up the other.
        fields: what a chunk of this run holds, for shards.
        item_steps: the shortest and the longest item that the run learns from, for shards.
    """

    config: dict[str, Any]
    structural_hash: str = ""
    run: str = ""
    heartbeat_s: float = 1.0
    liveness_s: float = 15.0
    fields: Sequence[FieldEntry] = ()
    item_steps: tuple[int, int] = (0, 0)


class ControlServer:
    """The ROUTER that every service joins, and the PUB that announces parameter versions.

    Attributes:
        telemetry: reports in the order of arrival; the learner drains it.
        session: random number of this learner process.
        inference_endpoint: told to all who join; empty where there is no central inference.
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
        self.inference_endpoint = ""
        self._ctx = ctx
        self._endpoints = (control_endpoint, announce_endpoint)
        self._terms = terms
        self._bfloat16 = bfloat16
        self._security = security
        # Where a shard may have an ipc socket: beside our own, or where this run is told to look for one.
        self._shard_directories = claims.ipc_directories((*self._endpoints, shard_sockets))
        self._budget = budget or StepBudget()
        self._roster = Roster(
            slots.total,
            terms.heartbeat_s,
            terms.liveness_s,
            spread=slots.spread,
            most_per_key=slots.most_per_key,
            budget=self._budget,
        )
        self._evaluations = evaluations
        self._reports = Reports(evaluations)
        self.telemetry = self._reports.queue
        self._epochs = epochs or Epochs("this server has no learner")
        self._offer = Offer()
        self._changed = system.Condition()  # guards everything below, and the roster
        self._state: dict[str, Any] = {
            "session": self.session,
            "version": -1,
            "updates": 0,
            "stopping": False,
        }
        self._status: dict[str, Any] = {}
        self._status_of: dict[str, claims.Allowance] = {}
        self._news: dict[str, claims.Allowance] = {}
        self._throttle = Throttle(GARBAGE_LOG_PERIOD_S)
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
            {
                messages.Hello: self._on_hello,
                messages.Heartbeat: self._from_member(self._on_heartbeat),
                messages.ParamsGet: self._from_member(self._on_params_get),
                messages.Telemetry: self._from_member(self._on_telemetry),
                messages.Bye: self._from_member(self._on_bye),
                messages.Status: self._on_status,
            },
            limits=messages.CONTROL_LIMITS,
            lock=self._changed,
            heard=self._heard,
        )
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
        with self._changed:
            steps, updates = self._budget.steps, self._state["updates"]
            self._offer.newest = Published(version, manifest, blob, steps, updates, system.monotonic())
            self._state["version"] = version
        self._announce()

    @property
    def params_sent(self) -> int:
        """How many times parameters have been sent to a peer."""
        return self._offer.sent

    def params_fetched(self, version: int) -> tuple[dict[str, np.ndarray], Published] | None:
        """The parameters that an evaluator was given as this version; see `Offer.fetched`."""
        with self._changed:
            return self._offer.fetched(version)

    def set_state(self, *, updates: int | None = None, stopping: bool | None = None) -> None:
        """Change what every heartbeat answer carries beside the steps. `stopping` is announced at once."""
        changes = {"updates": updates, "stopping": stopping}
        with self._changed:
            self._state.update({name: value for name, value in changes.items() if value is not None})
        if stopping is not None:
            self._announce()

    def tell(self, status: dict[str, Any]) -> None:
        """Answer STATUS with this from now on, without what a message has no room for."""
        fitting = next(
            (each for each in _shorter(status) if fits(messages.StatusOk(values=each).message())), {}
        )
        with self._changed:
            self._status = fitting

    def shards(self) -> list[str]:
        """Endpoints of the live replay shards, in the order of their names."""
        with self._changed:
            return self._roster.shards()

    def leases(self) -> dict[int, set[int]]:
        """The slots of every live actor process, by its incarnation."""
        with self._changed:
            return self._roster.leases()

    @property
    def learner_waits(self) -> bool:
        """Whether a learner waits for a seat."""
        with self._changed:
            return self._epochs.waits(self._roster.processes("learner"), system.monotonic())

    def own_seat(self, meeting: Callable[[], tuple[str, int]]) -> Seat | None:
        """The seat of this learner in the next epoch, or None while others may come: ask again soon.

        `meeting` is called for the address at which learners meet, where there are several.
        """
        with self._changed:
            return self._epochs.formed(self._roster.processes("learner"), system.monotonic(), meeting)

    def planned_seat(self, staying: Collection[int], meeting: Callable[[], tuple[str, int]]) -> Seat | None:
        """The seat of this learner in an epoch of these ranks and those that wait; see `Epochs.planned`."""
        with self._changed:
            live = self._roster.processes("learner")
            return self._epochs.planned(staying, live, system.monotonic(), meeting)

    @property
    def comer_gone(self) -> bool:
        """Whether one that is to come to the planned epoch has left, or not been heard for a while."""
        with self._changed:
            heard_s = system.monotonic() - max(GONE_S, timing.HEARTBEATS_LATE * self._terms.heartbeat_s)
            return not self._roster.processes("learner", heard_s).issuperset(self._epochs.comers)

    @property
    def epoch_over(self) -> bool:
        """Whether another learner has left the newest epoch; see `Epochs.over`."""
        with self._changed:
            return self._epochs.over(self._roster.processes("learner"))

    def epoch_changed(self) -> None:
        """Note that the epoch that was planned is the newest now."""
        with self._changed:
            self._epochs.changed()

    def epoch_begun(self) -> None:
        """Note that all who had a seat in the newest epoch have come."""
        with self._changed:
            self._epochs.begun()

    def epoch_failed(self, absent: Collection[int]) -> None:
        """Note that it did not begin; see `Epochs.failed`."""
        with self._changed:
            self._epochs.failed(absent, system.monotonic())

    def epoch_unreached(self, ranks: Collection[int]) -> bool:
        """Note that these cannot connect to those who are to come; see `Epochs.unreached`."""
        with self._changed:
            return self._epochs.unreached(ranks, system.monotonic())

    def epoch_misled(self, ranks: Collection[int]) -> None:
        """Note that one of these has said in it what cannot be; see `Epochs.misled`."""
        with self._changed:
            self._epochs.misled(ranks, system.monotonic())

    def has(self, *roles: str) -> bool:
        """Whether a peer of one of these roles is in the run."""
        with self._changed:
            return self._roster.has(*roles)

    def untold(self, *roles: str) -> bool:
        """Whether a peer of one of these roles has not been told yet that the run is done."""
        with self._changed:
            return any(self._roster.untold(role) for role in roles)

    def peers(self) -> list[dict[str, Any]]:
        """A snapshot of all peers: role, name, slots, seen_s_ago, version, error, endpoint, host, pid, ..."""
        with self._changed:
            peers = self._roster.snapshot(system.monotonic())
            for peer in peers:
                identity = peer.pop("identity")
                peer["rejected"] = self._server.rejections.of(identity) if self._server else 0
            return peers

    def rejected(self) -> dict[str, int]:
        """How many messages could not be served, by kind. What a port scanner sends counts as a handshake."""
        with self._changed:
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
                    self._expire()
                    if 0 < served < BURST and (members := self._roster.members) > MANY_MEMBERS:
                        system.sleep(min(GATHER_S * members, MOST_GATHER_S))
                except zmq.ContextTerminated:
                    return
                except Exception:
                    _log.exception("the control thread carries on after an error of its own")
                    self._stop.wait(0.1)
        finally:
            loop.close()
            _close(server)

    def _announce(self) -> None:
        if self._announcer is not None:
            self._announcer.announce()

    def _announcement(self) -> messages.Announce:
        with self._changed:
            return messages.Announce(**self._run_state())

    def _announced_again_s(self) -> float:
        """How long until an announcement is repeated: answers to HEARTBEAT say the same."""
        with self._changed:
            # The end is waited for.
            return self._terms.heartbeat_s if self._state["stopping"] else self._roster.beat_s("actor")

    def _count_cut(self, cut: Counter[str]) -> None:
        with self._changed:
            assert self._server is not None
            self._server.rejections.by_kind.update(cut)

    def _expire(self) -> None:
        with self._changed:
            for peer in self._roster.expire(system.monotonic()):
                line = "%s is silent for %.0f s: given up, slots %s are free"
                self._tell(peer, logging.WARNING, line, peer.name, self._terms.liveness_s, ranges(peer.slots))
                self._changed.notify_all()

    def _heard(self, envelope: Envelope, header_bytes: int) -> None:
        peer = self._roster.seen(envelope.peer, system.monotonic(), envelope.key.public)
        self._reports.admit(peer, envelope.key.public, header_bytes)

    # -- one method per message, all called under the lock --

    def _from_member(self, serve: Callable[[Peer, Any], Body | None]) -> Handler:
        """A handler that serves those who have said HELLO."""

        def handler(envelope: Envelope, body: Body) -> Body | None:
            # The key as well as the identity: a stranger may choose any identity, and would speak for its
            # owner.
            peer = self._roster.seen(envelope.peer, system.monotonic(), envelope.key.public)
            if peer is None:
                self._hear_replaced(envelope, body)
                raise RefusedError(messages.UNKNOWN_PEER, "say HELLO first")
            peer.spoke = True
            return serve(peer, body)

        return handler

    def _on_hello(self, envelope: Envelope, body: messages.Hello) -> messages.Welcome:
        role, name, key = body.role, body.name, envelope.key
        if role not in messages.ROLES or not name or not name.isprintable():
            detail = f"no service called {name!r} of the role {role!r}; roles are {', '.join(messages.ROLES)}"
            raise RefusedError(messages.REFUSED_BAD_HELLO, detail)
        claims.check_role(role, name, key.role)
        if role == "learner" and self._epochs.closed_because:
            raise RefusedError(messages.REFUSED_CLAIM, self._epochs.closed_because)
        claims.check_slots(role, name, body.slots_wanted, body.slots_held)
        claims.check_progress(role, body.steps_made, body.steps_limit)
        claims.check_replay_endpoint(body.replay_endpoint, role, name, self._shard_directories)
        # Only clients of other makes send one: Troupe's services take their configuration from WELCOME.
        if body.hash and body.hash != self._terms.structural_hash:
            ours = f"the run (hash {self._terms.structural_hash})"
            detail = f"{name} has another structural config (hash {body.hash}) than {ours}"
            raise RefusedError(messages.REFUSED_HASH, detail, config=self._terms.config)
        # A service that outlived its run holds other weights, and chunks of another training.
        if body.run and body.run != self._terms.run:
            raise RefusedError(
                messages.REFUSED_RUN,
                f"{name} is in run {body.run}, and this learner has begun run {self._terms.run}: "
                "start it again",
            )
        peer = Peer(
            envelope.peer,
            role,
            name,
            body.incarnation,
            key=key.public,
            endpoint=body.replay_endpoint,
            host=body.host,
            pid=body.pid,
            boot=body.boot,
            started_s=body.started_s,
            software=peer_text(body.software)[:100],
        )
        previous = self._roster.join(peer, body.slots_wanted, body.slots_held, system.monotonic())
        again = previous is not None and previous.incarnation == peer.incarnation
        how = " again" if again else ""
        where = f"{peer.host}, slots {ranges(peer.slots)}" if role == "actor" else peer.host
        self._tell(peer, _level(peer), "%s joins%s (%s)", name, how, where)
        self._changed.notify_all()
        return self._welcome(peer, body)

    def _welcome(self, peer: Peer, body: messages.Hello) -> messages.Welcome:
        terms = self._terms
        stores = peer.role == "replay"
        least, most = terms.item_steps if stores else (0, 0)
        return messages.Welcome(
            config=terms.config,
            run=terms.run,
            slots=peer.slots,
            total_slots=self._roster.total_slots,
            announce=self.announce_endpoint,
            inference=self.inference_endpoint,
            shards=self._roster.shards(),
            heartbeat_s=peer.beat_s,
            liveness_s=terms.liveness_s,
            steps_limit=self._step_limit(peer, body),
            fields=list(terms.fields) if stores else [],
            least_item_steps=least,
            most_item_steps=most,
            **self._run_state(),
        )

    def _on_heartbeat(self, peer: Peer, body: messages.Heartbeat) -> messages.HeartbeatOk:
        peer.version, peer.error = body.version, body.error
        if body.clock_s:
            peer.take_clock(body.clock_s, system.time())
        limit = self._step_limit(peer, body)
        answer = messages.HeartbeatOk(shards=self._roster.shards(), steps_limit=limit, **self._run_state())
        peer.told_end = answer.stopping
        if (beat_s := self._roster.beat_s(peer.role)) != peer.beat_s:
            answer.heartbeat_s = peer.beat_s = beat_s
        if body.epoch_ended is not UNSET:
            claims.check_epoch(peer.role)
            now_s = system.monotonic()
            answer.seat = self._epochs.asked(peer.incarnation, body.epoch_ended, now_s) or UNSET
        return answer

    def _run_state(self) -> dict[str, Any]:
        return {**self._state, "steps": self._budget.steps}

    def _step_limit(self, peer: Peer, body: messages.Hello | messages.Heartbeat) -> int:
        """Count the steps of an actor, and say how far it may go; 0 for others."""
        claims.check_progress(peer.role, body.steps_made, body.steps_limit)
        claims.check_steps(peer.name, body.steps_made, self._budget.permitted(peer.incarnation))
        return self._budget.extend(peer.incarnation, body.steps_made, body.steps_limit)

    def _on_params_get(self, peer: Peer, body: messages.ParamsGet) -> messages.Params:
        if body.games:
            return self._on_games_wanted(peer, body)
        newest = self._offer.newest
        # An empty manifest says that there is nothing newer.
        if newest is None or body.version == self._state["version"]:
            return messages.Params(manifest=[], **self._run_state())
        if peer.role == "evaluator":
            self._offer.keep(newest)
        self._offer.sent += 1
        return messages.Params(manifest=newest.manifest, blob=newest.blob, **self._run_state())

    def _on_games_wanted(self, peer: Peer, body: messages.ParamsGet) -> messages.Params:
        """The part of an evaluation that is next, with the parameters that it is of."""
        claims.check_games(peer.role)
        state, evaluations, now_s = self._run_state(), self._evaluations, system.monotonic()
        params = self._offer.newest
        if evaluations is None or params is None:
            return messages.Params(manifest=[], **state)
        live, newest, stopping = self._roster.processes("evaluator"), state["version"], state["stopping"]
        part = evaluations.next(peer.incarnation, live, newest, stopping, now_s)
        version = evaluations.version
        played = self._offer.evaluate(params, version)
        if part is None:
            return messages.Params(manifest=[], over=evaluations.over(newest, stopping, now_s), **state)
        if body.version == version:
            return messages.Params(manifest=[], part=part, evaluated=version, **state)
        self._offer.sent += 1
        return messages.Params(
            manifest=played.manifest, blob=played.blob, part=part, evaluated=version, **state
        )

    def _on_telemetry(self, peer: Peer, body: messages.Telemetry) -> None:
        made = self._budget.made(peer.incarnation)
        left_out = self._reports.take(peer, body, made, self._offer.evaluated)
        for kind, detail in left_out:
            assert self._server is not None
            self._server.rejections.count(peer.identity, kind, detail)

    def _on_status(self, envelope: Envelope, body: messages.Status) -> messages.StatusOk:
        key = envelope.key.public
        if key and not self._status_of.setdefault(key, claims.status()).take():
            raise RefusedError(messages.TOO_MANY, "more STATUS than those with one key may ask for")
        return messages.StatusOk(values={**self._status, "clock_s": system.time()})

    def _hear_replaced(self, envelope: Envelope, body: Body) -> None:
        """Count the steps that an actor tells of late: the HELLO of its successor was read before."""
        peer = self._roster.replaced_peer(envelope.peer, envelope.key.public)
        if peer is None or not isinstance(body, (messages.Heartbeat, messages.Bye)):
            return
        self._count_steps(peer, body)
        if isinstance(body, messages.Bye):
            self._roster.forget_replaced(peer.identity)

    def _count_steps(self, peer: Peer, body: messages.Heartbeat | messages.Bye) -> None:
        claims.check_progress(peer.role, body.steps_made, 0)
        claims.check_steps(peer.name, body.steps_made, self._budget.permitted(peer.incarnation))
        self._budget.report(peer.incarnation, body.steps_made, len(peer.slots))

    def _on_bye(self, peer: Peer, body: messages.Bye) -> None:
        self._count_steps(peer, body)
        # After the report: the budget has to know the slots that the steps were made in.
        self._roster.leave(peer.identity)
        self._tell(peer, _level(peer), "%s leaves (%s)", peer.name, body.reason or "no reason given")
        self._changed.notify_all()

    def _tell(self, peer: Peer, level: int, line: str, *words: object) -> None:
        """Log what a peer does, within the line limit of its key."""
        if not _log.isEnabledFor(level):
            return
        news = self._news.setdefault(peer.key, claims.Allowance(NEWS_AT_ONCE, NEWS_PER_S))
        if news.take():
            _log.log(level, line, *words)
        elif self._throttle(peer.key):
            _log.warning("services with the key of %s come and go too often to tell of each", peer.name)


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


def _level(peer: Peer) -> int:
    """How much the log cares about a peer: one that only looks is no part of the run."""
    return logging.DEBUG if peer.role == "viewer" else logging.INFO
