"""Selectors by themselves, and how often they choose what."""

import numpy as np

from troupe.common.data.table_config import TableConfig
from troupe.services.replay.storage.samplers import SAMPLERS
from troupe.services.replay.storage.selectors import TableView
from troupe.services.replay.storage.table import ITEM

CAPACITY = 150


def make(kind, capacity=CAPACITY, choices=SAMPLERS, **fields):
    """A selector, and the records of its table, which `appear` and `vanish` keep as a table does."""
    items = np.zeros(capacity, ITEM)
    features = np.random.default_rng(7).normal(size=(capacity, 3, 2))
    config = TableConfig(capacity=capacity, **fields)
    return choices[kind](config, TableView(items, lambda: 0, lambda slots: features[slots])), items


def appear(selector, items, slots, priorities):
    items["commit"][slots] = items["commit"].max() + 1
    selector.insert(np.asarray(slots), np.asarray(priorities, float))


def vanish(selector, items, slots):
    items["commit"][slots] = 0
    selector.delete(slots)


def chi_square(counts, expected):
    return float((((counts - expected) ** 2) / expected).sum())
