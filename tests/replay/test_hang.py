"""A shard whose loop hangs ends itself, and the next one has every item."""

import subprocess
import sys

from tests.harness import until
from tests.replay import processes
from troupe.common.wire.replay.client import ReplayClient

HANGS_AT_A_FILE = """
import pathlib, sys, threading
from troupe.common.runtime import watchdog
from troupe.services.replay.__main__ import main
from troupe.services.replay.requests import RequestHandlers
advance = RequestHandlers.advance
def hang_or_advance(self):
    if pathlib.Path(sys.argv[1]).exists():
        threading.Event().wait()
    advance(self)
RequestHandlers.advance = hang_or_advance
watchdog.arm(2.0)
sys.exit(main(sys.argv[2:]))
"""


def test_a_shard_that_hangs_ends_with_every_item_on_its_disk(tmp_path):
    endpoint, folder = f"ipc://{tmp_path}/replay", tmp_path / "data"
    words = ["serve", "--bind", endpoint, "--data-dir", str(folder), "--max-bytes", str(1 << 28)]
    command = [sys.executable, "-c", HANGS_AT_A_FILE, str(tmp_path / "hang"), *words]
    shard = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    client = ReplayClient(endpoint, name="actor-0")
    try:
        processes.insert(client, 0)
        assert client.flush(60)
        (tmp_path / "hang").touch()
        _, errors = shard.communicate(timeout=120)
        assert shard.returncode == 70
        assert errors.strip().splitlines()[-1].startswith("troupe: error: the shard hangs: no progress")
        assert "in hang_or_advance" in errors
        shard = processes.start(folder, endpoint)
        until(lambda: client.status(60)["tables"]["default"]["items"] == processes.STEPS)
    finally:
        shard.kill()
        shard.wait()
        client.close(0)
