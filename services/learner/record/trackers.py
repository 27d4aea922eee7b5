"""Programs that keep the curves of many runs, beside the run's own record: W&B, MLflow, Trackio.

Each is one class here, with the library behind it imported on first use. It runs in a process of its own,
`python -m troupe.services.learner.record.trackers NAME`: rows come on its standard input, one JSON object a
line, and what went wrong goes to its standard output. `tracking` is the learner's end of both.

Keys and addresses of servers come from the libraries' own variables (`WANDB_API_KEY`, `MLFLOW_TRACKING_URI`,
`HF_TOKEN` and others), and nowhere else: none is in a configuration, a checkpoint or a log.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO
from urllib.parse import quote

from troupe.common.errors import caught

END_S = 20.0
"""How long a tracker may take to end after the last row; then its process ends all the same."""
TELL_PERIOD_S = 600.0
"""Seconds between two lines about rows that a tracker did not take."""
PROJECT = "troupe"
"""Project or experiment of the runs, unless a variable of the library says another."""
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|_PW|AUTH|CREDENTIAL", re.IGNORECASE)
_NAMED = re.compile(r"((?:key|token|secret|password|auth)\w*=)[^\s&]+|\b(bearer|basic) \S+", re.IGNORECASE)
# Characters of a value of the configuration, in MLflow.
_MAX_PARAM = 500


@dataclass(frozen=True)
class Run:
    """What a tracker is told of a run before its rows.

    Attributes:
        id: random, the same for all of the run's learner processes: a resumed run goes on under it.
        name: shown.
        directory: of the run.
        config: the whole configuration, as `Config.to_dict` gives it.
    """

    id: str
    name: str
    directory: str
    config: dict[str, Any]


class Tracker(Protocol):
    """One program's way to keep a run. Any method may raise anything, or block: its process is its own."""

    def begin(self, run: Run) -> None:
        """Opens the run, or goes on with it."""

    def add(self, steps: int, values: dict[str, float]) -> None:
        """Takes finite values by name, measured at this count of environment steps."""

    def end(self, summary: dict[str, float], complete: bool) -> None:
        """Closes the run with its last values, `final/...`; `complete`: it has all of its steps."""


class Wandb:
    """Weights & Biases; `WANDB_MODE=offline` keeps everything in `RUN/wandb` until `wandb sync`."""

    def begin(self, run: Run) -> None:
        """See `Tracker`."""
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run.id,
            name=run.name,
            dir=run.directory,
            config=run.config,
            resume="allow",
            # Nothing of the machine or the checkout leaves it unasked.
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                disable_code=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_disable_machine_info=True,
                x_save_requirements=False,
            ),
        )
        # W&B refuses rows that go back, as those of a run do that is resumed from an older checkpoint.
        self._run.define_metric("*", step_metric="run/steps")

    def add(self, steps: int, values: dict[str, float]) -> None:
        """See `Tracker`."""
        self._run.log({**values, "run/steps": steps})

    def end(self, summary: dict[str, float], complete: bool) -> None:
        """See `Tracker`."""
        self._run.summary.update(summary)
        self._run.finish(exit_code=0)


class Mlflow:
    """MLflow; without `MLFLOW_TRACKING_URI` the runs are kept in `mlruns` beside the run directory."""

    def begin(self, run: Run) -> None:
        """See `Tracker`."""
        import mlflow

        if not os.environ.get("MLFLOW_TRACKING_URI"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            mlflow.set_tracking_uri((Path(run.directory).parent / "mlruns").as_uri())
        self._client = mlflow.MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = mlflow.set_experiment(name).experiment_id
        # MLflow makes its own ids, so a resumed run is found by a tag of ours.
        past = self._client.search_runs([experiment], f"tags.`troupe.run` = '{run.id}'", max_results=1)
        if past:
            self._id = past[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        tags = {"troupe.run": run.id, "troupe.directory": run.directory}
        self._id = self._client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
        params = [
            mlflow.entities.Param(name, str(value)[:_MAX_PARAM])
            for name, value in flat(run.config)
            if value != ""
        ]
        for first in range(0, len(params), 100):  # MLflow's bound for one call
            self._client.log_batch(self._id, params=params[first : first + 100])

    def add(self, steps: int, values: dict[str, float]) -> None:
        """See `Tracker`."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        metrics = [Metric(_mlflow_name(name), value, now_ms, steps) for name, value in values.items()]
        for first in range(0, len(metrics), 1000):
            self._client.log_batch(self._id, metrics=metrics[first : first + 1000])

    def end(self, summary: dict[str, float], complete: bool) -> None:
        """See `Tracker`."""
        self.add(int(summary.get("final/steps", 0)), summary)
        self._client.set_terminated(self._id, "FINISHED" if complete else "KILLED")


def _mlflow_name(name: str) -> str:
    """A name with one `/` at most: MLflow's files hold no `actor/env_ms` beside `actor/env_ms/actor-1`."""
    group, slash, rest = name.partition("/")
    return f"{group}{slash}{rest.replace('/', '.')}"


class Trackio:
    """Trackio, which keeps runs on this machine (`TRACKIO_DIR`) or in a Space (`TRACKIO_SPACE_ID`)."""

    def begin(self, run: Run) -> None:
        """See `Tracker`."""
        import trackio

        self._trackio = trackio
        # A run has no other identity than its name there.
        name = f"{run.name}-{run.id[:8]}"
        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        trackio.init(project=project, name=name, config=dict(flat(run.config)), resume="allow", embed=False)

    def add(self, steps: int, values: dict[str, float]) -> None:
        """See `Tracker`."""
        self._trackio.log(values, step=steps)

    def end(self, summary: dict[str, float], complete: bool) -> None:
        """See `Tracker`."""
        self._trackio.log(summary, step=int(summary.get("final/steps", 0)))
        self._trackio.finish()


TRACKERS: dict[str, type[Tracker]] = {"wandb": Wandb, "mlflow": Mlflow, "trackio": Trackio}
"""By the name in `run.trackers`, which is also that of the extra."""


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested values, by names such as `agent.gamma`."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def without_secrets(text: str, variables: Mapping[str, str]) -> str:
    """One line of `text` in which neither the values of secret variables nor users of an address stand."""
    for name, value in variables.items():
        # Shorter values would also replace parts of ordinary words.
        if _SECRET.search(name) and len(value) > 3:
            text = text.replace(value, "***").replace(quote(value, safe=""), "***")
    text = _NAMED.sub(lambda found: f"{found[1] or found[2] + ' '}***", text)
    return " ".join(re.sub(r"(\w://)\S+@", r"\1***@", text).split())


class _Problems:
    """Tells the learner what goes wrong, a line at a time and not too often."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._next_s = 0.0

    def tell(self, what: str, error: BaseException, *, always: bool = False) -> None:
        if not always and time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + TELL_PERIOD_S
        cause = without_secrets(f"{type(error).__name__}: {error}", os.environ)
        print(f"{what}: {cause[:400]}", file=self._out, flush=True)


def serve(tracker: Tracker, lines: TextIO, out: TextIO) -> int:
    """Hand over rows until the input ends; returns the exit code.

    The first line is the `Run`, then come rows, `{"steps": N, "values": {...}}`, and at last
    `{"summary": {...}, "complete": bool}`. Where that is missing, the learner has died.
    """
    problems = _Problems(out)
    try:
        tracker.begin(Run(**json.loads(lines.readline())))
    except caught() as error:  # what a library or a server answers may be anything
        problems.tell("cannot begin", error, always=True)
        return 1
    ending: dict[str, Any] = {"summary": {}, "complete": False}
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:  # the learner has died within it
            break
        if "summary" in row:
            ending = row
            break
        try:
            tracker.add(row["steps"], row["values"])
        except caught() as error:
            problems.tell("does not take a row", error)
    # The library may wait for a server that is gone, in threads that no exception reaches.
    watchdog = threading.Timer(END_S, os._exit, (1,))
    watchdog.daemon = True
    watchdog.start()
    try:
        tracker.end(**ending)
    except caught() as error:
        problems.tell("does not take the end of the run", error, always=True)
        return 1
    return 0


def main() -> None:
    """The process of one tracker."""
    # Ctrl-C in a terminal is for the learner, which ends this process when it has sent the last row.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What libraries print is for nobody; it could hold anything.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    code = serve(TRACKERS[sys.argv[1]](), sys.stdin, out)
    out.flush()
    os._exit(code)  # threads of the library may hang, and have had their time


if __name__ == "__main__":
    main()
