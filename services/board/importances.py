"""How much each field of a sweep decides by Optuna's PED-ANOVA, which takes any completed trials."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from troupe.common.installation import install_command

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

MIN_TRIALS = 10
"""It compares the best tenth with all: of fewer that is a single trial's luck."""


@dataclass(frozen=True)
class Axis:
    """A field in which trials differ: numbers from `low` to `high`, or one of `values`, by its index."""

    field: str
    label: str
    values: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False


@dataclass(frozen=True)
class Outcome:
    """A trial that is over: its place on each axis, and what it is worth."""

    at: tuple[float, ...]
    score: float


def of(axes: Sequence[Axis], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Shares of all fields, which add up to 1, or why there are none.

    Returns:
        `shares`, one for each axis, empty where there are none; `why`, in words; `trials`, how many they are
        from.
    """
    found: dict[str, Any] = {"shares": [], "why": "", "trials": len(outcomes)}
    if len(axes) < 2:
        found["why"] = "Importances need at least two fields that vary."
    elif len(outcomes) < MIN_TRIALS:
        found["why"] = f"Importances need at least {MIN_TRIALS} completed trials; there are {len(outcomes)}."
    elif len({outcome.score for outcome in outcomes}) == 1:
        found["why"] = "All completed trials have the same score."
    elif importlib.util.find_spec("optuna") is None:
        found["why"] = (
            f"Importances are computed by Optuna, which is not installed: {install_command('search')}"
        )
    else:
        found["shares"] = _shares(axes, outcomes)
    return found


def _shares(axes: Sequence[Axis], outcomes: Sequence[Outcome]) -> list[float]:
    import optuna
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    distributions = {str(index): _distribution(axis) for index, axis in enumerate(axes)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it was experimental once, and says so in the log of a server
        # In memory: the study's own file may be another user's, and a grid has none.
        study = optuna.create_study(direction="maximize")
        study.add_trials(
            [
                optuna.trial.create_trial(
                    params={
                        str(index): _value(axis, at)
                        for index, (axis, at) in enumerate(zip(axes, each.at, strict=True))
                    },
                    distributions=distributions,
                    value=each.score,
                )
                for each in outcomes
            ]
        )
        shares = get_param_importances(study, evaluator=PedAnovaImportanceEvaluator())
    return [float(f"{shares.get(str(index), 0.0):.4g}") for index in range(len(axes))]


def _distribution(axis: Axis) -> BaseDistribution:
    from optuna import distributions

    if axis.values:
        return distributions.CategoricalDistribution(range(len(axis.values)))
    return distributions.FloatDistribution(axis.low, axis.high, log=axis.log)


def _value(axis: Axis, at: float) -> float | int:
    return int(at) if axis.values else min(axis.high, max(axis.low, at))
