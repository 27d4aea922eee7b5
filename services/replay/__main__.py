"""`python -m troupe.services.replay`: serve a replay shard, look at one, or copy one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

import zmq

from troupe.common.runtime.commands import dispatch
from troupe.common.runtime.lifecycle import StopSignal, run_main
from troupe.common.runtime.parser import Parser
from troupe.common.runtime.startup import begin
from troupe.common.wire.replay.client import ReplayClient
from troupe.common.wire.security.key_options import add_key_arguments, make_security
from troupe.common.wire.sockets import Context
from troupe.services.replay.options import parse_serve
from troupe.services.replay.shard import serve
from troupe.services.replay.status_page import print_page


def main(argv: Sequence[str] | None = None) -> int:
    """Run `serve`, `status` or `snapshot`; return the exit code."""
    from troupe.services.commands import COMMANDS

    words = sys.argv[1:] if argv is None else argv
    return run_main(lambda: dispatch(COMMANDS, ["replay", *words]))


def serve_shard(words: Sequence[str]) -> int:
    """Run a shard until it is told to stop or its run is over."""
    options, common = parse_serve(words)
    begin(f"replay-{options.index}", common)
    stop = StopSignal(force_after_s=60.0).install()
    ctx: Context = zmq.Context()
    try:
        serve(options, ctx, stop)
    finally:
        ctx.destroy(linger=1000)
    return 0


def status_parser() -> Parser:
    """Return the parser of `troupe replay status`."""
    parser = Parser(
        prog="troupe replay status",
        description="Print the status of a running shard. If the shard has keys, --keys needs those of "
        "the viewer.",
    )
    parser.add_argument("address", metavar="ADDRESS", help="of the shard, such as tcp://127.0.0.1:5560")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    add_key_arguments(parser)
    return parser


def status(words: Sequence[str]) -> int:
    """Print the status of a shard."""
    options = status_parser().parse_args(words)
    client = ReplayClient(options.address, name="status", security=make_security(options.keys, "viewer"))
    try:
        shown = client.status(5.0)
    finally:
        client.close(0)
    if options.json:
        print(json.dumps(shown, indent=2))
    else:
        print_page(options.address, shown)
    return 0


def snapshot_parser() -> Parser:
    """Return the parser of `troupe replay snapshot`."""
    parser = Parser(
        prog="troupe replay snapshot",
        description="Make a running shard copy its items, and wait for it. If the shard has keys, "
        "--keys needs those of the learner.",
    )
    parser.add_argument("address", metavar="ADDRESS", help="of the shard, such as tcp://127.0.0.1:5560")
    parser.add_argument(
        "destination",
        metavar="DEST",
        help="a new directory on the shard's host, or an address for fsspec, such as s3://BUCKET/PATH",
    )
    add_key_arguments(parser)
    return parser


def snapshot(words: Sequence[str]) -> int:
    """Have a shard copy its items."""
    options = snapshot_parser().parse_args(words)
    destination = options.destination
    if "://" not in destination:
        destination = os.path.abspath(destination)
    client = ReplayClient(options.address, name="snapshot", security=make_security(options.keys, "learner"))
    if sys.stderr.isatty():
        print(f"waiting for {options.address} to copy its items to {destination}", file=sys.stderr)
    try:
        progress = client.snapshot(destination)
    finally:
        client.close(0)
    print(f"{progress['items']:,} items, {progress['bytes_done'] / 2**20:,.1f} MiB in {destination}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
