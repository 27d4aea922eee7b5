"""`make report`: docs/scores.md, a table of every recorded training, from the kept `metrics.csv` of its runs.

Nothing of it is typed but what the files do not hold: docs/results/runs.toml has preset or algo and options
(or sweep and run) and commit.
"""

from __future__ import annotations

import gzip
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from troupe.common.runtime.metrics import EVALUATION_RETURN, TRAINING_RETURN, Row, rows_of
from troupe.common.stats.intervals import bootstrap, mean

RESULTS = Path(__file__).parent / "results"
INDEX = "runs.toml"
_NAME = re.compile(r"(?P<name>.+)-(?P<seed>\d+)\.csv\.gz")
_HEAD = """\
# Scores of the recorded runs

<!-- Written by `make report` from docs/results: edit docs/results/runs.toml, not this page. -->

Every complete run whose `metrics.csv` is kept in [results](results/runs.toml). The score is the mean over
seeds of the last evaluation, with its 95 % bootstrap interval over seeds, which is rough with three seeds;
`best` is the mean of the runs' best evaluations. Runs without evaluations are scored by the means of
twentieths of their training episodes (of three rows at least), and the row says so. Minutes are those of one
run. `SWEEP: RUN` is a run of a file in `configs/sweeps`. [Results](results.md) describes the machines, and
evaluations made after the runs.

| run | seeds | score | 95 % interval | best | steps | minutes | commit |
|---|---|--:|---|--:|--:|--:|---|
"""


@dataclass(frozen=True)
class Recorded:
    """One run, from its rows.

    Attributes:
        seed: that of its file's name.
        last: mean return of its last evaluation or, without any, of the last twentieth of its training.
        best: the highest of these.
        steps: environment steps.
        minutes: of training, over all resumptions.
        evaluated: whether it had evaluations.
    """

    seed: int
    last: float
    best: float
    steps: int
    minutes: float
    evaluated: bool = True

    @classmethod
    def of(cls, seed: int, rows: list[Row]) -> Recorded:
        """Read them off the rows of a `metrics.csv`."""
        evaluations = [row.value for row in rows if row.name == EVALUATION_RETURN]
        returns = evaluations or _twentieths([row.value for row in rows if row.name == TRAINING_RETURN])
        steps, minutes = max(row.steps for row in rows), max(row.wall_s for row in rows) / 60
        return cls(seed, returns[-1], max(returns), steps, minutes, bool(evaluations))


def _twentieths(returns: list[float]) -> list[float]:
    """Their means, of three rows at least: a single row of training is the return of a game or two."""
    return [float(part.mean()) for part in np.array_split(returns, max(1, min(20, len(returns) // 3)))]


def recorded(folder: Path) -> dict[str, list[Recorded]]:
    """The runs in a folder of results by the name of their files, which ends with the seed."""
    found: dict[str, list[Recorded]] = {}
    for path in sorted(folder.glob("*.csv.gz")):
        name = _NAME.fullmatch(path.name)
        if name is None:
            raise SystemExit(f"{path} should be called NAME-SEED.csv.gz")
        with gzip.open(path, "rt", encoding="utf-8") as file:
            run = Recorded.of(int(name["seed"]), list(rows_of(file)))
        found.setdefault(name["name"], []).append(run)
    return {name: sorted(runs, key=lambda run: run.seed) for name, runs in found.items()}


def page(folder: Path = RESULTS) -> str:
    """The text of docs/scores.md.

    Raises:
        SystemExit: a file has no entry in the index, or an entry no file.
    """
    index, runs = tomllib.loads((folder / INDEX).read_text("utf-8")), recorded(folder)
    if strange := sorted(set(index) ^ set(runs)):
        raise SystemExit(f"{folder / INDEX} and the files beside it differ in {', '.join(strange)}")
    return _HEAD + "".join(_row(index[name], runs[name], name) for name in sorted(runs))


def _row(entry: dict[str, Any], runs: list[Recorded], name: str) -> str:
    if "sweep" in entry:
        training = f"{entry['sweep']}: {entry['run']}"
    else:
        chosen = entry["preset"] if "preset" in entry else f"--algo {entry['algo']}"
        training = " ".join(filter(None, [chosen, entry.get("options", "")]))
    files = ", ".join(f"[{run.seed}](results/{name}-{run.seed}.csv.gz)" for run in runs)
    last = [run.last for run in runs]
    interval = "one run"
    if len(runs) > 1:
        found = bootstrap([last], mean)
        interval = f"{found.low:.1f} to {found.high:.1f}"
    minutes = [run.minutes for run in runs]
    spread = f"{min(minutes):.1f} to {max(minutes):.1f}" if len(runs) > 1 else f"{minutes[0]:.1f}"
    score = f"{np.mean(last):.1f}" + ("" if all(run.evaluated for run in runs) else ", in training")
    cells = [f"`{training}`", files, score, interval]
    cells += [f"{np.mean([run.best for run in runs]):.1f}", f"{max(run.steps for run in runs):,}"]
    cells += [spread, entry["commit"]]
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    sys.stdout.write(page())
