"""`python -m troupe.services.evaluator`: one evaluator process."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

# Before numpy and torch are imported: evaluation is one core's work at most.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from troupe.common.errors import ConfigError
from troupe.common.installation import install_command
from troupe.common.machine import keep_freed_memory
from troupe.common.permits import add_module_argument, permitted_config
from troupe.common.runtime import watchdog
from troupe.common.runtime.lifecycle import StopSignal, run_main
from troupe.common.runtime.parser import Parser, real
from troupe.common.runtime.startup import FIELDS_AT_LEARNER, add_service_arguments, begin
from troupe.common.wire.security.key_options import add_key_arguments, make_security


def main_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        fields=FIELDS_AT_LEARNER,
        prog="troupe evaluator",
        description="Play full episodes with fresh parameters.",
    )
    parser.add_argument("--learner", required=True, metavar="ADDRESS", help="the learner's control address")
    parser.add_argument("--name", default="evaluator", help="unique in the run (default: evaluator)")
    parser.add_argument(
        "--join-timeout-s",
        type=real(0),
        default=60.0,
        metavar="S",
        help="seconds to wait for the learner (default: 60)",
    )
    add_module_argument(parser)
    add_key_arguments(parser)
    add_service_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate until the run is complete or a signal comes; returns the exit code."""
    return run_main(lambda: _run(main_parser().parse_args(argv)))


def _run(arguments: argparse.Namespace) -> None:
    begin(arguments.name, arguments)
    keep_freed_memory()
    stop = StopSignal(force_after_s=30.0).install()
    try:
        import zmq

        from troupe.common.wire.control.client import ControlClient
        from troupe.common.wire.link import new_incarnation
        from troupe.services.evaluator.service import Evaluator
    except ImportError as error:
        raise ConfigError(
            f"the evaluator needs the package {error.name}: {install_command('evaluator')}"
        ) from error
    with zmq.Context() as context:
        client = ControlClient(
            context,
            arguments.learner,
            role="evaluator",
            name=arguments.name,
            incarnation=new_incarnation(),
            connect_timeout_s=arguments.join_timeout_s,
            security=make_security(arguments.keys, "evaluator"),
        )
        try:
            welcome = client.join_unless(lambda: stop.requested)
            if welcome is None:
                return
            config = permitted_config(welcome.config, arguments.modules, "the run")
            watchdog.arm(config.run.hang_s)
            Evaluator(config, client, stop).run()
        finally:
            client.close()


if __name__ == "__main__":
    sys.exit(main())
