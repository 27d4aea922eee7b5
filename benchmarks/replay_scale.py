"""Replay when it is large: cost of a batch, memory, and restart after `kill -9`.

`python -m benchmarks.replay_scale --json [--seconds S] [--items N] [--raw-items N]`. The cycle of
`benchmarks.replay` over Pong frames with 100 thousand items and with N; `cost_ratio` is the CPU time of a
batch in the large table, both sides together, over that in the small one. `restart_s` is from the start of a
process on a million items, whose predecessor was killed, to its first batch. `raw_items` are those that are
there after a tenth more than N were stored, within 7,940 bytes each. `*_gb` is what the files take on
the disk (GB of 10^9 bytes): they are mapped, so that is memory as well as far as it is used;
`server_private_gb` is what the process has beyond that.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks import common
from benchmarks.replay_rig import (
    STEPS,
    Cycle,
    Server,
    chunks,
    cycle,
    insert_all,
    noise_frames,
    pong_frames,
    server,
    specs,
)
from troupe.common.wire.replay.client import ReplayClient

SMALL = 100_000
RESTART = 1_000_000
RAW_ITEM_BYTES = 7940
"""What `--max-bytes` lets a raw item take: 56 frames for each 50 items, 16 bytes, part of a record."""


def main() -> None:
    """The command line."""
    parser = common.parser(__doc__)
    parser.add_argument("--items", type=int, default=2_000_000, help="items of the large table")
    parser.add_argument("--raw-items", type=int, default=2_000_000, help="items to store raw; 0 for none")
    parser.add_argument("--port", type=int, default=15580, help="first of the ports to use")
    arguments = parser.parse_args()
    frames = pong_frames(20_000)
    figures: dict[str, float | int | str] = {"items": arguments.items}
    with server(f"default:capacity={SMALL}", arguments.port) as running:
        small = _fill_and_measure(running, frames, SMALL, arguments.seconds)
    with server(f"default:capacity={arguments.items}", arguments.port + 1) as running:
        first = min(RESTART, arguments.items)
        _fill_and_measure(running, frames, first, 0)
        figures |= {"restart_items": first, "restart_s": round(_restart(running), 2)}
        large = _fill_and_measure(running, frames, arguments.items - first, arguments.seconds)
        figures["pong_gb"] = round(running.disk_bytes / 1e9, 3)
        figures["server_private_gb"] = round(_private_bytes(running.process.pid) / 1e9, 3)
    figures |= small.figures("small") | large.figures("large")
    figures["cost_ratio"] = round(large.cpu_ms / small.cpu_ms, 3)
    if arguments.raw_items:
        limit = str(arguments.raw_items * RAW_ITEM_BYTES)
        with server(
            f"default:capacity={arguments.raw_items}", arguments.port + 2, "--max-bytes", limit
        ) as running:
            client = ReplayClient(running.endpoint, name="bench", specs=specs(False))
            # Enough for the old to make room for the new.
            insert_all(client, chunks(noise_frames(5_000)), arguments.raw_items // STEPS * 11 // 10)
            items = client.status()["tables"]["default"]["items"]
            client.close(0)
            figures |= {"raw_items": items, "raw_gb": round(running.disk_bytes / 1e9, 3)}
    if not arguments.json:
        for figure, value in figures.items():
            print(f"{figure:34} {value}")
    common.report("replay_scale", figures)


def _fill_and_measure(running: Server, frames: NDArray[np.uint8], items: int, seconds: float) -> Cycle:
    client = ReplayClient(running.endpoint, name="bench", specs=specs(True), map_files=False)
    source = chunks(frames)
    insert_all(client, source, items // STEPS)
    try:
        return cycle(client, source, seconds) if seconds else Cycle(0, 0, 0, 0)
    finally:
        client.close(0)


def _private_bytes(pid: int) -> int:
    """Memory of a process that is in no file."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("no smaps_rollup")


def _restart(running: Server) -> float:
    """Seconds from the start of a new process to its first batch."""
    running.kill()
    began = time.perf_counter()
    running.start()
    client = ReplayClient(running.endpoint, name="bench")
    client.sample(512)
    elapsed = time.perf_counter() - began
    client.close(0)
    return elapsed


if __name__ == "__main__":
    main()
