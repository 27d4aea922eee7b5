"""Chunks as actors send them to a queue."""

import numpy as np

from tests.replay import processes


def rollout(number, producer=0):
    """A chunk that is one item."""
    chunk = processes.chunk(number, producer)
    chunk.offsets, chunk.lengths, chunk.priorities = np.zeros(1, int), np.array([10]), np.ones(1)
    return chunk
