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

import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
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
    mean,
    noise_frames,
    pong_frames,
    server,
    specs,
)
from troupe.common.wire.replay.client import ReplayClient
from troupe.common.wire.security.key_options import make_security
from troupe.common.wire.security.keys import make_keys

ROUNDS = 4
"""Turns that two things take that are compared."""

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


class RawZmq:
    """A pair of processes that moves bare frames of the size of a raw batch, requested ahead as well."""

    def __init__(self, port: int) -> None:
        size = BATCH * WINDOW * FRAME[0] * FRAME[1]
        self._process = subprocess.Popen([sys.executable, "-c", RAW_SENDER, str(port), str(size)])
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(f"tcp://127.0.0.1:{port}")

    def batches_per_s(self, seconds: float) -> float:
        """Batches moved per second."""
        for _ in range(PREFETCH):
            self._socket.send(b"go")
        for _ in range(2 * PREFETCH):
            self._one()
        began, count = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - began) < seconds:
            self._one()
            count += 1
        for _ in range(PREFETCH):
            self._socket.recv(copy=False)
        return count / elapsed

    def close(self) -> None:
        """End the process."""
        self._context.destroy(linger=0)
        self._process.kill()
        self._process.wait()

    def _one(self) -> None:
        self._socket.recv(copy=False)
        self._socket.send(b"go")


def gather_batches_per_s(items: int) -> Callable[[float], float]:
    """A measurement of copying 512 random windows out of a frame store in this process, into one buffer."""
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

    def measure(seconds: float) -> float:
        began, count = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - began) < seconds:
            for row, start in enumerate(rng.integers(0, len(windows), BATCH).tolist()):
                out[row] = windows[start]
            count += 1
        return count / elapsed

    return measure


@contextlib.contextmanager
def filled(
    port: int,
    frames: NDArray[np.uint8],
    items: int,
    *,
    compress: bool,
    files: bool,
    keys: str = "",
    options: Sequence[str] = (),
) -> Iterator[Callable[[float], Cycle]]:
    """A measurement of the cycle against a server with `items` items; `files` may be mapped."""
    options = [*options, *(["--keys", keys] if keys else [])]
    with server(f"default:capacity={items}", port, *options) as running:
        client = ReplayClient(
            running.endpoint,
            name="bench",
            specs=specs(compress),
            map_files=files,
            security=make_security(keys, "learner").toward("replay") if keys else None,
        )
        source = chunks(frames)
        try:
            insert_all(client, source, items // STEPS)
            yield lambda seconds: cycle(client, source, seconds)
        finally:
            client.close(0)
        if files and client.counters["mapped_batches"] < 0.9 * client.counters["batches"]:
            raise SystemExit("the server's files could not be mapped")


def in_turn(
    first: Callable[[float], Cycle], second: Callable[[float], float], seconds: float
) -> tuple[Cycle, float, float]:
    """Both of them, and how much faster the first is, measured in turns so that both see the same machine."""
    pairs = [(first(seconds / ROUNDS), second(seconds / ROUNDS / 2)) for _ in range(ROUNDS)]
    ratios = [found.batches_per_s / limit for found, limit in pairs]
    return (
        mean([found for found, _ in pairs]),
        statistics.mean(x for _, x in pairs),
        statistics.median(ratios),
    )


class Parts:
    """What can be measured, each into some figures."""

    def __init__(self, seconds: float, items: int, port: int, options: Sequence[str] = ()) -> None:
        self.seconds, self.items, self.port = seconds, items, port
        self.filled = partial(filled, options=options)
        self.pong = lru_cache(lambda: pong_frames(20_000))
        self.noise = lru_cache(lambda: noise_frames(5_000))

    def tcp(self) -> dict[str, float]:
        """Compressed Pong frames."""
        with self.filled(self.port, self.pong(), self.items, compress=True, files=False) as measure:
            found = measure(self.seconds)
        return {**found.figures("tcp"), "wire_bytes_per_batch": round(found.wire_bytes_per_batch)}

    def raw(self) -> dict[str, float]:
        """Incompressible frames, and as many bare bytes."""
        bare = RawZmq(self.port + 2)
        try:
            with self.filled(self.port + 1, self.noise(), self.items, compress=False, files=False) as measure:
                found, limit, ratio = in_turn(measure, bare.batches_per_s, self.seconds)
        finally:
            bare.close()
        return {
            **found.figures("tcp_raw"),
            "raw_zmq_batches_per_s": round(limit, 1),
            "tcp_raw_vs_raw_zmq": round(ratio, 3),
        }

    def stored(self) -> dict[str, float]:
        """Incompressible frames in a field that is meant to be compressed."""
        with self.filled(self.port + 3, self.noise(), self.items, compress=True, files=False) as measure:
            return measure(self.seconds).figures("tcp_incompressible")

    def shm(self) -> dict[str, float]:
        """Frames read from the server's files."""
        with self.filled(self.port + 4, self.noise(), self.items, compress=False, files=True) as measure:
            found, limit, ratio = in_turn(measure, gather_batches_per_s(self.items), self.seconds)
        with self.filled(self.port + 5, self.pong(), self.items, compress=True, files=True) as measure:
            pong = measure(self.seconds)
        return {
            **found.figures("shm"),
            "gather_batches_per_s": round(limit, 1),
            "shm_vs_gather": round(ratio, 3),
            **pong.figures("shm_lz4"),
        }

    def curve(self) -> dict[str, float]:
        """Compressed Pong frames, encrypted."""
        with tempfile.TemporaryDirectory() as folder:
            keys = str(Path(folder) / "keys")
            make_keys(keys)
            with self.filled(
                self.port + 6, self.pong(), self.items, compress=True, files=False, keys=keys
            ) as measure:
                return measure(self.seconds).figures("curve")

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
    parser.add_argument("--durable", choices=("process", "power"), help="see `troupe replay serve`")
    parser.add_argument("--paper-load", action="store_true", help="the same as --only load")
    arguments = parser.parse_args()
    options = ["--durable", arguments.durable] if arguments.durable else []
    parts = Parts(arguments.seconds, arguments.items, arguments.port, options)
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
