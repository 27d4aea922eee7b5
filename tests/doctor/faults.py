"""Runs of the real services with one planted fault of learning each, and runs without any.

`python -m tests.doctor.faults [NAME ...]` trains them, some minutes in all, and keeps what they recorded in
`learning/` beside this file; then it prints what is said of each. `python -m tests.doctor.faults --kept`
prints that of what was kept.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from troupe.common.runtime.files import CONFIG_FILE
from troupe.common.runtime.metrics import CSV_FILE, CSV_HEADER, TRAINING_RETURN, read_rows
from troupe.services.doctor.why import lines_of
from troupe.services.launcher.learning import FAULTS

FOLDER = Path(__file__).parent / "learning"
CHECKOUT = Path(__file__).parents[2]
LIMIT_S = 1500.0
ROWS, RETURNS = 24, 40
"""Values of a metric that are kept, and of the returns, evenly spaced, the last one among them."""
SWING = {"agent.epochs": "5", "agent.minibatch_steps": "512"}
"""Fewer and larger minibatches than the preset has: a third of its time."""
CATCH = {"env.id": "tests.doctor.tasks:Catch-v0", "agent.reward_scale": "1.0"}


@dataclass
class Plant:
    """A training: a preset, its steps, fields that differ, and the finding that it should lead to."""

    preset: str
    steps: int
    fields: dict[str, str] = field(default_factory=dict)
    finding: str = ""


PLANTS = {
    "raw-pixels": Plant("cartpole-ppo", 40_000, {**CATCH, "env.kwargs": "{bright = 255.0}"}, "inputs"),
    "huge-rewards": Plant(
        "cartpole-apex",
        6_000,
        {"env.id": CATCH["env.id"], "env.kwargs": "{scale = 10000.0}"},
        "reward-scale",
    ),
    "high-rate": Plant("cartpole-ppo", 40_000, {"agent.learning_rate": "0.1"}, "learning-rate"),
    "collapsed": Plant(
        "cartpole-ppo",
        40_000,
        {**CATCH, "agent.advantage_offset": "50", "agent.learning_rate": "0.003"},
        "entropy",
    ),
    "dead": Plant(
        "cartpole-ppo",
        60_000,
        {
            "agent.activation": "relu",
            "agent.learning_rate": "0.3",
            "agent.learning_rate_schedule": "polynomial",
            "agent.learning_rate_power": "200",
            "agent.learning_rate_final": "0.001",
        },
        "dead-units",
    ),
    "timed": Plant("pendulum-ppo", 40_000, {**SWING, "env.id": "tests.doctor.tasks:Timed-v0"}, "time-limit"),
    "short-sighted": Plant(
        "cartpole-ppo", 60_000, {**CATCH, "env.kwargs": "{delay = 40}", "agent.gamma": "0.8"}, "discount"
    ),
    "stale": Plant(
        "cartpole-ppo",
        100_000,
        {
            "agent.max_staleness": "none",
            "replay.tables": '[{name = "default", limiter = "queue", capacity = 2048}]',
        },
        "stale",
    ),
    "at-bounds": Plant("pendulum-ppo", 40_000, {**SWING, "agent.deviation_start": "30"}, "at-bounds"),
    "tiny-replay": Plant(
        "cartpole-apex", 8_000, {"replay.capacity_items": "256", "replay.min_items": "128"}, "small-replay"
    ),
    "healthy-ppo": Plant("cartpole-ppo", 60_000),
    "healthy-apex": Plant("cartpole-apex", 12_000),
    "healthy-sac": Plant("cartpole-sac", 10_000),
    "healthy-impala": Plant("cartpole-impala", 80_000),
    "healthy-pqn": Plant("cartpole-pqn", 60_000),
    "healthy-catch": Plant("cartpole-ppo", 60_000, {**CATCH, "agent.entropy_cost": "0.01"}),
    "healthy-delay": Plant("cartpole-ppo", 100_000, {**CATCH, "env.kwargs": "{delay = 10}"}),
    "healthy-swing": Plant("pendulum-ppo", 100_000, SWING),
}


def train(name: str, folder: Path) -> Path:
    """Let a plant train to its end, or for LIMIT_S; returns the run directory."""
    plant, run = PLANTS[name], folder / name
    fields = {"run.log_every_s": "1.0", "evaluator.enabled": "false", **plant.fields}
    words = [word for key, value in fields.items() for word in (f"--{key}", value)]
    command = [sys.executable, "-m", "troupe", "train", plant.preset, "--run-dir", str(run), "--no-progress"]
    command += ["--total-steps", str(plant.steps), "--net.tensorboard-port", "0", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(CHECKOUT)}
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder)
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            process.wait()
    return run


def keep(run: Path) -> None:
    """Put what a run recorded, as far as it is looked at, into `learning/`."""
    looked_at = tuple(f"{metric}/" for fault in FAULTS for metric in fault.metrics)
    rows: dict[tuple[str, str], list[list[float]]] = {}
    for row in read_rows(run / CSV_FILE):
        if row.name == TRAINING_RETURN or f"{row.name}/".startswith(looked_at):
            value = float(f"{row.value:.5g}")
            rows.setdefault((row.source, row.name), []).append([round(row.wall_s, 1), row.steps, value])
    thinned: dict[str, dict[str, list[list[float]]]] = {}
    for (source, name), values in rows.items():
        count = RETURNS if name == TRAINING_RETURN else ROWS
        places = {round(place * (len(values) - 1) / (count - 1)) for place in range(count)}
        thinned.setdefault(source, {})[name] = [values[place] for place in sorted(places)]
    FOLDER.mkdir(exist_ok=True)
    kept = {"config": (run / CONFIG_FILE).read_text(), "metrics": thinned}
    (FOLDER / f"{run.name}.json").write_text(json.dumps(kept, separators=(",", ":")) + "\n")


def unpack(name: str, folder: Path) -> Path:
    """Make a run directory in `folder` of what was kept."""
    kept, run = json.loads((FOLDER / f"{name}.json").read_text()), folder / name
    run.mkdir()
    (run / CONFIG_FILE).write_text(kept["config"])
    rows = [
        (wall_s, steps, source, metric, value)
        for source, metrics in kept["metrics"].items()
        for metric, values in metrics.items()
        for wall_s, steps, value in values
    ]
    lines = [
        f"{wall_s},{steps},{steps},0,{source},{name},{value}"
        for wall_s, steps, source, name, value in sorted(rows)
    ]
    (run / CSV_FILE).write_text("\n".join([CSV_HEADER, *lines]) + "\n")
    return run


def main() -> None:
    """See the module."""
    words = sys.argv[1:]
    names = [word for word in words if word != "--kept"] or list(PLANTS)
    with tempfile.TemporaryDirectory(prefix="f", dir="/tmp") as place:
        for name in names:
            if "--kept" in words:
                run = unpack(name, Path(place))
            else:
                run = train(name, Path(place))
                keep(run)
            print(
                f"{name}: {PLANTS[name].finding or 'nothing'} expected",
                *lines_of(run),
                sep="\n  ",
                flush=True,
            )


if __name__ == "__main__":
    main()
