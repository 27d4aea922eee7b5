"""Thousands of seeds run in one process: none leaves anything open."""

import os
import threading
from pathlib import Path

from tests.simulation.plan import make_plan
from tests.simulation.run import run_seed

SEEDS = range(1, 9)


def held():
    """What this process has open: files, threads, and mappings of files, which are named."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    named = sorted(line.split(maxsplit=5)[5] for line in maps if len(line.split(maxsplit=5)) == 6)
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "mappings": [name for name in named if name.startswith(("/dev/shm", "/tmp"))],
    }


def test_no_seed_leaves_files_threads_or_mappings_open():
    kinds = {fault.kind for seed in SEEDS for fault in make_plan(seed).faults}
    assert {"kill", "torn"} <= kinds  # those that leave a process no time to close anything
    run_seed(SEEDS[0])  # modules that are imported late stay open for good
    before = held()
    for seed in SEEDS[1:]:
        assert run_seed(seed).problems == []
        assert held() == before
