"""Whole training on this machine: environment steps and updates per second of a preset, learner on.

`python -m benchmarks.system --json [--seconds S] [--preset pong-apex] [--agent apex] [--SECTION.FIELD VALUE]`

`--agent` is one of apex, impala, ppo, appo, pqn and r2d2. For Atari `raw_emulator_steps_per_s` is what as
many processes, slots and threads reach afterwards with random actions, without anything else.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

from benchmarks.actor import raw_emulator
from benchmarks.common import parser, report
from troupe.common.config import read_config
from troupe.common.runtime.files import CONFIG_FILE
from troupe.common.runtime.metrics import CSV_FILE, EVALUATION_RETURN, read_rows

START_LIMIT_S = 240.0
SETTLE_S = 10.0
"""At least so long between the first update and the measurement: caches fill."""


def progress(run_dir: Path) -> list[tuple[float, int, int]]:
    """Seconds of the run, steps and updates, once for each step count that was recorded."""
    seen: dict[int, tuple[float, int, int]] = {}
    for row in read_rows(run_dir / CSV_FILE):
        seen.setdefault(row.steps, (row.wall_s, row.steps, row.updates))
    return [seen[steps] for steps in sorted(seen)]


def cpu_seconds(launcher: int) -> Counter[str]:
    """CPU seconds that each service has used so far, by role, its threads together."""
    used: Counter[str] = Counter()
    for process in psutil.Process(launcher).children(recursive=True):
        try:
            command, times = process.cmdline(), process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        roles = [
            part.removeprefix("troupe.services.") for part in command if part.startswith("troupe.services.")
        ]
        used[roles[0] if roles else "other"] += times.user + times.system
    return used


def wait_for_updates(run_dir: Path, process: subprocess.Popen[bytes]) -> None:
    """Wait until learning has begun."""
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.5)
        if (run_dir / CSV_FILE).exists() and any(updates for _, _, updates in progress(run_dir)):
            return
    raise SystemExit(f"no update within {START_LIMIT_S:.0f} s; see {run_dir}/logs")


def wait_for_evaluation(run_dir: Path, process: subprocess.Popen[bytes]) -> None:
    """Wait until the first evaluation is over: on a slow machine it would fall into some windows only."""
    if not read_config(run_dir / CONFIG_FILE).evaluator.enabled:
        return
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        if any(row.name == EVALUATION_RETURN for row in read_rows(run_dir / CSV_FILE)):
            return
        time.sleep(0.5)
    raise SystemExit(f"no evaluation within {START_LIMIT_S:.0f} s; see {run_dir}/logs")


def measure(run_dir: Path, launcher: int, seconds: float) -> dict[str, float | int | str]:
    """Rates and CPU time per step of a run that is going on."""
    first, cpu_before = progress(run_dir)[-1], cpu_seconds(launcher)
    time.sleep(seconds)
    last, cpu = progress(run_dir)[-1], cpu_seconds(launcher) - cpu_before
    wall_s, steps, updates = (after - before for after, before in zip(last, first, strict=True))
    figures: dict[str, float | int | str] = {
        "train_steps_per_s": round(steps / wall_s, 1),
        "train_updates_per_s": round(updates / wall_s, 2),
    }
    # CPU time depends less than the rates on what else the machine does.
    return figures | {f"{role}_cpu_ms_per_step": round(used / steps * 1e3, 4) for role, used in cpu.items()}


def vs_emulator(run_dir: Path, steps_per_s: float, seconds: float) -> dict[str, float | int | str]:
    """Steps per second of the bare emulators of a run's actors, and the share of them that it made."""
    config = read_config(run_dir / CONFIG_FILE)
    family, _, game = config.env.id.partition(":")
    if family != "atari" or not config.actor.processes:
        return {}
    actor = config.actor
    raw, _ = raw_emulator(game, actor.processes, actor.slots, actor.env_threads, seconds)
    return {"raw_emulator_steps_per_s": round(raw, 1), "vs_raw_emulator": round(steps_per_s / raw, 3)}


def main() -> None:
    """The command line."""
    args = parser(__doc__, seconds=60.0)
    args.add_argument("--preset", default="")
    args.add_argument("--agent", default="apex", help="measures pong-AGENT unless --preset says otherwise")
    options, overrides = args.parse_known_args()
    preset = options.preset or f"pong-{options.agent}"
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, "-m", "troupe", "train", preset, "--run-dir", str(run_dir)]
        command += ["--no-progress", "--net.tensorboard_port", "0", "--run.log_every_s", "2", *overrides]
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        try:
            wait_for_updates(run_dir, process)
            time.sleep(SETTLE_S)
            wait_for_evaluation(run_dir, process)
            figures = measure(run_dir, process.pid, options.seconds)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(90)
        rate = float(figures["train_steps_per_s"])
        figures |= vs_emulator(run_dir, rate, seconds=max(3.0, options.seconds / 6))
    report("system", {"preset": preset, **figures, "seconds": options.seconds})


if __name__ == "__main__":
    main()
