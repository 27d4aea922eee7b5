"""The exploration slots of a run: which are free, and which of them an actor gets."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SlotRules:
    """The exploration slots of a run.

    Attributes:
        total: how many there are.
        spread: lease them evenly from all that are free, not the lowest; see `FreeSlots`.
        max_per_key: how many actors with one key hold together at most; 0 for any number.
    """

    total: int
    spread: bool = False
    max_per_key: int = 0


class FreeSlots:
    """The slots that nobody has on lease.

    The lowest are leased. With `spread` they are taken evenly from all that are free: where there are more
    slots than actors will ever hold, those that are there explore as the whole run would.
    """

    def __init__(self, rules: SlotRules) -> None:
        """All are free."""
        self._rules = rules
        self._free = list(range(rules.total))  # ascending
        self._held: Counter[str] = Counter()  # slots by the key of their holders

    def most(self, key: str, own: int) -> int:
        """How many slots an actor with this key may have that has `own` ones now."""
        if not (key and self._rules.max_per_key):
            return self._rules.total
        return min(self._rules.total, self._rules.max_per_key - self._held[key] + own)

    def choose(self, wanted: int, preferred: Sequence[int], own: Sequence[int]) -> list[int]:
        """Up to `wanted` slots, ascending, of those that are free and its `own`; first `preferred` ones."""
        free = sorted([*self._free, *own]) if own else self._free
        # The same slots again mean the same exploration, and chunks of a slot go on where they were.
        kept = [slot for slot in dict.fromkeys(preferred) if _place(free, slot) is not None][:wanted]
        rest = free.copy()
        _take_out(rest, kept)
        missing = min(wanted - len(kept), len(rest))
        spread = self._rules.spread
        return sorted(kept + [rest[i * len(rest) // missing if spread else i] for i in range(missing)])

    def lease(self, key: str, slots: Sequence[int]) -> None:
        """These are no longer free; an actor with this key has them."""
        _take_out(self._free, slots)
        self._held[key] += len(slots)

    def end_lease(self, key: str, slots: Sequence[int]) -> None:
        """The actor with this key has them no longer."""
        for slot in slots:
            insort(self._free, slot)
        self._held[key] -= len(slots)


def _place(ascending: list[int], slot: int) -> int | None:
    """Where a slot is among others; None where it is not."""
    place = bisect_left(ascending, slot)
    return place if ascending[place : place + 1] == [slot] else None


def _take_out(ascending: list[int], slots: Sequence[int]) -> None:
    """Take slots out of others that have them."""
    for slot in slots:
        if (place := _place(ascending, slot)) is not None:
            del ascending[place]


def ranges(slots: list[int]) -> str:
    """Ascending numbers for people: `[0, 1, 2, 5]` as `0-2,5`."""
    parts: list[list[int]] = []
    for slot in slots:
        if parts and slot == parts[-1][1] + 1:
            parts[-1][1] = slot
        else:
            parts.append([slot, slot])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in parts) or "none"
