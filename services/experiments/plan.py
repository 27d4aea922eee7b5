"""The sweep file, and the runs that it means."""

from __future__ import annotations

import copy
import difflib
import hashlib
import itertools
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from troupe.common.config.names import canonical
from troupe.common.config.presets import is_path, preset_id, read_preset, read_toml
from troupe.common.config.text import format_toml, format_value, load_toml
from troupe.common.errors import ConfigError
from troupe.services.experiments import suites
from troupe.services.experiments.groups import ENV, short_names
from troupe.services.experiments.section import MAX_RUNS, SweepSection
from troupe.services.experiments.space import Space, draw, read_space

SECTION = "sweep"
RECORD = "sweep.json"
"""In the directory of a sweep: what was asked for, and the state of each run."""
SEED = "run.seed"
NAME = "run.name"
# File systems take 255 bytes, and the files of values and logs add to the name.
_MAX_NAME_BYTES = 120

Fields = dict[str, Any]
"""`section.field` to its value."""


@dataclass(frozen=True)
class Planned:
    """One run of a sweep: its directory's name, and the values of its file, over preset and environment."""

    name: str
    fields: Fields


@dataclass(frozen=True)
class Sweep:
    """What somebody asked for.

    Attributes:
        source: file or preset, for messages and names.
        section: `[sweep]`, with what the command line says over it.
        fixed: fields of the file that all runs have.
        overrides: fields on the command line, as text: over all.
    """

    source: str
    section: SweepSection
    fixed: Fields = field(default_factory=dict)
    overrides: Mapping[str, str] = field(default_factory=dict)

    @property
    def preset(self) -> str:
        """What all runs begin from: a name, or an absolute path."""
        return self.section.preset

    @property
    def options(self) -> list[str]:
        """Words of `troupe train` for every run."""
        return ["--deterministic"] if self.section.deterministic else []

    @property
    def is_study(self) -> bool:
        """Whether what is tried next depends on what came of the runs before."""
        return self.section.study != "random"

    @property
    def depends(self) -> str:
        """What makes trials depend on each other, in a word; empty where each could be a job of its own."""
        return "a study" if self.is_study else self.section.course

    def runs(self) -> list[Planned]:
        """Every run, in order; of a study none, for its trials are not known yet.

        Raises:
            ConfigError: names what in the file cannot be.
        """
        if self.is_study:
            return []
        found: dict[str, Planned] = {}
        # Seeds vary fastest: a sweep that is stopped early has whole groups to compare, rather than one seed
        # of everything.
        repetitions = list(itertools.product(self._tasks(), self.seeds))
        for label, setting, said in self._settings():
            for task, seed in repetitions:
                varied = self._varied({**setting, **({ENV: task} if task else {}), **seed})
                planned = Planned(_name(label, varied, hidden=said), {**self.fixed, **varied})
                # What the command line decides makes runs alike; two values may be alike as names.
                if found.setdefault(planned.name, planned).fields != planned.fields:
                    other = Planned(f"{planned.name}-{_digest(varied)}", planned.fields)
                    found[other.name] = other
            # Within the loop: a grid of ten fields may mean more runs than memory holds.
            if len(found) > MAX_RUNS:
                raise ConfigError(f"{self.source} describes more than {MAX_RUNS:,} runs, the maximum")
        return list(found.values())

    @property
    def space(self) -> Space:
        """`[sweep.search]`, without what the command line has decided."""
        space = read_space(self.source, self.section.search)
        return {name: place for name, place in space.items() if name not in self.overrides}

    @property
    def seeds(self) -> Sequence[Fields]:
        """What each repetition of a setting has; one that is empty where the file says nothing of seeds."""
        seeds = self.section.seeds
        if SEED in self.overrides or not seeds:
            return [{}]
        return [{SEED: seed} for seed in (range(seeds) if isinstance(seeds, int) else seeds)]

    def with_fields(self, name: str, setting: Fields) -> Planned:
        """The run of a trial."""
        # `_check` lets a study have one seed at most.
        seed = self.seeds[0]
        return Planned(name, {**self.fixed, **self._varied({**setting, **seed})})

    def tables(self) -> dict[str, Any]:
        """The file again, as a document that `parse` reads."""
        return {SECTION: self.section.model_dump(exclude_defaults=True, by_alias=True), **nested(self.fixed)}

    def _tasks(self) -> list[str]:
        suite = self.section.suite
        return list(suites.load(suite)) if suite and ENV not in self.overrides else [""]

    def _varied(self, fields: Fields) -> Fields:
        return {name: value for name, value in fields.items() if name not in self.overrides}

    def _settings(self) -> Iterator[tuple[str, Fields, Collection[str]]]:
        """What is tried: a label, empty where the values say enough; the values; those that it stands for."""
        grid = _grid(self.source, self.section.grid)
        entries = [
            _flat(f"{self.source}: an entry of [[sweep.list]]", entry) for entry in self.section.entries
        ]
        space = self.space
        for entry in entries or [{}]:
            name = _plain(str(entry.get(NAME, ""))).strip("-.")  # it names a directory
            said = {*space, *(entry if name else ())}
            for values in itertools.product(*grid.values()):
                setting = {**entry, **dict(zip(grid, values, strict=True))}
                if not space:
                    yield name, setting, said
                for trial in range(self.section.trials if space else 0):
                    label = ",".join(filter(None, [name, f"trial-{trial:04d}"]))
                    yield label, {**setting, **draw(space, trial)}, said


def read(source: str, options: Mapping[str, Any], overrides: Mapping[str, str]) -> Sweep:
    """The sweep of a file, or of a preset with what the command line says.

    Args:
        source: TOML file with a section `[sweep]`, or a preset.
        options: keys of `[sweep]` from the command line; None: not given.
        overrides: fields from the command line.

    Raises:
        ConfigError: says what is wrong with the file.
    """
    tables = read_toml(Path(source)) if is_path(source) else {}
    # Read for its errors: a misspelt preset is refused by its name, with the nearest.
    if SECTION not in tables:
        read_preset(source)
        tables = {SECTION: {"preset": source}}
    if not isinstance(tables[SECTION], Mapping):
        raise ConfigError(f"{source}: sweep should be a section, [sweep]")
    return parse(source, with_options(source, tables, options), overrides)


def with_options(source: str, tables: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """A document with keys of `[sweep]` from the command line over it; None: not given.

    A field of `--grid` takes the place of its values in the file, and others are more to multiply with.
    """
    chosen = {name: value for name, value in options.items() if value is not None}
    section = tables[SECTION]
    merged = dict(tables)
    if "grid" in chosen:
        mine = chosen["grid"]
        chosen["grid"] = nested({**_grid(source, section.get("grid", {})), **mine})
        merged |= {
            name: {key: value for key, value in values.items() if canonical(f"{name}.{key}") not in mine}
            for name, values in tables.items()
            if name != SECTION and isinstance(values, Mapping)
        }
    return {**merged, SECTION: {**section, **chosen}}


def grid_option(text: str) -> tuple[str, list[Any]]:
    """The field and the values of `--grid agent.learning_rate=1e-3,3e-4`, as TOML or as plain texts.

    Raises:
        ValueError: it is not of this form.
    """
    key, equals, values = text.partition("=")
    name = canonical(key)
    if not equals or "." not in name or not values:
        raise ValueError(text)
    try:
        found = load_toml(f"values = [{values}]")["values"]
    except tomllib.TOMLDecodeError:  # texts without quotes, such as ids of environments
        found = [value.strip() for value in values.split(",")]
    return name, found


def halving_option(text: str) -> dict[str, int]:
    """`[sweep.halving]` of `--halving 10_000` or `--halving 10_000,2`.

    Raises:
        ValueError: it is not of this form.
    """
    first_steps, comma, eta = text.partition(",")
    return {"first_steps": int(first_steps), **({"eta": int(eta)} if comma else {})}


def parse(source: str, tables: Mapping[str, Any], overrides: Mapping[str, str]) -> Sweep:
    """The sweep that a document describes; see `read`."""
    try:
        section = SweepSection.model_validate(tables[SECTION])
    except ValidationError as error:
        raise ConfigError(_explain(source, error)) from None
    if not section.preset:
        raise ConfigError(f'{source} should say what to train: preset = "cartpole-ppo" under [sweep]')
    fixed = _flat(source, {name: values for name, values in tables.items() if name != SECTION})
    # Absolute, so that they are found again from another directory.
    section = section.model_copy(
        update={"preset": preset_id(section.preset), "suite": section.suite and preset_id(section.suite)}
    )
    decided = {canonical(name): text for name, text in overrides.items()}
    sweep = Sweep(source, section, fixed, decided)
    _check(sweep)
    return sweep


def nested(fields: Fields) -> dict[str, Any]:
    """Fields as tables within tables, as TOML has them."""
    tables: dict[str, Any] = {}
    for path, value in fields.items():
        *parents, name = path.split(".")
        table = tables
        for parent in parents:
            table = table.setdefault(parent, {})
        if isinstance(value, dict):  # a copy: other fields may lead into it
            value = {**table.get(name, {}), **copy.deepcopy(value)}
        table[name] = value
    return tables


def values_file(fields: Fields) -> str:
    """The text of one run's file, for `troupe train PRESET --sweep FILE`."""
    return format_toml(nested(fields))


def _check(sweep: Sweep) -> None:
    """Refuse what contradicts itself."""
    source, section = sweep.source, sweep.section
    if bool(section.search) != bool(section.trials):
        missing = "trials = 20 under [sweep]" if section.search else "fields under [sweep.search]"
        raise ConfigError(f"{source}: a search needs {missing} too")
    if sweep.is_study and (section.grid or section.entries or section.suite or len(sweep.seeds) > 1):
        raise ConfigError(
            f"{source}: a study ({section.study}) has one run for each trial; leave out grid, list, suite "
            "and further seeds, and repeat its best setting afterwards"
        )
    if section.course and (sweep.is_study or section.suite or len(sweep.seeds) > 1):
        raise ConfigError(
            f"{source}: {section.course} compares trials that differ in their values only; leave out study, "
            "suite and further seeds, and repeat the best setting afterwards"
        )
    if section.population and not section.search:
        raise ConfigError(f"{source}: a population needs fields under [sweep.search], and trials")
    if section.population and (section.grid or section.entries or section.halving):
        raise ConfigError(
            f"{source}: a population begins with values drawn from [sweep.search]; leave out grid, list and "
            "halving"
        )
    if section.course and section.deterministic:
        raise ConfigError(f"{source}: {section.course} stops runs anywhere; leave out deterministic")
    if sweep.is_study and not section.search:
        raise ConfigError(f"{source}: a study needs fields under [sweep.search]")
    seeds = section.seeds
    given = "seeds" in section.model_fields_set
    number, different = (
        (seeds, True) if isinstance(seeds, int) else (len(seeds), len(set(seeds)) == len(seeds))
    )
    if given and not (1 <= number <= MAX_RUNS and different):
        raise ConfigError(
            f"{source}: seeds should be their number, 1 to {MAX_RUNS:,}, or a list of different ones: [0, 1]"
        )
    grid = _grid(source, section.grid)
    entries = {name for entry in section.entries for name in _flat(f"{source}: [[sweep.list]]", entry)}
    layers = {
        "[sweep.grid]": set(grid),
        "[[sweep.list]]": entries,
        "[sweep.search]": set(read_space(source, section.search)),
        "seeds": {SEED} if seeds else set(),
        "suite": {ENV} if section.suite else set(),
        "its own section": set(sweep.fixed),
    }
    # Whichever of two layers won, the other would name runs by values that they do not have.
    for (first, names), (second, others) in itertools.combinations(layers.items(), 2):
        for name in sorted(names & others):
            raise ConfigError(f"{source}: {name} is in {first} and in {second}; leave one out")
    if section.suite:
        suites.load(section.suite)


def _grid(source: str, tables: Mapping[str, Any], prefix: str = "") -> dict[str, Sequence[Any]]:
    """Field to its values; tables lead to fields, `agent.gamma = [0.9, 0.99]`, a list ends the way."""
    found: dict[str, Sequence[Any]] = {}
    for key, value in tables.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            found.update(_grid(source, value, f"{path}."))
        # A field that is itself a list, such as `agent.mlp_units`, is a list of lists here.
        elif isinstance(value, list) and value and "." in path:
            found[canonical(path)] = value
        else:
            raise ConfigError(
                f"{source}: {path} of [sweep.grid] should be a list of values to try: "
                "agent.learning_rate = [1e-3, 3e-4]"
            )
    return found


def _flat(source: str, tables: Mapping[str, Any]) -> Fields:
    fields: Fields = {}
    for section, values in tables.items():
        if not isinstance(values, Mapping):
            raise ConfigError(f"{source}: {section!r} is outside any section; write agent.{section}")
        fields |= {canonical(f"{section}.{name}"): value for name, value in values.items()}
    return fields


def _name(label: str, fields: Fields, hidden: Collection[str]) -> str:
    """The name of a run: what is its own, readable in a shell and in TensorBoard."""
    short = short_names(fields)
    parts = [label] if label else []
    for path, value in fields.items():
        if path in hidden:
            continue
        text = value if isinstance(value, str) else format_value(value)
        text = text.rpartition(":")[2] if path == ENV else text
        text = _plain(text)
        parts.append(text if path == ENV else f"{short[path]}={text}")
    name = ",".join(parts)
    if not name.strip("."):  # it names a directory
        name = "run"
    if len(name.encode()) <= _MAX_NAME_BYTES:
        return name
    # Bytes, since file systems count them; cutting may split a character, which `ignore` leaves out.
    return f"{name.encode()[:60].decode(errors='ignore')}-{_digest(fields)}"


def _plain(text: str) -> str:
    """The text without what a shell or a path would take for something else."""
    return re.sub(r"[^\w.+-]+", "-", text).strip("-")


def _digest(fields: Fields) -> str:
    # Sorted, so that the name stays the same when the order in the file changes.
    text = format_value({name: fields[name] for name in sorted(fields)})
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _explain(source: str, error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in problem["loc"][:1])
    if problem["type"] == "extra_forbidden":
        keys = [info.alias or name for name, info in SweepSection.model_fields.items()]
        near = difflib.get_close_matches(where, keys, n=1, cutoff=0.0)
        return f"{source}: unknown key {where!r} of [sweep]; nearest: {near[0]}"
    message = problem["msg"].removeprefix("Input ")
    return f"{source}: {where} of [sweep]: {message}".replace("\n", " ")
