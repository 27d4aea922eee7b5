"""The load of the Ape-X paper (Horgan et al. 2018, 4.1) on one server, and how many times that it holds.

There, 360 actors make 12,500 transitions/s, and the learner takes 19 batches of 512 a second. Here eight
processes insert chunks of 50 Pong transitions, which they compress themselves, and this process samples,
unpacks and updates priorities. The server's limiter keeps the ratio of the two; otherwise everybody is as
fast as the machine, which they share, permits.
"""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.synchronize import Event

import numpy as np
from numpy.typing import NDArray

from benchmarks.replay_rig import BATCH, PREFETCH, STEPS, chunks, server, specs
from troupe.common.wire.replay.client import ReplayClient

ACTORS = 8
TRANSITIONS_PER_S = 12_500
BATCHES_PER_S = 19
CAPACITY = 200_000
MIN_ITEMS = 20_000
WARM_UP_S = 3.0


def paper_load(
    port: int, frames: NDArray[np.uint8], seconds: float, actors: int = ACTORS
) -> dict[str, float]:
    """Figures of the load, kept up for `seconds`."""
    ratio = BATCHES_PER_S * BATCH / TRANSITIONS_PER_S
    table = f"default:capacity={CAPACITY},min_items={MIN_ITEMS},samples_per_insert={ratio}"
    spawn = multiprocessing.get_context("spawn")
    stop = spawn.Event()
    with server(table, port) as running:
        shares = np.array_split(frames, actors)
        processes = [spawn.Process(target=act, args=(running.endpoint, share, stop)) for share in shares]
        for process in processes:
            process.start()
        client = ReplayClient(running.endpoint, name="learner", map_files=False)
        try:
            learn(client, WARM_UP_S)
            before, began = client.status(), time.perf_counter()
            batches = learn(client, seconds)
            elapsed, after = time.perf_counter() - began, client.status()
        finally:
            stop.set()
            client.close(0)
            for process in processes:
                process.join(20)
                process.kill()
    inserted = (after["inserted_items"] - before["inserted_items"]) / elapsed
    multiple = min(inserted / TRANSITIONS_PER_S, batches / elapsed / BATCHES_PER_S)
    server_cpu_s = after["cpu_s"] - before["cpu_s"]
    return {
        "paper_load_multiple": round(multiple, 2),
        "paper_load_inserts_per_s": round(inserted),
        "paper_load_batches_per_s": round(batches / elapsed, 1),
        # Of one core, were the load just that of the paper.
        "paper_load_server_cpu": round(server_cpu_s / elapsed / multiple, 3),
    }


def learn(client: ReplayClient, seconds: float) -> int:
    """Sample and update for `seconds`; returns the number of batches."""
    rng = np.random.default_rng(0)
    batches, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        while client.outstanding_samples < PREFETCH:
            client.request_sample(BATCH)
        batch = client.receive(60)
        if batch is None:
            raise SystemExit(f"replay sends no batches: {client.wait_reason}")
        client.update_priorities(batch.ids, rng.random(BATCH) + 0.01)
        client.recycle(batch)
        batches += 1
    return batches


def act(endpoint: str, frames: NDArray[np.uint8], stop: Event) -> None:
    """One synthetic actor: inserts as fast as it is allowed to."""
    client = ReplayClient(endpoint, name="actor", specs=specs(True), max_outstanding=8)
    for chunk in chunks(frames, STEPS):
        while not client.insert(chunk):
            if stop.is_set():
                client.close(0)
                return
            client.poll(20)
