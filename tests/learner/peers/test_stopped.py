"""A learner whose process is stopped accepts connections and answers nothing: others do not wait for it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness import until
from troupe.common.wire.control.messages import Seat
from troupe.services.learner.peers.group import GroupLostError, ProcessGroup, joined_store, within
from troupe.services.learner.peers.survivors import PLACE_BYTES, Survivors

HOST = "127.0.0.1"
MEETING = f"""
import time
from troupe.services.learner.peers.group import Meeting
meeting = Meeting("{HOST}")
print(meeting.port, flush=True)
time.sleep(600)
"""
PATIENCE_S = 2.0
GIVES_UP = f"""
import os, sys, time
from troupe.common.runtime import lingering
from troupe.services.learner.peers.group import joined_store

class Last:
    def __del__(self, kill=os.kill, pid=int(sys.argv[2]), sleep=time.sleep):  # as Python ends
        kill(pid, 9)  # so what waits for it goes on
        sleep(1.0)

last = Last()
try:
    joined_store("{HOST}", int(sys.argv[1]), 0.1)
except RuntimeError:
    sys.exit(lingering.ended(3))
"""

WAITS_IN_VAIN = f"""
import sys, threading, torch
from troupe.common.runtime import lingering
from troupe.services.learner.peers.group import GroupLostError, Meeting, ProcessGroup, joined_store

meeting, groups = Meeting("{HOST}"), []

def connect(rank):
    store = joined_store("{HOST}", meeting.port, 60.0)
    groups.append(ProcessGroup(store, 0, rank, 2, "{HOST}", 3600.0, lambda: True))

silent = threading.Thread(target=connect, args=[1])
silent.start()
connect(0)
silent.join()
one = groups.pop()
try:
    one.gather(torch.zeros(3))
except GroupLostError:
    one.close()
    sys.exit(lingering.ended(3))
"""


@pytest.fixture
def stopped():
    """A port where a process that is stopped has a meeting, a store joined before, and that process."""
    process = subprocess.Popen([sys.executable, "-c", MEETING], stdout=subprocess.PIPE, text=True)
    try:
        port = int(process.stdout.readline())
        store = joined_store(HOST, port, 60.0)
        process.send_signal(signal.SIGSTOP)
        status = Path(f"/proc/{process.pid}/status")
        until(lambda: "State:\tT" in status.read_text())
        yield port, store, process.pid
    finally:
        process.kill()  # which ends what still waits for it
        process.wait()
        process.stdout.close()


def test_who_joins_it_goes_on_in_time(stopped):
    port, _, _ = stopped
    with pytest.raises(RuntimeError, match="no answer within 2 s"):
        joined_store(HOST, port, PATIENCE_S)


def test_who_has_joined_it_goes_on_in_time(stopped):
    _, store, _ = stopped
    with pytest.raises(RuntimeError, match="no answer within 2 s"):
        within(PATIENCE_S, lambda: store.check(["here-0"]))
    with pytest.raises(GroupLostError, match="could not connect: no answer"):
        ProcessGroup(dist.PrefixStore("a", store), 3, 1, 2, HOST, PATIENCE_S)


def test_who_has_given_up_on_it_ends_well_though_a_thread_still_waits(stopped):
    port, _, pid = stopped
    arguments = [sys.executable, "-c", GIVES_UP, str(port), str(pid)]
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 3, ended.stderr


def test_who_has_left_a_group_ends_well_though_that_still_waits_for_another():
    arguments = [sys.executable, "-c", WAITS_IN_VAIN]
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 3, ended.stderr


class Epoch:
    """What learners tell each other at its beginning; that of rank 0 is gone, and that of rank 1 stopped."""

    def __init__(self, stopped_port: int) -> None:
        there = f"{HOST} {stopped_port}".encode().ljust(PLACE_BYTES, b"\0")
        self._told = [bytes(PLACE_BYTES), there, b"", b""]
        self._all = threading.Barrier(2)

    def member(self, rank: int) -> Member:
        return Member(self, rank)

    def gather(self, rank: int, own: torch.Tensor) -> list[torch.Tensor]:
        self._told[rank] = own.numpy().tobytes()
        self._all.wait(60)
        return [torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in self._told]


class Member:
    def __init__(self, epoch: Epoch, rank: int) -> None:
        self._epoch, self._rank = epoch, rank

    def gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        return self._epoch.gather(self._rank, own)


def test_those_who_are_left_go_on_without_the_lowest_that_is_stopped(stopped):
    port, _, _ = stopped
    epoch, seats, everyone = Epoch(port), {}, []

    def go_on(rank):
        survivors = Survivors("127.0.0.0/8")
        everyone.append(survivors)  # others meet at it after this thread has ended
        survivors.exchange(epoch.member(rank), Seat(7, rank, 4, port, HOST))
        time.sleep((rank - 2) * PATIENCE_S)  # one notices later that the owner is gone
        seats[rank] = until(lambda: survivors.seat(7))

    threads = [threading.Thread(target=go_on, args=[rank]) for rank in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    told = [(seat.epoch, seat.rank, seat.learners) for _, seat in sorted(seats.items())]
    assert told == [(8, 0, 2), (8, 1, 2)]
