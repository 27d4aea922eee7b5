"""Small file operations that survive a crash: atomic replacement, fsync, and the status file of a run."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from troupe.common import system, timing
from troupe.common.errors import DISK_FULL, ConfigError

STATUS_FILE = "status.json"
CONFIG_FILE = "config.toml"
EPISODES_FILE = "episodes.csv"
CERTIFICATE_FILE = "certificate.json"
SOURCE_FOLDER = "source"
"""Of a run directory: the module that was written of a notebook's cells."""
SERIAL_FOLDER = "serial-replay"
"""The same: the items of a run in one process, while it trains."""
MAX_JSON_BYTES = 1 << 26
"""Of a file of ours with counters and names: thousands of times what they take."""
SILENT_S = 10.0
"""Services are heard every second or so, where there are few; see `silent_after_s`."""
_STATUS_KINDS: dict[str, Any] = {
    **dict.fromkeys(("steps", "frames", "updates", "updates_since_start"), int),
    **dict.fromkeys(("version", "total_steps", "restarts"), int),
    **dict.fromkeys(("metrics", "services", "environments", "returns"), dict),
    "wall_s": int | float,
    **dict.fromkeys(("note", "host"), str),
    "peers": list,
}
# More than it takes to look whether a file is locked.
_LOOK_S = 0.1
# An empty file can be made on a full disk.
_PROBE_BYTES = 1 << 16
_FULL = tuple(map(os.strerror, DISK_FULL))
_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{12}\.tmp")


def lock_file(path: Path, refusal: str, *, shared: bool = False, wait_s: float = _LOOK_S) -> IO[str]:
    """Open a file and lock it against other processes, until it is closed or this process ends.

    With `shared` only against those that lock it without.

    Raises:
        ConfigError: another process holds it for `wait_s`, which `refusal` says; at least twice as long as
            those take that only look whether it is held.
        OSError: it cannot be opened.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    until_s = system.monotonic() + wait_s
    while True:
        file = path.open("w+")  # network file systems want it readable for a shared lock
        try:
            # The kernel's, not a file with a number in it: it ends with the process, and nobody has to find
            # out whether that lives.
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            # Who held it may have removed it: others would lock another file of this name.
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except OSError:
            pass
        file.close()
        if system.monotonic() >= until_s:
            raise ConfigError(refusal)
        system.sleep(_LOOK_S)


def is_locked(path: Path) -> bool:
    """Whether another process holds a file that it has locked by `lock_file`."""
    try:
        with path.open("rb") as lock:
            # Shared: two that look at the same moment must not take each other for who holds it.
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def check_regular(path: Path, at_most: int = 0) -> Path:
    """Return `path`; OSError where it is a pipe or a device, which may never end, or has too many bytes.

    A run directory may come from anybody. Directories and absent files are left to the code that opens them.
    """
    found = path.stat()
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    if at_most and found.st_size > at_most:
        raise OSError(errno.EFBIG, f"it has more than {at_most:,} bytes", str(path))
    return path


def last_lines(log: Path, at_most: int = 1 << 16) -> list[str]:
    """The lines in the last `at_most` bytes of a log that are not blank: it may have grown for days.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    with check_regular(log).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - at_most))
        lines = file.read(at_most).decode(errors="replace").splitlines()
    return [line for line in lines if line.strip()]


def fsync_path(path: Path) -> None:
    """Force a file's data, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def atomic_write(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replace `path` by `data`: a reader sees the old content or the new, never a mixture.

    `durable` also survives a power cut, at the price of two fsyncs.
    """
    # In the same directory, since a rename across file systems is a copy; of a name of its own, since two
    # processes may write, on two machines that share the directory.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        # The name is the directory's data: without this a power cut may leave the old one.
        fsync_path(path.parent)


def write_output(path: Path, data: bytes) -> None:
    """`atomic_write` a file that a command was asked for, through links; a pipe or a device is written to.

    Raises:
        ConfigError: it cannot be written, with one line that says why.
    """
    try:
        if path.exists() and not path.is_file():  # such as /dev/stdout, which must not be replaced
            path.write_bytes(data)
        else:
            atomic_write(Path(os.path.realpath(path)), data)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def meant(name: str) -> str:
    """The file that `name` was to become, where a process killed in `atomic_write` left it; else `name`."""
    left = _TEMPORARY.fullmatch(name)
    return left[1] if left else name


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Around every look at what a user's path is: one that may not be looked at is a mistake like any other.

    `Path.exists` and its relatives say False for what is not there, but raise for what is behind a directory
    without permission.

    Raises:
        ConfigError: the system refuses, with one line that says why.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot look into {path}: {error.strerror or error}") from error


def make_directory(path: Path, what: str) -> Path:
    """Create a directory and check that it can be written.

    Raises:
        ConfigError: it cannot, with one line that says why.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot create the {what} {path}: {error.strerror}; choose another place"
        ) from error
    check_writable(path, what)
    return path


def hold_run_dir(run_dir: Path) -> IO[str]:
    """Make a run directory, and hold it against other processes until what this returns is closed.

    Raises:
        ConfigError: it cannot be written, or another process holds it.
    """
    make_directory(run_dir, "run directory")
    return lock_file(run_dir / ".lock", f"{run_dir} is in use by another process; stop that one first")


@contextlib.contextmanager
def made_whole(directory: Path, suffix: str) -> Iterator[Path]:
    """Yield an empty directory that takes the name `directory` at the end; it is removed where that fails.

    Until then its name ends with `suffix`. Raises OSError, also where `directory` holds something at the end,
    or another process has begun to make it meanwhile.
    """
    unfinished = directory.with_name(directory.name + suffix)
    shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
    unfinished.mkdir(parents=True)
    held = os.open(unfinished, os.O_RDONLY)

    def is_own() -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(held), unfinished.stat())
        return False

    try:
        yield unfinished
        if not is_own():
            raise OSError(errno.EBUSY, "another process is making it too")
        os.rename(unfinished, directory)
    finally:
        if is_own():
            shutil.rmtree(unfinished, ignore_errors=True)
        os.close(held)


def check_writable(path: Path, what: str) -> None:
    """Refuse a directory that cannot be written; one that is not there yet is tried where it would be made.

    Raises:
        ConfigError: it cannot, or its disk is full, with one line that says why.
    """
    with readable(path):
        existing = next(place for place in (path, *path.absolute().parents) if place.exists())
    if why := write_trouble(existing):
        room = "make room or " if why in _FULL else ""
        raise ConfigError(f"cannot write into the {what} {path}: {why}; {room}choose another place")


def write_trouble(directory: Path) -> str:
    """Why a directory takes no file of `_PROBE_BYTES` now, in the system's words; empty if it does."""
    probe = directory / f".write-test.{os.getpid()}"
    try:
        try:
            probe.write_bytes(bytes(_PROBE_BYTES))
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def write_status(run_dir: Path, status: dict[str, Any]) -> None:
    """Write what the launcher's panel shows: counters, last metric values, peers. Not durable, and cheap."""
    atomic_write(run_dir / STATUS_FILE, json.dumps(status, default=float).encode(), durable=False)


def read_status(run_dir: Path) -> dict[str, Any]:
    """Read the last written status; empty before the first one, or when it is damaged."""
    try:
        return sound_status(json.loads(check_regular(run_dir / STATUS_FILE, MAX_JSON_BYTES).read_bytes()))
    except (OSError, ValueError, RecursionError):
        return {}


def sound_status(status: Any) -> dict[str, Any]:
    """Return a status without what is of another kind than a learner writes; it may come from anybody."""
    if not isinstance(status, dict):
        return {}
    sound = dict(status)
    for name, value in status.items():
        kind = _STATUS_KINDS.get(name)
        if kind is not None and not isinstance(value, kind):
            del sound[name]
    for name, kind in (("metrics", int | float), ("services", dict)):
        if name in sound:
            sound[name] = {k: v for k, v in sound[name].items() if isinstance(v, kind)}
    if "peers" in sound:
        sound["peers"] = [peer for peer in sound["peers"] if _is_peer(peer)]
    return sound


def _is_peer(peer: Any) -> bool:
    return (
        isinstance(peer, dict)
        and all(isinstance(peer.get(name), str) for name in ("role", "name"))
        and isinstance(peer.get("slots", []), list)
        and all(isinstance(peer.get(name) or 0.0, int | float) for name in ("seen_s_ago", "heartbeat_s"))
    )


def silent_after_s(peer: Mapping[str, Any]) -> float:
    """Seconds without a word after which something is wrong with a peer, as a status describes it."""
    # A busy machine keeps a service for several seconds.
    return max(SILENT_S, timing.HEARTBEATS_LATE * (peer.get("heartbeat_s") or 0.0))


def run_config(run_dir: Path) -> Path:
    """The complete configuration of a run; ConfigError where there is none."""
    file = run_dir / CONFIG_FILE
    with readable(run_dir):
        if not file.is_file():
            absent = "is not a directory" if run_dir.exists() else "does not exist"
            what = "has no config.toml" if run_dir.is_dir() else absent
            raise ConfigError(f"{run_dir} is not a run directory: it {what}")
    return file
