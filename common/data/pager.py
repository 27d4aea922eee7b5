"""The files of a store as memory: who maps them, who takes room for them, and who forces them to the disk.

Everything that a shard writes goes through one `FilePager`; a reader of its files has a `ReadingPager`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from troupe.common import system
from troupe.common.errors import DISK_FULL, ConfigError

PAGE_BYTES = 4096
SYNCS = 8
"""Files that are forced to the disk at one time."""


class DiskFullError(ConfigError):
    """There is no room on the disk for a file. Nothing was lost, and it may be tried again."""


def file_error(what: str, error: OSError) -> ConfigError:
    """The error for people that `error` is, where it prevented `what`."""
    if error.errno in DISK_FULL:
        return DiskFullError(f"the disk is full: {what}")
    return ConfigError(f"{what}: {error.strerror}")


class MappedFile:
    """A file of equal units that is mapped.

    Attributes:
        name: of the file, in its folder.
        array: `[units, *shape]`.
    """

    def __init__(self, path: Path, dtype: np.dtype, shape: tuple[int, ...]) -> None:
        """Describe the file at `path`, which its pager maps."""
        self.name = path.name
        self.path = path
        self.unit_bytes = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
        self.array: NDArray = np.empty(0, dtype)

    def reserve(self, start: int, end: int) -> None:
        """Take room on the disk for the units `[start, end)`; raises OSError where there is none.

        Writing to a mapped file whose disk is full kills the process, so nothing is written before this.
        """
        raise NotImplementedError


class ReadingPager:
    """Maps what another process writes, without changing it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open(self, name: str, dtype: str | np.dtype, shape: tuple[int, ...]) -> MappedFile:
        """Map the file `name`; raises OSError if it cannot be, or is too short."""
        path, dtype = self.folder / name, np.dtype(dtype)
        file = MappedFile(path, dtype, shape)
        if path.stat().st_size < shape[0] * file.unit_bytes:
            raise OSError(errno.EINVAL, "the file is too short", str(path))
        file.array = np.memmap(path, dtype=dtype, mode="r", shape=shape).view(np.ndarray)
        return file


class WrittenFile(MappedFile):
    """A file that is mapped for reading and writing, made or extended with zeros."""

    def __init__(self, path: Path, dtype: np.dtype, shape: tuple[int, ...], *, sparse: bool) -> None:
        """Map `path`. Unless it is `sparse`, its room on the disk is taken at once."""
        super().__init__(path, dtype, shape)
        try:
            self._file = path.open("r+b" if path.exists() else "w+b")
        except OSError as error:
            raise file_error(f"cannot make {path}", error) from None
        try:
            if os.fstat(self._file.fileno()).st_size < shape[0] * self.unit_bytes:
                # A sparse file: address space now, blocks on the disk when `reserve` takes them.
                self._file.truncate(shape[0] * self.unit_bytes)
            if not sparse:
                self.reserve(0, shape[0])
            self.array = np.memmap(self._file, dtype=dtype, mode="r+", shape=shape).view(np.ndarray)
        except OSError as error:
            self._file.close()
            raise file_error(f"cannot make {path}", error) from None

    def reserve(self, start: int, end: int) -> None:
        """See `MappedFile`."""
        if end > start:
            size_bytes = (end - start) * self.unit_bytes
            # Real blocks, not only a length: `ftruncate` leaves holes, and writing to a hole of a full disk
            # is SIGBUS.
            os.posix_fallocate(self._file.fileno(), start * self.unit_bytes, size_bytes)

    def sync(self) -> None:
        """Force what was written before this call to the disk; raises OSError where that fails."""
        os.fdatasync(self._file.fileno())

    def close(self) -> None:
        """Close the file. The mapping stays for as long as somebody uses it."""
        self._file.close()


class FilePager:
    """Maps the files of a folder for the one process that writes them, and forces them to the disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: list[WrittenFile] = []

    def open(
        self, name: str, dtype: str | np.dtype, shape: tuple[int, ...], *, sparse: bool = True
    ) -> MappedFile:
        """Map the file `name`, made or extended with zeros; raises ConfigError where there is no room."""
        file = self._map(self.folder / name, np.dtype(dtype), shape, sparse)
        self._files.append(file)
        return file

    def _map(self, path: Path, dtype: np.dtype, shape: tuple[int, ...], sparse: bool) -> WrittenFile:
        return WrittenFile(path, dtype, shape, sparse=sparse)

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Forget the files that are opened in this block, if it fails."""
        before = len(self._files)
        try:
            yield
        except BaseException:
            for file in self._files[before:]:
                file.close()
            del self._files[before:]
            raise

    def sync(self) -> None:
        """Force what was written before this call to the disk; raises OSError where that fails.

        What is written meanwhile, by another thread, may be on the disk then or not.
        """
        files = list(self._files)
        left, failures = iter(files), list[Exception]()

        def sync_some() -> None:
            for file in left:
                try:
                    file.sync()
                except Exception as error:  # whatever it is: the file is not on the disk
                    failures.append(error)

        # Side by side: the file system forces its journal to the disk once for several of them.
        threads = [system.Thread(target=sync_some, name="sync-file") for _ in files[:SYNCS]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def touch(self) -> None:
        """Have the next `sync` write everything, also what the system believes to be on the disk."""
        for file in self._files:
            pages = file.array.reshape(-1).view(np.uint8)[::PAGE_BYTES]
            pages[:] = pages.copy()

    def close(self) -> None:
        """Close all files."""
        for file in self._files:
            file.close()
        self._files.clear()


Pager = ReadingPager | FilePager
