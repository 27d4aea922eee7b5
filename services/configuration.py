"""`troupe config` and `troupe presets`: what a run would be configured with, and whether it is valid."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from troupe.common.config import Loaded, load_layers, preset_names, preset_summary
from troupe.common.config.field_options import field_parser, parse_with_fields
from troupe.common.errors import ConfigError, MissingEngineError
from troupe.common.runtime.files import readable, run_config
from troupe.common.runtime.parser import Parser
from troupe.services.training import add_algo, chosen_algo


def presets_parser() -> argparse.ArgumentParser:
    """Return the parser of `troupe presets`."""
    parser = Parser(prog="troupe presets", description="List the presets.")
    parser.add_argument("--json", action="store_true", help="print one JSON object {name: summary}")
    return parser


def presets(words: Sequence[str]) -> int:
    """List the presets."""
    options = presets_parser().parse_args(words)
    summaries = {name: preset_summary(name) for name in preset_names()}
    if options.json:
        print(json.dumps(summaries))
    else:
        width = max(map(len, summaries), default=0)
        for name, summary in summaries.items():
            print(f"{name:<{width}}  {summary}".rstrip())
    return 0


def show_parser() -> argparse.ArgumentParser:
    """Return the parser of `troupe config show`."""
    parser = field_parser(
        "config show",
        "[PRESET | RUN | --algo NAME --env ID] [OPTION ...]",
        "Print every value, and the layer that set it.",
    )
    parser.add_argument("source", metavar="PRESET | RUN", nargs="?", help="default: the defaults")
    add_algo(parser)
    parser.add_argument("--changed", action="store_true", help="only values that differ from the default")
    parser.add_argument(
        "--json", action="store_true", help='print one JSON object {"values": ..., "origins": ...}'
    )
    return parser


def show(words: Sequence[str]) -> int:
    """Print every value."""
    options, overrides = parse_with_fields(show_parser(), words)
    if options.algo:
        from troupe.services.launcher import by_kind

        algo = chosen_algo(options.algo, options.source, overrides, "troupe config show")
        loaded = by_kind.load(algo, options.sweep, overrides, os.environ)
    else:
        loaded = _load(options.source, options.sweep, overrides)
    if options.json:
        print(json.dumps({"values": loaded.config.to_dict(), "origins": loaded.origins}))
    else:
        from troupe.common.config.explain import show_toml

        print(show_toml(loaded, changed_only=options.changed))
    return 0


def validate_parser() -> argparse.ArgumentParser:
    """Return the parser of `troupe config validate`."""
    parser = field_parser(
        "config validate",
        "[PRESET | RUN ...] [OPTION ...]",
        "Check presets, TOML files or run directories.",
    )
    parser.add_argument("sources", metavar="PRESET | RUN", nargs="*", help="default: every preset")
    return parser


def validate(words: Sequence[str]) -> int:
    """Check presets, TOML files or run directories."""
    options, overrides = parse_with_fields(validate_parser(), words)
    from troupe.services.launcher.training import check_environment

    if not options.sources and "agent.algorithm" in overrides:
        raise ConfigError("--agent.algorithm belongs to one configuration: name the preset or file to check")
    for source in options.sources or preset_names():
        loaded = _load(source, options.sweep, overrides)
        try:
            check_environment(loaded, play=False)
            print(f"{source}: valid")
        except MissingEngineError as error:
            print(f"{source}: valid, but cannot run on this machine: {error}")
    return 0


def explain_parser() -> argparse.ArgumentParser:
    """Return the parser of `troupe config explain`."""
    parser = Parser(
        prog="troupe config explain", description="Describe fields: meaning, type, default, role."
    )
    parser.add_argument(
        "field",
        metavar="SECTION | SECTION.FIELD | ALGORITHM",
        nargs="?",
        help="for example replay, agent.n_steps, impala or my_package.my_algorithm (default: a list of all)",
    )
    return parser


def explain(words: Sequence[str]) -> int:
    """Describe a field, a section or an algorithm."""
    path = explain_parser().parse_args(words).field
    # Imports every algorithm, and so torch, which takes seconds.
    from troupe.common.config.explain import explain as explanation
    from troupe.common.config.explain import overview
    from troupe.services.launcher.by_kind import NAMES

    algorithm = NAMES.get(path, path)
    if algorithm != path:
        print(f"{path} is {algorithm} with values that `troupe config show --algo {path} --env ID` prints\n")
    print(explanation(algorithm) if algorithm else overview())
    return 0


def _load(source: str | None, sweep: Path | None, overrides: dict[str, str]) -> Loaded:
    if source is not None:
        with readable(Path(source)):
            is_run = Path(source).is_dir()
        if is_run:
            # As `troupe resume` loads it, so that what is shown is what a resumed run would have.
            return load_layers(None, sweep, overrides, os.environ, run_config=run_config(Path(source)))
    return load_layers(source, sweep, overrides, os.environ)
