"""`troupe doctor [RUN | ADDRESS]`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from troupe.common.config import load_config
from troupe.common.config.loading import config_from_dict
from troupe.common.runtime.files import run_config
from troupe.common.runtime.parser import Parser, real
from troupe.common.wire.security.key_options import add_key_arguments
from troupe.services.doctor.checks import Check, guarded
from troupe.services.launcher.evidence import config_of

FOUND = 7
"""Exit code where something is wrong."""
_ADDRESS = re.compile(r"(tcp|ipc)://.+")


def doctor_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="troupe doctor",
        description="Check ports, keys, limits, disk, processor, GPU and packages of this machine; with "
        "RUN also a run directory; with ADDRESS also a running run with its members, clocks "
        "and versions, by asking its learner as a viewer. Print one line per check: the "
        "subject, the figure, what to do. "
        f"Exit code {FOUND} if something is wrong, otherwise 0.",
    )
    parser.add_argument(
        "target",
        nargs="?",
        metavar="RUN | ADDRESS",
        help="a run directory, or the control address of a learner, such as tcp://127.0.0.1:5550",
    )
    parser.add_argument(
        "--preset", help="preset or TOML file whose ports, disk space and packages are checked"
    )
    parser.add_argument(
        "--timeout-s",
        type=real(0.1, 600),
        default=10.0,
        metavar="S",
        help="seconds to wait for ADDRESS (default: 10)",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list of the lines")
    add_key_arguments(parser)
    return parser


def doctor(words: Sequence[str]) -> int:
    """Look, print, and return the exit code."""
    options = doctor_parser().parse_args(words)
    checks = []
    for check in _checks(options.target, options.preset, options.keys, options.timeout_s):
        checks.append(check)
        if not options.json:
            print(check.line, flush=True)
    wrong = sum(check.state == "wrong" for check in checks)
    if options.json:
        print(json.dumps([check.to_dict() for check in checks], indent=1))
    else:
        print(
            f"{len(checks)} things checked, {wrong} wrong"
            if wrong
            else f"nothing is wrong ({len(checks)} things checked)"
        )
    return FOUND if wrong else 0


def _checks(target: str | None, preset: str | None, keys: str, timeout_s: float) -> Iterator[Check]:
    from troupe.services.doctor import machine, network, peers, run

    remote = target is not None and _ADDRESS.fullmatch(target) is not None
    folder = None if target is None or remote else Path(target).expanduser()
    if folder is not None:
        config = config_of(run_config(folder))
    elif preset:
        config = load_config(preset, None, {}, os.environ)
    else:  # a machine of replay has no torch, which the algorithm would want
        config = config_from_dict({"agent": {"algorithm": "apex"}}, typed_agent=False)
    place = folder or Path("runs")
    yield from guarded("versions", machine.versions())
    if not remote:  # there it is the learner's machine that counts
        yield from guarded("ports", network.ports(config))
    yield from guarded("keys", network.keys(keys or config.net.keys_dir))
    yield from guarded("limits", machine.limits())
    yield from guarded("disk", machine.disk(place, config))
    yield from guarded("processor", machine.processor(config))
    yield from guarded("gpu", machine.gpu(config))
    yield from guarded("packages", machine.packages(config))
    if folder is not None:
        yield from guarded("run", run.run_directory(folder, config))
    if remote and target is not None:
        yield from guarded("learner", peers.address(target, keys or config.net.keys_dir, timeout_s))
