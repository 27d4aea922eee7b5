"""`troupe replay import`: a data set becomes the files of replay shards, which serve it like others."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from troupe.common.config.field_options import field_parser, parse_with_fields
from troupe.common.errors import ConfigError
from troupe.common.runtime.parser import Parser


def replay_import_parser() -> Parser:
    """Return the parser of `troupe replay import`."""
    parser = field_parser(
        "replay import",
        "PRESET --minari ID --data-dir DIR [OPTION ...]",
        "Write a Minari data set into folders of replay shards, as the algorithm of a preset stores it. "
        "`troupe train PRESET --offline ID` does that by itself.",
    )
    parser.add_argument("preset", metavar="PRESET", help="a name from `troupe presets`, or a TOML file")
    parser.add_argument(
        "--minari", metavar="ID", default="", help="ID of the data set, or its folder (default: run.offline)"
    )
    parser.add_argument(
        "--data-dir",
        metavar="DIR",
        type=Path,
        required=True,
        help="gets a folder shard-0, shard-1, ... for each shard (replay.shards), for --data-dir of `troupe "
        "replay serve`",
    )
    return parser


def replay_import(words: Sequence[str]) -> int:
    """Fill the folders of shards."""
    options, fields = parse_with_fields(replay_import_parser(), words)
    from troupe.common.agents import make_agent
    from troupe.common.config import load_config
    from troupe.common.datasets import Dataset
    from troupe.common.datasets.fitting import fitted
    from troupe.common.envs import make_spec
    from troupe.services.offline.filling import fill

    config = load_config(options.preset, options.sweep, fields, os.environ)
    name = options.minari or config.run.offline
    if not name:
        raise ConfigError("--minari is required: the ID of a data set, or its folder")
    dataset, spec = Dataset(name), make_spec(config.env)
    agent = make_agent(config.agent, spec)
    config = fitted(config, agent, dataset.steps)
    items = fill(config, agent, dataset.trajectories(spec), options.data_dir)
    print(f"data set {name}: {dataset.episodes:,} episodes, {items:,} items in {options.data_dir}")
    return 0
