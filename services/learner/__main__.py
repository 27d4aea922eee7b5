"""`python -m troupe.services.learner`: one learner process."""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from troupe.common.config.field_options import parse_with_fields
from troupe.common.errors import ConfigError
from troupe.common.machine import keep_freed_memory
from troupe.common.permits import add_module_argument
from troupe.common.runtime import StopSignal, lingering, run_main, watchdog
from troupe.common.runtime.checkpoint import newest_first
from troupe.common.runtime.files import readable
from troupe.common.runtime.parser import Parser, real
from troupe.common.runtime.startup import add_service_arguments, begin
from troupe.common.wire.security.key_options import add_key_arguments, make_security

if TYPE_CHECKING:
    from troupe.common.config import Config


def main_parser() -> Parser:
    """The command line."""
    parser = Parser(
        takes_fields=True,
        prog="troupe learner",
        description="Run the learner of the run in RUN_DIR. With PRESET, begin a new run there, from the "
        "preset and TROUPE_SECTION__FIELD variables; without PRESET, read config.toml in RUN_DIR. With "
        "PRESET and --resume, begin the run or continue it, so that one command line serves for every "
        "start. --SECTION.FIELD VALUE sets a field of the configuration, as in `troupe train`. With --join, "
        "share the batches of another learner's run; none of these is needed then.",
    )
    parser.add_argument("preset", nargs="?", metavar="PRESET", help="preset of a new run")
    parser.add_argument("--run-dir", type=Path, help="the run directory")
    parser.add_argument(
        "--join",
        metavar="ADDRESS",
        help="share the batches of the learner with this control address, on the same machine or in the "
        "private network of net.learner_network",
    )
    parser.add_argument(
        "--name", metavar="NAME", help="with --join: unique in the run (default: learner- and a number)"
    )
    parser.add_argument("--device", metavar="DEVICE", help="with --join: torch device, if not the run's")
    parser.add_argument(
        "--join-timeout-s",
        type=real(0),
        default=60.0,
        metavar="S",
        help="with --join: seconds to wait for the other learner (default: 60)",
    )
    parser.add_argument("--resume", action="store_true", help="continue from the newest whole checkpoint")
    parser.add_argument("--control", metavar="ADDRESS", help="bind here instead of the config's net.control")
    parser.add_argument(
        "--announce", metavar="ADDRESS", help="bind here instead of the config's net.announce"
    )
    parser.add_argument(
        "--inference", metavar="ADDRESS", help="bind here instead of the config's net.inference"
    )
    parser.add_argument(
        "--linger-s",
        type=real(0),
        default=0.0,
        metavar="S",
        help="if the run is already complete, answer for S seconds, so that services that start with this "
        "one hear it and end (default: 0)",
    )
    add_module_argument(parser)
    add_key_arguments(parser, server=True)
    add_service_arguments(parser)
    return parser


def run_config(
    run_dir: Path, preset: str | None, overrides: dict[str, str], *, resume: bool = False
) -> Config:
    """The run's config: that of RUN_DIR, or of `preset` and the environment, which belongs there then.

    With `preset` and `resume` a run that is there goes on, with what the environment changes in it; so does
    a run without `preset`, with what `overrides` change for this process.
    """
    from troupe.common.config import check_resumable, load_config, load_layers, read_config
    from troupe.common.envs import check_settings, make_spec

    file = run_dir / "config.toml"
    with readable(run_dir):
        exists = file.exists()
    if preset is None:
        if not exists:
            raise ConfigError(f"{run_dir} has no config.toml: name a preset to start a new run there")
        # Without variables: the file has been written from them, and they may have changed since.
        config = load_config(None, file, overrides, {})
        check_resumable(read_config(file), config)
        return config
    if exists and not resume:
        raise ConfigError(
            f"{run_dir} already has a run: leave out {preset!r}, and add --resume to continue it"
        )
    if exists:
        config = _changed_config(file, preset, overrides)
    else:
        loaded = load_layers(preset, None, overrides, os.environ)
        config = loaded.config
        # Before the directory: a run that cannot begin should leave nothing behind.
        check_settings(config.env, make_spec(config.env), loaded.chosen("env"))
    return config


def _changed_config(file: Path, preset: str, overrides: dict[str, str]) -> Config:
    """The config of the run in `file`, with the tunable fields that the environment sets."""
    from troupe.common.config import check_resumable, load_config, read_config

    old = read_config(file)
    # The command line is the same for every start, so a volume that holds another run has to be noticed here.
    if old.run.preset and Path(old.run.preset).stem != Path(preset).stem:
        raise ConfigError(f"{file.parent} has a run of {old.run.preset}: choose another folder for {preset}")
    config = load_config(None, None, overrides, os.environ, run_config=file)
    for difference in check_resumable(old, config):
        logging.getLogger(__name__).info("resuming with %s", difference)
    return config


def _join(args: argparse.Namespace) -> None:
    """Share the batches of another learner's run until it ends."""
    name = args.name or f"learner-{secrets.randbelow(10**9)}"
    begin(name, args)
    keep_freed_memory()
    from troupe.services.learner.peers.member import JoinedLearner

    JoinedLearner(
        args.join,
        name,
        StopSignal(force_after_s=30.0).install(),
        device=args.device or "",
        join_timeout_s=args.join_timeout_s,
        security=make_security(args.keys, "learner"),
        modules=args.modules,
    ).run()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the learner until the run is complete or it is told to stop, and return the exit code."""

    def body() -> None:
        parser = main_parser()
        args, fields = parse_with_fields(parser, sys.argv[1:] if argv is None else argv)
        if args.join:
            if args.preset or args.run_dir or args.resume or fields:
                parser.error("--join takes its run from the other learner: no PRESET, --run-dir or fields")
            _join(args)
            return
        if args.run_dir is None:
            parser.error("--run-dir is needed, or --join")
        begin("learner", args)
        keep_freed_memory()
        from troupe.services.learner.service import Learner

        stop = StopSignal(force_after_s=60.0).install()
        options = {
            "net.control": args.control,
            "net.announce": args.announce,
            "net.inference": args.inference,
            "net.keys_dir": args.keys,
        }
        options["net.insecure"] = "true" if args.insecure else ""
        overrides = fields | {field: text for field, text in options.items() if text}
        config = run_config(args.run_dir, args.preset, overrides, resume=args.resume)
        # A run that lost its learner before the first checkpoint begins again.
        begun = next(newest_first(args.run_dir / "checkpoints"), None) is not None
        resume = args.resume and (begun or args.preset is None)
        writes = args.preset is not None
        watchdog.arm(config.run.hang_s)
        loop = watchdog.Loop("the learner")
        with loop.long("its start"):
            learner = Learner(
                config, args.run_dir, resume=resume, stop=stop, write_config=writes, linger_s=args.linger_s
            )
        loop.close()
        learner.run()

    return lingering.ended(run_main(body))


if __name__ == "__main__":
    sys.exit(main())
