"""Which items are sampled, and which go when a table is full: the same choice, so one interface for both."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from common.data.sumtree import SumTree, stratified

Slots = NDArray[np.int64]


class Selector(ABC):
    """Chooses among the slots of a table. Slots are inserted in the order of their items' age."""

    @property
    def total(self) -> float:
        """Sum of all weights, where the selector has weights."""
        return 0.0

    @abstractmethod
    def insert(self, slots: Slots, priorities: NDArray[np.float64]) -> None:
        """Add ``slots [n]``, none of them present, newest last."""

    @abstractmethod
    def delete(self, slots: Slots) -> None:
        """Take out ``slots [n]``, all of them present."""

    def update(self, slots: Slots, priorities: NDArray[np.float64]) -> None:  # noqa: B027
        """Change the priorities of ``slots [n]``, all present; where one is repeated the last counts."""

    @abstractmethod
    def select(self, count: int, rng: np.random.Generator) -> tuple[Slots, NDArray[np.float64]]:
        """``count`` slots and the probability of each; fewer (or none) where there are not enough."""


class Prioritized(Selector):
    """Proportional to ``priority ** exponent``, one draw from each of ``count`` equal parts of the whole."""

    def __init__(self, capacity: int, exponent: float) -> None:
        self._tree = SumTree(capacity)
        self._exponent = exponent

    @property
    def total(self) -> float:
        """Sum of all weights."""
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

    def fill(self, priorities: NDArray[np.float64]) -> None:
        """Set all slots at once; a priority of zero stands for an empty slot too."""
        self._tree.fill(self._weights(priorities))

    def select(self, count: int, rng: np.random.Generator) -> tuple[Slots, NDArray[np.float64]]:
        """See `Selector`."""
        total = self._tree.total
        if not total > 0:
            return np.empty(0, np.int64), np.empty(0)
        slots = self._tree.sample(stratified(rng, count))
        return slots, self._tree[slots] / total

    def _weights(self, priorities: NDArray[np.float64]) -> NDArray[np.float64]:
        if self._exponent == 1.0:
            return priorities
        # 0 ** 0 is 1 in floating point, but an item of priority zero is never sampled.
        return np.where(priorities > 0, np.power(priorities, self._exponent), 0.0)


class Fifo(Selector):
    """The oldest first."""

    def __init__(self, capacity: int) -> None:
        size = 1 << max(int(2 * capacity - 1).bit_length(), 1)
        self._queue = np.zeros(size, np.int64)
        self._mask = size - 1
        # Position of each slot in the queue, -1 if it is not there: deleting leaves a hole.
        self._position = np.full(capacity, -1, np.int64)
        self._head = self._tail = 0

    def insert(self, slots: Slots, priorities: NDArray[np.float64]) -> None:
        """See `Selector`."""
        if self._head - self._tail + len(slots) > len(self._queue):
            self._close_holes()
        positions = np.arange(self._head, self._head + len(slots))
        self._queue[positions & self._mask] = slots
        self._position[slots] = positions
        self._head += len(slots)

    def delete(self, slots: Slots) -> None:
        """See `Selector`."""
        self._position[slots] = -1

    def select(self, count: int, rng: np.random.Generator) -> tuple[Slots, NDArray[np.float64]]:
        """See `Selector`."""
        found: list[Slots] = []
        missing, at, leading_holes = count, self._tail, True
        while missing > 0 and at < self._head:
            positions = np.arange(at, min(at + max(missing, 256), self._head))
            slots = self._queue[positions & self._mask]
            alive = self._position[slots] == positions
            if leading_holes:  # nobody needs to look at them again
                first = int(np.argmax(alive)) if alive.any() else len(alive)
                self._tail += first
                leading_holes = first == len(alive)
            slots = slots[alive][:missing]
            found.append(slots)
            missing -= len(slots)
            at = int(positions[-1]) + 1
        chosen = np.concatenate(found) if found else np.empty(0, np.int64)
        return chosen, np.ones(len(chosen))

    def _close_holes(self) -> None:
        """Move what is alive to the start. Half of the queue is holes by then: cheap on average."""
        positions = np.arange(self._tail, self._head)
        slots = self._queue[positions & self._mask]
        slots = slots[self._position[slots] == positions]
        self._tail, self._head = 0, len(slots)
        self._queue[: len(slots)] = slots
        self._position[slots] = np.arange(len(slots))
