"""The replay shard: one thread, one socket, one folder."""

from __future__ import annotations

import logging

from troupe.common.runtime import health, watchdog
from troupe.common.runtime.lifecycle import Deadline, StopSignal
from troupe.common.wire import sockets
from troupe.common.wire.control.client import ControlClient
from troupe.common.wire.link import new_incarnation
from troupe.services.replay.rates import Rates, cut_to_fit
from troupe.services.replay.requests import RequestHandlers
from troupe.services.replay.scrubber import Scrubber
from troupe.services.replay.snapshots import Snapshots
from troupe.services.replay.storage.replay import Replay

_log = logging.getLogger(__name__)

POLL_S = 0.1
BURST = 128
"""Messages served before parked requests and credit get their turn."""

LAST_MESSAGES_S = 5.0
"""How long a shard goes on serving after the run is complete."""


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
        """Prepare to serve; `snapshots` is where they may go (see `Snapshots`)."""
        self._replay = replay
        self._stop = stop
        self._control = control
        self._requests = RequestHandlers(
            replay, socket, new_incarnation(), self._status, Snapshots(replay, snapshots)
        )
        self._scrubber = Scrubber(replay)
        self._rates = Rates(replay, self._requests)
        self._server = self._requests.server
        self._end: Deadline | None = None
        # The stop wakes the poll, or a signal would be noticed a tenth of a second late.
        self._server.open(stop.fileno(), *self._requests.wakers())

    def run(self) -> None:
        """The main loop."""
        self._report()  # not only after a second, by which a short run may be over
        loop = watchdog.Loop("the shard")
        while not self._done():
            # Bounded, or a flood of inserts would leave the learner's parked requests waiting.
            self._server.turn(POLL_S, BURST)
            self._requests.advance()
            self._scrubber.advance()
            if self._rates.due():
                self._report()
            loop.turn()
        loop.close()
        self._requests.close()
        self._server.close()
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

    def _report(self) -> None:
        self._requests.snapshots.announce()
        metrics = self._rates.metrics()
        health.report(metrics | self._rates.details(), self._rates.families())
        if self._control is not None:
            self._control.send_telemetry(metrics | self._rates.by_table())

    def _status(self) -> dict:
        return cut_to_fit(
            {**self._rates.status(), "failed_handshakes": sum(self._server.handshakes.values())}
        )
