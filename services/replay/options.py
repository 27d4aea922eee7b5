"""The command line of `troupe replay serve`, and what it comes to."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from troupe.common.data.table_config import TableConfig, check_tables, parse_table, table_meanings
from troupe.common.errors import ConfigError
from troupe.common.runtime.parser import Parser, integer, real
from troupe.common.runtime.startup import FIELDS_AT_LEARNER, add_service_arguments
from troupe.common.wire.security.key_options import add_key_arguments

FIELDS_OF_TABLES = {
    "--capacity": "capacity",
    "--min-items": "min_items",
    "--priority-exponent": "priority_exponent",
    "--samples-per-insert": "samples_per_insert",
    "--samples-per-insert-error": "samples_per_insert_error",
}
"""What people try as options of the shard, and which field of a table each is."""


@dataclass(frozen=True)
class ShardOptions:
    """What a shard is told when it starts.

    Attributes:
        bind: address of its socket.
        data_dir: folder of the items.
        tables: of this shard; a run's configuration takes their place.
        max_bytes: most that chunks may take; None for what there is.
        volatile: start empty.
        durable: what acknowledged items survive; None for what the run says.
        seed: of sampling; None for the run's, or for any.
        learner: control address of the learner whose run it joins; None for no run.
        advertise: address that others use; None for that of its socket.
        index: number of the shard in its run.
        join_timeout_s: patience with the learner, in seconds.
        restore: snapshot to start with, if any.
        adopt: take over what is there of another run.
        snapshot_to: the only place for snapshots; None for any.
        keys: directory of the keys; empty for none.
        insecure: whether it may bind other addresses than loopback without keys.
    """

    bind: str
    data_dir: Path
    tables: tuple[TableConfig, ...]
    max_bytes: int | None
    volatile: bool
    durable: str | None
    seed: int | None
    learner: str | None
    advertise: str | None
    index: int
    join_timeout_s: float
    restore: str | None
    adopt: bool
    snapshot_to: str | None
    keys: str
    insecure: bool


def parse_serve(words: Sequence[str]) -> tuple[ShardOptions, argparse.Namespace]:
    """Return the options of a shard, and those that every service has.

    Raises:
        ConfigError: a word that means nothing, or nothing here, rather than pass over it.
    """
    # Before argparse, which would call them unknown and suggest nothing.
    for word in words:
        if key := FIELDS_OF_TABLES.get(word.partition("=")[0]):
            raise ConfigError(f"{word.partition('=')[0]} is a field of a table: --table default:{key}=VALUE")
    options = serve_parser().parse_args(words)
    if options.learner:
        for name, value in (("--table", options.tables), ("--max-bytes", options.max_bytes)):
            if value is not None:
                decider = "the configuration of the learner's run decides"
                raise ConfigError(f"{name} has no effect here, {decider}: leave it out")
    options.tables = tuple(map(parse_table, options.tables or ["default"]))
    check_tables(options.tables)  # all of them, before anything is emptied for them
    return ShardOptions(**{each.name: getattr(options, each.name) for each in fields(ShardOptions)}), options


def serve_parser() -> Parser:
    """Return the parser of `troupe replay serve`."""
    parser = Parser(
        fields=FIELDS_AT_LEARNER,
        prog="troupe replay serve",
        description="Run a replay shard: by itself, or in the run of the learner at ADDRESS, whose "
        "configuration then decides about tables and bytes.",
    )
    parser.add_argument(
        "--bind",
        metavar="ADDRESS",
        default="tcp://127.0.0.1:5560",
        help="address to listen on (default: %(default)s)",
    )
    parser.add_argument(
        "--data-dir",
        metavar="DIR",
        type=Path,
        default=Path("replay-data"),
        help="holds the items; default: %(default)s",
    )
    parser.add_argument("--volatile", action="store_true", help="start empty, even if DIR holds items")
    parser.add_argument(
        "--durable",
        choices=("process", "power"),
        help="what acknowledged items survive: the death of the process (default), or also a power cut, "
        "for which each insert waits until it is on disk",
    )
    parser.add_argument("--seed", type=integer(0), help="seed of sampling")
    add_key_arguments(parser, server=True)
    _add_run_arguments(parser)
    _add_table_arguments(parser)
    _add_snapshot_arguments(parser)
    add_service_arguments(parser)
    return parser


def _add_run_arguments(parser: Parser) -> None:
    group = parser.add_argument_group("in a run")
    group.add_argument("--learner", metavar="ADDRESS", help="control address of a learner to join")
    group.add_argument(
        "--advertise", metavar="ADDRESS", help="address that others use, if not that of --bind"
    )
    group.add_argument("--index", type=integer(0), default=0, help="number of this shard in its run")
    group.add_argument(
        "--join-timeout-s",
        type=real(0),
        default=60.0,
        metavar="S",
        help="seconds to wait for the learner (default: 60)",
    )


def _add_table_arguments(parser: Parser) -> None:
    group = parser.add_argument_group("by itself")
    known = ", ".join(name for name in table_meanings() if name != "name")
    group.add_argument(
        "--table",
        metavar="NAME:FIELD=VALUE,...",
        action="append",
        dest="tables",
        help="a table; may be repeated (default: one named default). Fields, as in [[replay.tables]] of a "
        f"configuration: {known}; `troupe config explain replay.tables` says what they mean",
    )
    group.add_argument(
        "--max-bytes",
        type=integer(1),
        metavar="BYTES",
        help="most bytes that chunks may take; default: 90 %% of the available space",
    )


def _add_snapshot_arguments(parser: Parser) -> None:
    group = parser.add_argument_group("snapshots")
    group.add_argument(
        "--restore",
        metavar="SRC",
        help="start with the items of a snapshot, in a --data-dir that is empty or was restored from it",
    )
    group.add_argument(
        "--adopt",
        action="store_true",
        help="accept items in DIR or SRC from another run, or from none, which are otherwise refused",
    )
    group.add_argument(
        "--snapshot-to",
        metavar="DIR",
        help="permit snapshots only to this directory or address (default: any; with --insecure none)",
    )
