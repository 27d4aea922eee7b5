"""Replay as a real process, and chunks that tell where they come from."""

import os
import signal
import subprocess
import sys

import numpy as np

from tests import harness
from troupe.common.data.schema import Chunk
from troupe.common.wire.codec import encode
from troupe.common.wire.replay.codec import encode_insert, infer_specs

STEPS = 10
FRAME = (16, 16)


def start(folder, endpoint, *options):
    """A replay process. The folder may hold what a former one has left."""
    limit = [] if "--learner" in options else ["--max-bytes", str(1 << 28)]  # a learner would decide
    words = ["--bind", endpoint, "--data-dir", str(folder), *limit, *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "troupe.services.replay", "serve", "--log-level", "warning", *words],
        env=environment,
    )


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.wait(120)


def stop(process):
    """The exit code after SIGTERM."""
    process.terminate()
    try:
        return process.wait(120)
    finally:
        process.kill()


def chunk(number, producer=0, steps=STEPS):
    """Chunk `number` of `producer`: each step's action is its number, each frame shows it."""
    first = number * STEPS
    frames = np.zeros((steps + 3, *FRAME), np.uint8)
    frames[:] = ((np.arange(-3, steps) + first + 1000 * producer) % 251)[:, None, None]
    fields = {
        "obs": frames,
        "action": np.arange(first, first + steps),
        "producer": np.full(steps, producer, np.int32),
    }
    count = np.arange(steps, dtype=np.int32)
    return Chunk(
        fields, steps, count, np.ones(steps, np.int32), np.full(steps, 1.0 + producer), version=number
    )


def check(batch):
    """Every window of the batch is what was inserted."""
    action, producer = batch.fields["action"][:, 0], batch.fields["producer"][:, 0]
    numbers = action[:, None] + np.arange(-3, 1) + 1000 * producer[:, None]
    assert np.array_equal(batch.fields["obs"][..., 0, 0], numbers % 251)
    assert np.array_equal(batch.fields["obs"][..., -1, -1], numbers % 251)
    assert np.array_equal(batch.versions, action // STEPS)


def insert(client, number, producer=0):
    """Insert one chunk, waiting for credit."""
    harness.insert(client, chunk(number, producer))


def good_insert():
    """The frames of an INSERT as a stranger would send it."""
    data = chunk(5, producer=3)
    body = encode_insert(data, infer_specs(data), "default", incarnation=77)
    return [bytes(frame) for frame in encode(body.message(1))]
