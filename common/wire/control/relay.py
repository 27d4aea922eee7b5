"""One process of a host fetches parameters from the learner and feeds the others of that host.

Every process that takes part tries for a lock in a directory that they share. Who gets it serves PARAMS_GET
there as the learner does; the others ask it first, and the learner where it does not answer in time. The
kernel frees the lock of a process that dies, so another one takes over.
"""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
from pathlib import Path

import zmq

from troupe.common import system
from troupe.common.errors import ConfigError
from troupe.common.wire import messages, sockets
from troupe.common.wire.codec import Message, WireError, decode
from troupe.common.wire.control.member import Member

_log = logging.getLogger(__name__)

PATIENCE_S = 2.0
"""How long the relay may take to answer before the learner is asked instead."""
# How long a relay that did not answer is left alone.
_SHUN_S = 5.0
# How long one that is not there, or not yet.
_ABSENT_S = 0.2


def default_directory() -> Path:
    """The directory that the processes of this user on this host share."""
    return Path(tempfile.gettempdir()) / f"troupe-relay-{os.getuid()}"


class HostRelay:
    """The part of one process, for as long as its connection to one learner process lives.

    All methods belong to the thread of the control link.
    """

    def __init__(
        self,
        ctx: sockets.Context,
        directory: Path,
        member: Member,
        name: str,
        poller: zmq.Poller,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Become the relay of `directory`, or connect to it. Raises `ConfigError` for an unfit directory."""
        self.patience_s = patience_s
        self._ctx = ctx
        self._member = member
        self._name = name
        self._poller = poller
        # By session: a restarted learner's parameters are others, and two runs of one host may share the
        # directory.
        self._path = _private(directory) / f"{member.state.session:x}"
        if len(os.fsencode(self._path)) > zmq.IPC_PATH_MAX_LEN:
            raise ConfigError(
                f"the path {self._path} is too long for a socket: take another --relay directory"
            )
        self._lock: int | None = None
        self._server: sockets.Socket | None = None
        self._client: sockets.Socket | None = None
        # Who waits for a newer version: its request, the version that it has, and which we had when it asked.
        self._waiting: dict[bytes, tuple[int, int, int]] = {}
        self._in_flight = False
        self._shunned_until_s = 0.0
        self._elect()

    @property
    def serves(self) -> bool:
        """Whether this process is the relay."""
        return self._server is not None

    def close(self) -> None:
        """Close the sockets and leave the lock to another process."""
        for socket in (self._server, self._client):
            if socket is not None:
                self._poller.unregister(socket)
                socket.close(linger=0)
        self._server = self._client = None
        if self._lock is not None:
            for file in (self._path, self._lock_file):
                # While the lock is still held: afterwards the files would be somebody else's.
                file.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None

    @property
    def _lock_file(self) -> Path:
        return self._path.with_name(self._path.name + ".lock")

    def _elect(self) -> None:
        """Take the lock and serve; or connect to the process that has it."""
        lock = os.open(self._lock_file, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            # The kernel's lock ends with its process, however that ends; a file that merely exists would
            # outlive it.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A relay that left since the file was opened has removed it: this lock would keep nobody out.
            if os.fstat(lock).st_nlink == 0:
                raise FileNotFoundError(self._lock_file)
        except OSError:
            os.close(lock)
            if self._client is None:
                # Without keys: an ipc socket in a directory of mode 700 is open to this user alone.
                self._client = sockets.make_dealer(self._ctx, f"ipc://{self._path}")
                self._poller.register(self._client, zmq.POLLIN)
            return
        if self._client is not None:
            self._poller.unregister(self._client)
            self._client.close(linger=0)
            self._client = None
        self._lock = lock
        # The file of a dead relay is no obstacle: ZeroMQ binds over it.
        self._server = sockets.make_router(self._ctx, f"ipc://{self._path}", hwm=16)
        self._poller.register(self._server, zmq.POLLIN)
        _log.info("%s relays parameters to the other processes of this host", self._name)

    # -- as one of the others --

    def ask(self, version: int, request_id: int) -> bool:
        """Ask the relay for parameters newer than `version`; False where the learner has to be asked."""
        now_s = system.monotonic()
        if self._in_flight:
            self._in_flight = False
            _log.info("%s: the relay of this host does not answer: asking the learner", self._name)
            self._avoid(now_s + _SHUN_S)
        if self._client is None or now_s < self._shunned_until_s:
            return False
        question = messages.ParamsGet(version=version).message(request_id)
        self._in_flight = sockets.send(self._client, question)
        if not self._in_flight:  # nobody is there, or not yet
            self._avoid(now_s + _ABSENT_S)
        return self._in_flight

    def _avoid(self, until_s: float) -> None:
        """Ask the learner for a while, and take over if the lock is free."""
        self._shunned_until_s = until_s
        self._elect()

    def answer(self) -> Message | None:
        """What the relay has answered, if anything. Raises `WireError` for nonsense."""
        if self._client is None:
            return None
        message = sockets.receive(self._client)
        if message is not None:
            self._in_flight = False
        return message

    # -- as the relay --

    def serve(self) -> None:
        """Answer what can be answered; the others wait until newer parameters have come from the learner.

        Newer than when they asked: were the newest of all required, then a learner that publishes faster than
        it can be fetched from would have the others wait for ever.
        """
        if self._server is None:
            return
        while (frames := sockets.receive_frames(self._server)) is not None:
            self._take(frames)
        if not self._waiting:
            return
        member = self._member
        with member.changed:
            newest = member.has_newest()
            member.want_params |= not newest
            params, state, known = member.params, member.state, member.known_version()
        if params is None or params.encoded is None or params.version != known:
            return
        manifest, blob = params.encoded
        body = messages.Params(
            manifest=manifest,
            blob=blob,
            session=params.session,
            version=params.version,
            steps=state.steps,
            updates=state.updates,
            stopping=state.stopping,
        )
        for identity, (request_id, version, had) in list(self._waiting.items()):
            # Otherwise the peer is ahead of us; our own fetch will catch up.
            if known > version and (newest or known > had):
                sockets.send(self._server, body.message(request_id), identity)
                del self._waiting[identity]

    def _take(self, frames: list[zmq.Frame]) -> None:
        try:
            message = decode(frames[1:])
            if message.type != messages.ParamsGet.TYPE:
                raise WireError("bad_type", f"a relay does not know {message.type}")
            version = messages.ParamsGet.of(message).version
            with self._member.changed:
                had = self._member.known_version()
            self._waiting[frames[0].bytes] = message.request_id, version, had
        except WireError as error:
            self._member.rejected += 1
            _log.debug("the relay cannot serve a peer: %s", error)


def _private(directory: Path) -> Path:
    """The directory, made where it does not exist; no other user may put a socket there."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
    except OSError as error:
        raise ConfigError(f"the relay directory {directory} cannot be used: {error.strerror}") from None
    # Looked at also where `mkdir` made nothing: /tmp is everybody's, and the name can be guessed.
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(f"the relay directory {directory} should be yours alone: chmod 700 {directory}")
    return directory
