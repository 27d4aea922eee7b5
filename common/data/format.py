"""What a reader of replay's files must know: names, records, signature, and how to order reads and writes."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from troupe.common.data import sums
from troupe.common.data.pager import file_error
from troupe.common.data.schema import FIELD_NAME, MAX_FIELD_BYTES, FieldSpec
from troupe.common.errors import ConfigError

SIGNATURE_FILE = "signature.json"
RECORDS_FILE = "chunks.records"
HEADER_FILE = "chunks.header"
FORMAT = 2
"""Raised with every change of what the files mean. The first had no checksums."""
_LOCK = threading.Lock()


def record_dtype(lanes: int) -> np.dtype:
    """What is noted about one chunk: where it starts in each lane, how much of it it takes, and a checksum.

    Every number has 8 bytes.
    """
    numbers = [("commit", "u8"), ("incarnation", "u8"), ("sequence", "u8"), ("version", "i8")]
    rest = [("time_s", "f8"), ("steps", "i8"), ("starts", "i8", (lanes,)), ("counts", "i8", (lanes,))]
    return np.dtype([*numbers, *rest, ("sum", "u8")])


def record_sums(records: NDArray) -> NDArray[np.uint64]:
    """What the field `sum` of `records [n]` should say: of all other fields."""
    words = np.ascontiguousarray(records).view("u8").reshape(len(records), records.dtype.itemsize // 8)
    if len(records) == 1:
        return np.array([_record_sum(words[0, :-1].tolist())], np.uint64)
    words = words[:, :-1]
    total = np.ones(len(records), np.uint64)  # so that a record of zeros is none
    for first in range(0, words.shape[1], sums.MAX_WORDS):
        total = total * np.uint64(3) + sums.word_sums(words[:, first : first + sums.MAX_WORDS])
    return total


def _record_sum(words: list[int]) -> int:
    total = 1
    for first in range(0, len(words), sums.MAX_WORDS):
        total = total * 3 + sums.word_sum(words[first : first + sums.MAX_WORDS])
    return total % 2**64


def save_signature(folder: Path, specs: Sequence[FieldSpec], layout: Mapping[str, Any]) -> None:
    """Write what the files in `folder` mean, atomically."""
    fields = [asdict(spec) for spec in specs]
    for each in fields:
        del each["bounds"]  # of those who learn, not of what is stored
    content = {"format": FORMAT, "fields": fields, "layout": dict(layout)}
    text = json.dumps(content | {"crc32c": _content_sum(content)})
    temporary = folder / (SIGNATURE_FILE + ".tmp")
    try:
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # a power cut must not leave an empty one for all that was stored since
        # A reader sees the former file or the whole new one. The directory is forced to the disk as well:
        # without that the new name may be lost though the contents are not.
        os.replace(temporary, folder / SIGNATURE_FILE)
        directory = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise file_error(f"cannot write {folder / SIGNATURE_FILE}", error) from None


def load_signature(
    folder: Path, *, any_format: bool = False
) -> tuple[tuple[FieldSpec, ...], dict[str, Any]] | None:
    """What the files in `folder` mean; None if there are none.

    `any_format` is for those who only want to know which files there are.
    """
    path = folder / SIGNATURE_FILE
    if not path.exists():
        return None
    try:
        if not path.is_file():  # a pipe would be waited for
            raise ValueError("no ordinary file")
        content = json.loads(path.read_text())
        if content["format"] != FORMAT and not any_format:
            raise ConfigError(
                f"{path} has format {content['format']}, this version reads {FORMAT}: start with another "
                "--data-dir, or empty with --volatile"
            )
        if not any_format and content.pop("crc32c") != _content_sum(content):
            raise ValueError("it does not match its checksum")
        specs = tuple(FieldSpec(**{**entry, "shape": tuple(entry["shape"])}) for entry in content["fields"])
        for spec in specs:  # the folder may be somebody's snapshot, and a name is part of a file's
            if not FIELD_NAME.fullmatch(spec.name):
                raise ValueError(f"no field is called {spec.name[:64]!r}")
            if np.dtype(spec.dtype).kind not in "biuf" or not 0 <= spec.entry_bytes <= MAX_FIELD_BYTES:
                raise ValueError(f"field {spec.name} has no possible dtype or shape")
        layout = content["layout"]
        if not isinstance(layout, dict) or not isinstance(layout["tables"], dict):
            raise ValueError("no layout")
        layout["budget_bytes"] = int(layout["budget_bytes"])
        layout["entries"] = {spec.name: int(layout["entries"][spec.name]) for spec in specs}
        return specs, layout
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged ({error}): restore it or remove the folder") from None


def _content_sum(content: Mapping[str, Any]) -> int:
    """The checksum of a signature, however its JSON is laid out."""
    return sums.text_sum(json.dumps(content, sort_keys=True).encode())


def check_run(place: object, layout: Mapping[str, Any], run: str, remedy: str) -> None:
    """Raise ConfigError where the files in `place` are of another run than `run` (empty: of none)."""
    theirs = str(layout.get("run", ""))
    if theirs != run:
        raise ConfigError(f"{place} holds items of {_named(theirs)}, and this is {_named(run)}: {remedy}")


def _named(run: str) -> str:
    return f"run {run}" if run else "no run"


def fence() -> None:
    """Let no read or write move from before this call to after it, or the other way round.

    A lock keeps what is before it before its release, and what is after it after its acquisition: two rounds
    keep the two apart, on processors that order memory less strictly than x86 as well.
    """
    # One round is not enough: what comes before may move into the locked region from above, and what follows
    # from below.
    for _ in range(2):
        with _LOCK:
            pass
