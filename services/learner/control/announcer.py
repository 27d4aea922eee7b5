"""The PUB that announces what is new, in a thread of its own."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

import zmq

from troupe.common import system
from troupe.common.wire import messages, sockets
from troupe.common.wire.codec import encode
from troupe.common.wire.intake import Intake

_log = logging.getLogger(__name__)


class Announcer:
    """Repeats an announcement, and says it at once when `announce` is called.

    A peer with a key may subscribe as often as it likes. libzmq does the work of that inside the next call
    of the socket, and for each connection that ends it looks at all subscriptions there are: a call may take
    as long as a flood does. So nothing else waits for this thread, and no watchdog looks at it. Meanwhile
    the answers to heartbeats tell the same. An XPUB would help nobody: with ZMQ_XPUB_MANUAL, too, libzmq
    keeps each subscription, at the same 700 bytes.
    """

    def __init__(
        self,
        socket: sockets.Socket,
        announcement: Callable[[], messages.Announce],
        period_s: Callable[[], float],
        count: Callable[[Counter[str]], None],
    ) -> None:
        """Prepare to announce; `start` does.

        Args:
            socket: the PUB, which belongs to the thread from then on.
            announcement: what to say now.
            period_s: how long until it is repeated.
            count: takes how many connections were cut, by kind.
        """
        self._socket = socket
        self._announcement, self._count = announcement, count
        self._period_s = period_s
        self._stopping = False
        self._due = system.Event()
        self._thread: system.Thread | None = None

    def start(self) -> None:
        """Announce from now on."""
        self._thread = system.Thread(target=self._run, name="announcer", daemon=True)
        self._thread.start()

    def announce(self) -> None:
        """Have it said at once."""
        self._due.set()

    def stop(self, timeout_s: float) -> None:
        """Say it for the last time, and close the socket. May be called twice, and without `start`."""
        self._stopping = True
        self._due.set()
        if self._thread is None:
            self._socket.close()
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _log.error("the announcer thread did not stop within %.0f s", timeout_s)

    def _run(self) -> None:
        subscriptions = Intake(self._socket, messages.SUBSCRIPTION_BYTES, of_all=16)
        next_s = 0.0
        try:
            while not self._stopping:
                self._due.wait(max(min(next_s - system.monotonic(), subscriptions.period_ms / 1000), 0.0))
                try:
                    if self._due.is_set() or system.monotonic() >= next_s:
                        # Repeated although nothing is new: a PUB may have lost the newest for a slow peer.
                        self._due.clear()  # before: what changes from here on is said again
                        self._say()
                        next_s = system.monotonic() + self._period_s()
                    cut: Counter[str] = Counter()
                    subscriptions.look(cut)  # without a lock, for it may take as long as `_say`
                    if cut:
                        self._count(cut)
                except zmq.ContextTerminated:
                    return
                except Exception:
                    _log.exception("error in the announcer thread; it carries on")
                    system.sleep(0.1)
            self._say()
        finally:
            self._socket.close()

    def _say(self) -> None:
        sockets.send_frames(self._socket, encode(self._announcement().message()))
