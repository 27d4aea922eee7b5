"""Whether the files that a former process has left are all there, before anything is mapped or made.

A mapped file that is missing or too short would be made, or lengthened, with zeros, and those served as if
they had been stored. Whether what stands in the files is in order is for those who read them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from troupe.common.data.columns import column_files, damaged
from troupe.common.data.format import HEADER_FILE, RECORDS_FILE, SIGNATURE_FILE, record_dtype
from troupe.common.data.schema import FieldSpec
from troupe.services.replay.storage.header import header_bytes, read_header
from troupe.services.replay.storage.item_files import table_files
from troupe.services.replay.storage.producers import PRODUCERS_FILE, producers_file_bytes


def check_files(folder: Path, specs: Sequence[FieldSpec], tables: Mapping[str, int]) -> None:
    """Raise ConfigError where a file that belongs to the signature is missing, or shorter than it was.

    Args:
        folder: of the shard.
        specs: the fields that the signature names.
        tables: slots of each table.
    """
    for name, least in _least_sizes(folder, specs, tables):
        _check(folder, name, least)


def check_none(folder: Path) -> None:
    """Raise ConfigError where there is no signature, and yet chunks have been written."""
    # All headers begin with how much there ever was, of chunks or of a table's items. A process that dies in
    # its first insert, before it has written the signature, leaves zeros there.
    for header in folder.glob("*.header"):
        values = read_header(header.read_bytes()) if header.is_file() else None
        if values is not None and values[0]:
            raise damaged(folder, f"{SIGNATURE_FILE} is missing")


def _least_sizes(
    folder: Path, specs: Sequence[FieldSpec], tables: Mapping[str, int]
) -> Iterator[tuple[str, int]]:
    """Each file and its least number of bytes, the header first: the others' follow from it."""
    lanes = [lane for spec in specs for lane in column_files(spec)]
    yield HEADER_FILE, header_bytes(2 + len(lanes))
    values = read_header((folder / HEADER_FILE).read_bytes())
    limits = [1] * (1 + len(lanes)) if values is None else values[1:].astype(int).tolist()
    records = {RECORDS_FILE: record_dtype(1 + len(lanes)).itemsize}
    for files, limit in zip((records, *lanes), limits, strict=True):
        for name, unit_bytes in files.items():
            yield name, limit * unit_bytes
    for table, slots in tables.items():
        yield from table_files(table, slots).items()
    yield PRODUCERS_FILE, producers_file_bytes()


def _check(folder: Path, name: str, least: int) -> None:
    path = folder / name
    size = path.stat().st_size if path.is_file() else -1
    if size < 0:
        raise damaged(folder, f"{name} is missing")
    if size < least:
        raise damaged(folder, f"{name} has {size:,} bytes of at least {least:,}")
