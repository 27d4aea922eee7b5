"""What every benchmark prints: one flat JSON line with the machine, the commit and its figures."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path


def cpu_name() -> str:
    """Model and usable cores, such as `AMD EPYC x2`."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    import psutil

    return f"{model} x{len(psutil.Process().cpu_affinity())}"


def commit() -> str:
    """Short hash of the checked-out commit, or `unknown`."""
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or "unknown"


def parser(description: str | None, seconds: float = 10.0) -> argparse.ArgumentParser:
    """A command line with `--json` and `--seconds`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    parser.add_argument("--seconds", type=float, default=seconds, help="seconds per measurement")
    return parser


def report(bench: str, figures: dict[str, float | int | str]) -> None:
    """Print the JSON line that every benchmark ends with."""
    print(json.dumps({"bench": bench, "cpu": cpu_name(), "commit": commit(), **figures}), flush=True)


def median_ms(
    body: Callable[[], object],
    seconds: float,
    warm_up: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Median milliseconds of one call of `body`, over `seconds` and at least five calls.

    With `time.thread_time` as `clock` what others do on the machine counts for little.
    """
    for _ in range(warm_up):
        body()
    times: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(times) < 5:
        began = clock()
        body()
        times.append(clock() - began)
    return sorted(times)[len(times) // 2] * 1e3
