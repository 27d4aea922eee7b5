"""A learner whose process is stopped accepts connections and answers nothing: others do not wait for it."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.harness import until
from troupe.services.learner.peers.group import GroupLostError, ProcessGroup, joined_store, within

HOST = "127.0.0.1"
MEETING = f"""
import time
from troupe.services.learner.peers.group import Meeting
meeting = Meeting("{HOST}")
print(meeting.port, flush=True)
time.sleep(600)
"""
PATIENCE_S = 2.0


@pytest.fixture
def stopped():
    """A port where a process that is stopped has a meeting, and a store that was joined before."""
    process = subprocess.Popen([sys.executable, "-c", MEETING], stdout=subprocess.PIPE, text=True)
    try:
        port = int(process.stdout.readline())
        store = joined_store(HOST, port, 60.0)
        process.send_signal(signal.SIGSTOP)
        status = Path(f"/proc/{process.pid}/status")
        until(lambda: "State:\tT" in status.read_text())
        yield port, store
    finally:
        process.kill()  # which ends what still waits for it
        process.wait()
        process.stdout.close()


def test_who_joins_it_goes_on_in_time(stopped):
    port, _ = stopped
    with pytest.raises(RuntimeError, match="no answer within 2 s"):
        joined_store(HOST, port, PATIENCE_S)


def test_who_has_joined_it_goes_on_in_time(stopped):
    _, store = stopped
    with pytest.raises(RuntimeError, match="no answer within 2 s"):
        within(PATIENCE_S, lambda: store.check(["here-0"]))
    with pytest.raises(GroupLostError, match="do not meet: no answer"):
        ProcessGroup(dist.PrefixStore("a", store), 3, 1, 2, HOST, PATIENCE_S)
