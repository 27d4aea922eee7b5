"""Replay end to end: a server process, one client that inserts 50, samples 512, updates 512, in turn.

`python -m benchmarks.replay --json [--seconds S] [--items N] [--only PART] [--paper-load]`. The items are
Atari transitions: windows of 4 + 3 frames of 84x84 (stack 4, n = 3), an action, a return, a discount.

`tcp`: Pong frames, compressed, loopback TCP. `tcp_raw`: noise, 25 MB per batch; `raw_zmq`: bare ZeroMQ frames
of as many bytes. `tcp_incompressible`: noise in a field that is meant to be compressed. `shm`: noise, read
from the server's files; `gather`: such a copy alone, in this process. `shm_lz4`: Pong, read from the files.
`curve`: `tcp`, encrypted. `paper_load`: see `benchmarks.replay_load`. `*_cpu_ms` is CPU time per batch, of
the server and of the client, which a busy machine changes less than it does wall time.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
import zmq
from numpy.typing import NDArray

from benchmarks import common
from benchmarks.replay_load import paper_load
from benchmarks.replay_rig import (
    BATCH,
    FRAME,
    PREFETCH,
    STEPS,
    WINDOW,
    Cycle,
    chunks,
    cycle,
    insert_all,
    noise_frames,
    pong_frames,
    server,
    specs,
)
from common.wire.key_options import make_security
from common.wire.keys import make_keys
from common.wire.replay_client import ReplayClient

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


def measure(
    port: int,
    frames: NDArray[np.uint8],
    items: int,
    seconds: float,
    *,
    compress: bool,
    files: bool,
    keys: str = "",
) -> Cycle:
    """The cycle against a server with ``items`` items; ``files`` may be mapped; with or without ``keys``."""
    options = ["--keys", keys] if keys else []
    with server(items, port, *options) as running:
        client = ReplayClient(
            running.endpoint,
            name="bench",
            specs=specs(compress),
            map_files=files,
            security=make_security(keys, "learner").toward("replay") if keys else None,
        )
        try:
            source = chunks(frames)
            insert_all(client, source, items // STEPS)
            found = cycle(client, source, seconds)
        finally:
            client.close(0)
    if files and client.counters["mapped_batches"] < client.counters["batches"] // 2:
        raise SystemExit("the server's files could not be mapped")
    return found


class Parts:
    """What can be measured, each into some figures."""

    def __init__(self, seconds: float, items: int, port: int) -> None:
        self.seconds, self.items, self.port = seconds, items, port
        self.pong = lru_cache(lambda: pong_frames(20_000))
        self.noise = lru_cache(lambda: noise_frames(5_000))

    def tcp(self) -> dict[str, float]:
        """Compressed Pong frames."""
        found = measure(self.port, self.pong(), self.items, self.seconds, compress=True, files=False)
        return {**found.figures("tcp"), "wire_bytes_per_batch": round(found.wire_bytes_per_batch)}

    def raw(self) -> dict[str, float]:
        """Incompressible frames, and as many bare bytes."""
        found = measure(self.port + 1, self.noise(), self.items, self.seconds, compress=False, files=False)
        bare = raw_zmq(self.port + 2, self.seconds / 2)
        return {
            **found.figures("tcp_raw"),
            "raw_zmq_batches_per_s": round(bare, 1),
            "tcp_raw_vs_raw_zmq": round(found.batches_per_s / bare, 3),
        }

    def stored(self) -> dict[str, float]:
        """Incompressible frames in a field that is meant to be compressed."""
        found = measure(self.port + 3, self.noise(), self.items, self.seconds, compress=True, files=False)
        return found.figures("tcp_incompressible")

    def shm(self) -> dict[str, float]:
        """Frames read from the server's files."""
        found = measure(self.port + 4, self.noise(), self.items, self.seconds, compress=False, files=True)
        limit = gather(self.seconds / 4, self.items)
        pong = measure(self.port + 5, self.pong(), self.items, self.seconds, compress=True, files=True)
        return {
            **found.figures("shm"),
            "gather_batches_per_s": round(limit, 1),
            "shm_vs_gather": round(found.batches_per_s / limit, 3),
            **pong.figures("shm_lz4"),
        }

    def curve(self) -> dict[str, float]:
        """Compressed Pong frames, encrypted."""
        with tempfile.TemporaryDirectory() as folder:
            keys = str(Path(folder) / "keys")
            make_keys(keys)
            found = measure(
                self.port + 6, self.pong(), self.items, self.seconds, compress=True, files=False, keys=keys
            )
        return found.figures("curve")

    def load(self) -> dict[str, float]:
        """The load of a whole Ape-X system."""
        return paper_load(self.port + 7, self.pong(), self.seconds)


def main() -> None:
    """The command line."""
    parser = common.parser(__doc__)
    names = ("tcp", "raw", "stored", "shm", "curve", "load")
    parser.add_argument(
        "--items", type=int, default=100_000, help="items in the table (default: %(default)s)"
    )
    parser.add_argument("--port", type=int, default=15560, help="first of the ports to use")
    parser.add_argument("--only", choices=names, action="append", help="only this part; may be repeated")
    parser.add_argument("--paper-load", action="store_true", help="the same as --only load")
    arguments = parser.parse_args()
    parts = Parts(arguments.seconds, arguments.items, arguments.port)
    chosen = [*(arguments.only or ()), *(["load"] if arguments.paper_load else [])] or names
    figures: dict[str, float | int | str] = {"items": arguments.items}
    for name in chosen:
        part: Callable[[], dict[str, float]] = getattr(parts, name)
        found = part()
        figures |= found
        if not arguments.json:
            for figure, value in found.items():
                print(f"{figure:34} {value}", flush=True)
    common.report("replay", figures)


if __name__ == "__main__":
    main()
