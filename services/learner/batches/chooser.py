"""Which candidates of a draw are learned from, by the distances that the present network gives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from troupe.common.agents.base import Agent, Featured
from troupe.common.config import Config
from troupe.common.data.candidates import choose
from troupe.common.data.distances import FEATURES, distances, nearness
from troupe.common.data.table_config import TableConfig
from troupe.common.wire.replay.codec import SampleBatch
from troupe.services.learner.batches.usable import Usable

Places = NDArray[np.int64]
Floats = NDArray[np.float64]


class Chooser:
    """Chooses for the tables that are `scored_by` the learner."""

    def __init__(self, config: Config, agent: Agent) -> None:
        """`agent` is the one that learns; it has to be `Featured` where there is such a table."""
        self._agent = cast(Featured, agent)
        self._tables = {table.name: table for table in config.replay.sampled_tables()}
        # As many as an update learns from, so that scoring needs no more memory than that.
        self._block = config.replay.batch_size

    def choose(self, batch: SampleBatch, usable: Usable) -> tuple[SampleBatch, Usable, Floats]:
        """Choose among the `candidates` of `batch`; only its `usable` rows come into question.

        Returns:
            the batch without the candidates that were not chosen, all of it usable, and priorities `[B]` of
            the chosen ones: how near the present network is to the one that acted, see `nearness`.
        """
        places = np.arange(len(batch.ids)) if usable.rows is None else np.flatnonzero(usable.rows)
        near, kept = np.ones(len(places)), []
        for share, rows in zip(batch.shares, batch.rows().values(), strict=True):
            at = np.flatnonzero((places >= rows.start) & (places < rows.stop))
            if share.wanted is not None and batch.sampled is not None:
                table, newest = self._tables[share.table], at[:0]
                if table.sampler == "attentive":
                    last = places[at] == rows.stop - 1
                    newest, at = at[last], at[~last]
                distance, near[at] = self._distances(table, usable, at, newest)
                sampled, ids = batch.sampled[places[at]], batch.ids[places[at]]
                at = np.sort(at[choose(table.strategy, distance, sampled, ids, share.wanted)])
            kept.append(at)
        at = np.concatenate(kept)
        chosen = Usable(_rows(usable.fields, at), usable.lengths[at], placed=_rows(usable.placed, at))
        return batch.part(places[at], chosen.fields), chosen, near[at]

    def _distances(
        self, table: TableConfig, usable: Usable, at: Places, newest: Places
    ) -> tuple[Floats, Floats]:
        """How far the candidates `at [n]` are by what their table goes by, and how near by `nearness`.

        `newest` is the place of the item that attentive replay compares them with.
        """
        if not len(at) or table.scored_by != "learner":  # by a shard whose table is not the run's
            return np.zeros(len(at)), np.ones(len(at))
        rows = np.concatenate([at, newest])
        fields = usable.placed or usable.fields  # on a GPU they are there already
        features = np.concatenate(
            [
                self._agent.features(_rows(fields, rows[begin : begin + self._block]))
                for begin in range(0, len(rows), self._block)
            ]
        )
        off_policy = self._agent.distances(usable.fields[FEATURES][at], features[: len(at)])
        if not len(newest):
            return off_policy, nearness(off_policy)
        to_newest = distances(table.distance, features[:-1], features[-1:, -1:], table.distance_power)
        return to_newest, nearness(off_policy)


def _rows(fields: Mapping[str, Any], at: Places) -> dict[str, Any]:
    """Copies of rows `at [n]` of fields `[B, ...]`, arrays or tensors."""
    index = torch.from_numpy(at)
    return {
        name: field[index.to(field.device)] if isinstance(field, Tensor) else field[at]
        for name, field in fields.items()
    }
