"""Runs that differ in nothing but their seeds belong together; what the groups differ in names them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from troupe.common.config.fields import role_of
from troupe.common.config.names import canonical, nearest_field
from troupe.common.config.presets import is_path
from troupe.common.config.schema import SECTIONS
from troupe.common.config.text import format_value
from troupe.common.errors import ConfigError
from troupe.common.runtime.files import EPISODES_FILE
from troupe.common.runtime.metrics import EVALUATION_AGE, EVALUATION_RETURN, TRAINING_RETURN
from troupe.common.stats.played import LEVELS, LEVELS_PLAYED, levels_missed
from troupe.services.experiments.runs import Run, Series, read_episodes

# Rows of returns in training that make a curve.
_FEW_ROWS = 10
# Seeds are what a group is the mean over; a name is chosen by hand and says nothing of the training.
_NEVER = {"run.seed", "run.name"}
ENV, PRESET, ALGORITHM = "env.id", "run.preset", "agent.algorithm"


@dataclass(frozen=True)
class Group:
    """Runs of one task that are compared as one.

    Attributes:
        label: what the group has and others have not; empty where there is one group only.
        task: the environment.
        runs: of the group.
        series: of the compared metric, one for each run; some may be empty.
        metric: its name; the same for all groups of a task.
    """

    label: str
    task: str
    runs: Sequence[Run]
    series: Sequence[Series]
    metric: str

    @property
    def finals(self) -> list[float]:
        """The last value of every run that has one."""
        return [each.values[-1] for each in self.series if each]

    @property
    def bests(self) -> list[float]:
        """The highest value of every run that has one."""
        return [max(each.values) for each in self.series if each]


@dataclass(frozen=True)
class Comparison:
    """Groups of runs, and the metric that they are compared by.

    Attributes:
        metric: its name; tasks that have none of it are compared by returns in training, see `Group.metric`.
        by: fields in which the groups differ.
        groups: of runs.
        span: steps from and to which each run's values are one mean; None: all values are there.
        dated_late: runs whose evaluations are dated by the end of their games, as Troupe did once.
        missed: by path, runs with an evaluation that played only some of its environment's levels, and the
            fewest: `12 of 30 levels`.
    """

    metric: str
    by: Sequence[str]
    groups: Sequence[Group]
    span: tuple[int, int] | None = None
    dated_late: int = 0
    missed: Mapping[str, str] = field(default_factory=dict)

    def over(self, first: int, last: int) -> Comparison:
        """The same runs by the mean of what each recorded from `first` to `last` steps.

        Raises:
            ConfigError: none has a value there.
        """
        groups = [
            replace(group, series=[series.mean_over(first, last) for series in group.series])
            for group in self.groups
        ]
        if not any(group.finals for group in groups):
            raise ConfigError(f"no run has values of {self.metric} from {first:,} to {last:,} steps")
        return replace(self, groups=groups, span=(first, last))

    @property
    def labels(self) -> list[str]:
        """Labels of the groups, each once, in order."""
        return list(dict.fromkeys(group.label for group in self.groups))

    @property
    def tasks(self) -> list[str]:
        """Environments, each once, in order."""
        return list(dict.fromkeys(group.task for group in self.groups))

    def renamed(self, labels: Sequence[str]) -> Comparison:
        """The same groups under other labels, in the order of `labels` of this one.

        Raises:
            ConfigError: there are more or fewer.
        """
        if len(set(labels)) != len(self.labels):
            now = ", ".join(label or "all runs" for label in self.labels)
            raise ConfigError(f"--labels should name {len(self.labels)} groups, in this order: {now}")
        names = dict(zip(self.labels, labels, strict=True))
        return replace(self, groups=[replace(group, label=names[group.label]) for group in self.groups])

    def of(self, label: str) -> list[Group]:
        """The groups of this label, one for each task."""
        return [group for group in self.groups if group.label == label]


def compare(runs: Sequence[Run], by: Sequence[str] = (), metric: str = "") -> Comparison:
    """Group runs, and read the metric of each.

    Args:
        runs: at least one.
        by: fields; none: those in which the runs differ, see `differing_fields`.
        metric: name in `metrics.csv`; "": evaluations, or for a task of which no run was evaluated, or only
            some were and all have them, returns in training.

    Raises:
        ConfigError: there is no such field, or no run has this metric.
    """
    fields = [_known(name, runs) for name in by] or differing_fields(runs)
    names = [metric] if metric else [EVALUATION_RETURN, TRAINING_RETURN]
    read = [run.series([*names, EVALUATION_AGE, LEVELS_PLAYED, LEVELS]) for run in runs]
    if metric and not any(series[metric] for series in read):
        raise ConfigError(f"no run has values of {metric!r} in its metrics.csv")
    tasks: dict[str, list[tuple[Run, dict[str, Series]]]] = {}
    for run, each in zip(runs, read, strict=True):
        tasks.setdefault(run.env_id, []).append((run, each))
    if not metric:
        for members in tasks.values():
            _value_training_alike(members)
    metrics = {task: _metric([each for _, each in members], names) for task, members in tasks.items()}
    # Evaluations where any task has them; tasks that have none are then compared among themselves.
    chosen = min(metrics.values(), key=names.index)
    labels = labelled([run.fields for run in runs], fields)
    if not by:
        # Names stand for the groups only where no fields were asked for: `--by` wants to see values.
        labels = _names(runs, labels) or labels
    groups: dict[tuple[str, str], list[int]] = {}
    for index, run in enumerate(runs):
        groups.setdefault((labels[index], run.env_id), []).append(index)
    return Comparison(
        chosen,
        fields,
        [
            Group(
                label,
                task,
                [runs[i] for i in members],
                series=[read[i][metrics[task]] for i in members],
                metric=metrics[task],
            )
            for (label, task), members in groups.items()
        ],
        dated_late=sum(
            # An evaluation without an age is from before evaluations were dated by the parameters that were
            # played.
            len(series[EVALUATION_AGE].values) < len(series[chosen].values)
            for series in read
            if chosen.startswith("eval/")
        ),
        missed={
            str(run.path): words
            for run, series in zip(runs, read, strict=True)
            if chosen.startswith("eval/") and (words := _fewest_levels(series))
        },
    )


def _metric(read: Sequence[Mapping[str, Series]], names: Sequence[str]) -> str:
    """The first metric that all runs of a task have; else the first that any has."""
    # A task is compared by one metric: evaluations of some runs and training returns of others differ by
    # exploration and clipped episodes.
    for among in (all, any):
        for name in names:
            if among(bool(series[name]) for series in read):
                return name
    return names[0]


def _value_training_alike(read: Sequence[tuple[Run, dict[str, Series]]]) -> None:
    """Take returns in training from the single games of all runs of a task, if one is short and has few rows.

    Rows are means of other games, so where the games of one run are not there, all keep their rows.
    """
    # `log_every_s` is 10 s, and CartPole is learned in less than a minute.
    rows = [min(_FEW_ROWS, len(series[TRAINING_RETURN].values)) for _, series in read]
    if min(rows) == _FEW_ROWS:
        return
    games = [read_episodes(run.path / EPISODES_FILE) for run, _ in read]
    if all(len(each.values) >= few for each, few in zip(games, rows, strict=True)):
        for (_, series), each in zip(read, games, strict=True):
            series[TRAINING_RETURN] = each


def _fewest_levels(series: Mapping[str, Series]) -> str:
    """What a run's evaluation of the fewest levels missed; empty where all were played."""
    columns = {name: series[name].values for name in (LEVELS_PLAYED, LEVELS)}
    if not all(columns.values()):
        return ""
    return levels_missed({name: min(values) for name, values in columns.items()})


def _names(runs: Sequence[Run], labels: Sequence[str]) -> list[str]:
    """What runs call themselves, where each label has one name and each name one label; else nothing."""
    names = [str(run.fields.get("run.name", "")) for run in runs]
    kinds = len(set(zip(names, labels, strict=True)))
    # Two settings under one name would otherwise become one group.
    return names if all(names) and kinds == len(set(names)) == len(set(labels)) > 1 else []


def differing_fields(runs: Sequence[Run]) -> list[str]:
    """Fields in which runs of one environment differ, without seeds, names, and what belongs to a machine.

    Runs of several presets differ in too much to list: the preset stands for it, and then only what
    differs among runs of one preset. Without a preset, as `troupe train --algo` begins, the algorithm and the
    environment have chosen the values, and the algorithm stands for them.
    """
    kinds: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for run in runs:
        preset, algorithm = str(run.fields.get(PRESET, "")), str(run.fields.get(ALGORITHM, ""))
        kinds.setdefault((preset, "" if preset else algorithm, run.env_id), []).append(run.fields)
    within: dict[str, None] = {}
    if len({preset for preset, _, _ in kinds}) > 1:
        within[PRESET] = None
    if len({algorithm for preset, algorithm, _ in kinds if not preset}) > 1:
        within[ALGORITHM] = None
    # Sorted, so that labels do not depend on the order in which directories were named.
    for kind in sorted(kinds):
        within.update(dict.fromkeys(_differing(kinds[kind])))
    return list(within)


def labelled(runs: Sequence[Mapping[str, Any]], fields: Sequence[str]) -> list[str]:
    """What names each run: `learning_rate=0.001 gamma=0.9`; whole names where short ones are ambiguous."""
    short = short_names(fields)
    said = ([_said(field, short[field], run.get(field)) for field in fields] for run in runs)
    return [" ".join(filter(None, words)) for words in said]


def short_names(fields: Collection[str]) -> dict[str, str]:
    """The last part of each field's name, or all of it where several end alike."""
    last = [field.rpartition(".")[2] for field in fields]
    return {field: name if last.count(name) == 1 else field for field, name in zip(fields, last, strict=True)}


def _said(field: str, name: str, value: Any) -> str:
    if field in (PRESET, ENV) and isinstance(value, str):
        return value.rpartition("/")[2].removesuffix(".toml") if is_path(value) and field == PRESET else value
    text = value if isinstance(value, str) else "none" if value is None else format_value(value)
    return f"{name}={text}"


def _differing(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    names: dict[str, None] = {}
    for run in runs:
        names.update(dict.fromkeys(run))
    # repr, since values may be lists, which have no hash.
    return [name for name in names if _counts(name) and len({repr(run.get(name)) for run in runs}) > 1]


def _counts(name: str) -> bool:
    section, _, field = name.partition(".")
    model = SECTIONS.get(section)
    known = model is not None and field in model.model_fields
    operational = known and model is not None and role_of(model, field) == "operational"
    return not operational and name not in (*_NEVER, ENV, PRESET)


def _known(name: str, runs: Sequence[Run]) -> str:
    field = canonical(name.removeprefix("--"))
    if not any(field in run.fields for run in runs):
        raise ConfigError(f"no run has a field {name!r}; {nearest_field(field)}")
    return field
