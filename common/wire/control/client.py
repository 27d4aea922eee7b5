"""A service's end of the control connection: joins the run, stays in it, fetches parameters, reports metrics.

A thread of its own (`membership.py`) owns the sockets. The methods here may be called from any thread and,
but for `join` and `close`, return at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from troupe.common import installation, system
from troupe.common.errors import PeerError
from troupe.common.machine import boot_id
from troupe.common.wire import messages, sockets
from troupe.common.wire.codec import WireError, encode
from troupe.common.wire.control.member import Games, Member, Params, RunState, Welcome
from troupe.common.wire.control.membership import Membership
from troupe.common.wire.control.messages import Seat, TelemetryFields
from troupe.common.wire.control.relay import PATIENCE_S

__all__ = ["ControlClient", "Games", "Params", "RunState", "Welcome"]

_log = logging.getLogger(__name__)

REPORT_S, MAX_REPORT_S = 2.0, 10.0
"""How often an actor reports: with every second HEARTBEAT, within these limits."""

# Minutes of reports: enough for a learner that restarts, and a bound for one that does not.
_TELEMETRY_BACKLOG = 256
_JOIN_SLICE_S = 0.2  # how late a stop may be noticed


class ControlClient:
    """One service's membership of a run.

    Attributes:
        name: name of the service, unique in the run.
        incarnation: random number of this process.
        telemetry_dropped: reports dropped because they were too large, or the learner was away for too long.
    """

    def __init__(
        self,
        ctx: sockets.Context,
        control_endpoint: str,
        *,
        role: str,
        name: str,
        incarnation: int,
        slots_wanted: int = 0,
        replay_endpoint: str | None = None,
        heartbeat_s: float = 1.0,
        liveness_s: float = 15.0,
        connect_timeout_s: float = 60.0,
        security: sockets.Security | None = None,
        relay_directory: Path | None = None,
        relay_patience_s: float = PATIENCE_S,
    ) -> None:
        """Prepare to join; nothing is connected before `join`.

        Processes with the same `relay_directory` fetch parameters once for all of them; the one that does has
        `relay_patience_s` to answer the others before they ask the learner.
        `heartbeat_s` and `liveness_s` hold until the learner's own values are known.
        """
        self.name = name
        self.incarnation = incarnation
        self.telemetry_dropped = 0
        self._endpoint = control_endpoint
        self._connect_timeout_s = connect_timeout_s
        self._delivered_session = 0
        self._member = Member()
        self._changed = self._member.changed
        hello = messages.Hello(
            role=role,
            name=name,
            incarnation=incarnation,
            slots_wanted=slots_wanted,
            replay_endpoint=replay_endpoint or "",
            host=system.hostname(),
            pid=system.pid(),
            boot=boot_id(),
            started_s=system.monotonic(),
            software=f"troupe {installation.version()}",
        )
        self._membership = Membership(
            ctx,
            control_endpoint,
            self._member,
            hello,
            heartbeat_s=heartbeat_s,
            liveness_s=liveness_s,
            security=security,
            relay_directory=relay_directory,
            relay_patience_s=relay_patience_s,
        )
        self._thread: system.Thread | None = None

    def join(self, timeout_s: float | None = None) -> Welcome:
        """Join the run and wait to be welcome.

        Raises `ConfigError` where the learner refuses, `PeerError` where it does not answer within
        `timeout_s` (by default the `connect_timeout_s` of the constructor), or after `close`.
        """
        timeout_s = self._connect_timeout_s if timeout_s is None else timeout_s
        if self._thread is None:
            self._thread = system.Thread(
                target=self._membership.run, name=f"control-{self.name}", daemon=True
            )
            self._thread.start()
        member = self._member
        with self._changed:
            self._changed.wait_for(
                lambda: self._has_joined() or member.failure or self._membership.stopped.is_set(), timeout_s
            )
            self.check()
            if member.welcome is None or not self._has_joined():
                raise PeerError(self._no_answer(timeout_s))
            return member.welcome

    def want_slots(self, slots: int) -> None:
        """Ask for exploration slots, having joined without: the next `join` waits for them."""
        with self._changed:
            self._membership.hello = msgspec.structs.replace(self._membership.hello, slots_wanted=slots)
        self._membership.waker.wake()

    def _has_joined(self) -> bool:
        return self._member.slots_wanted == self._membership.hello.slots_wanted

    def join_unless(self, stopped: Callable[[], bool], timeout_s: float | None = None) -> Welcome | None:
        """Join as `join` does, but return None as soon as `stopped()` is true (a signal has come)."""
        timeout_s = self._connect_timeout_s if timeout_s is None else timeout_s
        deadline_s = system.monotonic() + timeout_s
        while not stopped():
            left_s = max(0.0, deadline_s - system.monotonic())
            try:
                return self.join(min(left_s, _JOIN_SLICE_S))
            except PeerError:
                if left_s <= _JOIN_SLICE_S:
                    raise PeerError(self._no_answer(timeout_s)) from None
        return None

    def _no_answer(self, timeout_s: float) -> str:
        return (
            f"{self.name} could not join the learner at {self._endpoint} within {timeout_s:.0f} s"
            f" ({self._member.waiting_for})"
        )

    def check(self) -> None:
        """Raise the error that ended the membership for good, if there is one (refused after a restart)."""
        if self._member.failure is not None:
            raise self._member.failure

    @property
    def connected(self) -> bool:
        """Whether the learner has answered lately."""
        return self._member.connected

    @property
    def answers(self) -> int:
        """How often the learner has answered HELLO and HEARTBEAT."""
        return self._member.answers

    @property
    def silent_s(self) -> float:
        """Seconds since the newest of these answers."""
        return system.monotonic() - self._member.heard_s

    @property
    def joins(self) -> int:
        """How often it has joined; grows when the learner has been away."""
        return self._member.joins

    @property
    def rejected(self) -> int:
        """Messages that the learner could not serve, or that came from it and could not be understood."""
        return self._membership.rejected

    @property
    def relays(self) -> bool:
        """Whether it feeds parameters to the others of its relay directory."""
        return self._member.relays

    @property
    def relayed(self) -> int:
        """Parameter sets that came from the relay rather than from the learner."""
        return self._member.relayed

    @property
    def state(self) -> RunState:
        """The newest known counters of the run."""
        return self._member.state

    @property
    def slots(self) -> list[int]:
        """Exploration slots on lease; they may change when `joins` does."""
        with self._changed:
            return self._member.slots()

    @property
    def shards(self) -> list[str]:
        """Endpoints of the live replay shards."""
        with self._changed:
            return list(self._member.shards)

    def report_steps(self, made: int) -> None:
        """Say how many environment steps this process has made; the learner hears of it in good time."""
        member = self._member
        with self._changed:
            member.made(made)
            wanted = member.short_of_steps()
            member.steps_wanted |= wanted
        if wanted:
            self._membership.waker.wake()

    def may_step(self, steps: int, timeout_s: float = 0.0) -> bool:
        """Whether this many more steps fit into the run, as far as the learner says within `timeout_s`.

        Where they do, make them, and report them: until then no lower limit is obeyed.
        """
        member = self._member
        with self._changed:
            return self._changed.wait_for(lambda: member.begin(steps), timeout_s)

    def next_seat(self, ended: int, timeout_s: float) -> Seat | None:
        """The seat of this learner in an epoch later than `ended` (-1: any), waiting up to `timeout_s`.

        None where there is none yet: ask again, with the same number.
        """
        member = self._member
        with self._changed:
            member.epoch_ended = ended
            member.steps_wanted = True  # ask at once
        self._membership.waker.wake()

        def given() -> bool:
            return member.seat is not None and member.seat.epoch > ended

        with self._changed:
            if not self._changed.wait_for(given, timeout_s):
                return None
            member.epoch_ended = msgspec.UNSET
            return member.seat

    def want_no_seat(self) -> None:
        """Stop asking for one; else every heartbeat does, until it is given."""
        with self._changed:
            self._member.epoch_ended = msgspec.UNSET

    def want_params(self) -> None:
        """Start fetching the newest parameters, unless they are here already."""
        with self._changed:
            if self._member.has_newest():
                return
            self._member.want_params = True
        self._membership.waker.wake()

    def params_if_newer(self, version: int) -> Params | None:
        """The parameters fetched last, if newer than `version`; otherwise starts a fetch of newer ones.

        Never waits: ask again a little later. After the learner has been restarted its parameters count as
        newer, whatever their number (it may have gone back to a checkpoint).
        """
        with self._changed:
            params = self._member.params
            # A restarted learner counts versions on from its checkpoint, so its number may be lower and its
            # weights still newer.
            if params is not None and (params.session != self._delivered_session or params.version > version):
                return self._deliver(params)
        self.want_params()
        return None

    @property
    def games_over(self) -> bool:
        """Whether the learner has said that no more games of this run are to be evaluated."""
        return self._member.games_over

    def next_games(self) -> Games | None:
        """Games for an evaluator that has handed in those before, or None: ask again a little later."""
        member = self._member
        with self._changed:
            games = member.games
            if games is not None:
                member.games = None
                self._deliver(games.params)
                return games
            member.want_games = True
        self._membership.waker.wake()
        return None

    @property
    def report_s(self) -> float:
        """How often to report where many may do so: the learner says how often it wants to hear."""
        return min(max(REPORT_S, 2 * self._membership.heartbeat_s), MAX_REPORT_S)

    def send_telemetry(
        self,
        metrics: dict[str, float],
        blobs: dict[str, np.ndarray | bytes] | None = None,
        fields: TelemetryFields | None = None,
    ) -> bool:
        """Queue a report; False where it is dropped (and counted) because it is too large.

        While the learner is away the newest few hundred reports are kept. Leave `blobs` alone afterwards.
        """
        arrays = {
            name: np.frombuffer(blob, np.uint8) if isinstance(blob, bytes) else blob
            for name, blob in (blobs or {}).items()
        }
        numbers = {name: float(value) for name, value in metrics.items()}
        try:
            report = messages.Telemetry(metrics=numbers, fields=fields or TelemetryFields(), blobs=arrays)
            # Encoded by the caller's thread: a report that cannot be sent is refused here, where somebody
            # hears of it.
            frames = encode(report.message(), limits=messages.CONTROL_LIMITS)
        except WireError as error:
            self.telemetry_dropped += 1
            _log.warning("%s drops a report: %s", self.name, error)
            return False
        with self._changed:
            self._member.telemetry.append(frames)
            while len(self._member.telemetry) > _TELEMETRY_BACKLOG:
                self._member.telemetry.popleft()
                self.telemetry_dropped += 1
        self._membership.waker.wake()
        return True

    def close(self, reason: str = "done", timeout_s: float = 5.0) -> None:
        """Send what is queued, say BYE (the slots are free at once), and stop. May be called twice."""
        self._membership.bye_reason = reason
        self._membership.stopped.set()
        self._membership.waker.wake()
        with self._changed:
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                _log.error("the control thread of %s did not stop within %.0f s", self.name, timeout_s)
                return
        # Last: the thread polls this pipe until it ends.
        self._membership.waker.close()

    def _deliver(self, params: Params) -> Params:
        self._delivered_session = params.session
        self._member.version_in_use = params.version
        return params
