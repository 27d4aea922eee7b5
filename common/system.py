"""Clocks, random numbers, identifiers and threads: all that the services' protocols take from the machine.

A test replaces them, so that a whole process runs by a simulated clock and seeded generators. Look them up
at each use (`system.monotonic()`); never import one by itself. Ruff refuses the originals in the folders
that keep to this: see `banned-api` in pyproject.toml.

Locks are not among them: nothing waits while it holds one.
"""

from __future__ import annotations

import os
import queue
import random as _random
import socket
import threading
import time as _time
from concurrent import futures

import numpy as np

# Names of their own for the same functions, so that a call costs what it did.
monotonic = _time.monotonic
time = _time.time
sleep = _time.sleep
perf_counter = _time.perf_counter
process_time = _time.process_time

random: _random.Random = _random.SystemRandom()
"""Numbers that cannot be guessed: identities, tokens, jitter."""

pid = os.getpid
hostname = socket.gethostname

Thread = threading.Thread
Event = threading.Event
Condition = threading.Condition
Queue = queue.Queue
Future = futures.Future
# Not simulated: it is for batches that are larger than those of any simulation.
ThreadPoolExecutor = futures.ThreadPoolExecutor


def generator(seed: int | None = None) -> np.random.Generator:
    """A generator of numpy; without a seed, one that cannot be repeated."""
    return np.random.default_rng(random.getrandbits(128) if seed is None else seed)
