"""Where snapshots go: a directory, or whatever fsspec knows an address of, such as `s3://BUCKET/PATH`."""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO

from troupe.common.errors import CheckpointError, ConfigError
from troupe.common.installation import install_command


class Destination(ABC):
    """Files by name under one address, and one of them that makes them count."""

    @abstractmethod
    def prepare(self) -> None:
        """Make the place, before the first file is written; this may take as long as a network does.

        Raises ConfigError or CheckpointError where something is there already, or nothing can be written.
        """

    @abstractmethod
    def open(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """A new file, to be written."""

    @abstractmethod
    def open_to_read(self, name: str) -> IO[bytes]:
        """A file that is there; raises OSError if it is not."""

    @abstractmethod
    def finish(self, manifest: bytes) -> None:
        """Write the last file, by which all of them count."""

    @abstractmethod
    def abort(self) -> None:
        """Remove what has been written, as far as it can be done."""

    def read(self, name: str) -> bytes:
        """The contents of a small file."""
        with self.open_to_read(name) as file:
            return file.read(1 << 24)


class Directory(Destination):
    """A local directory, which appears under its name when it is complete.

    No symbolic link on the way to it is followed for writing, whenever it was made: who permits a place
    resolves its links once (`os.path.realpath`), looks at what they lead to, and has that written.
    """

    def __init__(self, path: Path, manifest_name: str) -> None:
        self._path = path
        self._manifest_name = manifest_name
        self._temporary = path.name + ".incomplete"
        self._parent = self._folder = -1  # descriptors
        if not manifest_name:
            return
        try:
            self._parent = _descend(path.parent)
            if _is_there(path.name, self._parent):
                raise ConfigError(f"{path} already exists: a snapshot needs a new directory")
            shutil.rmtree(self._temporary, ignore_errors=True, dir_fd=self._parent)
            os.mkdir(self._temporary, dir_fd=self._parent)
            self._folder = os.open(self._temporary, _DIRECTORY, dir_fd=self._parent)
        except OSError as error:
            self._close()
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None
        except ConfigError:
            self._close()
            raise

    def prepare(self) -> None:
        """See `Destination`. No network is asked, so all of it has been done."""

    @contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        """See `Destination`. The file is on the disk when it is closed."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(name, flags, 0o666, dir_fd=self._folder), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def open_to_read(self, name: str) -> IO[bytes]:
        """See `Destination`."""
        return (self._path / name).open("rb")

    def finish(self, manifest: bytes) -> None:
        """See `Destination`."""
        with self.open(self._manifest_name) as file:
            file.write(manifest)
        os.rename(self._temporary, self._path.name, src_dir_fd=self._parent, dst_dir_fd=self._parent)
        os.fsync(self._parent)
        self._close()

    def abort(self) -> None:
        """See `Destination`."""
        if self._parent >= 0:
            shutil.rmtree(self._temporary, ignore_errors=True, dir_fd=self._parent)
        self._close()

    def _close(self) -> None:
        for descriptor in (self._parent, self._folder):
            if descriptor >= 0:
                os.close(descriptor)
        self._parent = self._folder = -1


_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def _descend(path: Path) -> int:
    """A descriptor of the directory `path`, made if it is not there; raises OSError at a symbolic link."""
    descriptor = os.open("/", _DIRECTORY)
    try:
        for part in path.parts[1:]:
            with suppress(FileExistsError):
                os.mkdir(part, dir_fd=descriptor)
            inner = os.open(part, _DIRECTORY, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _is_there(name: str, directory: int) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


class Remote(Destination):
    """Objects under an address that fsspec knows. There is no snapshot before its manifest is there."""

    def __init__(self, url: str, manifest_name: str) -> None:
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise ConfigError(f"{url}: {_to_install(url)}") from None
        try:
            self._system, path = url_to_fs(url)
        except ImportError as error:
            raise ConfigError(f"{url} cannot be used: {_line(error)} ({_to_install(url)})") from None
        except Exception as error:  # every system has errors of its own
            raise ConfigError(f"{url} cannot be used: {_line(error)}") from None
        self._path = path.rstrip("/")
        self._manifest_name = manifest_name
        self._url = url
        self._written: list[str] = []

    def prepare(self) -> None:
        """See `Destination`."""
        try:
            there = self._system.exists(f"{self._path}/{self._manifest_name}")
            if not there:
                self._system.makedirs(self._path, exist_ok=True)
        except Exception as error:
            raise CheckpointError(f"{self._url} cannot be written: {_line(error)}") from None
        if there:
            raise ConfigError(f"{self._url} already exists: a snapshot needs a new address")

    def open(self, name: str) -> IO[bytes]:
        """See `Destination`."""
        self._written.append(f"{self._path}/{name}")
        file: IO[bytes] = self._system.open(self._written[-1], "wb")
        return file

    def open_to_read(self, name: str) -> IO[bytes]:
        """See `Destination`."""
        try:
            file: IO[bytes] = self._system.open(f"{self._path}/{name}", "rb")
        except OSError:
            raise
        except Exception as error:  # no credentials, for one
            raise OSError(_line(error)) from None
        return file

    def finish(self, manifest: bytes) -> None:
        """See `Destination`."""
        with self.open(self._manifest_name) as file:
            file.write(manifest)

    def abort(self) -> None:
        """See `Destination`."""
        for path in self._written:
            with suppress(Exception):  # what stays has no manifest, and so does not count
                self._system.rm(path)


def _line(error: Exception) -> str:
    """What a library says, in one line."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _to_install(url: str) -> str:
    if url.startswith(("s3://", "s3a://")):
        return f"install s3fs where this is to be read or written: {install_command('s3')}"
    return f"install fsspec and its package for this: {install_command('snapshot')}"


def open_destination(address: str, manifest_name: str = "") -> Destination:
    """The place that `address` means: to write to, if the name of a manifest is given, or to read."""
    if "://" in address:
        return Remote(address, manifest_name)
    if not os.path.isabs(address):
        raise ConfigError(f"{address!r} is neither an absolute path nor an address such as s3://BUCKET/PATH")
    return Directory(Path(address), manifest_name)
