import subprocess
import sys

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
