"""Whole training on this machine: environment steps and updates per second of a preset, learner on.

`python -m benchmarks.system --json [--seconds S] [--preset pong-apex] [--agent apex]`
"""

from __future__ import annotations

import csv
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common import parser, report

START_LIMIT_S = 240.0


def rates(run_dir: Path, name: str, since_s: float) -> list[float]:
    """Values of a metric that were written after `since_s` seconds of the run."""
    with (run_dir / "metrics.csv").open() as file:
        return [
            float(row["value"])
            for row in csv.DictReader(file)
            if row["name"] == name and float(row["wall_s"]) > since_s
        ]


def wait_for_updates(run_dir: Path, process: subprocess.Popen[bytes]) -> float:
    """Waits until learning has begun; seconds of the run at that moment."""
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.5)
        if (run_dir / "metrics.csv").exists():
            with (run_dir / "metrics.csv").open() as file:
                for row in csv.DictReader(file):
                    if int(row["updates"]) > 0:
                        return float(row["wall_s"])
    raise SystemExit(f"no update within {START_LIMIT_S:.0f} s; see {run_dir}/logs")


def main() -> None:
    """The command line."""
    args = parser(__doc__, seconds=60.0)
    args.add_argument("--preset", default="")
    args.add_argument("--agent", default="apex", help="measures pong-AGENT unless --preset says otherwise")
    options = args.parse_args()
    preset = options.preset or f"pong-{options.agent}"
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, "-m", "services", "train", preset, "--run-dir", str(run_dir)]
        command += ["--no-progress", "--net.tensorboard_port", "0", "--run.log_every_s", "2"]
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        try:
            began_s = wait_for_updates(run_dir, process)
            # The rates are means over 30 s: the first ones still contain the time before learning began.
            time.sleep(30.0 + options.seconds)
            since_s = began_s + 30.0
            figures: dict[str, float | int | str] = {
                "preset": preset,
                "train_steps_per_s": round(
                    statistics.median(rates(run_dir, "speed/steps_per_s", since_s)), 1
                ),
                "train_updates_per_s": round(
                    statistics.median(rates(run_dir, "speed/updates_per_s", since_s)), 2
                ),
                "learner_wait_share": round(
                    statistics.median(rates(run_dir, "learner/wait_share", since_s)), 3
                ),
                "seconds": options.seconds,
            }
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(90)
    report("system", figures)


if __name__ == "__main__":
    main()
