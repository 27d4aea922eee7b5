"""The `troupe` command: finds what a command line names in `troupe.services.commands`, and runs it."""

# ruff: noqa: E402 - signals are seen to before the imports that take a moment

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence

# Ctrl-C while the rest is imported, which takes a moment, ends as it does later: without a traceback.
_IN_MAIN_THREAD = threading.current_thread() is threading.main_thread()
if _IN_MAIN_THREAD:
    # `os._exit`: an exception would only end the import that it interrupts, with a traceback.
    _former_handler = signal.signal(signal.SIGINT, lambda *_: os._exit(130))

from troupe.common import installation
from troupe.common.config.field_options import EXIT_CODES, FIELDS_HELP
from troupe.common.runtime.commands import dispatch, listing
from troupe.common.runtime.lifecycle import run_main
from troupe.common.runtime.parser import Parser
from troupe.services.commands import COMMANDS

if _IN_MAIN_THREAD:
    signal.signal(signal.SIGINT, _former_handler)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    if "_ARGCOMPLETE" in os.environ:  # the shell asks what may stand here
        from troupe.services.completion import complete

        complete()
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    # Taken out here, so that it may stand anywhere and no parser has to know it.
    words = [word for word in words if word != "--debug"]
    if debug:
        logging.basicConfig(level=logging.DEBUG)
    else:
        # Without any handler Python would print the traceback of an unexpected error, which --debug is for.
        logging.getLogger().addHandler(logging.NullHandler())
    return run_main(lambda: _dispatch(words))


def _dispatch(words: list[str]) -> int:
    if words and not words[0].startswith("-"):
        return dispatch(COMMANDS, words)
    _main_parser().parse_args(words[:1] or ["--help"])
    return 0


def _main_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="troupe",
        usage="troupe COMMAND [ARGUMENT ...]",
        description="Distributed deep reinforcement learning: learner, actors, replay, evaluator.\n\n"
        f"commands (`troupe COMMAND --help` shows the options of one):\n{listing(COMMANDS)}",
        epilog=f"{FIELDS_HELP}\n\n{EXIT_CODES}",
    )
    parser.add_argument("--version", action="version", version=f"troupe {installation.version()}")
    parser.add_argument(
        "--debug", action="store_true", help="with any command: traceback of unexpected errors"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
