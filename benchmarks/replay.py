"""Replay end to end: a server process, one client that inserts 50, samples 512, updates 512, in turn.

`python -m benchmarks.replay --json [--seconds S] [--items N] [--paper-load]`. Atari transitions: windows of
4 + 3 frames of 84x84 (stack 4, n = 3), an action, a return, a discount. `tcp_*` go over loopback TCP: Pong
frames or incompressible noise. `raw_zmq_batches_per_s` is what bare ZeroMQ frames of a raw batch reach.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import zmq
from numpy.typing import NDArray

from benchmarks import common
from common.data.fields import Chunk, FieldSpec
from common.wire.replay_client import ReplayClient

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
    """Consecutive frames ``[count, 84, 84]`` of games played at random."""
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
    """Chunks of ``frames``, over and over."""
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


@contextlib.contextmanager
def server(capacity: int, port: int, *options: str) -> Iterator[str]:
    """A replay process with an empty folder, on loopback TCP."""
    folder = tempfile.mkdtemp(prefix="troupe-bench-replay-")
    endpoint = f"tcp://127.0.0.1:{port}"
    words = ["--bind", endpoint, "--data-dir", folder, "--capacity", str(capacity), "--log-level", "warning"]
    process = subprocess.Popen([sys.executable, "-m", "services.replay", *words, *options])
    try:
        yield endpoint
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)


def insert_all(client: ReplayClient, source: Iterator[Chunk], count: int) -> None:
    """Insert ``count`` chunks and wait until they are stored."""
    for _ in range(count):
        chunk = next(source)
        while not client.insert(chunk):
            client.poll(100)
    if not client.flush(60):
        raise SystemExit(f"replay does not take inserts: {client.blocked_reason}")


@dataclass
class Cycle:
    """Figures of insert, sample and update in turn."""

    batches_per_s: float
    wire_bytes_per_batch: float
    server_cpu_ms: float
    client_cpu_ms: float


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
        return client.batch_bytes

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


RAW_SENDER = """
import sys, numpy as np, zmq
port, size = int(sys.argv[1]), int(sys.argv[2])
socket = zmq.Context().socket(zmq.ROUTER)
socket.bind(f"tcp://127.0.0.1:{port}")
data = [np.random.default_rng(i).integers(0, 256, size, dtype=np.uint8) for i in range(4)]
count = 0
while True:
    peer, word = socket.recv_multipart()
    if word == b"stop":
        break
    socket.send_multipart([peer, data[count % 4]], copy=False)
    count += 1
"""


def raw_zmq(port: int, seconds: float) -> float:
    """Batches/s that one pair of processes moves as bare frames of the same size, requested ahead as well."""
    size = BATCH * WINDOW * FRAME[0] * FRAME[1]
    process = subprocess.Popen([sys.executable, "-c", RAW_SENDER, str(port), str(size)])
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(f"tcp://127.0.0.1:{port}")
    try:
        for _ in range(PREFETCH):
            socket.send(b"go")
        for _ in range(2 * PREFETCH):
            socket.recv(copy=False)
            socket.send(b"go")
        began, count = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - began) < seconds:
            socket.recv(copy=False)
            socket.send(b"go")
            count += 1
        socket.send(b"stop")
        return count / elapsed
    finally:
        context.destroy(linger=0)
        process.kill()
        process.wait()


def gather(seconds: float, items: int) -> float:
    """Batches/s of copying 512 random windows out of a frame store in this process, into one buffer."""
    frames = noise_frames(4096)
    store = np.resize(frames, (min(items, 100_000), *FRAME))
    windows = np.lib.stride_tricks.as_strided(
        store,
        (len(store) - WINDOW + 1, WINDOW, *FRAME),
        (store.strides[0], *store.strides),
        writeable=False,
    )
    rng = np.random.default_rng(0)
    out = np.empty((BATCH, WINDOW, *FRAME), np.uint8)

    def one() -> None:
        for row, start in enumerate(rng.integers(0, len(windows), BATCH).tolist()):
            out[row] = windows[start]

    return 1e3 / common.median_ms(one, seconds)


def tcp(port: int, frames: NDArray[np.uint8], items: int, seconds: float, *, compress: bool) -> Cycle:
    """The cycle against a server with ``items`` items."""
    with server(items, port) as endpoint:
        client = ReplayClient(endpoint, name="bench", specs=specs(compress))
        try:
            source = chunks(frames)
            insert_all(client, source, items // STEPS)
            return cycle(client, source, seconds)
        finally:
            client.close(0)


def main() -> None:
    """The command line."""
    parser = common.parser(__doc__)
    parser.add_argument(
        "--items", type=int, default=100_000, help="items in the table (default: %(default)s)"
    )
    parser.add_argument("--port", type=int, default=15560, help="first of the ports to use")
    parser.add_argument("--only", choices=("tcp", "raw"), help="only one part")
    arguments = parser.parse_args()
    seconds, items, port = arguments.seconds, arguments.items, arguments.port
    figures: dict[str, float | int | str] = {"items": items}
    if arguments.only in (None, "tcp"):
        pong = tcp(port, pong_frames(20_000), items, seconds, compress=True)
        figures |= {
            "tcp_batches_per_s": round(pong.batches_per_s, 1),
            "wire_bytes_per_batch": round(pong.wire_bytes_per_batch),
            "server_cpu_ms_per_batch": round(pong.server_cpu_ms, 2),
            "client_cpu_ms_per_batch": round(pong.client_cpu_ms, 2),
        }
    if arguments.only in (None, "raw"):
        raw = tcp(port + 1, noise_frames(5_000), items, seconds, compress=False)
        bare = raw_zmq(port + 2, seconds / 2)
        figures |= {
            "tcp_raw_batches_per_s": round(raw.batches_per_s, 1),
            "raw_wire_bytes_per_batch": round(raw.wire_bytes_per_batch),
            "raw_server_cpu_ms_per_batch": round(raw.server_cpu_ms, 2),
            "raw_client_cpu_ms_per_batch": round(raw.client_cpu_ms, 2),
            "raw_zmq_batches_per_s": round(bare, 1),
            "tcp_raw_vs_raw_zmq": round(raw.batches_per_s / bare, 3),
            "gather_batches_per_s": round(gather(seconds / 4, items), 1),
        }
    if not arguments.json:
        for figure, value in figures.items():
            print(f"{figure:28} {value}")
    common.report("replay", figures)


if __name__ == "__main__":
    main()
