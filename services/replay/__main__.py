"""`python -m services.replay`: one replay shard."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import json
import logging
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq

from common.data.replay import Replay
from common.data.snapshot import restore_snapshot
from common.data.table_config import (
    LIMITERS,
    REMOVERS,
    SAMPLERS,
    TableConfig,
    check_tables,
    parse_table,
    plain_table,
)
from common.errors import ConfigError
from common.runtime.arguments import Parser, integer, real
from common.runtime.lifecycle import StopSignal, run_main
from common.runtime.startup import add_service_arguments, begin
from common.wire.control_client import ControlClient, new_incarnation
from common.wire.key_options import add_key_arguments, make_security
from common.wire.replay_client import ReplayClient
from common.wire.sockets import Context, bound_endpoint, make_router
from services.replay.folder import clear
from services.replay.plan import make_plan
from services.replay.service import ReplayService
from services.replay.status_page import print_page

_log = logging.getLogger(__name__)

TABLE_OPTIONS = [
    "capacity",
    "min_items",
    "priority_exponent",
    "samples_per_insert",
    "samples_per_insert_error",
]
"""What describes the one table of a shard by itself, as `plain_table` takes it."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    defaults = TableConfig()
    parser = Parser(
        prog="troupe replay",
        description="Runs a replay shard: by itself, or as part of the run of the learner at ADDRESS, whose "
        "configuration it takes then (the options about the table are for running by itself).",
    )
    parser.add_argument(
        "--bind", metavar="ADDRESS", default="tcp://127.0.0.1:5560", help="default: %(default)s"
    )
    parser.add_argument(
        "--data-dir",
        metavar="DIR",
        type=Path,
        default=Path("replay-data"),
        help="holds the items; default: %(default)s",
    )
    parser.add_argument("--learner", metavar="ADDRESS", help="control address of a learner to join")
    parser.add_argument(
        "--advertise", metavar="ADDRESS", help="address that others use, if not that of --bind"
    )
    parser.add_argument("--index", type=integer(0), default=0, help="number of this shard in its run")
    parser.add_argument(
        "--join-timeout-s",
        type=real(0),
        default=60.0,
        metavar="S",
        help="patience with the learner (default: 60)",
    )
    add_key_arguments(parser, server=True)
    parser.add_argument(
        "--status",
        metavar="ADDRESS",
        help="print the status of a running shard (with --keys by that of the viewer), and exit",
    )
    parser.add_argument("--json", action="store_true", help="print the status as JSON")
    parser.add_argument(
        "--snapshot",
        nargs=2,
        metavar=("ADDRESS", "DEST"),
        help="have a running shard copy its items to DEST, a new directory on its host or an address that "
        "fsspec knows, such as s3://BUCKET/PATH (with --keys by that of the learner), and exit",
    )
    parser.add_argument(
        "--restore",
        metavar="SRC",
        help="start with the items of a snapshot, in a --data-dir that is empty or was restored from it",
    )
    parser.add_argument(
        "--adopt",
        action="store_true",
        help="take over what DIR or SRC holds of another run, or of none, which is refused otherwise",
    )
    parser.add_argument(
        "--snapshot-to",
        metavar="DIR",
        help="permit snapshots to this directory or address only (default: any; with --insecure none)",
    )
    parser.add_argument(
        "--table",
        metavar="NAME:KEY=VALUE,...",
        action="append",
        dest="tables",
        help="a table, instead of the one that the options below describe; may be repeated. Keys: sampler "
        f"({', '.join(SAMPLERS)}), remover ({', '.join(REMOVERS)}), limiter "
        f"({', '.join(LIMITERS)}), capacity, min_items, max_times_sampled, samples_per_insert, "
        "samples_per_insert_error, priority_exponent, removal_exponent, soft_period_batches; the word queue "
        "stands for what makes a queue",
    )
    table = parser.add_argument_group("the table")
    table.add_argument(
        "--capacity",
        type=integer(1),
        default=defaults.capacity,
        metavar="ITEMS",
        help="default: %(default)s",
    )
    table.add_argument(
        "--min-items",
        type=integer(1),
        default=1,
        metavar="ITEMS",
        help="items before sampling begins; default: %(default)s",
    )
    table.add_argument(
        "--priority-exponent",
        type=real(0),
        default=defaults.priority_exponent,
        metavar="ALPHA",
        help="default: %(default)s",
    )
    table.add_argument(
        "--samples-per-insert", type=real(0), default=0.0, metavar="RATIO", help="default: 0, no limit"
    )
    table.add_argument(
        "--samples-per-insert-error", type=real(0), metavar="SAMPLES", help="default: a few batches"
    )
    table.add_argument(
        "--max-bytes",
        type=integer(1),
        metavar="BYTES",
        help="most that chunks may take; default: 90 %% of what there is",
    )
    parser.add_argument("--volatile", action="store_true", help="start empty, whatever items DIR holds")
    parser.add_argument("--seed", type=integer(0), help="of sampling")
    add_service_arguments(parser)
    parser.set_defaults(run_tables=None)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a shard until it is told to stop or its run is over; return the exit code."""

    def body() -> None:
        args = parser().parse_args(argv)
        if args.status:
            return print_status(args.status, args.keys, as_json=args.json)
        if args.snapshot:
            endpoint, destination = args.snapshot
            return make_snapshot(endpoint, destination, args.keys)
        refuse_unheard(args)
        begin(f"replay-{args.index}", args)
        stop = StopSignal(force_after_s=60.0).install()
        ctx: Context = zmq.Context()
        try:
            serve(args, ctx, stop)
        finally:
            ctx.destroy(linger=1000)

    return run_main(body)


def refuse_unheard(args: argparse.Namespace) -> None:
    """Raise `ConfigError` for options that something else decides, rather than pass over them."""
    options, decider = TABLE_OPTIONS, "--table"
    if args.learner:
        options, decider = [*TABLE_OPTIONS, "tables", "max_bytes"], "the configuration of the learner's run"
    elif not args.tables:
        return
    defaults = parser()
    for name in options:
        if getattr(args, name) != defaults.get_default(name):
            option = "--table" if name == "tables" else "--" + name.replace("_", "-")
            raise ConfigError(f"{option} has no effect here, {decider} decides: leave it out")


def serve(args: argparse.Namespace, ctx: Context, stop: StopSignal) -> None:
    """Bind, join the run if there is one, open the folder, and serve."""
    # Bound before joining, for the learner passes the address on. Early requests wait in the socket.
    security = make_security(args.keys, "replay", insecure=args.insecure)
    router = make_router(ctx, args.bind, security)
    control, run = None, ""
    try:
        endpoint = args.advertise or bound_endpoint(router)
        if args.learner and not args.advertise:
            endpoint = address_towards(args.learner, endpoint)
        if args.learner:
            incarnation = new_incarnation()
            control = ControlClient(
                ctx,
                args.learner,
                role="replay",
                name=f"replay-{args.index}",
                incarnation=incarnation,
                replay_endpoint=endpoint,
                connect_timeout_s=args.join_timeout_s,
                security=security,
            )
            welcome = control.join_unless(lambda: stop.requested)
            if welcome is None:
                return
            run = welcome.run
            use_config(args, welcome.config)
            if args.seed is None:
                args.seed = welcome.seed(incarnation, args.index)
        replay = open_replay(args, run)
        _log.info("serving at %s", endpoint)
        permitted = args.snapshot_to or (None if args.insecure and not args.keys else "")
        ReplayService(replay, router, stop, control, snapshots=permitted).run()
        replay.close()
    finally:
        if control is not None:
            control.close()
        router.close(linger=1000)


def address_towards(learner: str, endpoint: str) -> str:
    """Put a host that others can reach in place of a wildcard: the one that packets to the learner leave by.

    Raises:
        ConfigError: there is none, or only one that means something else on other machines.
    """
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if host not in ("0.0.0.0", "[::]"):
        return endpoint
    local = ""
    if learner.startswith("tcp://"):
        learner_host, _, learner_port = learner.removeprefix("tcp://").rpartition(":")
        local = _host_towards(learner_host.strip("[]"), learner_port)
    if not local or ipaddress.ip_address(local).is_loopback:
        raise ConfigError(
            f"bound to every interface, but the learner at {learner} does not tell by which one others "
            f"reach this shard: give --advertise tcp://HOST:{port}"
        )
    return f"tcp://[{local}]:{port}" if ":" in local else f"tcp://{local}:{port}"


def _host_towards(host: str, port: str) -> str:
    """Return the own address that packets to `host` come from; empty where there is no way to it."""
    with contextlib.suppress(OSError):  # connecting a datagram socket sends nothing
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return ""


def use_config(args: argparse.Namespace, config: dict[str, Any]) -> None:
    """Let the run's configuration replace the options about the table."""
    # Only these sections: to read that of the agent would import its algorithm, and torch with it.
    from common.config import ReplayConfig  # takes a second to import, so not for a shard by itself

    replay = ReplayConfig.model_validate(config["replay"])
    args.run_tables = replay.shard_tables(replay.shards)
    args.max_bytes = replay.max_bytes
    args.volatile = args.volatile or not replay.durable


def make_tables(args: argparse.Namespace) -> list[TableConfig]:
    """The tables that the run's configuration, or the options, describe."""
    if args.run_tables:
        return list(args.run_tables)
    if args.tables:
        tables = [parse_table(text) for text in args.tables]
        check_tables(tables)  # all of them, before anything is emptied for them
        return tables
    if args.min_items > args.capacity:
        raise ConfigError(f"--min-items {args.min_items} should be from 1 to --capacity ({args.capacity})")
    return [plain_table(*(getattr(args, name) for name in TABLE_OPTIONS))]


def open_replay(args: argparse.Namespace, run: str = "") -> Replay:
    """Open the folder for `run` (empty: for none), and say what is in it, and what it may grow to."""
    tables = make_tables(args)
    if args.volatile:
        clear(args.data_dir, [table.name for table in tables])
    if args.restore:
        # What would be refused afterwards is refused before anything is copied.
        make_plan(args.data_dir, tables, args.max_bytes)
        restore(args.restore, args.data_dir, tables, None if args.adopt else run)
    try:
        args.data_dir.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise ConfigError(f"cannot write in {args.data_dir}: {failure.strerror}") from None
    plan = make_plan(args.data_dir, tables, args.max_bytes)
    _log.info("memory plan for %d items: %s", sum(table.capacity for table in tables), plan)
    replay = Replay(
        args.data_dir,
        tables,
        budget_bytes=plan.store_bytes,
        must_fit=args.max_bytes is None,
        seed=args.seed,
        run=run,
        adopt=args.adopt,
    )
    if args.max_bytes is not None and replay.budget_bytes < args.max_bytes:
        _log.warning(
            "%s was made for %d bytes and keeps to them, not %d: for more, start with another --data-dir",
            args.data_dir,
            replay.budget_bytes,
            args.max_bytes,
        )
    if replay.restored_items:
        _log.info("restored %d items from %s", replay.restored_items, args.data_dir)
    return replay


def restore(source: str, folder: Path, tables: Sequence[TableConfig], run: str | None) -> None:
    """Make the folder of these tables from a snapshot of `run` (empty: of none; None: of any)."""
    if "://" not in source:
        source = os.path.abspath(source)
    items = restore_snapshot(source, folder, _log.info, run=run, tables=tables)
    if items is None:
        _log.info("%s was restored from %s before: it goes on from what it holds now", folder, source)
    else:
        _log.info("restored the snapshot in %s: %d items", source, items)


def print_status(endpoint: str, keys_dir: str = "", *, as_json: bool = False) -> None:
    """Print the status of a shard."""
    client = ReplayClient(endpoint, name="status", security=make_security(keys_dir, "viewer"))
    try:
        status = client.status(5.0)
    finally:
        client.close(0)
    if as_json:
        print(json.dumps(status, indent=2))
    else:
        print_page(endpoint, status)


def make_snapshot(endpoint: str, destination: str, keys_dir: str = "") -> None:
    """Have a running shard make a snapshot, and wait for it."""
    if "://" not in destination:
        destination = os.path.abspath(destination)
    client = ReplayClient(endpoint, name="snapshot", security=make_security(keys_dir, "learner"))
    try:
        progress = client.snapshot(destination)
    finally:
        client.close(0)
    print(f"{progress['items']:,} items, {progress['bytes_done'] / 2**20:,.1f} MiB in {destination}")


if __name__ == "__main__":
    sys.exit(main())
