"""A study: Optuna chooses what to try next from what came of earlier trials, and ends those that lag."""

from __future__ import annotations

import errno
import functools
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from troupe.common.config.text import format_value
from troupe.common.errors import ConfigError
from troupe.common.installation import install_command
from troupe.services.experiments.jobs import Job
from troupe.services.experiments.plan import Planned, Sweep
from troupe.services.experiments.runs import without_score
from troupe.services.experiments.space import Choice, Range, readable

if TYPE_CHECKING:
    from optuna import Study as OptunaStudy
    from optuna.distributions import BaseDistribution

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

STORAGE = "study.sqlite3"
_NAME = "sweep"
# Parts of a run after which its newest evaluation is compared with that of other trials: pruners need places
# that all trials pass, and evaluations come when they come.
_LEVELS = 20
_WARM_UP_LEVELS = 5
# No trial ends early before this level, nor before this many have ended by themselves.
_STARTUP_TRIALS = 4
# Fixed, so that a study of one run at a time repeats itself; several at a time end in no fixed order.
_SEED = 0x0A7
# What Optuna calls the end of a trial. One that is `RUNNING` waits to be resumed.
_STATES = {"COMPLETE": "done", "PRUNED": "pruned", "FAIL": "failed"}


def check_installed() -> None:
    """Raise ConfigError where Optuna is not installed."""
    if importlib.util.find_spec("optuna") is None:
        raise ConfigError(f"a study needs optuna: {install_command('search')}")


def _stored(method: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Raise OSError where Optuna cannot use its file: it only says that a commit failed."""

    @functools.wraps(method)
    def stored(*words: Parameters.args, **named: Parameters.kwargs) -> Result:
        from optuna.exceptions import StorageInternalError

        try:
            return method(*words, **named)
        except StorageInternalError as error:
            why = getattr(error.__cause__, "orig", None) or error.__cause__ or error
            raise OSError(errno.EIO, f"{STORAGE}: {why}") from error

    return stored


class Study:
    """The trials of one sweep, kept in a SQLite file in its directory.

    Methods raise OSError where that cannot be used, as on a full disk.
    """

    def __init__(self, sweep: Sweep, folder: Path) -> None:
        """Open the study, or begin it.

        Raises:
            ConfigError: the file is damaged, or another study's.
        """
        check_installed()
        self._sweep, self._folder = sweep, folder
        self._space = sweep.space
        self._study = _opened(sweep, folder / STORAGE)
        self._levels: dict[str, int] = {}

    def jobs(self) -> list[Job]:
        """Every trial so far; those that were under way wait to be resumed."""
        found = []
        for trial in self._study.get_trials(deepcopy=False):
            job = Job(self._planned(trial.number, trial.params), self._folder)
            job.state = _STATES.get(trial.state.name, "waiting")
            run = job.run() if job.state == "waiting" else None
            # Stopped in its last evaluation, it has all its steps: to go on with it would evaluate nothing.
            job.anew = run is not None and run.state == "done" and run.score is None
            job.error = str(trial.user_attrs.get("error", ""))
            found.append(job)
        return found

    @_stored
    def ask(self) -> Job:
        """The next trial."""
        trial = self._study.ask({name: _distribution(place) for name, place in self._space.items()})
        return Job(self._planned(trial.number, trial.params), self._folder)

    @_stored
    def look(self, job: Job) -> bool:
        """Take in how far a trial is; returns whether it should end, for most others were better there."""
        import optuna

        run = job.run()
        if run is None or run.score is None or self._sweep.section.pruner == "none":
            return False
        level = _LEVELS * run.steps // max(1, run.total_steps)
        # A trial that has all its steps only waits for its last evaluation: pruning saves nothing and loses
        # its score.
        if level >= _LEVELS or level <= self._levels.get(job.name, 0):
            return False
        self._levels[job.name] = level
        frozen = self._study.get_trials(deepcopy=False)[_number(job)]
        # Optuna hands a `Trial` only to the process that asked for it; after a resume it has to be made
        # again.
        trial = optuna.trial.Trial(self._study, frozen._trial_id)
        # Every level up to here, since one evaluation may span several and Optuna compares trials at the same
        # level.
        for passed in range(max(frozen.intermediate_values, default=0) + 1, level + 1):
            trial.report(run.score, passed)
        return trial.should_prune()

    @_stored
    def tell(self, job: Job) -> None:
        """Record the end of a trial: its score is what it is worth."""
        from optuna.trial import TrialState

        run = job.run()
        value = None if run is None else run.score
        if job.state == "done" and value is not None:
            self._study.tell(_number(job), value)
        elif job.state == "pruned":
            self._study.tell(_number(job), state=TrialState.PRUNED)
        elif job.state in ("done", "failed"):
            # Optuna has no end without a value, and a missing score must not count as a bad one.
            job.state, job.error = "failed", job.error or without_score(run)
            self._study.tell(_number(job), state=TrialState.FAIL)

    def best(self) -> tuple[str, float, dict[str, Any]] | None:
        """Name, return and values of the best trial; None while none is over."""
        done = [trial for trial in self._study.get_trials(deepcopy=False) if trial.state.name == "COMPLETE"]
        if not done:
            return None
        trial = max(done, key=lambda each: each.value if each.value is not None else float("-inf"))
        return _name(trial.number), float(trial.value or 0.0), self._setting(trial.params)

    def _planned(self, number: int, params: dict[str, Any]) -> Planned:
        return self._sweep.with_fields(_name(number), self._setting(params))

    def _setting(self, params: dict[str, Any]) -> dict[str, Any]:
        """The fields that Optuna's parameters mean."""
        setting = {}
        for name, value in params.items():
            place = self._space.get(name)
            if isinstance(place, Choice):
                value = place.values[_labels(place).index(value)]
            elif isinstance(place, Range) and not place.whole:
                value = readable(place, value)
            setting[name] = value
        return setting


def _opened(sweep: Sweep, file: Path) -> OptunaStudy:
    import optuna

    # It would print a line for each trial between those of the sweep.
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    pruner: optuna.pruners.BasePruner = optuna.pruners.NopPruner()
    if sweep.section.pruner == "median":
        pruner = optuna.pruners.MedianPruner(_STARTUP_TRIALS, _WARM_UP_LEVELS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study = optuna.create_study(
                storage=f"sqlite:///{file.absolute()}",
                study_name=_NAME,
                direction="maximize",
                load_if_exists=True,
                pruner=pruner,
            )
            # One that goes on must not draw again what it began with.
            seed = _SEED + len(study.get_trials(deepcopy=False))
            # A constant liar counts running trials as bad ones: without it, runs side by side would try the
            # same place.
            study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=sweep.section.parallel > 1)
    except Exception as error:  # SQLAlchemy's and Optuna's own are of no common kind
        why = str(error).splitlines()[0]
        raise ConfigError(f"cannot open the study {file}: {why}; choose another --dir") from error
    return study


def _distribution(place: Choice | Range) -> BaseDistribution:
    from optuna import distributions

    if isinstance(place, Choice):
        return distributions.CategoricalDistribution(_labels(place))
    if place.whole:
        return distributions.IntDistribution(int(place.low), int(place.high), log=place.log)
    return distributions.FloatDistribution(place.low, place.high, log=place.log)


def _labels(place: Choice) -> Sequence[Any]:
    """What the study's file calls the choices: it can hold no lists."""
    return [
        value if isinstance(value, str | int | float | bool) else format_value(value)
        for value in place.values
    ]


def _name(number: int) -> str:
    return f"trial-{number:04d}"


def _number(job: Job) -> int:
    return int(job.name.removeprefix("trial-"))
