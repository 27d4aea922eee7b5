"""CURVE keys in files: making them, loading them, and the list of who may connect.

A directory of keys holds, for each role, `ROLE.secret` and `ROLE.public`, one Z85 key of 40 characters each,
and `allowed`, the allow-list of the servers. A service reads its own secret, the public keys of the servers
that it connects to and, if it is a server, the allow-list: give each machine only the files that it needs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from troupe.common.errors import AuthError, ConfigError
from troupe.common.runtime.files import lock_file
from troupe.common.wire.messages import ROLES

_log = logging.getLogger(__name__)

KEY_ROLES = ("learner", *(role for role in ROLES if role != "learner"))
"""Who has a pair of keys. `viewer` is for whatever only looks."""

SERVERS = ("learner", "replay")
ALLOWED_FILE = "allowed"
_UNFINISHED = ".unfinished"
"""Is there, and locked, while keys are made: what a killed process left is known by it."""
_OTHERS_S = 10.0
"""A process that makes keys is waited for: a full set is a dozen small files."""

_KEY = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")  # Z85, 32 bytes
_MAX_FILE_BYTES = 1 << 20
_MINE_ONLY = 0o600
_OTHERS = 0o077

_ALLOWED_HEAD = """\
# Who may connect to this run's servers: one `ROLE PUBLIC_KEY` a line; what follows is a comment.
# A role may have several keys. Servers notice changes by themselves; the next connection is judged by them.
"""


class AllowList:
    """The public keys that servers let in, each with its role; read again when its file changes.

    A changed file that cannot be used is reported, and the former list stays in force.
    """

    def __init__(self, path: Path) -> None:
        """Read the list. Raises `AuthError` where it cannot be used."""
        self.path = path
        self._lock = threading.Lock()
        self._seen = _signature(path)
        self._roles = _parse_allowed(path)

    def role_of(self, key: bytes) -> str:
        """The role of a public key (Z85, 40 characters), empty for a key that is not in the list."""
        with self._lock:
            self._refresh()
            return self._roles.get(key, "")

    def _refresh(self) -> None:
        signature = _signature(self.path)
        # Looked at for every handshake: a stat is cheap, and a revoked key has to be turned away at once.
        if signature == self._seen:
            return
        # Also where the file is damaged: the error is said once, not at every handshake.
        self._seen = signature
        try:
            self._roles = _parse_allowed(self.path)
            _log.info("read %s again: %d keys may connect", self.path, len(self._roles))
        except AuthError as error:
            _log.error("%s; the previous list stays in force", error)


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one service.

    Attributes:
        directory: where they are from.
        role: whose they are.
        public: own public key, Z85.
        secret: its secret half.
        servers: public keys of the servers that this role connects to, by role.
    """

    directory: Path
    role: str
    public: bytes
    # Out of `repr`, and with that out of logs and tracebacks.
    secret: bytes = field(repr=False)
    servers: Mapping[str, bytes] = field(default_factory=dict)

    def allow_list(self) -> AllowList:
        """The list that this service, as a server, decides by. Raises `AuthError`."""
        return AllowList(self.directory / ALLOWED_FILE)


def load_keys(directory: str | Path, role: str) -> Keys:
    """Read what a service of `role` needs.

    Raises `AuthError` where a file is missing, is no key, or may be read or written by others.
    """
    folder = Path(directory).expanduser()
    _check_folder(folder)
    secret = _read_key(folder / f"{role}.secret")
    public = zmq.curve_public(secret)
    servers = {name: _read_key(folder / f"{name}.public") for name in SERVERS if _connects(role, name)}
    if role == "learner":  # one that joins connects to another, which has the same key
        servers[role] = public
    return Keys(folder, role, public, secret, servers)


def make_keys(directory: str | Path) -> list[Path]:
    """Make a pair for every role and the allow-list of all; the files, readable by their owner only.

    What an earlier call left that was killed half-way is replaced.

    Raises `ConfigError` where the directory holds keys already, also of a call at the same time, or cannot be
    written.
    """
    folder = Path(directory).expanduser()
    files: dict[str, bytes] = {}
    allowed = _ALLOWED_HEAD
    for role in KEY_ROLES:
        public, secret = zmq.curve_keypair()
        files[f"{role}.secret"], files[f"{role}.public"] = secret + b"\n", public + b"\n"
        allowed += f"{role} {public.decode()}\n"
    files[ALLOWED_FILE] = allowed.encode()  # the last one: where it is, everything is
    unfinished = folder / _UNFINISHED
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            _refuse_keys(folder, files)
        except ConfigError:
            # Looked for last: it is there before the first key, until after the last one. Without it the keys
            # are somebody's, and nothing may say of them that they were left half-way.
            if not unfinished.exists():
                raise
        refusal = f"another process is making keys in {folder}; choose another directory"
        with lock_file(unfinished, refusal, wait_s=_OTHERS_S):
            try:
                _refuse_keys(folder, [ALLOWED_FILE])
                _remove(folder, files)  # of a process that was killed
                _write_all(folder, files)
            finally:
                _remove(folder, [_UNFINISHED])
    except OSError as error:
        raise ConfigError(f"cannot make keys in {folder}: {error.strerror}") from error
    return [folder / name for name in files]


def _refuse_keys(folder: Path, files: Iterable[str]) -> None:
    present = [name for name in files if (folder / name).exists()]
    if present:
        raise ConfigError(f"{folder} holds keys already ({present[0]}); choose another directory")


def _write_all(folder: Path, files: Mapping[str, bytes]) -> None:
    made: list[str] = []
    try:
        for name, content in files.items():
            _write(folder / name, content)
            made.append(name)
    except BaseException:  # also Ctrl-C: a part of a set would be in the way of the next try
        _remove(folder, reversed(made))
        raise


def _remove(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        (folder / name).unlink(missing_ok=True)


def check_set(directory: str | Path) -> None:
    """Check a complete directory of keys, as `make_keys` makes it. Raises `AuthError`."""
    for role in KEY_ROLES:
        load_keys(directory, role)
    AllowList(Path(directory).expanduser() / ALLOWED_FILE)


def _connects(role: str, server: str) -> bool:
    return role != server and not (role == "replay" and server == "replay")


def _write(path: Path, content: bytes) -> None:
    # With its mode from the first moment on: between writing and a later chmod anybody could have opened it.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MINE_ONLY)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, _MINE_ONLY)  # whatever the umask is
            file.write(content)
            file.flush()
            os.fsync(descriptor)
    except BaseException:
        path.unlink()
        raise


def _check_folder(folder: Path) -> None:
    try:
        mode = folder.stat().st_mode
    except OSError as error:
        hint = " (`troupe keys new DIR` makes keys)" if isinstance(error, FileNotFoundError) else ""
        raise AuthError(f"cannot read the keys in {folder}: {error.strerror}{hint}") from None
    if not stat.S_ISDIR(mode):
        raise AuthError(f"{folder} is not a directory of keys (`troupe keys new DIR` makes one)")
    if mode & 0o022:
        raise AuthError(f"others may write in {folder}: chmod 700 {folder}")


def _read(path: Path) -> bytes:
    """The content of a file that is nobody else's. The file that is checked is the one that is read."""
    try:
        with path.open("rb") as file:
            # Of the open file: between a stat of the name and the opening another file could take its place.
            mode = os.fstat(file.fileno()).st_mode
            if mode & _OTHERS:
                raise AuthError(f"others may read {path} ({stat.S_IMODE(mode):04o}): chmod 600 {path}")
            return file.read(_MAX_FILE_BYTES)
    except OSError as error:
        raise AuthError(f"cannot read the key file {path}: {error.strerror}") from None


def _read_key(path: Path) -> bytes:
    key = _read(path).strip()
    if not _is_key(key):
        raise AuthError(f"{path} does not hold a key (40 characters, as `troupe keys new` writes them)")
    return key


def _is_key(key: bytes) -> bool:
    if not _KEY.fullmatch(key):
        return False
    with contextlib.suppress(ValueError, struct.error):  # five of its digits may be more than 32 bits
        return len(z85.decode(key)) == 32
    return False


def _parse_allowed(path: Path) -> dict[bytes, str]:
    return dict(_allowed_lines(path))


def _allowed_lines(path: Path) -> Iterator[tuple[bytes, str]]:
    for number, line in enumerate(_read(path).splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith(b"#"):  # later in the line it may be part of a key
            continue
        role = words[0].decode("utf-8", "replace")
        if role not in KEY_ROLES or len(words) < 2 or not _is_key(words[1]):
            expected = f"`ROLE PUBLIC_KEY`, ROLE one of {', '.join(KEY_ROLES)}"
            raise AuthError(f"{path}, line {number}, is not {expected}")
        yield words[1], role


def _signature(path: Path) -> tuple[int, ...]:
    """Changes when the file does."""
    try:
        status = path.stat()
    except OSError:
        return ()
    # The inode as well: an editor that replaces the file may leave time and size as they were.
    return status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode
