"""Films of a run's evaluations, as its learner keeps them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from troupe.services.board.opening import directory, open_regular

FOLDER = "videos"
KINDS = {"mp4": "video/mp4", "gif": "image/gif"}
MAX_BYTES = 1 << 25
MAX_FILMS = 20
BLOCK_BYTES = 1 << 18
_NAME = re.compile(r"[\w.+:-]{1,150}-(\d{1,18})\.(mp4|gif)", re.ASCII)


def names(run: Path) -> list[dict[str, Any]]:
    """The newest films, newest first: `name` of the file, and `steps` of the run when it was made."""
    found = []
    try:
        with directory(run, FOLDER) as folder, os.scandir(folder) as listing:
            for entry in listing:
                name = _NAME.fullmatch(entry.name)
                if name is not None and entry.is_file(follow_symlinks=False):
                    found.append((entry.stat(follow_symlinks=False).st_mtime_ns, entry.name, int(name[1])))
    except OSError:
        return []
    return [{"name": name, "steps": steps} for _, name, steps in sorted(found, reverse=True)[:MAX_FILMS]]


def opened(run: Path, name: str) -> tuple[IO[bytes], str]:
    """A film, opened for reading, and its media type.

    Raises:
        OSError: there is none of this name, or it is too large.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        raise FileNotFoundError(name)
    return open_regular(run, FOLDER, name, at_most=MAX_BYTES), KINDS[found[2]]


def part(film: IO[bytes], first: int, count: int) -> Iterator[bytes]:
    """So many bytes of a film, in blocks, and close it: several players must not fill memory with films."""
    with film:
        film.seek(first)
        while count > 0 and (block := film.read(min(count, BLOCK_BYTES))):
            count -= len(block)
            yield block
