"""Which items a batch has."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from troupe.common.data.sample import Sample, Share
from troupe.services.replay.storage.records import SAMPLED_UNIT
from troupe.services.replay.storage.store import ChunkStore
from troupe.services.replay.storage.table import Table


def choose(
    tables: Mapping[str, Table], store: ChunkStore, shares: Mapping[str, int], rng: np.random.Generator
) -> Sample | None:
    """A batch of so many rows of each table, in the order of `shares`: without data, and not yet counted.

    Of a table that the learner scores, as many as there are candidates.

    None where a table has not as many items that may be drawn.
    """
    chosen = []
    for name, count in shares.items():
        drawn = tables[name].draw(count, rng)
        if drawn is None:
            return None
        chosen.append(drawn)
    slots = [each for each, _ in chosen]
    items = np.concatenate([tables[name].items(each) for name, each in zip(shares, slots, strict=True)])
    rows = items["row"].astype(np.int64)
    return Sample(
        shares=[
            Share(
                name,
                len(each),
                tables[name].size,
                tables[name].sampler.total,
                wanted=count if len(each) > count else None,
            )
            for (name, count), each in zip(shares.items(), slots, strict=True)
        ],
        slots=slots,
        ids=np.ascontiguousarray(items["id"]),
        probabilities=np.concatenate([probabilities for _, probabilities in chosen]),
        versions=store.versions[rows],
        times_s=store.times_s[rows],
        lengths=np.ascontiguousarray(items["length"]),
        sampled=items["sampled"] // SAMPLED_UNIT,
        rows=rows,
        commits=np.ascontiguousarray(items["commit"]),
        offsets=np.ascontiguousarray(items["offset"]),
    )
