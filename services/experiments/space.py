"""`[sweep.search]`: from where each field's values are taken, draws at random, and steps from a value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from troupe.common.config.names import canonical
from troupe.common.errors import ConfigError

_DIGITS = 4
# Fixed, not the run's seed: the same file means the same trials on every machine, and `--trials` only adds to
# them.
_SEED = 0x5EA4C4
_FACTORS = (0.8, 1.25)
# The largest bound: whole numbers are drawn as 64-bit ones, and no field needs a larger one.
_MAX_BOUND = 1e18


@dataclass(frozen=True)
class Choice:
    """One of these values."""

    values: Sequence[Any]


@dataclass(frozen=True)
class Range:
    """A number between two bounds, both included; whole where they are; `log`: on a logarithmic scale."""

    low: float
    high: float
    log: bool

    @property
    def whole(self) -> bool:
        """Whether only whole numbers are meant."""
        return isinstance(self.low, int) and isinstance(self.high, int)


Space = Mapping[str, Choice | Range]


def read_space(source: str, tables: Mapping[str, Any], prefix: str = "") -> dict[str, Choice | Range]:
    """Field to where its values are from: a list, or `{low = 1e-5, high = 1e-3, log = true}`.

    Raises:
        ConfigError: names the field that is neither.
    """
    found: dict[str, Choice | Range] = {}
    for key, value in tables.items():
        path = f"{prefix}{key}"
        if isinstance(value, list) and value and prefix:
            found[canonical(path)] = Choice(value)
        elif isinstance(value, Mapping) and prefix and {"low", "high"} & set(value):
            found[canonical(path)] = _range(f"{source}: {path} of [sweep.search]", value)
        elif isinstance(value, Mapping) and value:
            found.update(read_space(source, value, f"{path}."))
        else:
            raise ConfigError(
                f"{source}: {path} of [sweep.search] should be a list of values, or "
                "{low = 1e-5, high = 1e-3, log = true}"
            )
    return found


def draw(space: Space, trial: int) -> dict[str, Any]:
    """The values of a trial, drawn at random; the same for every call with the same number."""
    return {
        # A generator for each trial and field: more trials, or another range of one field, leave all other
        # values as they were.
        name: _drawn(place, np.random.default_rng([_SEED, trial, index]))
        for index, (name, place) in enumerate(space.items())
    }


def explored(
    space: Space, values: Mapping[str, Any], rng: np.random.Generator, *, again: float
) -> dict[str, Any]:
    """Other values near these, within their bounds.

    Args:
        space: the fields.
        values: of each of them.
        rng: draws.
        again: probability with which a value is drawn again, from all of its place. Otherwise a number of a
            range is multiplied by 0.8 or 1.25, and one of a list stays as it is.
    """
    found = {}
    for name, place in space.items():
        # Each draw is made in any case: whether one field is drawn again leaves the others' draws as they
        # were.
        anew, factor, fresh = rng.random() < again, _FACTORS[int(rng.integers(2))], _drawn(place, rng)
        found[name] = fresh if anew else _multiplied(place, values[name], factor)
    return found


def ends(space: Space) -> list[dict[str, Any]]:
    """Settings that have every extreme value once, to be checked before anything is tried."""
    values = [
        [place.low, place.high] if isinstance(place, Range) else place.values for place in space.values()
    ]
    # Ends side by side, not all combinations, which would be 2^n. What fails only for two values together is
    # found when that run starts.
    longest = max(map(len, values), default=0)
    return [
        {name: options[min(index, len(options) - 1)] for name, options in zip(space, values, strict=True)}
        for index in range(longest)
    ]


def readable(place: Range, value: float) -> float:
    """`value` with as many digits as one reads, within the bounds."""
    # Rounding to four digits may step over a bound.
    return min(place.high, max(place.low, float(f"{value:.{_DIGITS}g}")))


def _drawn(place: Choice | Range, rng: np.random.Generator) -> Any:
    if isinstance(place, Choice):
        return place.values[int(rng.integers(len(place.values)))]
    if place.whole and not place.log:
        return int(rng.integers(int(place.low), int(place.high) + 1))
    if place.log:
        # Whole numbers too: each gets the share of the logarithmic scale that rounds to it.
        width = 0.5 if place.whole else 0.0
        low, high = math.log(place.low - width), math.log(place.high + width)
        value = math.exp(rng.uniform(low, high))
    else:
        value = rng.uniform(place.low, place.high)
    return min(place.high, max(place.low, round(value))) if place.whole else readable(place, value)


def _multiplied(place: Choice | Range, value: Any, factor: float) -> Any:
    if isinstance(place, Choice):
        return value
    if not place.whole:
        return readable(place, value * factor)
    moved = round(value * factor)
    # 2 times 1.25 rounds to 2 again, and would never become 3.
    if moved == value:
        moved += 1 if factor > 1 else -1
    return min(place.high, max(place.low, moved))


def _range(where: str, table: Mapping[str, Any]) -> Range:
    unknown = set(table) - {"low", "high", "log"}
    bounds = [table.get(name) for name in ("low", "high")]
    log = table.get("log", False)
    numbers = [value for value in bounds if isinstance(value, int | float) and not isinstance(value, bool)]
    if unknown or len(numbers) < 2 or not isinstance(log, bool):
        raise ConfigError(f"{where} should have two numbers, low and high, and log = true or not")
    low, high = numbers
    if not (abs(low) <= _MAX_BOUND and abs(high) <= _MAX_BOUND):
        raise ConfigError(f"{where}: low and high should be finite, from -{_MAX_BOUND:g} to {_MAX_BOUND:g}")
    if low >= high:
        raise ConfigError(f"{where}: low ({low:g}) should be less than high ({high:g})")
    if log and low <= 0:
        raise ConfigError(f"{where}: low ({low:g}) should be above 0 where log = true")
    return Range(low, high, log)
