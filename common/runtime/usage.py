"""Cores that processes have, and cores that they could also have used."""

from __future__ import annotations

import contextlib
from collections import deque
from pathlib import Path

import psutil

from troupe.common import system
from troupe.common.machine import memory_limit_bytes

WINDOW_S = 10.0
"""Acting and learning may take turns of several seconds."""
MAX_PROCESSES = 1000


class CoresUsed:
    """Measures processes over the last `WINDOW_S` seconds, from one call to the next."""

    def __init__(self) -> None:
        # Of each process: when, and how long it had run and waited by then; the oldest is forgotten first.
        self._samples: dict[psutil.Process, deque[tuple[float, float, float]]] = {}

    def of_tree(self, pid: int) -> tuple[float, float, int]:
        """Cores that a process and what it started had, cores that they waited for, and bytes of memory."""
        cpu, memory, starved = 0.0, 0, 0.0
        with contextlib.suppress(psutil.Error):
            parent = psutil.Process(pid)
            for process in [parent, *parent.children(recursive=True)]:
                ran, waited = self.of_process(process)
                cpu, starved = cpu + ran, starved + waited
                memory += process.memory_info().rss
        return cpu, starved, memory

    def of_process(self, process: psutil.Process) -> tuple[float, float]:
        """How many cores a process had lately, and how many more its threads were ready for."""
        times = process.cpu_times()
        sample = system.monotonic(), times.user + times.system, waited_s(process.pid)
        samples = self._samples[process] = self._samples.pop(process, deque())
        while len(self._samples) > MAX_PROCESSES:
            self._samples.pop(next(iter(self._samples)))
        samples.append(sample)
        while sample[0] - samples[0][0] > WINDOW_S and len(samples) > 2:
            samples.popleft()
        seconds, ran, waited = (now - then for now, then in zip(sample, samples[0], strict=True))
        return (max(0.0, ran) / seconds, max(0.0, waited) / seconds) if seconds > 0 else (0.0, 0.0)


class OwnUsage:
    """What a service reports of its own process and of those that it has started."""

    def __init__(self, prefix: str, period_s: float = 2.0) -> None:
        """`prefix` begins the names of its metrics; they are measured anew every `period_s`."""
        self._prefix = prefix
        self._period_s = period_s
        self._cores = CoresUsed()
        self._pid = psutil.Process().pid
        self._next_s = 0.0
        self._told: dict[str, float] = {}

    def metrics(self) -> dict[str, float]:
        """The newest values."""
        now_s = system.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + self._period_s
            cpu, starved, memory = self._cores.of_tree(self._pid)
            values = {"cpu_cores": cpu, "starved_cores": starved, "memory_bytes": float(memory)}
            # Of a container its limit: the machine's memory is not for it.
            values["memory_share"] = memory / memory_limit_bytes()
            self._told = {f"{self._prefix}/{name}": value for name, value in values.items()}
        return self._told


def waited_s(pid: int) -> float:
    """Seconds for which a process's threads were ready to run and had no core; 0 where unknown."""
    total_s = 0.0
    with contextlib.suppress(OSError):  # not Linux, or the process has just ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):  # the thread has: the others count
                total_s += int((thread / "schedstat").read_text().split()[1]) / 1e9
    return total_s
