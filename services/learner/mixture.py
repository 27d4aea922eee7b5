"""Where the rows of a batch come from: fresh ones from a queue, others from tables that give them again."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from troupe.common.config import Config
from troupe.common.wire.replay.codec import SampleBatch


class Mixture:
    """The tables that a run's batches come from.

    Attributes:
        shares: rows of a batch, by table.
        kept: those that still have an item when it has been learned from.
        has_queue: whether one of them is a queue.
    """

    def __init__(self, config: Config) -> None:
        self.shares = config.replay.shares()
        tables = config.replay.sampled_tables()
        self.kept = {table.name for table in tables if table.max_times_sampled != 1}
        self.has_queue = any(table.is_queue for table in tables)
        again = {table.name for table in tables if not table.is_queue}
        self._again = again if config.agent.table.replays else set()

    def replayed(self, batch: SampleBatch) -> NDArray[np.bool_] | None:
        """Which rows `[B]` may have been learned from before; None where the algorithm need not know."""
        if not self._again:
            return None
        replayed = np.zeros(len(batch.ids), bool)
        for table, rows in batch.rows().items():
            replayed[rows] = table in self._again
        return replayed

    def staleness(self, batch: SampleBatch, version: int) -> dict[str, float]:
        """Metrics: mean number of versions from the policy that acted to the newest, of all and by table."""
        behind = np.maximum(0, version - batch.versions)
        found = {"replay/sampled_staleness": float(behind.mean())}
        if len(self.shares) > 1:
            found |= {
                f"replay/sampled_staleness_{table}": float(behind[rows].mean())
                for table, rows in batch.rows().items()
            }
        return found
