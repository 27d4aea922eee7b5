"""Which items are sampled, and which go when a table is full: the same choice, so one interface for both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from troupe.services.replay.storage.sumtree import SumTree, stratified

Slots = NDArray[np.int64]
Chosen = tuple[Slots, NDArray[np.float64]]

NO_SLOTS: Slots = np.empty(0, np.int64)

TINY_PRIORITY = 1e-12
"""With a negative exponent, smaller priorities weigh as much as this one; zero would weigh infinitely."""


@dataclass(frozen=True)
class TableView:
    """What a selector may look at of its table, apart from what it is told.

    Attributes:
        items: `[slots]`, the table's records (`table.ITEM`), as they are now.
        samples: how many samples the table has given in its life.
        features: the field `features` of items at `slots [n]`, `[n, window, ...]`.
    """

    items: NDArray
    samples: Callable[[], int]
    features: Callable[[Slots], NDArray]


class Selector(ABC):
    """Chooses among the slots of a table. Slots are inserted in the order of their items' age.

    Attributes:
        ordered: the choice is a matter of order, not of chance: what is selected is all different, and the
            same until something changes.
    """

    ordered = False

    @property
    @abstractmethod
    def total(self) -> float:
        """Sum of all weights; the number of slots where they have none."""

    @abstractmethod
    def insert(self, slots: Slots, priorities: NDArray[np.float64]) -> None:
        """Add `slots [n]`, none of them present, newest last."""

    @abstractmethod
    def delete(self, slots: Slots) -> None:
        """Take out `slots [n]`, all of them present and different."""

    def update(self, slots: Slots, priorities: NDArray[np.float64]) -> None:  # noqa: B027
        """Change the priorities of `slots [n]`, all present; where one is repeated the last counts."""

    @abstractmethod
    def select(self, count: int, rng: np.random.Generator) -> Chosen:
        """`count` slots and the probability of each; fewer (or none) where there are not enough."""

    def distinct(self, count: int, rng: np.random.Generator) -> Slots:
        """`count` different slots, about to be deleted; fewer where there are not enough."""
        return self.select(count, rng)[0]


class Prioritized(Selector):
    """Proportional to `priority ** exponent`, one draw from each of `count` equal parts of the whole.

    A priority of zero is never selected if the exponent is zero or more.
    """

    def __init__(self, capacity: int, exponent: float) -> None:
        self._tree = SumTree(capacity)
        self._exponent = exponent

    @property
    def total(self) -> float:
        """See `Selector`."""
        return self._tree.total

    def insert(self, slots: Slots, priorities: NDArray[np.float64]) -> None:
        """See `Selector`."""
        self._tree.set(slots, self._weights(priorities))

    def delete(self, slots: Slots) -> None:
        """See `Selector`."""
        self._tree.set(slots, 0.0)

    def update(self, slots: Slots, priorities: NDArray[np.float64]) -> None:
        """See `Selector`."""
        self._tree.set(slots, self._weights(priorities))

    def select(self, count: int, rng: np.random.Generator) -> Chosen:
        """See `Selector`."""
        total = self._tree.total
        if not total > 0:
            return NO_SLOTS, np.empty(0)
        slots = self._tree.sample(stratified(rng, count))
        return slots, self._tree[slots] / total

    def distinct(self, count: int, rng: np.random.Generator) -> Slots:
        """See `Selector`."""
        found = [NO_SLOTS]
        while count > 0 and self._tree.total > 0:
            slots = np.unique(self._tree.sample(rng.random(count)))
            self._tree.set(slots, 0.0)  # they are deleted anyway, and now they are not drawn again
            found.append(slots)
            count -= len(slots)
        return np.concatenate(found)

    def _weights(self, priorities: NDArray[np.float64]) -> NDArray[np.float64]:
        if self._exponent == 1.0:
            return priorities
        if self._exponent < 0:
            return np.power(np.maximum(priorities, TINY_PRIORITY), self._exponent)
        # 0 ** 0 is 1 in floating point, but an item of priority zero is never sampled.
        return np.where(priorities > 0, np.power(priorities, self._exponent), 0.0)


class Uniform(Selector):
    """Each with the same probability, whatever its priority."""

    def __init__(self, capacity: int) -> None:
        self._slots = np.zeros(capacity, np.int64)  # those present, without gaps, in no order
        self._position = np.zeros(capacity, np.int64)
        self._size = 0

    @property
    def total(self) -> float:
        """See `Selector`."""
        return float(self._size)

    def insert(self, slots: Slots, priorities: NDArray[np.float64]) -> None:
        """See `Selector`."""
        end = self._size + len(slots)
        self._slots[self._size : end] = slots
        self._position[slots] = np.arange(self._size, end)
        self._size = end

    def delete(self, slots: Slots) -> None:
        """See `Selector`."""
        size = self._size - len(slots)
        positions = self._position[slots]
        # What stands behind the new end and stays moves into the holes before it.
        stays = np.ones(len(slots), bool)
        stays[positions[positions >= size] - size] = False
        holes = positions[positions < size]
        movers = self._slots[size : self._size][stays]
        self._slots[holes] = movers
        self._position[movers] = holes
        self._size = size

    def select(self, count: int, rng: np.random.Generator) -> Chosen:
        """See `Selector`."""
        if not self._size:
            return NO_SLOTS, np.empty(0)
        slots = self._slots[rng.integers(0, self._size, count)]
        return slots, np.full(count, 1.0 / self._size)

    def distinct(self, count: int, rng: np.random.Generator) -> Slots:
        """See `Selector`."""
        return self._slots[rng.choice(self._size, min(count, self._size), replace=False)]


class _Arrival(Selector):
    """Slots in the order in which they came. Subclasses take them from one end or the other."""

    ordered = True

    def __init__(self, capacity: int) -> None:
        # Twice the capacity: at least half of a full queue is holes, so closing them costs each deletion
        # little. A power of two: positions wrap by a mask.
        size = 1 << max(int(2 * capacity - 1).bit_length(), 1)
        self._queue = np.zeros(size, np.int64)
        self._mask = size - 1
        # Position of each slot in the queue, -1 if it is not there: deleting leaves a hole.
        self._position = np.full(capacity, -1, np.int64)
        self._head = self._tail = 0
        self._size = 0

    @property
    def total(self) -> float:
        """See `Selector`."""
        return float(self._size)

    def insert(self, slots: Slots, priorities: NDArray[np.float64]) -> None:
        """See `Selector`."""
        if self._head - self._tail + len(slots) > len(self._queue):
            self._close_holes()
        positions = np.arange(self._head, self._head + len(slots))
        self._queue[positions & self._mask] = slots
        self._position[slots] = positions
        self._head += len(slots)
        self._size += len(slots)

    def delete(self, slots: Slots) -> None:
        """See `Selector`."""
        self._position[slots] = -1
        self._size -= len(slots)

    def _alive(self, positions: NDArray[np.int64]) -> tuple[Slots, NDArray[np.bool_]]:
        slots = self._queue[positions & self._mask]
        return slots, self._position[slots] == positions

    def _close_holes(self) -> None:
        """Move what is alive to the start. Half of the queue is holes by then: cheap on average."""
        slots, alive = self._alive(np.arange(self._tail, self._head))
        slots = slots[alive]
        self._tail, self._head = 0, len(slots)
        self._queue[: len(slots)] = slots
        self._position[slots] = np.arange(len(slots))

    def _chosen(self, found: list[Slots]) -> Chosen:
        slots = np.concatenate(found) if found else NO_SLOTS
        return slots, np.full(len(slots), 1.0 / max(self._size, 1))


class Fifo(_Arrival):
    """The oldest first."""

    def select(self, count: int, rng: np.random.Generator) -> Chosen:
        """See `Selector`."""
        found: list[Slots] = []
        missing, at, leading_holes = count, self._tail, True
        while missing > 0 and at < self._head:
            # Many at a time, however few are wanted: there may be long runs of holes.
            positions = np.arange(at, min(at + max(missing, 256), self._head))
            slots, alive = self._alive(positions)
            if leading_holes:  # nobody needs to look at them again
                first = int(np.argmax(alive)) if alive.any() else len(alive)
                self._tail += first
                leading_holes = first == len(alive)
            slots = slots[alive][:missing]
            found.append(slots)
            missing -= len(slots)
            at = int(positions[-1]) + 1
        return self._chosen(found)


class Lifo(_Arrival):
    """The newest first."""

    def select(self, count: int, rng: np.random.Generator) -> Chosen:
        """See `Selector`."""
        found: list[Slots] = []
        missing, end, leading_holes = count, self._head, True
        while missing > 0 and end > self._tail:
            positions = np.arange(end - 1, max(end - max(missing, 256), self._tail) - 1, -1)
            slots, alive = self._alive(positions)
            if leading_holes:
                first = int(np.argmax(alive)) if alive.any() else len(alive)
                self._head -= first
                leading_holes = first == len(alive)
            slots = slots[alive][:missing]
            found.append(slots)
            missing -= len(slots)
            end = int(positions[-1])
        return self._chosen(found)


class Heap(Selector):
    """The largest priorities first, or the smallest. Equal ones come in no particular order.

    Like the sum tree it has two levels: costs in rows, and the least cost of each row. The `k` cheapest
    slots are in the `k` rows of the cheapest minima, so a batch is found in two partial sorts.
    """

    ordered = True
    WIDTH = 64

    def __init__(self, capacity: int, *, largest: bool) -> None:
        rows = -(-capacity // self.WIDTH)
        self._costs = np.full((rows, self.WIDTH), np.inf)  # infinite where there is no slot
        self._flat = self._costs.reshape(-1)
        self._least = np.full(rows, np.inf)
        self._sign = -1.0 if largest else 1.0
        self._size = 0

    @property
    def total(self) -> float:
        """See `Selector`."""
        return float(self._size)

    def insert(self, slots: Slots, priorities: NDArray[np.float64]) -> None:
        """See `Selector`."""
        self._size += len(slots)
        self._set(slots, priorities * self._sign)

    def delete(self, slots: Slots) -> None:
        """See `Selector`."""
        self._size -= len(slots)
        self._set(slots, np.inf)

    def update(self, slots: Slots, priorities: NDArray[np.float64]) -> None:
        """See `Selector`."""
        self._set(slots, priorities * self._sign)

    def select(self, count: int, rng: np.random.Generator) -> Chosen:
        """See `Selector`."""
        count = min(count, self._size)
        if not count:
            return NO_SLOTS, np.empty(0)
        rows = _smallest(self._least, count)
        costs = self._costs[rows].reshape(-1)
        best = _smallest(costs, count)
        best = best[np.argsort(costs[best], kind="stable")]
        slots = rows[best // self.WIDTH] * self.WIDTH + best % self.WIDTH
        return slots, np.full(count, 1.0 / self._size)

    def _set(self, slots: Slots, costs: NDArray[np.float64] | float) -> None:
        self._flat[slots] = costs
        rows = np.unique(slots // self.WIDTH)
        self._least[rows] = self._costs[rows].min(axis=1)


def _smallest(values: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Where the `count` smallest of `values` are, in no order."""
    if count >= len(values):
        return np.arange(len(values))
    return np.argpartition(values, count - 1)[:count]
