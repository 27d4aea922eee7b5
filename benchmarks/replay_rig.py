"""What the benchmarks of replay share: Atari-like chunks, a server process, and the measured cycle."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from numpy.typing import NDArray

from troupe.common.data.schema import Chunk, FieldSpec
from troupe.common.wire.replay.client import ReplayClient

BATCH = 512
STEPS = 50
STACK, N_STEPS = 4, 3
WINDOW = STACK + N_STEPS
PREFETCH = 6
FRAME = (84, 84)


def specs(compress: bool) -> tuple[FieldSpec, ...]:
    """The fields of an Atari transition."""
    return (
        FieldSpec("obs", "uint8", FRAME, before=STACK - 1, after=N_STEPS, compress=compress),
        FieldSpec("action", "int64", ()),
        FieldSpec("reward", "float32", ()),
        FieldSpec("discount", "float32", ()),
    )


def pong_frames(count: int) -> NDArray[np.uint8]:
    """Consecutive frames `[count, 84, 84]` of games played at random."""
    from ale_py.vector_env import AtariVectorEnv

    env = AtariVectorEnv("pong", 4, stack_num=1, repeat_action_probability=0.0)
    env.reset(seed=1)
    rng = np.random.default_rng(0)
    frames = [np.asarray(env.step(rng.integers(0, 6, 4))[0])[:, -1] for _ in range(-(-count // 4))]
    env.close()
    return np.concatenate(np.stack(frames, axis=1))[:count].copy()


def noise_frames(count: int) -> NDArray[np.uint8]:
    """Frames that do not compress."""
    return np.random.default_rng(0).integers(0, 256, (count, *FRAME), dtype=np.uint8)


def chunks(frames: NDArray[np.uint8], steps: int = STEPS) -> Iterator[Chunk]:
    """Chunks of `frames`, over and over."""
    rng = np.random.default_rng(1)
    entries = steps + STACK - 1 + N_STEPS
    offsets = np.arange(steps, dtype=np.int32)
    while True:
        for start in range(0, len(frames) - entries + 1, steps):
            fields: dict[str, NDArray] = {
                "obs": frames[start : start + entries],
                "action": rng.integers(0, 6, steps),
                "reward": rng.random(steps, dtype=np.float32),
                "discount": np.full(steps, 0.97, np.float32),
            }
            yield Chunk(fields, steps, offsets, np.ones(steps, np.int32), rng.random(steps) + 0.1, version=1)


class Server:
    """A replay process with a folder of its own, on loopback TCP. It may be killed and started again.

    Attributes:
        endpoint: its address.
        folder: its files.
        process: the process.
    """

    def __init__(self, table: str, port: int, *options: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="troupe-bench-replay-"))
        self.endpoint = f"tcp://127.0.0.1:{port}"
        words = ["serve", "--bind", self.endpoint, "--data-dir", str(self.folder), "--table", table]
        self._command = [
            sys.executable,
            "-m",
            "troupe.services.replay",
            *words,
            "--log-level",
            "warning",
            *options,
        ]
        self.start()

    def start(self) -> None:
        """Start the process, on what the folder holds."""
        self.process = subprocess.Popen(self._command)

    def kill(self) -> None:
        """Kill the process at once."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """End the process and delete its files."""
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def disk_bytes(self) -> int:
        """Bytes that the files take, which is less than their length: they are sparse."""
        return sum(file.stat().st_blocks * 512 for file in self.folder.iterdir())


@contextlib.contextmanager
def server(table: str, port: int, *options: str) -> Iterator[Server]:
    """A `Server` of this table, `NAME:FIELD=VALUE,...`, for as long as the block runs."""
    running = Server(table, port, *options)
    try:
        yield running
    finally:
        running.stop()


def insert_all(client: ReplayClient, source: Iterator[Chunk], count: int) -> None:
    """Insert `count` chunks and wait until they are stored."""
    for _ in range(count):
        chunk = next(source)
        while not client.insert(chunk):
            client.poll(100)
    if not client.flush(60):
        raise SystemExit(f"replay does not take inserts: {client.blocked_reason}")


@dataclass
class Cycle:
    """Figures of insert, sample and update in turn; CPU time is per batch, of all threads."""

    batches_per_s: float
    wire_bytes_per_batch: float
    server_cpu_ms: float
    client_cpu_ms: float

    @property
    def cpu_ms(self) -> float:
        """CPU time of both sides."""
        return self.server_cpu_ms + self.client_cpu_ms

    def figures(self, prefix: str) -> dict[str, float]:
        """For the JSON line."""
        return {
            f"{prefix}_batches_per_s": round(self.batches_per_s, 1),
            f"{prefix}_wire_bytes_per_batch": round(self.wire_bytes_per_batch),
            f"{prefix}_server_cpu_ms": round(self.server_cpu_ms, 2),
            f"{prefix}_client_cpu_ms": round(self.client_cpu_ms, 2),
        }


def cycle(client: ReplayClient, source: Iterator[Chunk], seconds: float, *, inserts: bool = True) -> Cycle:
    """Insert 50, sample 512, update 512, over and over, with some batches requested ahead."""
    rng = np.random.default_rng(2)

    def one() -> int:
        batch = client.receive(30)
        if batch is None:
            raise SystemExit(f"replay sends no batches: {client.wait_reason}")
        client.request_sample(BATCH)
        client.update_priorities(batch.ids, rng.random(BATCH) + 0.01)
        if inserts:
            chunk = next(source)
            while not client.insert(chunk):
                client.poll(10)
        size = client.batch_bytes
        client.recycle(batch)
        return size

    for _ in range(PREFETCH):
        client.request_sample(BATCH)
    for _ in range(2 * PREFETCH + 20):
        one()
    server_s, client_s = client.status()["cpu_s"], time.process_time()
    began, batches, size = time.perf_counter(), 0, 0
    while (elapsed := time.perf_counter() - began) < seconds:
        size += one()
        batches += 1
    client_s = time.process_time() - client_s
    server_s = client.status()["cpu_s"] - server_s
    while client.outstanding_samples:
        client.receive(10)
    client.flush(30)
    return Cycle(batches / elapsed, size / batches, server_s / batches * 1e3, client_s / batches * 1e3)


def mean(cycles: Sequence[Cycle]) -> Cycle:
    """The mean of several measurements."""
    names = [field.name for field in dataclasses.fields(Cycle)]
    return Cycle(**{name: statistics.mean(getattr(each, name) for each in cycles) for name in names})
