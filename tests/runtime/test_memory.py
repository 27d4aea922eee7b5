import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = """
import resource, sys
from troupe.common.machine import keep_freed_memory
import numpy as np

if sys.argv[1] == "keep" and not keep_freed_memory():
    sys.exit("unknown C library")
for _ in range(3):
    np.ones(64 << 20, np.uint8)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    np.ones(64 << 20, np.uint8)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, how], capture_output=True, text=True, timeout=120, check=False
    )
    if "unknown C library" in done.stderr:
        pytest.skip("not the GNU C library")
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_large_arrays_are_not_faulted_in_again():
    assert faults("keep") < faults("default") / 4


LARGE_PAGES = """
import re
from pathlib import Path
import torch
from troupe.common.machine import keep_freed_memory

keep_freed_memory()
array = torch.ones(64 << 20, dtype=torch.uint8)
print(re.search(r"AnonHugePages: +([0-9]+) kB", Path("/proc/self/smaps_rollup").read_text())[1])
"""


def test_large_arrays_are_in_large_pages():
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("this kernel gives no large pages")
    done = subprocess.run(
        [sys.executable, "-c", LARGE_PAGES], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 32 << 10
