"""Population-based training: which runs go on as copies of better ones, and with which values.

Jaderberg et al. 2017 (https://arxiv.org/abs/1711.09846), with truncation selection: after each interval of
steps, every run of the worst quarter takes over a run of the best quarter, drawn at random (exploit), and
goes on with other values than that has (explore). Runs are compared when all have made the interval, not
whenever one has: scores are then of the same steps, also where fewer runs than all fit at a time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from troupe.common.config import Config
from troupe.common.config.fields import role_of
from troupe.common.errors import ConfigError
from troupe.services.experiments.space import Space, explored

_QUARTER = 0.25
_AGAIN = 0.25
"""Probability with which a field of a copy is drawn again instead of multiplied."""
# Fixed: the same scores mean the same copies, on every machine and after every interruption.
_SEED = 0x9B7
# What a run learns with. Tunable fields of other sections make runs comparable, or are of the machine:
# processes, devices, periods, paths.
_SECTIONS = ("agent", "replay")


def check(source: str, space: Space, config: Config, members: int, interval_steps: int) -> None:
    """Refuse a population that could not be.

    Raises:
        ConfigError: names the field that cannot be explored, or what is missing.
    """
    if members < 2:
        raise ConfigError(f"{source}: a population needs at least two runs: trials = 2")
    for name in space:
        section, _, field = name.partition(".")
        role = role_of(type(getattr(config, section)), field.partition(".")[0])  # env.kwargs.X is of a table
        if role != "tunable" or section not in _SECTIONS:
            why = f"it is of [{section}]" if role == "tunable" else f"it is {role}"
            raise ConfigError(
                f"{source}: a population cannot explore {name} ({why}), only tunable fields of "
                f"{' and '.join(f'[{each}]' for each in _SECTIONS)}: take it out of [sweep.search]"
            )
    if interval_steps >= config.run.total_steps:
        raise ConfigError(
            f"{source}: the population's interval is {interval_steps:,} steps, and runs have "
            f"{config.run.total_steps:,}: lower interval_steps"
        )


@dataclass
class Member:
    """One run of the population.

    Attributes:
        values: of the fields that are explored, as it has them now.
        since: steps after which a value tells of this interval.
        score: what it is worth at the end of the interval; None: it is not there, or has failed.
        error: why it has failed in this interval.
    """

    values: dict[str, Any]
    since: int = 0
    score: float | None = None
    error: str = ""

    @property
    def is_there(self) -> bool:
        """Whether it has made this interval, or never will."""
        return self.score is not None or bool(self.error)


@dataclass
class Copy:
    """A run that goes on as another.

    Attributes:
        source: name of the other.
        values: with which it goes on.
        checkpoint: of the other, that it took; empty: not yet.
    """

    source: str
    values: dict[str, Any]
    checkpoint: str = ""


@dataclass
class Generation:
    """The end of an interval.

    Attributes:
        steps: that every run was to have made.
        scores: by run; None for one that has failed.
        errors: why, of those that have.
        copies: by the run that goes on as another.
    """

    steps: int
    scores: dict[str, float | None]
    errors: dict[str, str]
    copies: dict[str, Copy]

    @property
    def is_open(self) -> bool:
        """Whether a copy is still to be made."""
        return not all(copy.checkpoint for copy in self.copies.values())


class Population:
    """What each run was worth after each interval, and what followed. Makes no copies itself.

    Args:
        space: the fields that are explored.
        initial: for each run, their values at the beginning.
        interval_steps: after so many steps each, runs are compared.
    """

    def __init__(self, space: Space, initial: Mapping[str, Mapping[str, Any]], interval_steps: int) -> None:
        self._space, self.interval_steps = space, interval_steps
        self.initial = {name: dict(values) for name, values in initial.items()}
        self.members = {name: Member(dict(values)) for name, values in initial.items()}
        self.generations: list[Generation] = []

    @property
    def boundary(self) -> int:
        """The steps at which this interval ends."""
        return self.interval_steps * (len(self.generations) + 1)

    @property
    def open(self) -> Generation | None:
        """The end of an interval of which copies are still to be made; no run goes on before they are."""
        last = self.generations[-1] if self.generations else None
        return last if last is not None and last.is_open else None

    def is_due(self, complete: Collection[str] = ()) -> bool:
        """Whether all have made the interval, and one that has steps left has not failed."""
        left = [each for name, each in self.members.items() if name not in complete]
        return all(each.is_there for each in self.members.values()) and any(
            each.score is not None for each in left
        )

    def select(self, complete: Collection[str] = ()) -> Generation:
        """End the interval: decide who goes on as whom. Their values change now, and nothing else.

        Args:
            complete: runs that have made all their steps, as one can before it is evaluated: they stay what
                they are, and a copy of one would have nothing left to train.
        """
        # Of two alike the one that was planned first, since the sort is stable.
        order = sorted(
            (name for name in self.members if name not in complete),
            key=lambda name: -_worth(self.members[name].score),
        )
        quarter = max(1, int(_QUARTER * len(order)))
        failed = [name for name in order if self.members[name].score is None]
        worst = order[-max(quarter, len(failed)) :]
        best = [name for name in order[:quarter] if name not in worst]
        if not best:  # one alone goes on
            worst = []
        copies = {}
        for name in worst:
            number = list(self.members).index(name)
            rng = np.random.default_rng([_SEED, len(self.generations), number])
            source = best[int(rng.integers(len(best)))]
            values = explored(self._space, self.members[source].values, rng, again=_AGAIN)
            copies[name] = Copy(source, values)
        ended = Generation(
            self.boundary,
            {name: each.score for name, each in self.members.items()},
            {name: each.error for name, each in self.members.items() if each.error},
            copies,
        )
        self.generations.append(ended)
        for name, copy in copies.items():
            self.members[name].values = dict(copy.values)
        return ended

    def begin(self, since: Mapping[str, int]) -> None:
        """Begin the next interval, where each run has so many steps."""
        for name, member in self.members.items():
            member.since, member.score, member.error = since[name], None, ""

    def ancestors(self, name: str) -> list[tuple[int, str, dict[str, Any]]]:
        """Where the network of a run comes from: from how many steps on, in which run, with which values."""
        found = []
        for index in reversed(range(len(self.generations))):
            copy = self.generations[index].copies.get(name)
            if copy is not None:
                found.append((self.generations[index].steps, name, copy.values))
                # Its source had been copied into by nobody then: only the worst are.
                name = copy.source
        return [(0, name, self.initial[name]), *reversed(found)]

    def record(self) -> dict[str, Any]:
        """Everything, for `restore`."""
        return {
            "interval_steps": self.interval_steps,
            "initial": self.initial,
            "members": {name: asdict(member) for name, member in self.members.items()},
            "generations": [asdict(generation) for generation in self.generations],
        }

    def restore(self, record: Mapping[str, Any]) -> None:
        """Take up what an earlier call has recorded.

        Raises:
            ConfigError: it was another population.
        """
        was, fields = record["initial"], {name for each in record["initial"].values() for name in each}
        if (
            record["interval_steps"] != self.interval_steps
            or list(was) != list(self.members)
            or fields != set(self._space)
        ):
            raise ConfigError(
                f"the sweep was started with a population of {len(was)} runs that explore "
                f"{', '.join(fields)} "
                f"every {record['interval_steps']:,} steps: continue that one, or choose another --dir"
            )
        self.initial = was
        self.members = {name: Member(**told) for name, told in record["members"].items()}
        self.generations = [generation_of(told) for told in record["generations"]]


def generation_of(record: Mapping[str, Any]) -> Generation:
    """A generation of its record."""
    copies = {name: Copy(**told) for name, told in record["copies"].items()}
    return Generation(record["steps"], record["scores"], record["errors"], copies)


def copies_in_words(generations: Iterable[Generation]) -> dict[str, str]:
    """By run: as which others it went on, and at how many steps."""
    found: dict[str, list[str]] = {}
    for generation in generations:
        for name, copy in generation.copies.items():
            found.setdefault(name, []).append(f"{copy.source} at {generation.steps:,} steps")
    return {name: f"goes on as {', '.join(told)}" for name, told in found.items()}


def _worth(score: float | None) -> float:
    return -math.inf if score is None else score
