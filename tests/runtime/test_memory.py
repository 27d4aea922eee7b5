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
from pathlib import Path
import torch
from troupe.common.machine import keep_freed_memory

keep_freed_memory()
array = torch.ones(64 << 20, dtype=torch.uint8)
address, asked = array.data_ptr() + array.nbytes // 2, False
for line in Path("/proc/self/smaps").read_text().splitlines():
    first, dash, last = line.split(" ")[0].partition("-")
    if dash:
        inside = int(first, 16) <= address < int(last, 16)
    elif line.startswith("VmFlags:") and inside:
        asked = "hg" in line.split()
print(asked)
"""


def test_large_arrays_ask_for_large_pages():
    """Whether the kernel has any to give is another matter."""
    if not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        pytest.skip("this kernel has no large pages")
    done = subprocess.run(
        [sys.executable, "-c", LARGE_PAGES], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "True", done.stderr
