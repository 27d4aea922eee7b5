"""`python -m troupe.services.actor`: one actor process."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

# Before numpy and torch are imported: one actor is one core, and OpenMP would take them all.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from troupe.common.errors import ConfigError
from troupe.common.installation import install_command
from troupe.common.machine import keep_freed_memory
from troupe.common.permits import add_module_argument
from troupe.common.runtime.lifecycle import StopSignal, run_main
from troupe.common.runtime.parser import Parser, integer, real
from troupe.common.runtime.startup import FIELDS_AT_LEARNER, add_service_arguments, begin
from troupe.common.wire.control.relay import default_directory
from troupe.common.wire.security.key_options import add_key_arguments, make_security


def main_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        fields=FIELDS_AT_LEARNER, prog="troupe actor", description="Step environments and fill replay."
    )
    parser.add_argument("--learner", required=True, metavar="ADDRESS", help="the learner's control address")
    parser.add_argument("--name", default="actor-0", help="unique in the run (default: actor-0)")
    parser.add_argument(
        "--slots",
        type=integer(1),
        default=0,
        metavar="N",
        help="environment copies (default: actor.slots of the run)",
    )
    parser.add_argument(
        "--join-timeout-s",
        type=real(0),
        default=60.0,
        metavar="S",
        help="seconds to wait for the learner (default: 60)",
    )
    parser.add_argument(
        "--relay",
        nargs="?",
        const=default_directory(),
        type=Path,
        metavar="DIR",
        help="fetch parameters once for all actors of this host that share DIR (default: this user's, in "
        "the temporary directory), through one of them",
    )
    parser.add_argument(
        "--preload",
        action="store_true",
        help="load torch while the learner starts, for a run with inference.mode local",
    )
    add_module_argument(parser)
    add_key_arguments(parser)
    add_service_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run an actor until the run is done or a signal comes; the exit code."""
    return run_main(lambda: _run(main_parser().parse_args(argv)))


def _run(arguments: argparse.Namespace) -> None:
    begin(arguments.name, arguments)
    keep_freed_memory()
    stop = StopSignal(force_after_s=30.0).install()
    try:
        import zmq

        from troupe.services.actor.service import ActorService

        if arguments.preload:
            import troupe.services.actor.local_inference  # noqa: F401 - not after the learner's answer
    # Only here: inside the service a missing module is a defect, or the environment's own affair.
    except ImportError as error:
        raise ConfigError(f"the actor needs the package {error.name}: {install_command('actor')}") from error
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        ActorService(
            context,
            arguments.learner,
            arguments.name,
            stop,
            slots=arguments.slots,
            join_timeout_s=arguments.join_timeout_s,
            security=make_security(arguments.keys, "actor"),
            relay_directory=arguments.relay,
            modules=arguments.modules,
        ).run()
    finally:
        context.destroy(linger=1000)


if __name__ == "__main__":
    sys.exit(main())
