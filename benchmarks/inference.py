"""Central inference with simulated actors, against a process that runs the network itself.

`python -m benchmarks.inference --json [--seconds S]`. Actors send Pong's frames and step in no time, so that
what is measured is requests, batches, the network and the assembly of chunks: an upper bound of steps/s, and
the wait of an actor when nothing else limits. The service is a process, and so are the actors of every four
cores together.
`batching_efficiency_N` is the mean number of slots in a forward pass against those of all N actors. Figures
per CPU-second are of the process with the network alone, and hold on a machine that is busy otherwise, too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import zmq

from benchmarks import common
from troupe.common.agents import make_agent
from troupe.common.config import Config, load_config
from troupe.common.data.schema import Chunk
from troupe.common.envs import EnvSpec, Step, VectorEnv, make_spec
from troupe.common.envs.base import Seed
from troupe.common.envs.transfer import pack_start, pack_step
from troupe.common.machine import usable_cores
from troupe.services.actor.inference_client import InferenceClient
from troupe.services.actor.local_inference import Rollout
from troupe.services.learner.inference.service import CentralInference

ACTORS = (1, 4, 16)
GROUPS = 2
WARM_UP_S = 2.0
START_TIMEOUT_S = 120.0
FRAMES = 64


class Still(VectorEnv):
    """Shows the same frames again and again; a step costs nothing."""

    def __init__(self, spec: EnvSpec, slots: int, seed: int) -> None:
        self.spec, self.num_slots = spec, slots
        rng = np.random.default_rng(seed)
        frame_shape = spec.obs_shape[1:]
        frames = rng.integers(0, 256, (FRAMES, slots, *frame_shape), dtype=np.uint8)
        stacks = [np.roll(frames, shift, axis=0) for shift in range(spec.stack - 1, -1, -1)]
        self._stacks = np.stack(stacks, axis=2)
        self._no = np.zeros(slots, bool)
        self._reward = np.zeros(slots, np.float32)
        self._t = 0

    def reset(self, seed: Seed | None = None) -> np.ndarray:
        """The first observations."""
        return self._stacks[self._t]

    def step(self, actions: np.ndarray) -> Step:
        """The next ones."""
        self._t = (self._t + 1) % FRAMES
        return Step(self._stacks[self._t], self._reward, self._no.copy(), self._no.copy())

    def render_frame(self, slot: int) -> np.ndarray:
        """Nothing to see."""
        raise NotImplementedError


class NullReplay:
    """Takes every chunk and keeps none."""

    outstanding = 0
    blocked_reason = ""
    paused = False
    counters = {"pack_us": 0}  # noqa: RUF012  it packs nothing

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.sockets = [context.socket(zmq.PAIR)]

    def set_shards(self, endpoints: list[str]) -> None:
        """There are none."""

    def insert(self, chunk: Chunk, table: str) -> bool:
        """Forget it."""
        return True

    def poll(self, timeout_ms: int) -> None:
        """Nothing ever comes."""

    def flush(self, timeout_s: float) -> bool:
        """Nothing is outstanding."""
        return True

    def close(self) -> None:
        """Close the socket."""
        self.sockets[0].close(linger=0)


def config_of(arguments: argparse.Namespace) -> Config:
    """Pong with the Nature network, in as many slots as 16 actors have."""
    overrides = {
        "env.id": "atari:pong",
        "agent.torso": "nature",
        "agent.hidden_units": "512",
        "actor.processes": str(max(ACTORS)),
        "actor.slots": str(arguments.slots),
        "inference.mode": "central",
        "inference.min_batch": str(arguments.min_batch),
        "inference.timeout_ms": str(arguments.timeout_ms),
    }
    return load_config(overrides=overrides)


def simulate(endpoint: str, actors: range, slots: int, seconds: float) -> dict[str, Any]:
    """The actors' side: steps, requests and latencies of `actors` for `seconds`, in one process."""
    spec = make_spec(load_config(overrides={"env.id": "atari:pong"}).env)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    rows = slots // GROUPS
    env = Still(spec, rows, seed=1)  # every group looks at the same pictures
    poller = zmq.Poller()
    clients: dict[Any, InferenceClient] = {}
    for actor in actors:
        client = InferenceClient(context, endpoint, name=f"actor-{actor}", incarnation=actor + 1)
        clients[client.socket] = client
        poller.register(client.socket, zmq.POLLIN)
        for group in range(GROUPS):
            first = actor * slots + group * rows
            client.begin(group, range(first, first + rows), pack_start(env.reset()))
    requests, waits, began_s = 0, [], 0.0
    end_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end_s:
        for socket in dict(poller.poll(100)) or clients:
            for answer in clients[socket].poll(0):
                if answer.actions is None:
                    raise SystemExit("the service lost a group")
                clients[socket].go_on(answer.group, pack_step(env.step(answer.actions), spec.stack))
                requests += 1
                waits.append(answer.waited_s)
        now_s = time.monotonic()
        if not began_s and requests >= GROUPS * len(actors):
            began_s, end_s = now_s + WARM_UP_S, now_s + WARM_UP_S + seconds
        if now_s < began_s:
            requests = 0
            waits.clear()
    for client in clients.values():
        client.close()
    context.destroy(linger=0)
    if not waits:
        raise SystemExit("the service answered nobody")
    return {"requests": requests, "waits_s": waits}


def central(config: Config, actors: int, seconds: float) -> dict[str, float]:
    """The service in this process, `actors` in others."""
    spec, slots = make_spec(config.env), config.actor.slots
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    agent = make_agent(config.agent, spec, device=config.learner.device)
    leases = {a + 1: set(range(a * slots, (a + 1) * slots)) for a in range(actors)}
    with tempfile.TemporaryDirectory(prefix="troupe-bench-") as directory:
        service = CentralInference(
            context,
            config,
            agent,
            spec,
            leases=lambda: leases,
            shards=lambda: ["null"],
            replay=NullReplay(context),  # type: ignore[arg-type]
            seed=1,
        )
        service.endpoint = f"ipc://{directory}/inference"
        service.start()
        service.offer(1, agent.params())
        service.metrics()
        rows, cpu_s = service.rows_total, time.process_time()
        command = [sys.executable, "-m", "benchmarks.inference", "--endpoint", service.endpoint]
        command += ["--slots", str(slots), "--seconds", str(seconds), "--simulate"]
        several = min(actors, max(1, usable_cores() // 4))
        bounds = [actors * each // several for each in range(several + 1)]
        processes = [
            subprocess.Popen([*command, str(first), str(end)], stdout=subprocess.PIPE, text=True)
            for first, end in pairwise(bounds)
        ]
        try:
            limit_s = START_TIMEOUT_S + WARM_UP_S + seconds + 60
            outputs = [process.communicate(timeout=limit_s)[0] for process in processes]
            for process in processes:
                if process.returncode:
                    raise subprocess.CalledProcessError(process.returncode, command)
            told = [json.loads(output) for output in outputs]
            service.check()
            cpu_s, rows = time.process_time() - cpu_s, service.rows_total - rows
            measured = service.metrics()
        finally:
            for process in processes:
                process.kill()
            service.stop()
            context.destroy(linger=0)
    batch = measured["inference/batch_slots"]
    requests = sum(each["requests"] for each in told)
    p50, p99 = np.percentile([wait for each in told for wait in each["waits_s"]], [50, 99]) * 1e3
    return {
        "steps_per_s": requests * (slots // GROUPS) / seconds,
        "requests_per_s": requests / seconds,
        "latency_p50_ms": p50,
        "latency_p99_ms": p99,
        "steps_per_cpu_s": rows / cpu_s,
        "batch_slots": batch,
        "batching_efficiency": batch / (actors * slots),
    }


def local(config: Config, seconds: float) -> tuple[float, float]:
    """Steps/s, and steps per CPU-second, of a process that runs the network itself for one actor's slots."""
    spec = make_spec(config.env)
    env = Still(spec, config.actor.slots, seed=1)
    rollout = Rollout(make_agent(config.agent, spec), env, config.actor.chunk_steps, 1)
    for _ in range(5):
        rollout.step(1)
    before, began_s, cpu_s = rollout.timing.steps, time.monotonic(), time.process_time()
    while time.monotonic() < began_s + seconds:
        rollout.step(1)
    steps = rollout.timing.steps - before
    return steps / (time.monotonic() - began_s), steps / (time.process_time() - cpu_s)


def main() -> None:
    """The command line."""
    parser = common.parser(__doc__, seconds=10.0)
    parser.add_argument("--slots", type=int, default=32, help="slots of an actor, in two groups")
    parser.add_argument("--min-batch", type=int, default=1, help="inference.min_batch")
    parser.add_argument("--timeout-ms", type=float, default=5.0, help="inference.timeout_ms")
    parser.add_argument("--simulate", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--endpoint", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.simulate:
        own = range(*arguments.simulate)
        print(json.dumps(simulate(arguments.endpoint, own, arguments.slots, arguments.seconds)))
        return
    config = config_of(arguments)
    figures: dict[str, float | int | str] = {}
    for actors in ACTORS:
        measured = central(config, actors, arguments.seconds)
        if actors == 4:
            for name in ("latency_p50_ms", "latency_p99_ms"):
                figures[name] = round(measured[name], 2)
        figures |= {f"{name}_{actors}": round(value, 3) for name, value in measured.items()}
    steps_per_s, steps_per_cpu_s = local(config, arguments.seconds)
    figures["local_steps_per_s"] = round(steps_per_s, 1)
    figures["local_steps_per_cpu_s"] = round(steps_per_cpu_s, 1)
    figures |= {"slots": arguments.slots, "min_batch": arguments.min_batch}
    if not arguments.json:
        for figure, value in figures.items():
            print(f"{figure:28} {value}")
    common.report("inference", figures)


if __name__ == "__main__":
    main()
