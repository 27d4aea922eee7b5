"""Files of run directories that may be anybody's: what is opened is a regular file within the directory."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without waiting: to open a pipe that nobody writes into would never return.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextmanager
def directory(path: Path, *below: str) -> Iterator[int]:
    """Yield a descriptor of `path`, or of a directory below it; no step is a link.

    Raises:
        OSError: there is none, or something else stands there.
    """
    descriptor = os.open(path, _DIRECTORY)
    try:
        for name in below:
            if name in ("", ".", "..") or "/" in name:
                raise OSError(errno.EINVAL, "is not a directory name", name)
            descriptor, above = os.open(name, _DIRECTORY, dir_fd=descriptor), descriptor
            os.close(above)
        yield descriptor
    finally:
        os.close(descriptor)


def open_regular(path: Path, *below: str, at_most: int = 0) -> IO[bytes]:
    """Open a file below `path` for reading; no step is a link, and nothing but a regular file is opened.

    Args:
        path: a directory.
        below: names of directories, and of the file.
        at_most: bytes of it; 0 for any number.

    Raises:
        OSError: there is none, it is none, or it is larger.
    """
    *folders, name = below
    if name in ("", ".", "..") or "/" in name:
        raise OSError(errno.EINVAL, "is not a file name", name)
    with directory(path, *folders) as above:
        descriptor = os.open(name, _FILE, dir_fd=above)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", name)
        if at_most and found.st_size > at_most:
            raise OSError(errno.EFBIG, f"it has more than {at_most:,} bytes", name)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        with suppress(OSError):
            os.close(descriptor)
        raise


def stamp(path: Path, name: str) -> tuple[int, int, int] | None:
    """What changes when a file does: its time, size and number; None where it is not a regular file."""
    try:
        found = os.stat(f"{path}/{name}", follow_symlinks=False)
    except (OSError, ValueError):
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino) if stat.S_ISREG(found.st_mode) else None


def is_absent(path: Path, name: str) -> bool:
    """Whether nothing has this name in a directory."""
    try:
        os.lstat(f"{path}/{name}")
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        pass
    return False
