"""`troupe replay export`: the whole episodes that replay holds become a Minari data set."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from troupe.common.runtime.parser import Parser, integer


def replay_export_parser() -> Parser:
    """Return the parser of `troupe replay export`."""
    parser = Parser(
        prog="troupe replay export",
        description="Write the whole episodes that replay holds into a Minari data set. The run may go on "
        "meanwhile. Pieces of episodes are left out, and counted in the last line.",
    )
    parser.add_argument(
        "path",
        metavar="PATH",
        type=Path,
        help="a run directory, a folder with a folder shard-N for each shard, or a snapshot",
    )
    parser.add_argument(
        "--minari",
        metavar="ID",
        required=True,
        help="new ID, such as my/pendulum-v0, or a new folder, such as ./pendulum-v0",
    )
    parser.add_argument(
        "--preset", metavar="PRESET", default="", help="what PATH was filled for, if it is in no run"
    )
    parser.add_argument(
        "--slots",
        metavar="N",
        type=integer(1),
        help="most environment copies of an actor process of the run (default: actor.slots, "
        "or all of a run with --serial or --deterministic)",
    )
    return parser


def replay_export(words: Sequence[str]) -> int:
    """Write a data set, and say of what."""
    options = replay_export_parser().parse_args(words)
    from troupe.services.offline.collecting import export

    print(export(options.path, options.minari, options.preset, options.slots))
    return 0
