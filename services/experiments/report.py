"""Runs and groups of runs as tables for people, and as plain values for programs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from troupe.common.errors import ConfigError
from troupe.common.stats.intervals import Statistic, bootstrap, iqm, mean, median, optimality_gap
from troupe.common.stats.played import levels_missed
from troupe.common.stats.scores import normalized, random_and_human
from troupe.services.experiments.groups import Comparison, Group
from troupe.services.experiments.runs import Run, Series

References = Mapping[str, tuple[float, float] | None]
"""Environment to its scores of 0 and of 1; None: unknown."""

Scores = Sequence[Sequence[float]]
"""For each task, those of its runs."""

AGGREGATES: dict[str, Statistic] = {
    "median": median,
    "iqm": iqm,
    "mean": mean,
    "optimality_gap": optimality_gap,
}


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Lines of a table, as wide as it takes; all but the first `left` columns are flush right.

    A cell with nothing after it, such as the words of an error, may run on and makes no column wider.
    """
    last = len(headers) - 1
    widths = [
        max(len(row[i]) for row in (headers, *rows) if i == last or any(row[i + 1 :]))
        for i in range(len(headers))
    ]
    lines = []
    for row in (headers, *rows):
        cells = [
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def overview(runs: Sequence[tuple[str, Run | str]]) -> list[str]:
    """One line for each directory: what `troupe runs` prints. Instead of a run, what is wrong with it."""
    rows = []
    for name, run in runs:
        if isinstance(run, str):
            rows.append([name, "", "", run, "", "", "", ""])
            continue
        share = f"{min(1.0, run.steps / run.total_steps):.0%}" if run.total_steps else ""
        rows.append(
            [
                *(name, run.preset, run.env_id, run.state),
                *(f"{run.steps:,}", share, _evaluation(run), _age(time.time() - run.changed_s)),
            ]
        )
    headers = ["run", "preset", "environment", "state", "steps", "done", "evaluation", "changed"]
    return table(headers, rows, left=4)


def _evaluation(run: Run) -> str:
    missed = levels_missed(run.metrics)
    return number(run.last_evaluation) + (f" ({missed})" if missed else "")


def run_values(run: Run | str) -> dict[str, Any]:
    """What `overview` shows, for programs."""
    if isinstance(run, str):
        return {"state": run}
    return {
        "preset": run.preset,
        "env_id": run.env_id,
        "state": run.state,
        "steps": run.steps,
        "total_steps": run.total_steps,
        "wall_s": run.wall_s,
        "last_evaluation": run.last_evaluation,
        "changed_s": run.changed_s,
    }


def run_rows(runs: Sequence[tuple[str, Run | None, str, Series]]) -> list[str]:
    """The runs of a sweep, one line each: name, run (None: not begun), state, and its metric's values."""
    rows = []
    for name, run, state, series in runs:
        final, best = (number(series.values[-1]), number(max(series.values))) if series else ("-", "-")
        steps, minutes = (f"{run.steps:,}", f"{run.wall_s / 60:.1f}") if run else ("-", "-")
        rows.append([name, state, final, best, steps, minutes])
    return table(["run", "state", "final", "best", "steps", "minutes"], rows, left=2)


def group_table(comparison: Comparison) -> list[str]:
    """One line for each group and task: its runs' last values, their mean and IQM with intervals."""
    several = len(comparison.tasks) > 1
    rows = []
    for group in comparison.groups:
        incomplete = f" ({count} incomplete)" if (count := len(_incomplete(comparison, group))) else ""
        runs = f"{len(group.finals)}{incomplete}"
        row = [group.label or "all runs", *([group.task] if several else []), runs]
        finals, bests = group.finals, group.bests
        # Steps and minutes of the runs that the means are of; of all, where there is no value yet.
        counted = [run for run, series in zip(group.runs, group.series, strict=True) if series or not finals]
        row += [
            interval([finals], mean) if finals else "-",
            interval([finals], iqm) if finals else "-",
            number(sum(bests) / len(bests)) if bests else "-",
            f"{_mean([run.steps for run in counted]):,.0f}",
            f"{_mean([run.wall_s for run in counted]) / 60:.1f}",
        ]
        rows.append(row)
    headers = ["group", *(["task"] if several else []), "runs"]
    headers += ["mean [95 %]", "IQM [95 %]", "best", "steps", "minutes"]
    return table(headers, rows, left=2 if several else 1)


def suite_table(comparison: Comparison, references: References | None = None) -> list[str]:
    """Normalised scores over all tasks, a line for each label; none where there is one task or no score."""
    rows = []
    for label, scores, missing in _normalized(comparison, references):
        values = [interval(scores, statistic) for statistic in AGGREGATES.values()]
        tasks = f"{len(scores)}" + (f" of {len(scores) + missing}" if missing else "")
        rows.append([label or "all runs", tasks, f"{sum(map(len, scores))}", *values])
    if not rows:
        return []
    headers = ["normalised scores", "tasks", "runs"]
    return table([*headers, *(f"{title_of(name)} [95 %]" for name in AGGREGATES)], rows)


def as_values(comparison: Comparison, references: References | None = None) -> dict[str, Any]:
    """The same numbers for programs."""
    groups = [_group_values(group) for group in comparison.groups]
    suites = [
        {
            "label": label,
            "tasks": len(scores),
            "tasks_without_reference": missing,
            **{name: _estimate(scores, statistic) for name, statistic in AGGREGATES.items()},
        }
        for label, scores, missing in _normalized(comparison, references)
    ]
    return {
        "metric": comparison.metric,
        "by": list(comparison.by),
        "span": comparison.span,
        "levels_missed": dict(comparison.missed),
        "groups": groups,
        "normalized": suites,
    }


def page(comparison: Comparison, references: References | None = None) -> list[str]:
    """All tables of a comparison, and what their numbers are."""
    what = f"{comparison.metric}: the last value of each run"
    if comparison.span is not None:
        first, last = comparison.span
        what = f"{comparison.metric}: the mean of each run from {first:,} to {last:,} steps"
    if len(comparison.tasks) == 1:
        what += f" of {comparison.tasks[0]}"
    lines = [what, *notes(comparison), "", *group_table(comparison)]
    if normalised := suite_table(comparison, references):
        lines += ["", *normalised]
    return lines


def notes(comparison: Comparison) -> list[str]:
    """What a reader of these values should know."""
    found = []
    if comparison.dated_late:
        runs = "1 run" if comparison.dated_late == 1 else f"{comparison.dated_late} runs"
        found.append(
            f"{runs} of an older version of Troupe: evaluations are dated there by the end of "
            "their episodes, which is later than the parameters that were played"
        )
    for task, metric in {group.task: group.metric for group in comparison.groups}.items():
        if metric != comparison.metric:
            found.append(f"{task}: not every run was evaluated, so its values are of {metric}")
    empty = [
        run.name
        for group in comparison.groups
        for run, series in zip(group.runs, group.series, strict=True)
        if not series
    ]
    if empty:
        found.append(f"no values yet: {_some(empty)}")
    incomplete = [
        f"{run.name} ({run.state} at {run.steps:,} of {run.total_steps:,} steps)"
        for group in comparison.groups
        for run in _incomplete(comparison, group)
    ]
    if incomplete:
        found.append(f"incomplete: {_some(incomplete)}")
    for words, count in sorted(Counter(comparison.missed.values()).items()):
        runs = "1 run" if count == 1 else f"{count} runs"
        found.append(f"{runs} with evaluations that played {words}: not comparable with the mean over all")
    return found


def _incomplete(comparison: Comparison, group: Group) -> list[Run]:
    """Runs with values that have not come as far as they were to, or as the steps that are compared."""
    last = comparison.span[1] if comparison.span else None
    return [
        run
        for run, series in zip(group.runs, group.series, strict=True)
        if series and run.steps < (run.total_steps if last is None else min(last, run.total_steps))
    ]


def _some(names: Sequence[str]) -> str:
    """Three of them at most, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def number(value: float | None) -> str:
    """A return, with as many digits as one reads."""
    return "-" if value is None else f"{value:,.2f}" if abs(value) < 10_000 else f"{value:,.0f}"


def interval(scores: Scores, statistic: Statistic) -> str:
    """`3.00 [2.50, 3.50]`; without bounds where no task has two runs to tell them from."""
    found = bootstrap(scores, statistic)
    # Resampling single runs gives one number, and an interval of no width would look like certainty.
    bounds = f" [{number(found.low)}, {number(found.high)}]" if max(map(len, scores)) > 1 else ""
    return f"{number(found.value)}{bounds}"


def _estimate(scores: Scores, statistic: Statistic) -> dict[str, float | None]:
    found = asdict(bootstrap(scores, statistic))
    # As in `interval`: no bounds rather than false ones.
    return found if max(map(len, scores)) > 1 else {**found, "low": None, "high": None}


def _group_values(group: Group) -> dict[str, Any]:
    finals = group.finals
    return {
        "label": group.label,
        "task": group.task,
        "runs": [str(run.path) for run in group.runs],
        "finals": finals,
        "bests": group.bests,
        "mean": _estimate([finals], mean) if finals else None,
        "iqm": _estimate([finals], iqm) if finals else None,
        "states": [run.state for run in group.runs],
        "steps": [run.steps for run in group.runs],
        "total_steps": [run.total_steps for run in group.runs],
        "wall_s": [run.wall_s for run in group.runs],
    }


def scores(comparison: Comparison, references: References | None) -> tuple[dict[str, Scores], bool]:
    """For each label its runs' last values by task, and whether they are normalised.

    Of one task without `references` they are its returns.

    Raises:
        ConfigError: several tasks have returns that cannot be put on one scale.
    """
    if len(comparison.tasks) == 1 and references is None:
        return {group.label: [group.finals] for group in comparison.groups if group.finals}, False
    found: dict[str, Scores] = {label: of_tasks for label, of_tasks, _ in _normalized(comparison, references)}
    if not found:
        raise ConfigError("these tasks have no scores to normalise by: name them in a file, --suite FILE")
    return found, True


def _normalized(
    comparison: Comparison, references: References | None
) -> list[tuple[str, list[list[float]], int]]:
    """For each label its normalised scores by task, and the number of tasks that have none."""
    if len(comparison.tasks) < 2 and references is None:
        return []
    of: Callable[[str], tuple[float, float] | None] = random_and_human
    if references is not None:
        of = references.get
    found = []
    for label in comparison.labels:
        scores = []
        for group in comparison.of(label):
            reference = of(group.task)
            # Scores of training are not mixed with those of evaluation: published ones are of evaluation.
            if reference is not None and group.finals and group.metric == comparison.metric:
                scores.append([normalized(value, reference) for value in group.finals])
        tasks = comparison.tasks if references is None else references
        if scores:
            found.append((label, scores, len(tasks) - len(scores)))
    return found


def title_of(name: str) -> str:
    """Return how people read the name of a statistic."""
    return "IQM" if name == "iqm" else name.replace("_", " ")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _age(seconds: float) -> str:
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"
