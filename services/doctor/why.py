"""`troupe why RUN ...`: what keeps a run from learning."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from troupe.common.runtime.parser import Parser
from troupe.services.experiments.runs import read_each
from troupe.services.launcher import evidence
from troupe.services.launcher.findings import Finding
from troupe.services.launcher.learning import faults

NOTHING = "nothing found"


def why_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="troupe why",
        description="Say why a run does not learn, from its record: inputs, rewards, units, the "
        "optimiser's steps, entropy, values, experience. Print one line per finding, the likeliest "
        "first: the problem, the figure, why it matters, and the field that helps. Runs may still be "
        "running or have ended.",
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="a run directory, or one with runs in it"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object: findings by run directory")
    return parser


def why(words: Sequence[str]) -> int:
    """Look, print, and return the exit code."""
    options = why_parser().parse_args(words)
    found = read_each((run.expanduser() for run in options.runs), _found)
    if options.json:
        named = {
            str(run): [{"name": each.name, "what": each.what, "advice": each.advice} for each in findings]
            for run, findings in found.items()
        }
        print(json.dumps(named, indent=1))
        return 0
    for run, findings in found.items():
        if len(found) > 1:
            print(f"{run}:")
        for line in map(line_of, findings) if findings else [NOTHING]:
            print(f"  {line}" if len(found) > 1 else line)
    return 0


def lines_of(run: Path) -> list[str]:
    """What is said of a run."""
    return list(map(line_of, _found(run))) or [NOTHING]


def line_of(finding: Finding) -> str:
    """A finding in one line."""
    return f"{finding.name}: {finding.what}; {finding.advice}"


def _found(run: Path) -> list[Finding]:
    return faults(evidence.of_run(run))
