"""The replay shard: one thread, one socket, one folder."""

from __future__ import annotations

import logging
from collections import Counter

import zmq

from common.data.replay import Replay
from common.runtime import health
from common.runtime.lifecycle import Deadline, StallWatchdog, StopSignal
from common.runtime.logging import Throttle
from common.wire import messages, sockets
from common.wire.codec import Message, WireError, decode
from common.wire.control_client import ControlClient
from common.wire.handshakes import HandshakeMonitor
from common.wire.member import new_incarnation
from services.replay.meter import Meter, fitting
from services.replay.rejections import peer_name
from services.replay.requests import Requests
from services.replay.snapshots import Snapshots

_log = logging.getLogger(__name__)

POLL_MS = 100
BURST = 128
"""Messages served before parked requests and credit get their turn."""

STALL_LIMIT_S = 30.0
LAST_MESSAGES_S = 5.0
"""How long a shard goes on serving after the run is complete."""

MAY_SEND = {
    messages.INSERT: ("actor", "learner"),
    messages.SAMPLE: ("learner",),  # for it uses up what the limiter permits
    messages.PRIORITIES: ("learner",),
    messages.SNAPSHOT: ("learner",),  # for it writes wherever it is told to
}
"""Roles whose keys permit a message, where there are keys; what is not here, anyone may send who has one."""


class ReplayService:
    """Serves a `Replay` on a bound ROUTER until `stop` is set or the run is over."""

    def __init__(
        self,
        replay: Replay,
        socket: sockets.Socket,
        stop: StopSignal,
        control: ControlClient | None = None,
        *,
        snapshots: str | None = "",
    ) -> None:
        """Prepare to serve; ``snapshots`` is where they may go (see `Snapshots`)."""
        self._replay = replay
        self._socket = socket
        self._stop = stop
        self._control = control
        self._requests = Requests(
            replay, socket, new_incarnation(), self._status, Snapshots(replay, snapshots)
        )
        self._meter = Meter(replay, self._requests)
        self._monitor = HandshakeMonitor(socket)
        self._handshakes: Counter[str] = Counter()
        self._keyed = bool(socket.getsockopt(zmq.CURVE_SERVER))
        self._end: Deadline | None = None
        self._throttle = Throttle(10.0)
        self._poller = zmq.Poller()
        for source in (socket, self._monitor.socket, stop.fileno()):
            self._poller.register(source, zmq.POLLIN)

    def run(self) -> None:
        """The main loop."""
        watchdog = StallWatchdog(STALL_LIMIT_S)
        while not self._done():
            self._poller.poll(POLL_MS)
            self._monitor.drain(self._handshakes)
            self._serve_messages()
            self._requests.advance()
            if self._meter.due():
                self._report()
            watchdog.beat()
        watchdog.close()
        self._monitor.close()
        self._requests.snapshots.close()
        held = sum(table.size for table in self._replay.tables.values())
        _log.info("stopped with %d items, %d inserted", held, self._replay.counters.inserted_items)

    def _done(self) -> bool:
        if self._control is not None:
            self._control.check()
            if self._control.state.stopping:
                # Actors still send what they have, and the learner its last priorities.
                self._end = self._end or Deadline(LAST_MESSAGES_S)
                if self._end.expired:
                    _log.info("the run is over")
                    return True
        return self._stop.requested

    def _serve_messages(self) -> None:
        for _ in range(BURST):
            frames = sockets.receive_frames(self._socket)
            if frames is None:
                return
            peer, message = frames[0].bytes, Message("", request_id=0)
            try:
                message = decode(frames[1:])
                self._check_role(frames[0], message)
                self._requests.serve(peer, message)
            except WireError as error:
                self._requests.refuse(peer, message, error.kind, error.detail)
                if self._throttle(error.kind):
                    rejections = self._requests.rejections
                    _log.warning(
                        "bad message from %s: %s (%d of this kind so far, %d from this peer)",
                        peer_name(peer),
                        error,
                        rejections.by_kind[error.kind],
                        rejections.of(peer),
                    )

    def _check_role(self, frame: zmq.Frame, message: Message) -> None:
        """Raise `WireError` where the sender has shown the key of a role that may not send this."""
        roles = MAY_SEND.get(message.type) if self._keyed else None
        if roles is not None and (role := sockets.peer_role(frame)) not in roles:
            detail = f"{message.type} takes a key of {' or '.join(roles)}, and this is one of {role}"
            raise WireError(messages.REFUSED_KEY, detail)

    def _report(self) -> None:
        self._requests.snapshots.announce()
        metrics = self._meter.metrics()
        handshakes = {"replay/failed_handshakes_total": float(sum(self._handshakes.values()))}
        health.report(metrics | self._meter.details() | handshakes)
        if self._control is not None:
            self._control.send_telemetry(metrics)

    def _status(self) -> dict:
        return fitting({**self._meter.status(), "failed_handshakes": sum(self._handshakes.values())})
