"""Elite and attentive replay: what a batch costs, and how well estimated distances stand for fresh ones.

`python -m benchmarks.elite --json [--seconds S] [--parts drawing learning ...]`. Five parts, in CPU time:

* drawing: to choose 16 of N unrolls;
* learning: updates of 5 fresh and 5 replayed unrolls of MinAtar, with each way to choose these in turn;
* scoring: a learner that computes the features of candidates anew, instead of sending distances back as
  priorities;
* exact: whole batches of Breakout, from the shard to the update, where replay or the learner scores, in turn;
* estimating: training CartPole on as many fresh as replayed unrolls, how far off policy what each way would
  choose is.
"""

from __future__ import annotations

import tempfile
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import median_ms, parser, report
from troupe.common.agents.base import Batch
from troupe.common.agents.impala import ImpalaAgent, ImpalaConfig
from troupe.common.config import load_config
from troupe.common.config.env_section import EnvConfig
from troupe.common.data.candidates import STRATEGIES
from troupe.common.data.columns import Payload
from troupe.common.data.distances import distances
from troupe.common.data.inserts import Insert
from troupe.common.data.schema import Chunk, FieldSpec, Items, stored_as
from troupe.common.data.table_config import TableConfig
from troupe.common.envs import EnvSpec, make_vector
from troupe.common.runtime import StopSignal
from troupe.common.spaces import ActionSpec
from troupe.serial import SerialTraining
from troupe.services.actor.local_inference import Rollout
from troupe.services.replay.storage.elite import Elite
from troupe.services.replay.storage.replay import Replay
from troupe.services.replay.storage.selectors import TableView
from troupe.services.replay.storage.table import ITEM

cpu_ms = partial(median_ms, clock=time.thread_time)
STEPS, FEATURES, ROWS, LAMBDA = 20, 64, 16, 6
PARTS = ("drawing", "learning", "scoring", "exact", "estimating")
BREAKOUT = EnvSpec("atari:breakout", (4, 84, 84), "uint8", ActionSpec.discrete(4), 4, 4, True)
MINATAR = EnvSpec("minatar:breakout", (4, 10, 10), "uint8", ActionSpec.discrete(3), 0, 1, True)
CANDIDATES = {"candidates_max": LAMBDA}
SAMPLERS: dict[str, dict[str, Any]] = {
    "uniform": {"sampler": "uniform"},
    **{f"elite_{name}": {"sampler": "elite", "strategy": name, **CANDIDATES} for name in STRATEGIES},
    "attentive": {"sampler": "attentive", **CANDIDATES},
}


def drawing(unrolls: int, seconds: float) -> dict[str, float]:
    """Milliseconds that a shard needs to choose the rows of a batch, by sampler."""
    rng = np.random.default_rng(0)
    specs = (FieldSpec("features", "float16", (FEATURES,)),)
    tables = [TableConfig(name, capacity=unrolls, **fields) for name, fields in SAMPLERS.items()]
    whole = Items(np.zeros(1, np.int32), np.full(1, STEPS, np.int32), np.ones(1))
    with tempfile.TemporaryDirectory() as folder:
        replay = Replay(Path(folder), tables, budget_bytes=1 << 31)
        features = rng.normal(size=(STEPS, FEATURES)).astype(np.float16)
        for sequence in range(1, unrolls + 1):
            items = dict.fromkeys(SAMPLERS, whole)
            payloads = {"features": Payload(features * np.float16(rng.random()))}
            replay.insert(Insert(1, sequence, sequence, specs, payloads, STEPS, 0, items))
        found = {}
        for name in SAMPLERS:
            draw = partial(replay.tables[name].draw, ROWS, replay.rng)
            found[f"{name}_ms_{unrolls}"] = cpu_ms(draw, seconds)
        update = replay.tables["elite_nearest"]
        ids = replay.sample({"elite_nearest": ROWS}).ids  # type: ignore[union-attr]
        found[f"update_ms_{unrolls}"] = cpu_ms(lambda: update.update(ids, rng.random(ROWS)), seconds)
        replay.close()
    return found


def random_unrolls(agent: ImpalaAgent, count: int) -> dict[str, np.ndarray]:
    """Unrolls of noise."""
    rng, batch = np.random.default_rng(0), {}
    for field in agent.fields:
        shape = (count, field.entries(STEPS), *field.shape)
        batch[field.name] = rng.integers(0, 2, shape).astype(field.dtype)
    if "frames" in batch:
        batch["frames"][:] = 4
    return batch


class Learning:
    """A learner with its queue and its table of 1,000 unrolls, full, and a fixed stream of unrolls."""

    ROWS = 5
    POOL = 64

    def __init__(self, folder: Path, features: Any, sampler: dict[str, Any]) -> None:
        config = ImpalaConfig(
            torso="minatar", hidden_units=128, normalize_pixels=False, unroll_steps=STEPS,
            behaviour_features=features, optimizer="adam", optimizer_epsilon=1e-5,
        )  # fmt: skip
        self.agent = ImpalaAgent(config, MINATAR, seed=1)
        tables = [
            TableConfig("fresh", limiter="queue", sampler="fifo", max_times_sampled=1, capacity=1000),
            TableConfig("again", capacity=1000, **sampler),
        ]
        self._replay = Replay(folder, tables, budget_bytes=1 << 28, seed=1)
        self._specs = stored_as("none", self.agent.fields)
        self._unrolls = random_unrolls(self.agent, self.POOL)
        self._whole = Items(np.zeros(1, np.int32), np.full(1, STEPS, np.int32), np.ones(1))
        self._sequence = 0
        self._replayed = np.repeat([False, True], self.ROWS)
        for _ in range(1000):
            self._insert(["again"])

    def _insert(self, tables: list[str]) -> None:
        self._sequence += 1
        at = self._sequence % self.POOL
        payloads = {name: Payload(array[at]) for name, array in self._unrolls.items()}
        items = dict.fromkeys(tables, self._whole)
        self._replay.insert(Insert(1, self._sequence, self._sequence, self._specs, payloads, STEPS, 0, items))

    def __call__(self) -> None:
        """Store as many unrolls as are fresh in a batch, draw it, learn, and send distances back."""
        for _ in range(self.ROWS):
            self._insert(["fresh", "again"])
        sample = self._replay.sample({"fresh": self.ROWS, "again": self.ROWS})
        assert not isinstance(sample, str), sample
        weights = np.ones(2 * self.ROWS, np.float32)
        found = self.agent.update(Batch(sample.arrays, weights, measure=False, replayed=self._replayed))
        if found.priorities is not None:
            self._replay.update("again", sample.ids[self._replayed], found.priorities[self._replayed])

    def close(self) -> None:
        """Release the folder."""
        self._replay.close()


def learning(seconds: float) -> dict[str, float]:
    """Environment steps that a learner takes in for each second of its CPU time, the ways alternating.

    `share_NAME` is the median over turns of a way's speed over that of `uniform` in the same turn.
    """
    ways = {"uniform_without_features": ("none", SAMPLERS["uniform"])}
    ways |= {name: ("torso", sampler) for name, sampler in SAMPLERS.items()}
    with tempfile.TemporaryDirectory() as folder:
        learners = {name: Learning(Path(folder) / name, *way) for name, way in ways.items()}
        taken_s: dict[str, list[float]] = {name: [] for name in ways}
        end_s = time.monotonic() + 20 * seconds
        while time.monotonic() < end_s or len(taken_s["uniform"]) < 6:
            for name, body in learners.items():
                began_s = time.thread_time()
                for _ in range(10):
                    body()
                taken_s[name].append(time.thread_time() - began_s)
        for body in learners.values():
            body.close()
    turns = {name: np.array(values[1:]) for name, values in taken_s.items()}  # the first warms up
    steps = 10 * Learning.ROWS * STEPS
    figures = {f"steps_per_s_{name}": steps / float(np.median(values)) for name, values in turns.items()}
    for name, values in turns.items():
        figures[f"share_{name}"] = float(np.median(turns["uniform"] / values))
    features = next(field for field in learners["uniform"].agent.fields if field.name == "features")
    figures["feature_bytes_minatar"] = float(features.entries(STEPS) * features.entry_bytes)
    return figures


def fresh_features(agent: ImpalaAgent, batch: dict[str, np.ndarray]) -> np.ndarray:
    """How far off policy each unroll is, with the features of today's network."""
    unrolls = agent.stored.read(batch)
    inputs = (unrolls.obs, unrolls.last_action, unrolls.last_reward, unrolls.ended != 0, unrolls.memory)
    with torch.inference_mode():
        features = agent.net.described(*inputs)[3]
    return agent.distances(batch["features"], features[:-1].transpose(0, 1).numpy())


def scoring(seconds: float) -> dict[str, float]:
    """An update of 5 fresh and 5 replayed unrolls of Breakout, and what elite replay adds to it."""
    agents = [
        ImpalaAgent(ImpalaConfig(torso="shallow", unroll_steps=STEPS, behaviour_features=kind), BREAKOUT)
        for kind in ("none", "torso", "head")
    ]
    figures = {}
    for agent in agents:
        batch, weights = random_unrolls(agent, 10), np.ones(10, np.float32)
        name = f"update_ms_{agent.config.behaviour_features}"
        figures[name] = cpu_ms(partial(agent.update, Batch(batch, weights, measure=False)), seconds)
    more = random_unrolls(agents[1], 5 * (LAMBDA - 1))
    figures["rescore_ms"] = cpu_ms(lambda: fresh_features(agents[1], more), seconds)
    stored = {field.name: field.entries(STEPS) * field.entry_bytes for field in agents[1].fields}
    figures["unroll_bytes_raw"] = float(sum(stored.values()) - stored["features"])
    figures["feature_bytes_torso"] = float(stored["features"])
    figures["feature_bytes_head"] = float(STEPS * agents[2].net.head_features * 2)
    width = agents[1].net.head_features
    left, right = np.random.default_rng(0).normal(size=(2, 10, STEPS, width)).astype(np.float16)
    figures["distance_ms"] = cpu_ms(lambda: distances("norm", left, right), seconds)
    return figures


def exact(seconds: float) -> dict[str, float]:
    """Milliseconds for a batch of `breakout-elite`, by who scores the candidates, the ways alternating.

    From the chunks of an actor to the update: insert, draw, pack, unpack, score, choose, learn. `x_NAME` is
    the median over turns of a way's time over that of `replay` in the same turn.
    """
    ways = {
        "uniform": "sampler = 'uniform'",
        "replay": f"sampler = 'elite', candidates_max = {LAMBDA}",
        **{
            f"learner_{name}": f"sampler = 'elite', candidates_max = {LAMBDA}, scored_by = 'learner', "
            f"strategy = '{name}'"
            for name in ("nearest", "least_sampled")
        },
    }
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: _training(Path(folder) / name, way) for name, way in ways.items()}
        rollout, chunks = runs["uniform"].rollout, list[Chunk]()
        while len(chunks) < 60:
            chunks += rollout.step(0)
        taken_s: dict[str, list[float]] = {name: [] for name in ways}
        figures: dict[str, float] = {}
        end_s = time.monotonic() + 20 * seconds
        while time.monotonic() < end_s or len(taken_s["uniform"]) < 6:
            for name, run in runs.items():
                began_s = time.thread_time()
                for _ in range(5):
                    _whole_batch(run, chunks)
                taken_s[name].append((time.thread_time() - began_s) / 5)
        for name, run in runs.items():
            figures[f"wire_bytes_{name}"] = _wire_bytes(run, chunks)
            run.close()
    turns = {name: np.array(values[1:]) for name, values in taken_s.items()}  # the first warms up
    for name, values in turns.items():
        figures[f"batch_ms_{name}"] = 1000 * float(np.median(values))
        figures[f"x_{name}"] = float(np.median(values / turns["replay"]))
    return figures


def _training(folder: Path, way: str) -> SerialTraining:
    """A training in this process that has made no step, with its queue and a table of 1,000."""
    tables = (
        "[{name = 'fresh', limiter = 'queue', capacity = 5, share = 5}, "
        f"{{name = 'again', capacity = 1000, min_items = 5, share = 5, {way}}}]"
    )
    fields = {"replay.tables": tables, "run.total_steps": "1_000_000", "learner.torch_threads": "1"}
    return SerialTraining(load_config("breakout-elite", None, fields, {}), folder, StopSignal())


def _insert_fresh(run: SerialTraining, chunks: list[Chunk]) -> None:
    """Store the five unrolls that a batch takes from the queue."""
    for _ in range(5):
        run.insert(chunks[run.inserts % len(chunks)])


def _whole_batch(run: SerialTraining, chunks: list[Chunk]) -> None:
    """Store, draw and learn from a batch."""
    _insert_fresh(run, chunks)
    batch = run.sample()
    assert batch is not None
    run.learn(batch)


def _wire_bytes(run: SerialTraining, chunks: list[Chunk]) -> float:
    """Bytes of the arrays of a batch as a shard sends them; mean of ten."""
    _insert_fresh(run, chunks)
    total = 0
    for _ in range(10):
        sample = run.replay.draw(run.mixture.shares)
        assert not isinstance(sample, str), sample
        total += sum(array.nbytes for array in sample.arrays.values())
    return total / 10


class Estimates:
    """What is known of the unrolls of a table, oldest out first, and of each way to estimate a distance."""

    def __init__(self, capacity: int) -> None:
        self.items = np.zeros(capacity, ITEM)
        self.chunks: list[Chunk | None] = [None] * capacity
        self.stale = np.zeros(capacity)
        self.inserted = 0
        config = TableConfig(capacity=capacity, sampler="elite", candidates_max=LAMBDA)
        self.sampler = Elite(config, TableView(self.items, lambda: 0, lambda slots: slots))

    def insert(self, chunk: Chunk) -> None:
        """Take in an unroll."""
        slot = np.array([self.inserted % len(self.items)])
        if self.inserted >= len(self.items):
            self.sampler.delete(slot)
        self.inserted += 1
        self.items["commit"][slot] = self.inserted
        self.chunks[slot[0]], self.stale[slot] = chunk, 0.0
        self.sampler.insert(slot, np.ones(1))

    def measured(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        """Take in what an update says."""
        self.stale[slots] = 1.0 / priorities - 1.0
        self.sampler.update(slots, priorities)

    def batch(self, slots: np.ndarray) -> list[dict[str, np.ndarray]]:
        """The fields of unrolls."""
        return [chunk.fields for slot in slots if (chunk := self.chunks[slot]) is not None]


def estimating(updates: int, capacity: int = 500) -> dict[str, float]:
    """Mean distance of the 4 nearest of 24 unrolls, when each way to know distances chooses them."""
    env = make_vector(EnvConfig(id="gym:CartPole-v1", reward_clip="none"), 16, 1)
    config = ImpalaConfig(
        torso="mlp", see_last_step=False, unroll_steps=STEPS, gamma=0.98, baseline_cost=0.1,
        entropy_cost=0.003, optimizer="adam", optimizer_epsilon=1e-5, learning_rate=1e-3,
        behaviour_features="torso",
    )  # fmt: skip
    agent = ImpalaAgent(config, env.spec, seed=1)
    rollout, queue = Rollout(agent, env, 0, 1), deque[Chunk]()
    rollout.explore(list(range(16)), 16)
    table, rng = Estimates(capacity), np.random.default_rng(1)
    probes: dict[str, list[float]] = {}
    done = 0
    while done < updates:
        queue.extend(rollout.step(0))
        while len(queue) >= 4:
            fresh = [queue.popleft() for _ in range(4)]
            slots = table.sampler.select(4 * (table.inserted >= capacity // 2), rng)[0]
            rows = [chunk.fields for chunk in fresh] + table.batch(slots)
            batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
            priorities = agent.update(
                Batch(batch, np.ones(len(rows), np.float32), measure=False, progress=done / updates)
            ).priorities
            assert priorities is not None
            table.measured(slots, priorities[4:])
            for chunk in fresh:
                table.insert(chunk)
            done += 1
            if table.inserted > capacity and done % 100 == 0:
                _probe(agent, table, rng, probes)
    return {name: float(np.mean(values)) for name, values in probes.items()}


def _probe(
    agent: ImpalaAgent, table: Estimates, rng: np.random.Generator, probes: dict[str, list[float]]
) -> None:
    slots = np.arange(len(table.items))
    rows = table.batch(slots)
    true = fresh_features(agent, {name: np.stack([row[name] for row in rows]) for name in rows[0]})
    ages = (table.inserted - table.items["commit"]).astype(float)
    ways = {"fresh": true, "estimated": table.sampler._distances(slots), "stale": table.stale, "age": ages}
    probes.setdefault("distance_uniform", []).append(float(true.mean()))
    for name, known in ways.items():
        drawn = [rng.choice(len(slots), 4 * LAMBDA, replace=False) for _ in range(200)]
        chosen = [true[each[np.argsort(known[each], kind="stable")[:4]]].mean() for each in drawn]
        probes.setdefault(f"distance_{name}", []).append(float(np.mean(chosen)))


def main() -> None:
    """Measure, and print the JSON line."""
    options = parser(__doc__, seconds=2.0)
    options.add_argument("--updates", type=int, default=500, help="updates of the training")
    options.add_argument("--unrolls", type=int, nargs="*", default=[1000, 10_000])
    options.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    args = options.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, float | int | str] = {}
    if "drawing" in args.parts:
        for unrolls in args.unrolls:
            figures |= drawing(unrolls, args.seconds)
    if "learning" in args.parts:
        figures |= learning(args.seconds)
    if "scoring" in args.parts:
        figures |= scoring(args.seconds)
    if "exact" in args.parts:
        figures |= exact(args.seconds)
    if "estimating" in args.parts:
        figures |= estimating(args.updates)
    rounded = {name: round(value, 4) for name, value in figures.items() if isinstance(value, float)}
    if not args.json:
        for name, value in rounded.items():
            print(f"{name:32} {value:12.4g}")
    report("elite", {**rounded})


if __name__ == "__main__":
    main()
