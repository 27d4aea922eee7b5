"""`python -m troupe.services.replay`: serve a replay shard, look at one, or copy one."""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Sequence

import zmq

from troupe.common.errors import ConfigError
from troupe.common.runtime.lifecycle import StopSignal, run_main
from troupe.common.runtime.parser import Parser
from troupe.common.runtime.startup import begin
from troupe.common.wire.replay.client import ReplayClient
from troupe.common.wire.security.key_options import add_key_arguments, make_security
from troupe.common.wire.sockets import Context
from troupe.services.replay.options import parse_serve
from troupe.services.replay.shard import serve
from troupe.services.replay.status_page import print_page

COMMANDS = {
    "serve": "run a shard: by itself, or as part of a run",
    "status": "print the status of a running shard",
    "snapshot": "have a running shard copy its items",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of COMMANDS; return the exit code."""

    def body() -> None:
        words = list(sys.argv[1:] if argv is None else argv)
        command = words[0] if words else ""
        if command in ("-h", "--help"):
            return _usage().print_help()
        if command not in COMMANDS:
            raise ConfigError(_unknown(command))
        {"serve": _serve, "status": _status, "snapshot": _snapshot}[command](words[1:])

    return run_main(body)


def _usage() -> Parser:
    listing = "\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items())
    return Parser(
        prog="troupe replay",
        usage="troupe replay COMMAND [ARGUMENT ...]",
        description=f"commands (`troupe replay COMMAND --help` shows the options of one):\n{listing}",
    )


def _unknown(word: str) -> str:
    """What to say where no command stands."""
    if not word:
        return f"troupe replay needs a command: {', '.join(COMMANDS)} (`troupe replay --help` lists them)"
    option = word.partition("=")[0]
    if option.lstrip("-") in COMMANDS:
        return f"{option} is a command: `troupe replay {option.lstrip('-')} --help` shows its usage"
    if option.startswith("-"):
        return f"a command stands before {option}: `troupe replay serve {option} ...` runs a shard"
    near = difflib.get_close_matches(word, COMMANDS, n=1)
    nearest = f"; nearest: {near[0]}" if near else f"; there are {', '.join(COMMANDS)}"
    return f"unknown command 'replay {word}'{nearest} (`troupe replay --help` lists them)"


def _serve(words: Sequence[str]) -> None:
    """Run a shard until it is told to stop or its run is over."""
    options, common = parse_serve(words)
    begin(f"replay-{options.index}", common)
    stop = StopSignal(force_after_s=60.0).install()
    ctx: Context = zmq.Context()
    try:
        serve(options, ctx, stop)
    finally:
        ctx.destroy(linger=1000)


def _status(words: Sequence[str]) -> None:
    parser = Parser(
        prog="troupe replay status",
        description="Prints the status of a running shard. Where it has keys, --keys needs those of the "
        "viewer.",
    )
    parser.add_argument("address", metavar="ADDRESS", help="of the shard, such as tcp://127.0.0.1:5560")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    add_key_arguments(parser)
    options = parser.parse_args(words)
    client = ReplayClient(options.address, name="status", security=make_security(options.keys, "viewer"))
    try:
        status = client.status(5.0)
    finally:
        client.close(0)
    if options.json:
        print(json.dumps(status, indent=2))
    else:
        print_page(options.address, status)


def _snapshot(words: Sequence[str]) -> None:
    parser = Parser(
        prog="troupe replay snapshot",
        description="Has a running shard copy its items, and waits for it. Where it has keys, --keys needs "
        "those of the learner.",
    )
    parser.add_argument("address", metavar="ADDRESS", help="of the shard, such as tcp://127.0.0.1:5560")
    parser.add_argument(
        "destination",
        metavar="DEST",
        help="a new directory on the shard's host, or an address that fsspec knows, such as s3://BUCKET/PATH",
    )
    add_key_arguments(parser)
    options = parser.parse_args(words)
    destination = options.destination
    if "://" not in destination:
        destination = os.path.abspath(destination)
    client = ReplayClient(options.address, name="snapshot", security=make_security(options.keys, "learner"))
    try:
        progress = client.snapshot(destination)
    finally:
        client.close(0)
    print(f"{progress['items']:,} items, {progress['bytes_done'] / 2**20:,.1f} MiB in {destination}")


if __name__ == "__main__":
    sys.exit(main())
