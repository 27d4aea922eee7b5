"""Where the rows of a batch come from: fresh ones from a queue, others from tables that give them again."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from troupe.common.config import Config
from troupe.common.wire.replay.codec import SampleBatch
from troupe.services.learner.batches.usable import Usable


class Mixture:
    """The tables that a run's batches come from.

    Attributes:
        shares: rows of a batch, by table.
        kept: those that still have an item when it has been learned from.
        has_queue: whether one of them is a queue.
        rated: whether one of them chooses by priorities; else nobody need be told new ones.
        once: the queue through which every step passes, and so tells what was learned; None where an
            algorithm learns from a table again and again, or a full queue drops what comes.
    """

    def __init__(self, config: Config) -> None:
        self.shares = config.replay.shares()
        tables = config.replay.sampled_tables()
        self.kept = {table.name for table in tables if table.max_times_sampled != 1}
        self.rated = any(table.uses_priorities for table in tables)
        self.has_queue = any(table.is_queue for table in tables)
        # Items of other algorithms overlap, so their lengths do not add up to the steps that were made.
        once = (
            [table for table in tables if table.holds_writers] if config.agent.table.kind == "queue" else []
        )
        self.once = once[0] if once else None
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

    def learned_steps(self, batch: SampleBatch, usable: Usable) -> float:
        """Steps that a batch adds to those that were learned from: see `once`."""
        rows = batch.rows().get(self.once.name) if self.once else None
        if rows is None or self.once is None:
            return 0.0
        lengths = batch.lengths[rows]
        if usable.rows is not None:
            lengths = lengths[usable.rows[rows]]
        # An item that is learned from k times counts a k-th each time.
        return float(lengths.sum()) / self.once.max_times_sampled

    def staleness(self, batch: SampleBatch, version: int) -> dict[str, float]:
        """Metrics: mean number of versions from the policy that acted to the newest, of all and by table."""
        # Not below 0: after a restart from an older checkpoint the stored steps may be of later versions.
        behind = np.maximum(0, version - batch.versions)
        found = {"replay/sampled_staleness": float(behind.mean())}
        if len(self.shares) > 1:
            found |= {
                f"replay/sampled_staleness_{table}": float(behind[rows].mean())
                for table, rows in batch.rows().items()
            }
        return found
