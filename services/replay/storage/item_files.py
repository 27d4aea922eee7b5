"""The files of a table: an item and a priority for each slot, and the table's totals, all with checksums."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from troupe.common import system
from troupe.common.data.pager import FilePager
from troupe.services.replay.storage.header import Header, header_bytes
from troupe.services.replay.storage.records import (
    ITEM,
    PRIORITY,
    item_sums,
    numbered,
    priority_records,
    whole_items,
    whole_priorities,
)
from troupe.services.replay.storage.selectors import Slots

MAX_FIRST_ID = 1 << 52
"""The first id of a table is drawn below this, so that the others stay exact as float64, and in JSON."""

_HEADER = 8
# Of a count.
_MAX_COUNT = 2**53


def table_files(name: str, slots: int) -> dict[str, int]:
    """The files of a table with this many slots, by name, and their bytes."""
    items, priorities, header = ITEM.itemsize * slots, PRIORITY.itemsize * slots, header_bytes(_HEADER)
    return {f"{name}.items": items, f"{name}.priorities": priorities, f"{name}.header": header}


@dataclass
class Damage:
    """What of a table's files was not what had been written: items, priorities, and whether its totals."""

    items: int = 0
    priorities: int = 0
    header: int = 0


class ItemFiles:
    """Items and priorities by slot, in mapped files.

    Attributes:
        items: records `[slots]` of `ITEM`.
        commits: of their chunks; 0 where the slot is empty.
        ids: of items, also of those that have left.
        priorities: raw ones.
        header: items inserted and sampled, the limiter's base, the limits that it is for, items dropped, and
            slots that were ever used.
        used: slots that ever held an item, the first ones.
        damage: what was not what had been written.
    """

    def __init__(self, pager: FilePager, name: str, slots: int) -> None:
        """Open the files of the table `name`, or make them."""
        self._slots = slots
        self.items = pager.open(f"{name}.items", ITEM, (slots,), sparse=False).array
        self.commits: NDArray[np.uint64] = self.items["commit"]
        self.ids: NDArray[np.uint64] = self.items["id"]
        # Late priorities for items of a folder that has been emptied since must not meet those of this one.
        self._first_ids = np.uint64(system.random.randrange(MAX_FIRST_ID // slots) * slots + 1)
        self._rated = pager.open(f"{name}.priorities", PRIORITY, (slots,), sparse=False).array
        self.priorities: NDArray[np.float64] = self._rated["value"]
        # As bytes without fields, for numpy copies those four times as fast.
        self._raw_items = self.items.view(f"V{ITEM.itemsize}")
        self._raw_rated = self._rated.view(f"V{PRIORITY.itemsize}")
        self.header = Header(pager, f"{name}.header", _HEADER)
        self.used = 0
        self.damage = Damage()

    def totals_are_possible(self) -> bool:
        """Whether the header holds what a table may have counted, or nothing that can be read."""
        if not self.header.found:
            return True  # they never came to the disk, or are damaged
        values = self.header.values
        counts = values[[0, 1, 3, 4, 5, 6]]
        whole = np.delete(counts, 2)  # all but the ratio
        return bool(
            np.all(np.isfinite(values))
            and np.all((counts >= 0) & (counts <= _MAX_COUNT))
            and np.all(whole == np.floor(whole))
            and values[4] >= 1  # `min_items` is always there
        )

    def find_first_ids(self) -> None:
        """Have slots that had no item yet begin where the others began, so that ids ascend with age."""
        used = self.ids[self.ids > 0]
        if len(used):
            self._first_ids = used.min() - (used.min() - np.uint64(1)) % np.uint64(self._slots)

    def write(self, slots: Slots, items: NDArray) -> None:
        """Put `items [n]` into `slots [n]`, with ids and checksums."""
        self.used = max(self.used, int(slots.max()) + 1)
        # A slot's ids are its first, and so much more each time: never reused, found again without a search.
        last = self.ids[slots]
        first = slots.astype(np.uint64) + self._first_ids
        items["id"] = np.where(last > 0, last + np.uint64(self._slots), first)
        items["sum"] = item_sums(items)
        self._raw_items[slots] = items.view(self._raw_items.dtype)

    def drop_damaged(self) -> Slots:
        """Empty the slots that do not match their checksums; returns the others that hold an item."""
        self.used = int(self.header.values[6])
        self.damage = Damage(header=self.header.damaged)
        used, every = self.ids > 0, np.arange(self._slots)
        right = whole_items(self.items, every, self._slots)
        filled = self.commits != 0
        # Of what was removed only the id still counts. Slots are used in their order: one without an id among
        # those that had one was in a page that is lost.
        torn = np.flatnonzero((used & filled & ~right) | (~used & (filled | (every < self.used))))
        misnumbered = np.flatnonzero(used & ~filled & ~numbered(self.ids, every, self._slots))
        self.damage.items = len(torn)
        self.empty(torn)
        self.empty(misnumbered)
        return np.flatnonzero(self.commits)

    def empty(self, slots: Slots) -> None:
        """Have no item in `slots`, whose contents are of no use, with ids that were not given out yet."""
        if not len(slots):
            return
        every = np.arange(self._slots)
        known = numbered(self.ids, every, self._slots)
        known[slots] = False
        highest = self.ids[known].max(initial=self._first_ids)
        items = np.zeros(len(slots), ITEM)
        items["id"] = highest - (highest - np.uint64(1)) % np.uint64(self._slots) + slots.astype(np.uint64)
        self.items[slots] = items

    def mend_priorities(self, slots: Slots) -> None:
        """Give items whose priority is damaged the largest of the others, as if they were new."""
        right = whole_priorities(self._rated[slots])
        wrong, values = slots[~right], self.priorities[slots[right]]
        if len(wrong):
            self.rate(wrong, np.full(len(wrong), float(values.max(initial=0.0)) or 1.0))
            self.damage.priorities = len(wrong)

    def read(self, slots: Slots) -> NDArray:
        """The records `[n]` of `slots`, as `ITEM`."""
        return self._raw_items[slots].view(ITEM)

    def rate(self, slots: Slots, priorities: NDArray[np.float64]) -> None:
        """Set the raw priorities of `slots [n]`."""
        self._raw_rated[slots] = priority_records(priorities).view(self._raw_rated.dtype)

    def contents(self) -> dict[str, NDArray]:
        """What stands in the table's files, by their endings."""
        return {"items": self.items, "priorities": self._rated, "header": self.header.file()}
