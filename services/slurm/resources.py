"""Options of the command line that say what the parts of a job ask for."""

from __future__ import annotations

import argparse

from troupe.services.slurm import script


def add_resources(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what every part of a job asks for."""
    parser.add_argument(
        "--partition", metavar="P", default="", help="partition to submit to (default: the cluster's)"
    )
    parser.add_argument(
        "--time",
        metavar="TIME",
        default="",
        help="time limit of the job, as for sbatch (default: the partition's)",
    )
    parser.add_argument(
        "--sbatch",
        metavar="OPTION",
        action="append",
        default=[],
        help="further sbatch option for every part, such as --sbatch=--account=lab; may be repeated",
    )


def resources(options: argparse.Namespace) -> script.Resources:
    """Return what `add_resources` was given."""
    return script.Resources(options.partition, options.time, options.sbatch)
