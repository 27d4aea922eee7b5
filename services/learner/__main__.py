"""`python -m services.learner`: one learner process."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from common.runtime import StopSignal, run_main
from common.runtime.startup import add_service_arguments, begin
from common.wire.key_options import add_key_arguments


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="troupe learner",
        description="Runs the learner of the run in RUN_DIR, which holds its config.toml.",
    )
    parser.add_argument("--run-dir", type=Path, required=True, help="the run directory, with a config.toml")
    parser.add_argument("--resume", action="store_true", help="go on from the newest whole checkpoint")
    parser.add_argument("--control", metavar="ADDRESS", help="bind here instead of the config's net.control")
    parser.add_argument(
        "--announce", metavar="ADDRESS", help="bind here instead of the config's net.announce"
    )
    add_key_arguments(parser, server=True)
    add_service_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the learner until the run is complete or it is told to stop; returns the exit code."""
    args = parser().parse_args(argv)

    def body() -> None:
        begin("learner", args)
        from common.config import load_config
        from services.learner.service import Learner

        stop = StopSignal(force_after_s=60.0).install()
        options = {"net.control": args.control, "net.announce": args.announce, "net.keys_dir": args.keys}
        options["net.insecure"] = "true" if args.insecure else ""
        overrides = {field: text for field, text in options.items() if text}
        config = load_config(None, args.run_dir / "config.toml", overrides, {})
        Learner(config, args.run_dir, resume=args.resume, stop=stop).run()

    return run_main(body)


if __name__ == "__main__":
    sys.exit(main())
