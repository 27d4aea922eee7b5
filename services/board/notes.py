"""A run's note: Markdown in `notes.md` of its directory, the only thing that the page writes."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from troupe.common.errors import ConfigError
from troupe.services.board.opening import directory, open_regular

NOTES_FILE = "notes.md"
MAX_BYTES = 1 << 16


def read(run: Path) -> str:
    """The note; empty where there is none, or something that is none."""
    try:
        with open_regular(run, NOTES_FILE, at_most=MAX_BYTES) as file:
            return file.read(MAX_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def write(run: Path, text: str) -> None:
    """Replace the note at once; an empty text removes it.

    Raises:
        ConfigError: it is too long, or cannot be written.
    """
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError("the note is not valid text: it contains half of a character") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(f"the note has {len(data):,} bytes: shorten it to {MAX_BYTES:,}")
    # A name that nobody can have put a link at, and a file that is new.
    temporary = f".{NOTES_FILE}.{secrets.token_hex(8)}.tmp"
    try:
        with directory(run) as folder:
            if not data:
                with suppress(FileNotFoundError):
                    os.unlink(NOTES_FILE, dir_fd=folder)
                return
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(temporary, flags, 0o644, dir_fd=folder)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(data)
                os.replace(temporary, NOTES_FILE, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)
                raise
    except OSError as error:
        raise ConfigError(f"the note cannot be written: {error.strerror or error}") from error
