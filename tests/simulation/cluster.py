"""The services of a run as simulated processes, restarted where they end before the run does.

Shards and actors are the real services, from joining to leaving; an actor's network and environment are a
sleep and a counter. The learner is the real control server, budget and prefetcher, around a loop that learns
nothing, but publishes, saves what a checkpoint saves of these, and ends as the learner does.
"""

from __future__ import annotations

import contextlib
import json
import queue
import shutil
import sys
from collections import deque
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import zmq
from greenlet import GreenletExit

from tests.simulation import threads
from tests.simulation.ledger import Ledger
from tests.simulation.network import Network
from tests.simulation.plan import Fault, Plan
from tests.simulation.sockets import Context
from tests.simulation.world import Node, World
from troupe.common import system
from troupe.common.config import Config, load_config
from troupe.common.data.schema import Chunk, FieldSpec
from troupe.common.data.table_config import TableConfig
from troupe.common.errors import PeerError
from troupe.common.wire.codec import PROTOCOL_VERSION
from troupe.common.wire.control.member import Params
from troupe.common.wire.replay.codec import specs_to_wire
from troupe.common.wire.sockets import Security
from troupe.services.actor.acting import Place
from troupe.services.actor.local_inference import LocalActing
from troupe.services.actor.service import ActorService
from troupe.services.actor.timing import Blocked, Timing
from troupe.services.learner.batches.prefetch import Prefetcher
from troupe.services.learner.control.budget import StepBudget
from troupe.services.learner.control.server import ControlServer, SlotRules, Terms
from troupe.services.replay import shard
from troupe.services.replay.options import ShardOptions

SPECS = (FieldSpec("number", "int64", ()), FieldSpec("obs", "float32", (2,)))
BATCH = 4
CHUNK_STEPS = 3
CONTROL, ANNOUNCE = "tcp://10.0.0.1:5000", "tcp://10.0.0.1:5001"
OPEN = Security(insecure=True)
RESTART_S = 0.3
SETTLE_S = 150.0
"""After the last fault the run has to be complete within this."""

TABLES: dict[str, dict[str, Any]] = {
    "plenty": {"capacity_items": 4000, "min_items": 4, "samples_per_insert": 0.0},
    "small": {"capacity_items": 24, "min_items": 4, "samples_per_insert": 0.0},
    "ratio": {
        "capacity_items": 4000,
        "min_items": 8,
        "samples_per_insert": 4.0,
        "samples_per_insert_error": 32.0,
    },
    "queue": {"tables": [{"name": "default", "limiter": "queue", "capacity": 16}]},
}


def contents(numbers: np.ndarray) -> np.ndarray:
    """What `obs` holds in these steps: who reads a step can tell whether it is whole."""
    return np.stack([numbers % 9973, numbers // 9973], axis=1).astype(np.float32)


class _Env:
    """Copies of nothing."""

    def __init__(self, slots: int) -> None:
        self.num_slots = slots
        self.failures: Any = deque()
        self.calls = self

    def running(self) -> list[Any]:
        return []

    def assign(self, slots: list[int], total: int) -> None:
        pass

    def close(self) -> None:
        pass


class _Agent:
    fields = SPECS

    def load_params(self, params: dict[str, np.ndarray]) -> None:
        self.loaded = float(params["version"][0])


class _Rollout:
    """Steps that are numbered over all actors, and cut into chunks."""

    def __init__(
        self, ledger: Ledger, slots: list[int], timing: Timing, incarnation: int, step_s: float
    ) -> None:
        self._step_s = step_s
        self._ledger, self._slots, self._timing, self._incarnation = ledger, slots, timing, incarnation
        self._steps: dict[int, list[int]] = {slot: [] for slot in slots}

    def explore(self, slots: list[int], total_slots: int) -> None:
        self._slots = list(slots)
        self._steps = dict(zip(slots, self._steps.values(), strict=True))

    def step(self, version: int) -> list[Chunk]:
        system.sleep(self._step_s * (0.5 + system.random.random()))
        self._timing.steps += len(self._slots)
        self._timing.calls += 1
        self._ledger.acted(self._incarnation, self._slots, version, self._timing.steps)
        chunks = []
        for slot, steps in self._steps.items():
            steps.append(self._ledger.new_number(self._incarnation, slot))
            if len(steps) == CHUNK_STEPS:
                chunks.append(_chunk(steps, version))
                steps.clear()
        return chunks

    def flush(self) -> list[Chunk]:
        chunks = [_chunk(steps, 0) for steps in self._steps.values() if steps]
        for steps in self._steps.values():
            steps.clear()
        return chunks


def _chunk(steps: list[int], version: int) -> Chunk:
    numbers = np.array(steps, np.int64)
    count = len(steps)
    return Chunk(
        {"number": numbers, "obs": contents(numbers)},
        count,
        np.arange(count, dtype=np.int32),
        np.ones(count, np.int32),
        np.ones(count),
        max(version, 0),
    )


class _Acting(LocalActing):
    """Local acting with all of its protocol, and without a network."""

    def __init__(self, config: Config, place: Place, ledger: Ledger) -> None:
        self.timing = Timing()
        self.version = -1
        self._config, self._place, self._ledger = config, place, ledger
        self._steps_with_params = 0
        self._blocked = Blocked(self.timing)
        self._wait_log = self._held_since_s = self._pace = None

    def prepare(self, slots: int) -> None:
        self._env = self._make_env(slots)  # type: ignore[assignment]
        self._agent = _Agent()  # type: ignore[assignment]

    def _make_env(self, slots: int) -> _Env:  # type: ignore[override]
        return _Env(slots)

    def _take_slots(self, welcome: Any) -> None:
        self._env = self._make_env(len(welcome.slots))  # type: ignore[assignment]
        self.rollout = _Rollout(  # type: ignore[assignment]
            self._ledger, welcome.slots, self.timing, self._control.incarnation, self._ledger.plan.step_s
        )

    def _load(self, params: Params) -> None:
        super()._load(params)
        self._ledger.loaded(self._control.incarnation, params.session, params.version, params.params)


class _Actor(ActorService):
    ledger: Ledger

    def _make_acting(self) -> Any:
        return _Acting(self._config, self._place, self.ledger)


class Cluster:
    """The processes of one plan."""

    def __init__(self, world: World, network: Network, folder: Path, plan: Plan) -> None:
        self.world, self.network, self.folder, self.plan = world, network, folder, plan
        self.ledger = Ledger(world, plan)
        network.observer = self.ledger
        self.config = _config(plan)
        self.nodes: dict[str, Node] = {}
        self.stops: dict[Node, threads.StopSignal] = {}
        self.complete = False
        self.replays: dict[str, Any] = {}
        self.data_dirs = {name: folder / name for name in plan.services()}
        self.doomed: dict[str, int] = {}
        """Lines of a shard's storage code until it dies."""
        self.kills: dict[str, int] = dict.fromkeys(plan.services(), 0)
        self.called: dict[str, str] = {}
        """Names of those that have taken the place of others."""
        self.checkpoint: str | None = None
        self.control: ControlServer | None = None
        self._bodies = {"learner": self._learner, "replay": self._shard, "actor": self._actor}
        for name in plan.services():
            world.after(0.2 * world.rng.random(), self.start, name)
        for fault in plan.faults:
            world.at(fault.at_s, self.strike, fault)

    # -- processes --

    def host(self, name: str) -> str:
        """Where a process runs."""
        return "main" if self.plan.shared_host and not name.startswith("actor") else name

    def start(self, name: str) -> None:
        """Start a process, and again whenever it ends while the run goes on."""
        name = self.called.get(name, name)
        if self.complete and name != "learner":
            return
        node = self.world.node(name, self.host(name))
        self.nodes[name] = node
        self.world.log("starts", name)
        role = name.partition("-")[0]
        node.start(lambda: self._bodies[role](node, name))
        node.at_exit.append(lambda: self._ended(node, name))

    def stop_the_rest(self) -> None:
        """The run is over: who has not heard of it gets a signal, as from whoever started the services."""
        for node, stop in self.stops.items():
            if self.complete and not node.dead:
                stop.set()

    def begin_again(self) -> None:
        """A learner that was killed at the end of the run goes on from its last checkpoint, and needs all."""
        if self.complete:
            self.complete = False
            for name, node in list(self.nodes.items()):
                if node.dead and name != "learner":
                    self.start(name)

    def _ended(self, node: Node, name: str) -> None:
        if node.finished and node.result is not None and not isinstance(node.result, PeerError):
            self.ledger.wrong(f"{name} ended with {type(node.result).__name__}: {node.result}")
        if not self.complete or (node.result is None and not node.finished):
            self.world.after(RESTART_S, self.start, name)

    def opened(self, name: str, node: Node, replay: Any) -> Any:
        """A shard has opened its folder: note it, and have it die where a fault says so."""
        self.replays[name] = replay
        for method in ("insert", "take", "count_sampled", "put_back", "update"):
            setattr(replay, method, self._mortal(name, node, getattr(replay, method)))
        return replay

    def _mortal(self, name: str, node: Node, call: Any) -> Any:
        def mortal(*args: Any, **options: Any) -> Any:
            left = self.doomed.get(name, 0)
            if not left or node.dead:
                return call(*args, **options)

            def trace(frame: Any, event: str, _: Any) -> Any:
                nonlocal left
                where = frame.f_code.co_filename
                if "/replay/storage/" not in where and "/common/data/" not in where:
                    return None
                if event == "line":
                    left -= 1
                    if not left:
                        self._tear(name, node)
                return trace

            sys.settrace(trace)
            try:
                return call(*args, **options)
            finally:
                sys.settrace(None)
                self.doomed[name] = left

        return mortal

    def _tear(self, name: str, node: Node) -> None:
        """Kill a shard in the midst of a change: its handlers of exceptions change no file any more."""
        self.kills[name] += 1
        old = self.data_dirs[name]
        self.data_dirs[name] = self.folder / f"{name}.{self.kills[name]}"
        shutil.copytree(old, self.data_dirs[name])
        node.kill(leave=False)
        raise GreenletExit

    def _shard(self, node: Node, name: str) -> None:
        index = int(name.rpartition("-")[2])
        options = ShardOptions(
            bind=f"tcp://10.0.1.{index}:6000",
            data_dir=self.data_dirs[name],
            tables=(TableConfig(),),
            max_bytes=1 << 20,
            volatile=False,
            seed=None,
            learner=CONTROL,
            advertise=None,
            index=index,
            join_timeout_s=30.0,
            restore=None,
            adopt=False,
            snapshot_to=None,
            keys="",
            insecure=True,
        )
        stop = self.stops[node] = threads.StopSignal()
        shard.serve(options, Context(node, self.network), stop)  # type: ignore[arg-type]

    def _actor(self, node: Node, name: str) -> None:
        context = Context(node, self.network)
        stop = self.stops[node] = threads.StopSignal()
        service = _Actor(context, CONTROL, name, stop, join_timeout_s=30.0, security=OPEN)  # type: ignore[arg-type]
        service.ledger = self.ledger
        service.run()
        context.destroy(linger=2000)

    def _learner(self, node: Node, name: str) -> None:
        Learner(self, node).run()

    # -- what goes wrong --

    def strike(self, fault: Fault) -> None:
        """Let a fault happen."""
        self.world.log("fault", fault)
        until_s = self.world.now + fault.amount
        if fault.kind in ("kill", "torn", "stop", "replace", "stall", "slow_reader"):
            node = self.nodes.get(self.called.get(fault.target, fault.target))
            if node is None or node.dead:
                return
            if fault.kind == "stall":
                node.stalled_until = max(node.stalled_until, until_s)
            elif fault.kind == "slow_reader":
                node.reads_slowly_until = max(node.reads_slowly_until, until_s)
            elif fault.kind == "stop":
                if node in self.stops:
                    self.stops[node].set()
            elif fault.kind == "torn":
                self.doomed[fault.target] = int(fault.amount)
            else:
                self.kills[fault.target] += 1
                if fault.kind == "replace":
                    self.called[fault.target] = f"{fault.target}.{self.kills[fault.target]}"
                    self.called[node.name] = self.called[fault.target]
                node.kill()
        elif fault.kind in ("partition", "one_way", "isolate"):
            one = self.host(fault.target)
            others = [self.host(fault.other)] if fault.other else [self.host(n) for n in self.plan.services()]
            for other in others:
                self.network.cut(one, other, until_s)
                if fault.kind != "one_way":
                    self.network.cut(other, one, until_s)
            if self.world.rng.random() < 0.3:
                self.world.at(until_s, self.network.break_all, 0.5)
        elif fault.kind == "forget":
            self.network.forget_all(fault.amount)
        elif fault.kind == "reset":
            self.network.break_all(fault.amount)
        elif fault.kind == "slow":
            self.network.slow_until_s, self.network.slow_s = until_s, 2.0
        elif fault.kind == "clock":
            self.world.wall_offset[self.host(fault.target)] = fault.amount
        else:
            self._garbage(fault.target)

    def _garbage(self, target: str) -> None:
        """A stranger sends what is no message, of another version, or not its to send."""
        endpoint = CONTROL if target == "learner" else f"tcp://10.0.1.{target.rpartition('-')[2]}:6000"
        node = self.world.node("stranger")

        def body() -> None:
            rng = self.world.rng
            socket = Context(node, self.network).socket(zmq.DEALER)
            socket.connect(endpoint)
            for _ in range(20):
                kind = rng.randrange(4)
                if kind == 0:
                    frames = [rng.randbytes(rng.randrange(40)) for _ in range(rng.randrange(1, 4))]
                elif kind == 1:
                    frames = [msgpack.packb({"v": 99, "t": "HELLO", "i": 1, "f": {}, "a": []})]
                else:
                    name = rng.choice(
                        ("INSERT", "SAMPLE", "PRIORITIES", "HEARTBEAT", "PARAMS_GET", "BYE", "X")
                    )
                    frames = [msgpack.packb({"v": PROTOCOL_VERSION, "t": name, "i": 1, "f": {}, "a": []})]
                with contextlib.suppress(zmq.Again):
                    socket.send_multipart(frames)
                self.world.sleep(0.05)
            socket.close(0)

        node.start(body)


class Learner:
    """The learner's protocol: control, budget, prefetch; see `troupe.services.learner.service`."""

    def __init__(self, cluster: Cluster, node: Node) -> None:
        self.cluster = cluster
        self.ledger = cluster.ledger
        config = cluster.config
        self.total = config.run.total_steps
        self.budget = StepBudget(self.total)
        self.version = self.updates = 0
        if cluster.checkpoint is not None:
            saved = json.loads(cluster.checkpoint)
            self.budget.load_meta(saved["budget"])
            self.version, self.updates = saved["version"], saved["updates"]
        self.context = Context(node, cluster.network)
        plan = cluster.plan
        self.control = ControlServer(
            self.context,  # type: ignore[arg-type]
            CONTROL,
            ANNOUNCE,
            Terms(
                config.to_dict(),
                "hash",
                run="simulated",
                heartbeat_s=config.net.heartbeat_s,
                liveness_s=config.net.liveness_s,
                fields=specs_to_wire(SPECS),
                item_steps=(1, CHUNK_STEPS),
            ),
            SlotRules(plan.actors * plan.slots),
            security=OPEN,
            budget=self.budget,
        )
        shares, queued = config.replay.shares(), plan.table == "queue"
        self.prefetch = Prefetcher(
            self.context,  # type: ignore[arg-type]
            self.control.shards,
            shares=shares,
            kept=() if queued else tuple(shares),
            depth=2,
            incarnation=system.random.getrandbits(63),
            fields=SPECS,
            security=OPEN,
        )
        cluster.control = self.control
        roster = self.control._roster
        expire = roster.expire

        def watched(now_s: float) -> Any:
            gone = expire(now_s)
            for peer in gone:
                self.ledger.expired(peer.identity, config.net.liveness_s)
            self.ledger.leases(roster.leases())
            return gone

        roster.expire = watched  # type: ignore[method-assign]

    def run(self) -> None:
        self.cluster.begin_again()
        if self.cluster.checkpoint is None:
            self._save()
        self.control.start()
        self.prefetch.start()
        self._publish()
        saved_s = system.monotonic()
        while self.budget.steps < self.total:
            self._learn(0.25)
            if system.monotonic() - saved_s > 2.0:
                saved_s = system.monotonic()
                self._save()
        end_s = system.monotonic() + (5.0 if self.cluster.plan.table == "queue" else 0.5)
        while system.monotonic() < end_s:
            if self._learn(0.25) and self.cluster.plan.table == "queue":
                end_s = system.monotonic() + 5.0
        self._publish()
        self.cluster.complete = True
        self.control.set_state(updates=self.updates, stopping=True)
        end_s = system.monotonic() + 8.0
        while system.monotonic() < end_s and any(p["role"] == "actor" for p in self.control.peers()):
            system.sleep(0.05)
        self.budget.close()
        self._save()
        self.ledger.finished(self.budget.steps, self.updates)
        self.prefetch.stop()
        self.control.stop()
        self.context.destroy(linger=1000)
        self.cluster.world.after(10.0, self.cluster.stop_the_rest)

    def _learn(self, timeout_s: float) -> bool:
        batch = self.prefetch.get(timeout_s=timeout_s)
        with contextlib.suppress(queue.Empty):
            while True:
                self.control.telemetry.get_nowait()
        if batch is None:
            return False
        self.updates += 1
        self.ledger.learned(batch)
        system.sleep(self.cluster.plan.update_s * (0.5 + system.random.random()))
        self.prefetch.put_priorities(batch, 0.5 + np.arange(len(batch.ids)) / 7)
        if self.updates % 5 == 0:
            self._publish()
        self.control.set_state(updates=self.updates)
        return True

    def _publish(self) -> None:
        self.version += 1
        self.control.publish(self.version, {"version": np.array([self.version], np.float32)})

    def _save(self) -> None:
        saved = {"budget": self.budget.to_meta(), "version": self.version, "updates": self.updates}
        self.cluster.checkpoint = json.dumps(saved)


_CONFIGS: dict[Any, Config] = {}


def _config(plan: Plan) -> Config:
    key = plan.table, plan.slots, plan.shards, plan.total_steps
    if key not in _CONFIGS:
        replay = {f"replay.{name}": value for name, value in TABLES[plan.table].items()}
        _CONFIGS[key] = load_config(
            "cartpole-impala" if plan.table == "queue" else "cartpole-apex",
            None,
            {
                "run.total_steps": plan.total_steps,
                "run.seed": 1,
                "replay.batch_size": BATCH,
                "replay.max_bytes": 1 << 20,
                "replay.durable": True,
                "replay.shards": plan.shards,
                "actor.slots": plan.slots,
                "actor.params_period_steps": 1,
                "net.heartbeat_s": 1.0,
                "net.liveness_s": 4.0,
                "evaluator.enabled": False,
                **replay,
            },
            {},
        )
    return _CONFIGS[key]
