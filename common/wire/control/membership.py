"""The thread behind `ControlClient`: it owns the sockets, joins the run, and joins again after every loss."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import msgspec
import zmq
from msgspec import UNSET

from troupe.common import system
from troupe.common.errors import AuthError, ConfigError, PeerError, TroupeError
from troupe.common.runtime.logging import Throttle
from troupe.common.wire import messages, sockets
from troupe.common.wire.body import Body
from troupe.common.wire.codec import Message, WireError
from troupe.common.wire.control.member import Games, Member, Params, RunState, Welcome
from troupe.common.wire.control.messages import State
from troupe.common.wire.control.params import decode_params
from troupe.common.wire.control.relay import PATIENCE_S, HostRelay
from troupe.common.wire.link import Link
from troupe.common.wire.rejections import GARBAGE_LOG_PERIOD_S
from troupe.common.wire.security.claims import unusable

_log = logging.getLogger(__name__)


class Membership:
    """Keeps `member` a member of the run at `endpoint`.

    A life is one set of sockets. It ends when the learner is silent for `liveness_s`, or does not know us (it
    has been restarted); the next life starts after a pause, with new sockets and HELLO.

    Attributes:
        heartbeat_s: how often HEARTBEAT is sent, as the learner said last.
    """

    def __init__(
        self,
        ctx: sockets.Context,
        endpoint: str,
        member: Member,
        hello: messages.Hello,
        *,
        heartbeat_s: float = 1.0,
        liveness_s: float = 15.0,
        security: sockets.Security | None = None,
        relay_directory: Path | None = None,
        relay_patience_s: float = PATIENCE_S,
    ) -> None:
        """Prepare to say `hello` to `endpoint`.

        With `relay_directory`, parameters come through the one process of the host that fetches them.
        """
        self.bye_reason = ""
        self.hello = hello
        self.stopped = system.Event()
        self.waker = sockets.Waker()
        self._ctx = ctx
        self._member = member
        self._name = hello.name
        self.heartbeat_s = heartbeat_s
        self._link = Link(
            ctx,
            endpoint,
            "learner",
            name=hello.name,
            incarnation=hello.incarnation,
            liveness_s=liveness_s,
            security=security,
            hwm=256,
        )
        self._relay_options = relay_directory, relay_patience_s
        self._relay: HostRelay | None = None
        self._request_id = 0
        self._slots_asked = 0  # by the newest HELLO
        self._throttle = Throttle(GARBAGE_LOG_PERIOD_S)

    @property
    def rejected(self) -> int:
        """Messages that the learner could not serve, or that could not be understood."""
        return self._link.bad_messages + self._member.rejected

    def run(self) -> None:
        """Live until stopped or refused; the body of the thread."""
        member = self._member
        wait_log = sockets.WaitLog()
        while not self.stopped.is_set() and member.failure is None:
            try:
                if self._live(wait_log):
                    self._link.welcomed()
                    wait_log = sockets.WaitLog()
            # The process ends, and took the context with it: there is nothing left to say BYE over.
            except zmq.ContextTerminated:
                return
            except TroupeError as error:
                with member.changed:
                    member.failure = error
            # Counted as a loss of the connection: a thread that died silently would leave a service that
            # waits for ever.
            except Exception as error:
                _log.exception("error in the control thread of %s; it starts again", self._name)
                member.waiting_for = f"{type(error).__name__}: {error}"
            with member.changed:
                member.connected = False
                member.changed.notify_all()
            if member.failure is None:
                self.stopped.wait(self._link.backoff.next_s())

    def _live(self, wait_log: sockets.WaitLog) -> bool:
        """One life; whether it has been welcome."""
        self._link.connect()
        sub: sockets.Socket | None = None
        try:
            welcome = self._say_hello(wait_log)
            if welcome is None:
                return False
            # A learner in a container binds 0.0.0.0 and says so; the host by which it was reached is the one
            # that works.
            announce = sockets.reachable_endpoint(welcome.announce, self._link.endpoint)
            sub = sockets.make_sub(self._ctx, announce, self._link.security)
            self._stay(sub)
            return True
        finally:
            self._leave_relay()
            self._link.close(sockets.LINGER_MS / 1000)
            if sub is not None:
                sub.close(linger=0)

    def _say_hello(self, wait_log: sockets.WaitLog) -> Welcome | None:
        """Say HELLO until WELCOME; None after `liveness_s` without. Raises `TroupeError` if refused."""
        member, link = self._member, self._link
        hello_s = 0.0
        while not self.stopped.is_set() and not link.lost():
            if wait_log.due():
                _log.info(
                    "%s waits for %s, %.0f s so far (%s)",
                    self._name,
                    link,
                    wait_log.waited_s,
                    member.waiting_for,
                )
            now_s = system.monotonic()
            unsent = now_s >= hello_s
            if unsent and self._request(hello := self._former(member)):
                self._slots_asked = hello.slots_wanted
                unsent, hello_s = False, now_s + 2 * self.heartbeat_s
            # A DEALER becomes writable when its connection is up, so this does not poll in a circle.
            link.wait(200, writable=unsent)
            try:
                message = link.next()
                if message is not None and message.type == messages.Welcome.TYPE:
                    return self._enter(self._welcome(message), self._slots_asked)
                if message is None or message.type != messages.Error.TYPE:
                    continue
                error = messages.Error.of(message)
            except WireError as nonsense:
                if nonsense.kind == messages.REFUSED_VERSION:
                    raise ConfigError(f"{link} cannot be used: {nonsense.detail}") from nonsense
                link.bad(nonsense)
                continue
            member.waiting_for = error.detail
            # What time may change is tried again, such as a name that a dead process holds until its lease
            # ends.
            if error.kind not in messages.RETRY_KINDS:
                raise self._refusal(error)
            hello_s = system.monotonic() + self.heartbeat_s
        return None

    def _welcome(self, message: Message) -> Welcome:
        try:
            return Welcome.of(message)
        except WireError as wrong:  # saying HELLO again would bring the same
            raise ConfigError(f"{self._link} cannot be used: {wrong.detail}") from wrong

    def _former(self, member: Member) -> messages.Hello:
        """HELLO, with what is left of the membership that there was before."""
        with member.changed:
            return msgspec.structs.replace(self.hello, **member.former())

    def _enter(self, welcome: Welcome, slots_wanted: int) -> Welcome:
        # The learner's values, not our own: its patience decides when a lease ends.
        self.heartbeat_s, self._link.liveness_s = welcome.heartbeat_s, welcome.liveness_s
        member = self._member
        with member.changed:
            member.welcome, member.state = welcome, RunState.of(welcome)
            member.shards = self._usable(welcome.shards)
            member.permit(welcome.steps_limit)
            member.connected = True
            member.waiting_for = "no answer yet"
            member.joins += 1
            member.heard()
            member.slots_wanted = slots_wanted
            member.changed.notify_all()
        _log.info("%s has joined %s (join %d)", self._name, self._link, member.joins)
        return welcome

    def _refusal(self, error: messages.Error) -> TroupeError:
        line = f"{self._link} refuses {self._name}: {error.detail}"
        if error.kind == messages.REFUSED_KEY:
            return AuthError(line)
        if error.kind == messages.REFUSED_RUN:
            # As if its own learner had gone for good: its supervisor may start it again.
            return PeerError(line)
        return ConfigError(line)

    def _stay(self, sub: sockets.Socket) -> None:
        """Serve until the end, until the learner falls silent, or until another HELLO is due."""
        link = self._link
        poller = zmq.Poller()
        for readable in (link.socket, sub, self.waker.fd):
            poller.register(readable, zmq.POLLIN)
        self._join_relay(poller)
        heartbeat_s = params_s = 0.0
        confirmed = False
        while not self.stopped.is_set():
            # Somebody called `want_slots`: only HELLO can ask for slots, so this life ends for another.
            if self._member.slots_wanted != self.hello.slots_wanted:
                return
            if link.lost():  # or AuthError: it may have been restarted, and no longer let us in
                _log.warning(
                    "%s: %s has been silent for %.0f s: joining again with new sockets",
                    self._name,
                    link,
                    link.silent_s,
                )
                return
            now_s = system.monotonic()
            if now_s >= heartbeat_s or self._member.steps_wanted:
                self._send_heartbeat()
                heartbeat_s = now_s + self.heartbeat_s
            self._send_telemetry()
            if now_s >= params_s:
                params_s = now_s + self._ask_for_params()
            poller.poll(max(1, math.ceil((heartbeat_s - system.monotonic()) * 1000)))
            self.waker.clear()
            for message in link.receive():
                if message.type == messages.Params.TYPE:
                    params_s = 0.0
                if not self._on_message(message):
                    return
            self._hear(sub)
            # The learner stays until every shard has been told in an answer, so it asks for one at once.
            if self._member.state.stopping and self.hello.role == "replay" and not confirmed:
                confirmed, heartbeat_s = True, 0.0
            if self._relay is not None and self._turn_of_relay(self._relay):
                params_s = 0.0
        self._send_telemetry()
        # After the last reports: the learner forgets a member at its BYE.
        link.send(messages.Bye(reason=self.bye_reason, steps_made=self._member.steps_made))

    def _hear(self, sub: sockets.Socket) -> None:
        """Take in an announcement, if one has come."""
        try:
            announcement = sockets.receive(sub)
        except WireError as error:
            self._link.bad(error)
            return
        if announcement is not None:
            self._on_message(announcement)

    def _send_heartbeat(self) -> None:
        member = self._member
        with member.changed:
            body = messages.Heartbeat(
                version=member.version_in_use,
                clock_s=system.time(),
                epoch_ended=member.epoch_ended,
                **member.progress(),
            )
        self._request(body)

    def _send_telemetry(self) -> None:
        member = self._member
        while True:
            with member.changed:
                # Taken out only once it is sent, and in order: steps and games are counted as they come.
                if not member.telemetry or not self._link.send_frames(member.telemetry[0]):
                    return
                member.telemetry.popleft()

    def _ask_for_params(self) -> float:
        """Send PARAMS_GET where there are parameters that are wanted; seconds until the next try."""
        member = self._member
        with member.changed:
            # What has been played is handed in first: who asks has nothing to play.
            games = member.want_games and not member.telemetry and member.state.version >= 0
            body = messages.ParamsGet(version=member.known_version(), games=True)
        if games:
            return self._link.liveness_s if self._request(body) else 0.0
        with member.changed:
            if member.has_newest():
                member.want_params = False
            if not member.want_params or member.state.version < 0:
                return 0.0
            version = member.known_version()
        if self._relay is not None and self._relay.ask(version, self._request_id):
            return self._relay.patience_s
        asked = self._request(messages.ParamsGet(version=version))
        return self._link.liveness_s if asked else 0.0  # only a lost answer makes it ask twice

    # -- the relay of this host --

    def _join_relay(self, poller: zmq.Poller) -> None:
        directory, patience_s = self._relay_options
        if directory is not None:
            self._relay = HostRelay(self._ctx, directory, self._member, self._name, poller, patience_s)
            self._member.relays = self._relay.serves

    def _leave_relay(self) -> None:
        if self._relay is not None:
            self._relay.close()
            self._relay = None
            self._member.relays = False

    def _turn_of_relay(self, relay: HostRelay) -> bool:
        """Feed the others, or take what the relay has sent; whether it has answered."""
        relay.serve()
        member = self._member
        member.relays = relay.serves
        try:
            message = relay.answer()
            if message is None:
                return False
            body = messages.Params.of(message)
            state, params = RunState.of(body), _params_of(body)
        except WireError as error:
            self._link.bad(error)
            return False
        with member.changed:
            known = member.known_version()
            if params is not None and state.session == member.state.session and params.version > known:
                member.params = params
                member.want_params = False  # as with the learner's own: newer ones are asked for anew
                member.relayed += 1
                member.changed.notify_all()
        return True

    def _on_message(self, message: Message) -> bool:
        """Take in one message of the learner; False where it wants another HELLO."""
        member = self._member
        try:
            if message.type == messages.HeartbeatOk.TYPE:
                ok = messages.HeartbeatOk.of(message)
                self._on_state(ok, ok)
            elif message.type == messages.Announce.TYPE:
                self._on_state(messages.Announce.of(message), None)
            elif message.type == messages.Params.TYPE:
                self._on_params(messages.Params.of(message))
            elif message.type == messages.Welcome.TYPE:
                self._on_welcome(Welcome.of(message))
            elif message.type == messages.Error.TYPE:
                error = messages.Error.of(message)
                kind, detail = error.kind, error.detail
                # It has no lease for us any more, so everything that it sends or takes waits for another
                # HELLO.
                if kind == messages.UNKNOWN_PEER:
                    _log.info("%s does not know %s (restarted?)", self._link, self._name)
                    return False
                member.rejected += 1
                if self._throttle(("error", kind)):
                    _log.warning("the learner could not serve %s: %s, %s", self._name, kind, detail)
        except WireError as nonsense:
            self._link.bad(nonsense)
        return True

    def _on_welcome(self, welcome: Welcome) -> None:
        """Take in the answer to a HELLO that was repeated because the first one's took its time."""
        former = self._member.welcome
        # The lease may have ended between the two, and another process has its slots; or another process of
        # the learner has read the second one.
        if former is None or (welcome.slots, welcome.session) != (former.slots, former.session):
            self._enter(welcome, self._slots_asked)

    def _on_state(self, body: State, ok: messages.HeartbeatOk | None) -> None:
        state, member = RunState.of(body), self._member
        shards = member.shards if ok is None else self._usable(ok.shards)
        with member.changed:
            if ok is not None:
                member.heard()
            # A restarted learner speaks through WELCOME first; its announcements may come earlier.
            if state.session == member.state.session:
                member.state, member.shards = state, shards
                if ok is not None and ok.steps_limit is not UNSET:
                    member.permit(ok.steps_limit)
                if ok is not None and ok.heartbeat_s is not UNSET:
                    self.heartbeat_s = ok.heartbeat_s
                if ok is not None and ok.seat is not UNSET:
                    member.seat = ok.seat
                member.changed.notify_all()

    def _usable(self, shards: list[str]) -> list[str]:
        """Those that can be connected to; an ipc socket may be safe where the learner is, and not here."""
        problems = {endpoint: unusable(endpoint) for endpoint in shards}
        for endpoint, problem in problems.items():
            if problem and self._throttle(("shard", endpoint)):
                _log.warning("%s continues without the shard at %s: %s", self._name, endpoint[:100], problem)
        return [endpoint for endpoint, problem in problems.items() if not problem]

    def _on_params(self, body: messages.Params) -> None:
        state, params, opponent = RunState.of(body), _params_of(body), _opponent_of(body)
        member = self._member
        with member.changed:
            if params is not None:
                member.params = params
            if state.session == member.state.session:
                member.state = state
            if member.want_games:
                held = member.params
                # Where we have the parameters already, they are not sent again with every part.
                if body.part >= 0 and held is not None and held.version == body.evaluated:
                    member.games = Games(body.part, held, opponent)
                member.want_games, member.games_over = False, body.over
            member.want_params = False
            member.changed.notify_all()

    def _request(self, body: Body) -> bool:
        self._request_id += 1
        return self._link.send(body, self._request_id)


def _params_of(body: messages.Params) -> Params | None:
    """The parameter set in a PARAMS, None where it brings none; raises `WireError`."""
    if body.blob is UNSET:
        return None
    encoded = body.manifest, body.blob
    # Parameters for an evaluation may be older than the newest, whose number the state carries.
    version = body.version if body.evaluated < 0 else body.evaluated
    return Params(version, decode_params(*encoded), body.session, encoded)


def _opponent_of(body: messages.Params) -> Params | None:
    """The earlier version in a PARAMS, None where it brings none; raises `WireError`."""
    if body.opponent_blob is UNSET:
        return None
    return Params(body.opponent, decode_params(body.opponent_manifest, body.opponent_blob), body.session)
