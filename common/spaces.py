"""What observations and actions are made of, in plain numbers: no environment's library, no network.

A space is a list of leaves, arrays of one kind each, and where they are in a nest of dictionaries and tuples.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

MAX_LEAVES = 256
MAX_NUMBERS = 4096
"""Of one action."""
MAX_CHOICES = 1 << 16
"""Of one number of an action; also the sum over all of them, which is the width of a policy's output."""
MAX_REAL = 1e4
"""Largest real number of an action, in units of half its range."""

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Leaf:
    """One array of a space.

    Attributes:
        path: keys of dictionaries and places in tuples that lead to it; empty where there is no nest.
        shape: of the array; `()` for a number.
        dtype: numpy name, as the environment has it.
        choices: how many values each number may have, in the order of the array; empty for real numbers.
        start: the least value of each number that has choices.
        low: of each real number of an action; None: unbounded.
        high: likewise.
        picture: how the axes of an image in an observation lie, `hw`, `hwc` or `chw`; empty for others.
    """

    path: Path = ()
    shape: tuple[int, ...] = ()
    dtype: str = "int64"
    choices: tuple[int, ...] = ()
    start: tuple[int, ...] = ()
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()
    picture: Literal["", "hw", "hwc", "chw"] = ""

    def __post_init__(self) -> None:
        size = self.size
        if size < 1 or min(self.shape, default=1) < 1:
            raise ValueError(f"an array {list(self.shape)} holds no number")
        if self.choices and (len(self.choices), len(self.start)) != (size, size):
            raise ValueError(f"{len(self.choices)} choices and {len(self.start)} starts for {size} numbers")
        if any(not 1 <= count <= MAX_CHOICES for count in self.choices):
            raise ValueError(f"a number with {max(self.choices):,} values; there may be 1 to {MAX_CHOICES:,}")
        if self.low and (len(self.low), len(self.high)) != (size, size):
            raise ValueError(f"{len(self.low)} lower and {len(self.high)} upper bounds for {size} numbers")
        if np.dtype(self.dtype).kind not in "biuf":
            raise ValueError(f"numbers of dtype {self.dtype}")
        if self.picture and len(self.shape) != len(self.picture):
            raise ValueError(f"a picture {list(self.shape)} with the axes {self.picture}")

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return self.size * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class ActionSpec:
    """What an agent chooses: numbers with a few values each, real numbers, or both.

    To agents an action is one row, of `shape` and `dtype`: first every number with choices, from 0 on, then
    the real ones, of which those with two bounds are from -1 to 1. One number with choices is a plain int.

    Attributes:
        leaves: what the environment takes.
        bins: values to which each real number that has two bounds is restricted; 0: none is.
        bins_ratio: the largest of these values over the smallest, to either side of the middle, on a
            logarithmic scale; 0: they are evenly spaced.
    """

    leaves: tuple[Leaf, ...]
    bins: int = 0
    bins_ratio: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= len(self.leaves) <= MAX_LEAVES:
            raise ValueError(f"{len(self.leaves)} arrays in an action; there may be 1 to {MAX_LEAVES}")
        if sum(leaf.size for leaf in self.leaves) > MAX_NUMBERS:
            raise ValueError(f"more than {MAX_NUMBERS:,} numbers in an action")
        if any(not leaf.choices and not leaf.low for leaf in self.leaves):
            raise ValueError("real numbers without bounds, which may be None")
        if self.bins and not 2 <= self.bins <= MAX_CHOICES:
            raise ValueError("bins should be at least 2")
        if self.bins_ratio and (self.bins % 2 == 0 or self.bins_ratio <= 1):
            raise ValueError("a logarithmic scale needs an odd number of bins, and a ratio above 1")
        if sum(self.choices) > MAX_CHOICES:
            raise ValueError(f"{sum(self.choices):,} values to choose from; there may be {MAX_CHOICES:,}")

    @staticmethod
    def discrete(count: int) -> ActionSpec:
        """One number from 0 to `count - 1`."""
        return ActionSpec((Leaf(choices=(count,), start=(0,)),))

    # ------------------------------------------------------------- as agents see it

    @cached_property
    def choices(self) -> tuple[int, ...]:
        """How many values each number with choices has, in the order of a row."""
        return tuple(
            count
            for leaf in self.leaves
            for count in (leaf.choices or ((self.bins,) * leaf.size if self.binned(leaf) else ()))
        )

    @cached_property
    def bounded(self) -> tuple[bool, ...]:
        """Whether each real number has two bounds, in the order of a row."""
        return tuple(
            each
            for leaf in self.leaves
            if not leaf.choices and not self.binned(leaf)
            for each in _bounded(leaf)
        )

    def binned(self, leaf: Leaf) -> bool:
        """Whether the numbers of this leaf are choices by `bins`."""
        return self.bins > 0 and not leaf.choices and all(_bounded(leaf))

    @property
    def reals(self) -> int:
        """How many real numbers a row has."""
        return len(self.bounded)

    @cached_property
    def count(self) -> int:
        """How many actions there are where one is one choice; 0 where it is more, or something else."""
        return self.choices[0] if len(self.choices) == 1 and not self.reals else 0

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Of a row."""
        return () if self.count else (len(self.choices) + self.reals,)

    @cached_property
    def dtype(self) -> np.dtype:
        """Of a row: int64 without real numbers, else float32, which has every choice exactly."""
        return np.dtype(np.float32 if self.reals else np.int64)

    @property
    def stored_dtype(self) -> str:
        """Of a row in a chunk."""
        return "float32" if self.reals else "int32"

    @property
    def limits(self) -> tuple[float, float]:
        """The least and the largest number of a row."""
        most = max(self.choices, default=1) - 1
        return (-MAX_REAL, max(MAX_REAL, most)) if self.reals else (0, most)

    @cached_property
    def encoded_size(self) -> int:
        """Numbers in a row as a network is fed it: one-hot choices, and reals."""
        return sum(self.choices) + self.reals

    def zeros(self, slots: int) -> np.ndarray:
        """Rows `[S, *shape]` of zeros."""
        return np.zeros((slots, *self.shape), self.dtype)

    def random(self, rng: np.random.Generator, slots: int) -> np.ndarray:
        """Rows `[S, *shape]`, any action alike; unbounded numbers are drawn from a standard normal."""
        if self.count:
            return rng.integers(self.count, size=slots)
        chosen = rng.integers(np.array(self.choices, np.int64), size=(slots, len(self.choices)))
        reals = rng.uniform(-1.0, 1.0, (slots, self.reals))
        unbounded = ~np.array(self.bounded, bool)
        reals[:, unbounded] = rng.normal(size=(slots, int(unbounded.sum())))
        return np.concatenate([chosen, reals], axis=1).astype(self.dtype)

    def fault(self, rows: np.ndarray, slots: int) -> str:
        """Say what is wrong with rows that should be the actions of `slots` slots; empty if nothing is."""
        if rows.shape != (slots, *self.shape) or rows.dtype != self.dtype:
            return f"{rows.dtype}{list(rows.shape)} instead of {self.dtype}{[slots, *self.shape]}"
        chosen = rows if self.count else rows[:, : len(self.choices)]
        if chosen.size and (chosen.min() < 0 or (chosen >= np.array(self.choices)).any()):
            return "a choice that is not there"
        return "" if np.isfinite(rows).all() else "numbers that are not finite"

    # ----------------------------------------------------- as the environment sees it

    def native(self, row: int | Sequence[float] | np.ndarray) -> Any:
        """The environment's own action for a row: its nest, its dtypes, its units."""
        if self._plain:
            return self._plain[0] + int(row)  # type: ignore[arg-type]
        return self.natives(np.atleast_1d(np.asarray(row, self.dtype))[None])[0]

    def natives(self, rows: np.ndarray) -> Any:
        """The environment's own actions for rows `[S, ...]`: an array `[S, ...]`, maybe `rows`, or a list."""
        if self._plain:
            return self._plain[0] + rows if self._plain[0] else rows
        if len(self.leaves) == 1 and not self.leaves[0].path:
            return self._values(self.leaves[0], rows)
        numbers = rows.reshape(len(rows), -1)
        chosen, reals = 0, len(self.choices)
        columns = []
        for leaf in self.leaves:
            if leaf.choices or self.binned(leaf):
                part, chosen = numbers[:, chosen : chosen + leaf.size], chosen + leaf.size
            else:
                part, reals = numbers[:, reals : reals + leaf.size], reals + leaf.size
            columns.append(self._values(leaf, part))
        paths = [leaf.path for leaf in self.leaves]
        return [nested(paths, values) for values in zip(*columns, strict=True)]

    def rows(self, natives: np.ndarray) -> np.ndarray:
        """Rows `[T, *shape]` for the environment's own actions `[T, ...]`: the inverse of `natives`.

        Beyond two bounds the nearest action counts, and of bins the nearest. Raises ValueError for an action
        of several arrays, and for what is no action.
        """
        leaf = self.leaves[0]
        if len(self.leaves) > 1 or leaf.path:
            raise ValueError("actions of several parts")
        if natives[:1].size not in (0, leaf.size):
            raise ValueError(f"actions {list(natives.shape[1:])} instead of {list(leaf.shape)}")
        flat = natives.reshape(len(natives), leaf.size)
        if not np.isfinite(flat).all():
            raise ValueError("actions that are not finite")
        if leaf.choices:
            if not np.array_equal(flat, np.rint(flat)):
                raise ValueError("choices that are no whole numbers")
            found = flat.astype(np.int64) - np.array(leaf.start, np.int64)
        else:
            *_, middle, half = _limits_of(leaf).reshape(4, -1)
            found = (flat - middle) / np.where(half > 0, half, 1)
            bounded = np.fromiter(_bounded(leaf), bool, leaf.size)
            found[:, bounded] = found[:, bounded].clip(-1.0, 1.0)
            if self.binned(leaf):
                found = np.abs(found[..., None] - self._grid).argmin(-1)
        rows = found.astype(self.dtype).reshape(len(natives), *self.shape)
        if fault := self.fault(rows, len(natives)):
            raise ValueError(fault)
        return rows

    def __str__(self) -> str:
        if self.count:
            return str(self.count)
        parts = []
        if self.choices:
            least, most = min(self.choices), max(self.choices)
            many = len(self.choices)
            of = f"{least} to {most}" if least < most else f"{most}"
            parts.append(f"{many} choices of {of}" if many > 1 else f"a choice of {of}")
        if self.reals:
            parts.append(f"{self.reals} real numbers" if self.reals > 1 else "a real number")
        return " and ".join(parts)

    @cached_property
    def _plain(self) -> tuple[int, ...]:
        """The first action of a space that is one Discrete; empty for others."""
        leaf = self.leaves[0]
        return leaf.start if self.count and leaf.choices and not leaf.path and not leaf.shape else ()

    def _values(self, leaf: Leaf, part: np.ndarray) -> np.ndarray | list[np.ndarray]:
        """An array, or a number with choices, for each row of the leaf's columns, `leaf.size` numbers."""
        if leaf.choices:
            whole = (part.astype(np.int64) + leaf.start).astype(leaf.dtype)
            return whole.reshape(len(part), *leaf.shape)
        values = self._grid[part.astype(np.int64)] if self.bins and self.binned(leaf) else part
        limits = self._limits.get(leaf.path)
        if limits is None or len(limits[0]) != len(part):
            limits = self._limits[leaf.path] = tuple(np.repeat(_limits_of(leaf)[:, None], len(part), axis=1))
        low, high, middle, half = limits
        # `np.clip` costs more than both for a few numbers.
        values = np.minimum(np.maximum(half * values.reshape(low.shape) + middle, low), high)
        dtype = np.dtype(leaf.dtype)
        if values.dtype != dtype:
            # Rounded, for `astype` cuts, and the largest whole number would hardly ever be reached.
            values = (values if dtype.kind == "f" else np.rint(values)).astype(dtype)
        # Rows without a shape would be numbers, and an environment expects arrays.
        return values if leaf.shape else [values[row, ...] for row in range(len(part))]

    @cached_property
    def _limits(self) -> dict[Path, tuple[np.ndarray, ...]]:
        """`_limits_of` leaves of real numbers, for each row that they were last needed for.

        numpy takes several times as long where it is to use one row for all.
        """
        return {}

    @cached_property
    def _grid(self) -> np.ndarray:
        """The values from -1 to 1 that a number with bins may have."""
        if not self.bins_ratio:
            return np.linspace(-1.0, 1.0, self.bins)
        # With three bins there is one value on each side, its largest.
        side = np.geomspace(1.0 / self.bins_ratio, 1.0, self.bins // 2) if self.bins > 3 else np.ones(1)
        return np.concatenate([-side[::-1], [0.0], side])


def _limits_of(leaf: Leaf) -> np.ndarray:
    """Lower and upper bounds, middle and half of the range between two, else 0 and 1: `[4, *leaf.shape]`."""
    columns = [
        (-np.inf if low is None else low, np.inf if high is None else high, 0.0, 1.0)
        if low is None or high is None
        # Halved before they are added: the range of float64's extremes has no finite width.
        else (low, high, low / 2 + high / 2, high / 2 - low / 2)
        for low, high in zip(leaf.low, leaf.high, strict=True)
    ]
    return np.array(columns, np.result_type(leaf.dtype, np.float32)).T.reshape(4, *leaf.shape)


def _bounded(leaf: Leaf) -> Iterator[bool]:
    return (low is not None and high is not None for low, high in zip(leaf.low, leaf.high, strict=True))


def nested(paths: Sequence[Path], values: Sequence[Any]) -> Any:
    """Values at these paths, as dictionaries (of text keys) and tuples (of numbers)."""
    if len(paths) == 1 and not paths[0]:
        return values[0]
    groups: dict[str | int, tuple[list[Path], list[Any]]] = {}
    for path, value in zip(paths, values, strict=True):
        inner = groups.setdefault(path[0], ([], []))
        inner[0].append(path[1:])
        inner[1].append(value)
    built = {key: nested(*inner) for key, inner in groups.items()}
    return tuple(built.values()) if isinstance(next(iter(built)), int) else built


def runs(choices: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbours that have the same number of values, together: how many, and the values of each."""
    return [(len(list(group)), count) for count, group in itertools.groupby(choices)]


def packed(leaves: Sequence[Leaf], nest: Any, scales: Sequence[float | None] = ()) -> np.ndarray:
    """The arrays of a nested observation as uint8 `[bytes]`, one after the other, each in its own dtype.

    `scales`: of each leaf, what its floats are multiplied with to be pixels from 0 to 255; None: it has none.
    """
    parts = []
    for leaf, scale in itertools.zip_longest(leaves, scales):
        value = nest
        for key in leaf.path:
            value = value[key]
        value, kind = np.asarray(value), np.dtype(leaf.dtype).kind
        # What becomes infinite is looked for where it comes from.
        with np.errstate(over="ignore", invalid="ignore"):
            if scale is not None:
                value = np.rint(np.clip(value * scale, 0, 255))
            elif value.dtype.kind == "f" and kind != "f" and (leaf.picture or (value % 1).any()):
                pixels = ": pixels from 0 to 255" if leaf.picture else ""
                raise TypeError(f"{value.dtype} instead of {leaf.dtype}{pixels} at {list(leaf.path)}")
            array = np.ascontiguousarray(value, leaf.dtype)
        if array.size != leaf.size:
            raise ValueError(f"{list(array.shape)} instead of {list(leaf.shape)} at {list(leaf.path)}")
        parts.append(array.reshape(-1).view(np.uint8))
    return np.concatenate(parts)


def unpacked(leaves: Sequence[Leaf], row: np.ndarray) -> Iterator[np.ndarray]:
    """The arrays of what `packed` gave, as views."""
    begin = 0
    for leaf in leaves:
        yield np.frombuffer(row, leaf.dtype, leaf.size, begin).reshape(leaf.shape)
        begin += leaf.nbytes
