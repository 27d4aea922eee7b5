"""Changes of replay's state in memory: whole, or not begun."""

from __future__ import annotations

from types import TracebackType

import numpy as np

from troupe.common.errors import TornStateError


class _Change:
    """See `CHANGE`. It has no state, so one serves all, in one thread or several."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, TornStateError):
            raise TornStateError(f"a change of the tables failed halfway: {kind}: {error}") from error


CHANGE = _Change()
"""`with CHANGE:` holds steps that make sense only together: what fails among them is a TornStateError.

What may fail for a reason that a peer can cause comes before, with `check_memory` for the steps themselves.
"""

_BYTES = 1 << 20
_BYTES_PER_ITEM = 2048
_BYTES_PER_SLOT = 64


def check_memory(items: int, slots: int) -> None:
    """Raise MemoryError unless there is what a change of `items` in tables of `slots` needs on its way.

    A generous bound on the temporary arrays of every selector: a row of 64 weights for each item, and, for
    removal at random or a queue that closes its holes, a few numbers for each slot. It is address space that
    is asked for and given back, in microseconds; none of it is touched.
    """
    np.empty(_BYTES + _BYTES_PER_ITEM * items + _BYTES_PER_SLOT * slots, np.uint8)
