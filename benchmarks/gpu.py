"""The learner on a GPU: updates, batches on their way into it, and central inference.

`python -m benchmarks.gpu --json [--seconds S] [--only updates|batches|inference]`. An update is measured as
the learner makes it: its batch lies in page-locked memory and is copied while the one before is computed.
`NAME_kernels_ms` is the same without a CUDA graph. `batches_per_s` are batches of 512 Pong transitions,
stored compressed, from replay services on this machine into the GPU. With `--device cpu --small` the same
code runs anywhere, and its figures say nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import zmq
from numpy.typing import NDArray

from benchmarks import common, inference
from benchmarks.learner import PONG
from benchmarks.replay_rig import BATCH, STEPS, chunks, insert_all, noise_frames, pong_frames, server, specs
from troupe.common.agents import Batch, make_agent
from troupe.common.agents.learners.graphed import GraphedUpdates
from troupe.common.agents.network import NetworkAgent
from troupe.common.config import load_config
from troupe.common.config.algorithms import agent_model
from troupe.common.data.schema import FieldSpec
from troupe.common.wire.replay.client import ReplayClient
from troupe.common.wire.replay.codec import SampleBatch
from troupe.services.learner.batches.prefetch import Prefetcher
from troupe.services.learner.batches.staging import Staging, staging_for

WARM_UPS = 5
"""Updates before the measurement: graphs are recorded within the first of them."""

UPDATES: dict[str, tuple[str, dict[str, object], int, int]] = {
    "apex": ("apex", {"torso": "nature"}, 512, 8),
    "r2d2": ("r2d2", {"torso": "nature", "normalize_pixels": False}, 64, 2),
    "impala": ("impala", {"torso": "deep", "lstm_units": 256, "normalize_pixels": False}, 32, 2),
    "ppo": ("policy_gradient", {"torso": "nature", "unroll_steps": 128, "minibatch_steps": 2048}, 64, 1),
}
"""Algorithm and fields of each workload, its rows, and those with `--small`. R2D2's sequences are 40 steps of
burn-in and 80 that are learned from, deep IMPALA's unrolls 20 steps; PPO makes three passes over 64 unrolls
of 128."""

SMALL: dict[str, dict[str, object]] = {
    "r2d2": {"sequence_steps": 8, "sequence_period_steps": 4, "burn_in_steps": 4},
    "impala": {"unroll_steps": 4},
    "ppo": {"unroll_steps": 16, "minibatch_steps": 8},
}


def random_field(spec: FieldSpec, rows: int, steps: int, rng: np.random.Generator) -> NDArray:
    """What a field may hold, `[rows, entries, *shape]`; no episode ends."""
    shape = rows, spec.entries(steps), *spec.shape
    if spec.name == "ended":
        return np.zeros(shape, spec.dtype)
    if spec.dtype.startswith("float"):
        return rng.normal(size=shape).astype(spec.dtype)
    least, most = spec.limits() or (0, 255)
    if spec.name in ("frames", "bootstrap_steps"):
        return np.full(shape, most, spec.dtype)
    return rng.integers(int(least), int(most) + 1, shape).astype(spec.dtype)


class Updates:
    """An agent that learns from batches of random pixels, over and over.

    Attributes:
        agent: the agent.
        steps: of a batch that are learned from.
    """

    def __init__(self, name: str, device: str, *, small: bool) -> None:
        algorithm, fields, rows, few = UPDATES[name]
        fields = fields | (SMALL.get(name, {}) if small else {})
        config = agent_model(algorithm).model_validate({"algorithm": algorithm, **fields})
        agent = make_agent(config, PONG, seed=0, device=device)
        assert isinstance(agent, NetworkAgent)
        self.agent = agent
        self._rows, length = few if small else rows, agent.item_steps[1]
        self.steps = self._rows * (length - getattr(config, "burn_in_steps", 0))
        self._staging = staging_for(device)
        rng = np.random.default_rng(0)
        self._batches = [self._batch(length, rng) for _ in range(3)]
        self._weights, self._lengths = np.ones(self._rows, np.float32), np.full(self._rows, length, np.int32)

    def _batch(self, steps: int, rng: np.random.Generator) -> SampleBatch:
        fields, allocate = {}, np.empty if self._staging is None else self._staging.allocate
        for spec in self.agent.fields:
            made = random_field(spec, self._rows, steps, rng)
            fields[spec.name] = allocate(made.shape, spec.dtype)
            fields[spec.name][...] = made
        none = np.zeros(self._rows)
        return SampleBatch(
            none.astype(np.uint64), none, none.astype(np.int64), none.astype(np.int32), 0, fields=fields
        )

    def ms(self, update: Callable[[Batch], object], seconds: float) -> float:
        """Milliseconds of an update, each begun while the one before may be computed."""
        staging: Staging | None = self._staging
        pending, count, began_s = [], -WARM_UPS, time.perf_counter()
        if staging is not None:
            staging.put(self._batches[0])
        while count < 3 or time.perf_counter() < began_s + seconds:
            batch, after = (self._batches[(count + each) % 3] for each in (WARM_UPS, WARM_UPS + 1))
            placed = {}
            if staging is not None:
                staging.put(after)
                placed = staging.take(batch)
            pending.append(
                update(Batch(batch.fields, self._weights, self._lengths, measure=False, placed=placed))
            )
            if len(pending) > 1:
                pending.pop(0).settled()  # type: ignore[attr-defined]
            if staging is not None:
                staging.drop(batch)
            count += 1
            if not count:
                began_s = time.perf_counter()
        pending.pop().settled()  # type: ignore[attr-defined]
        return (time.perf_counter() - began_s) / count * 1e3


def updates(options: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """Figures of each workload."""
    for name in UPDATES:
        if options.device != "cpu":
            torch.cuda.reset_peak_memory_stats(options.device)
        measured = Updates(name, options.device, small=options.small)
        graphed = GraphedUpdates(measured.agent)
        ms = measured.ms(graphed.update, options.seconds)
        yield f"{name}_update_ms", round(ms, 3)
        yield f"{name}_steps_per_s", round(measured.steps / ms * 1e3)
        yield f"{name}_frames_per_s", round(measured.steps * PONG.frames_per_step / ms * 1e3)
        yield f"{name}_graphs", float(graphed.graphs if options.device != "cpu" else 0)
        yield f"{name}_kernels_ms", round(measured.ms(measured.agent.update, options.seconds), 3)
        if options.device != "cpu":
            yield f"{name}_memory_bytes", float(torch.cuda.max_memory_allocated(options.device))


def batches(options: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """How many batches a second come into the learner, from `--shards` services on this machine."""
    items, count = (2_000 if options.small else 50_000), options.shards
    try:
        frames = pong_frames(min(items, 10_000))
    except ImportError:
        frames = noise_frames(2_000)  # which do not compress
    with contextlib.ExitStack() as services:
        table = f"default:capacity={items}"
        shards = [services.enter_context(server(table, options.port + each)) for each in range(count)]
        for shard in shards:
            client = ReplayClient(shard.endpoint, name="actor", specs=specs(True))
            insert_all(client, chunks(frames), items // STEPS)
            client.close()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        prefetch = Prefetcher(
            context,
            lambda: [shard.endpoint for shard in shards],
            kept={"default"},
            depth=16,
            staging=staging_for(options.device),
        )
        prefetch.share({"default": BATCH}, ahead=None, held=False)
        prefetch.start()
        try:
            yield "batches_per_s", round(_rate(prefetch, options.seconds), 1)
        finally:
            prefetch.stop()
            context.destroy(linger=0)
        yield "batch_shards", float(count)


def _rate(prefetch: Prefetcher, seconds: float) -> float:
    rng, came, began_s = np.random.default_rng(0), -20, time.perf_counter()
    while came < 5 or time.perf_counter() < began_s + seconds:
        batch = prefetch.get(60.0)
        if batch is None:
            raise SystemExit(f"replay sends no batches: {prefetch.wait_reason}")
        prefetch.placed(batch)
        prefetch.put_priorities(batch, rng.random(len(batch.ids)) + 0.01)
        came += 1
        if not came:
            began_s = time.perf_counter()
    return came / (time.perf_counter() - began_s)


def acting(options: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """Central inference for simulated actors, as `benchmarks.inference` measures it."""
    overrides = {
        "env.id": "atari:pong",
        "agent.torso": "nature",
        "actor.processes": str(options.actors),
        "actor.slots": str(options.slots),
        "inference.mode": "central",
        "learner.device": options.device,
    }
    found = inference.central(load_config(overrides=overrides), options.actors, options.seconds)
    for name in ("steps_per_s", "latency_p50_ms", "latency_p99_ms", "batch_slots"):
        yield f"inference_{name}", round(found[name], 2)
    yield "inference_actors", float(options.actors)
    yield "inference_slots", float(options.slots)


PARTS = {"updates": updates, "batches": batches, "inference": acting}


def main() -> None:
    """The command line."""
    parser = common.parser(__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu to try the code")
    parser.add_argument("--small", action="store_true", help="sizes that a CPU can do")
    parser.add_argument(
        "--only", choices=PARTS, action="append", help="this part; may be given several times"
    )
    parser.add_argument("--shards", type=int, default=4, help="replay services that batches come from")
    parser.add_argument("--port", type=int, default=17800, help="of the first of them, on loopback")
    parser.add_argument("--actors", type=int, default=16, help="that central inference acts for")
    parser.add_argument("--slots", type=int, default=64, help="of each of them")
    options = parser.parse_args()
    if options.device != "cpu" and not torch.cuda.is_available():
        print(
            "benchmarks.gpu: torch finds no GPU here: run it where nvidia-smi shows one, with PyPI's torch, "
            "or try its code with --device cpu --small",
            file=sys.stderr,
        )
        sys.exit(2)
    gpu = torch.cuda.get_device_name(options.device) if options.device != "cpu" else "none"
    figures: dict[str, float | int | str] = {"gpu": gpu, "torch": torch.__version__}
    for name in options.only or PARTS:
        for figure, value in PARTS[name](options):
            figures[figure] = value
            if not options.json:
                print(f"{figure:28} {value:g}", flush=True)
    common.report("gpu", figures)


if __name__ == "__main__":
    main()
