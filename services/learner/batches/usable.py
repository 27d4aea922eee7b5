"""What an agent can learn from in a sampled batch: any holder of an actor's key may have stored anything."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from troupe.common.agents.base import Agent
from troupe.common.runtime.logging import Throttle
from troupe.common.wire.replay.codec import SampleBatch

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)

LOG_PERIOD_S = 60.0


@dataclass(frozen=True)
class Usable:
    """The items of a batch that can be learned from.

    Attributes:
        fields: `[n, window, *shape]` by name, the window as long as the longest of these items needs.
        lengths: int32 `[n]`, steps of each.
        rows: `[B]` bool, which of the batch they are; None for all.
        placed: those of the fields that are on the learner's device already; see `Batch`.
    """

    fields: dict[str, NDArray]
    lengths: NDArray[np.int32]
    rows: NDArray[np.bool_] | None = None
    placed: Mapping[str, Tensor] = field(default_factory=dict)

    def chosen(self, values: NDArray) -> NDArray:
        """Those `[n]` of values `[B]` of the batch."""
        return values if self.rows is None else values[self.rows]

    def part(self, batch: SampleBatch) -> SampleBatch:
        """What of `batch` they are, to be told new priorities: of the others replay was told already."""
        return batch if self.rows is None else batch.part(np.flatnonzero(self.rows), {})


class UsableItems:
    """Leaves out the items of batches that `agent` cannot learn from, counts them and says so.

    Args:
        agent: the one that learns.
        tell: gives replay new priorities `[B]` of a batch.

    Attributes:
        left_out: items so far.
    """

    def __init__(self, agent: Agent, tell: Callable[[SampleBatch, NDArray[np.float64]], None]) -> None:
        self._tell = tell
        self._specs = agent.fields
        self._steps = agent.item_steps
        self._throttle = Throttle(LOG_PERIOD_S)
        self.left_out = 0

    def of(self, batch: SampleBatch) -> Usable:
        """The usable items of a `batch` whose fields are those of the agent."""
        bad = self._bad(batch)
        if not bad:
            return Usable(batch.fields, batch.lengths)
        rows = ~np.logical_or.reduce(list(bad.values()))
        left_out = np.flatnonzero(~rows)
        # Zero, so that replay never draws the items again: they would spoil batch after batch. At once: an
        # algorithm may give no priorities, or none that are sent.
        self._tell(batch.part(left_out, {}), np.zeros(len(left_out)))
        self._count(len(left_out), ", ".join(bad))
        lengths = batch.lengths[rows]
        longest = int(lengths.max(initial=1))
        # The window shrinks to what the remaining items need: a forged item of the greatest length would
        # otherwise make every batch that it is in as slow as the longest.
        fields = {spec.name: batch.fields[spec.name][rows, : spec.entries(longest)] for spec in self._specs}
        return Usable(fields, lengths, rows)

    def _bad(self, batch: SampleBatch) -> dict[str, NDArray[np.bool_]]:
        """By what is wrong, which items `[B]`."""
        found = {}
        least, most = self._steps
        if batch.lengths.min() < least or batch.lengths.max() > most:
            wanted = f"{least}" if least == most else f"{least} to {most}"
            found[f"a length other than {wanted}"] = (batch.lengths < least) | (batch.lengths > most)
        for spec in self._specs:
            bad = spec.bad_rows(batch.fields[spec.name])
            if bad is not None:
                found["`{}` outside of {:g} to {:g}".format(spec.name, *(spec.limits() or ()))] = bad
        return found

    def _count(self, count: int, why: str) -> None:
        self.left_out += count
        if self._throttle():
            _log.warning(
                "left out %d unusable items of a batch (%d so far): %s. They came from an actor, or another "
                "holder of an actor's key",
                count,
                self.left_out,
                why,
            )
