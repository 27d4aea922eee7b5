"""The command line of `troupe eval`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from troupe.common.config.field_options import parse_with_fields
from troupe.common.config.fields import MAX_SLOTS
from troupe.common.config.names import canonical
from troupe.common.permits import add_module_argument
from troupe.common.runtime.parser import Parser, integer, real

SLOTS = 8
"""Games side by side, unless somebody wants others."""


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, dict[str, str]]:
    """Read the command line: options, and fields of `[env]` as text."""
    parser = eval_parser()
    options, given = parse_with_fields(parser, argv)
    fields = {canonical(name): text for name, text in given.items()}
    for name in fields:
        # Other fields would change the agent, and it would no longer be that of the checkpoint.
        if not name.startswith("env."):
            parser.error(f"unrecognized arguments: --{name}")
    if (limit := fields.get("env.max_episode_frames")) is not None:
        # An evaluation has a limit of its own, apart from that of training: here it is the one that is meant.
        fields["evaluator.max_episode_frames"] = limit
    return options, fields


def eval_parser() -> Parser:
    """Return the parser of `troupe eval`."""
    parser = Parser(
        fields="only fields of [env] may be other than in training",
        prog="troupe eval",
        usage="troupe eval PATH ... [OPTION ...] [--env.FIELD VALUE ...]",
        description="Play full episodes with a run's newest checkpoint, or with given ones.\n\n"
        "Fields of [env] are options too, such as --env.sticky_actions 0.25 or another --env ID: the\n"
        "network then plays in a different environment. Observations and actions must have the same shape.",
    )
    add = parser.add_argument
    add("path", type=Path, nargs="+", metavar="PATH", help="run directory, or checkpoint")
    add("--all", action="store_true", help="every whole checkpoint of the run, oldest first: a curve")
    add("--episodes", type=integer(1), default=20, metavar="N", help="number of episodes (default: 20)")
    add(
        "--seed",
        type=integer(0),
        default=0,
        metavar="S",
        help="seed of the episodes: the same seed and --slots repeat the same episodes, and a smaller "
        "--episodes plays the first of them (default: 0)",
    )
    add(
        "--slots",
        type=integer(1, MAX_SLOTS),
        default=SLOTS,
        metavar="N",
        help="episodes played at the same time (default: 8)",
    )
    add(
        "--device",
        default="cpu",
        metavar="DEVICE",
        help="device of the network: cpu, cuda or cuda:N (default: cpu)",
    )
    explore = parser.add_mutually_exclusive_group()
    explore.add_argument(
        "--epsilon",
        type=real(0, 1),
        metavar="E",
        help="probability of a random action or, for a policy, of a sampled action instead of the best "
        "(default: agent.eval_epsilon)",
    )
    explore.add_argument("--greedy", action="store_true", help="always the best action: --epsilon 0")
    explore.add_argument(
        "--sampled", action="store_true", help="sample actions from the policy, for algorithms that have one"
    )
    add("--video", type=Path, metavar="FILE", help="record a video of the first episode: .mp4 or .gif")
    add("--render", action="store_true", help="show the episodes of the first slot in a window, in real time")
    add("--output", type=Path, action="append", default=[], metavar="FILE", help="report: .json, .csv or .md")
    add(
        "--minari",
        metavar="ID",
        help="also write the episodes into a new Minari data set, such as my/pendulum-v0; those of every "
        "PATH, and with --all of every checkpoint",
    )
    add_module_argument(parser)
    add("--json", action="store_true", help="print one JSON line for each checkpoint instead of a table")
    return parser
