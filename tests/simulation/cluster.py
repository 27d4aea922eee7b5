"""The services of a run as simulated processes, restarted where they end before the run does.

All are the real services, from joining to leaving. Networks and environments are a sleep and a counter, and
what learns is a chain of hashes.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import zmq
from greenlet import GreenletExit

from tests.replay.storage.power import Disk
from tests.runtime import power
from tests.simulation import threads
from tests.simulation.actors import SimulatedActor, SimulatedEvaluator
from tests.simulation.configuration import make_config
from tests.simulation.learner import Learner
from tests.simulation.learners import CONTROL, OPEN, run_joined
from tests.simulation.ledger import Ledger
from tests.simulation.network import Network
from tests.simulation.plan import COMMIT, IN_SYNC, UPDATE, Fault, Plan
from tests.simulation.sockets import Context
from tests.simulation.world import Node, World
from troupe.common.data.table_config import TableConfig
from troupe.common.errors import PeerError
from troupe.common.wire.codec import PROTOCOL_VERSION
from troupe.common.wire.control.client import ControlClient
from troupe.common.wire.link import new_incarnation
from troupe.services.learner.control.server import ControlServer
from troupe.services.replay import shard
from troupe.services.replay.options import ShardOptions
from troupe.services.replay.storage.replay import Replay
from troupe.services.replay.storage.store import ChunkStore

RESTART_S = 0.3
SYNC_S, SLOW_SYNC_S = 0.004, 0.5
"""What a sync takes on average, and one of twenty."""

LAST_S = 2e-3
"""Within this the last messages of an update have come."""

SETTLE_S = 150.0
"""After the last fault the run has to be complete within this."""


def shard_address(name: str) -> str:
    """Where the shard of this name listens."""
    return f"tcp://10.0.1.{name.rpartition('-')[2]}:6000"


class Cluster:
    """The processes of one plan."""

    def __init__(self, world: World, network: Network, folder: Path, plan: Plan) -> None:
        self.world, self.network, self.folder, self.plan = world, network, folder, plan
        self.ledger = Ledger(world, plan)
        network.observer = self.ledger
        self.config = make_config(plan)
        self.nodes: dict[str, Node] = {}
        self.stops: dict[Node, threads.StopSignal] = {}
        self.complete = False
        self.replays: dict[str, Any] = {}
        self.openers: dict[str, Node] = {}
        """By shard, the process that opened its folder last."""
        self.data_dirs = {name: folder / name for name in plan.services()}
        self.doomed: dict[str, Fault] = {}
        """By shard, what it dies of in its next change of so many lines, counted in its storage code."""
        self.disks = {name: Disk(self._sync) for name in self.data_dirs if name.startswith("replay")}
        self.kills: dict[str, int] = dict.fromkeys(plan.services(), 0)
        self.moves = 0
        self.away_s: dict[str, float] = {}
        """How long one that is killed now is away, where others go on without it."""
        self.called: dict[str, str] = {}
        """Names of those that have taken the place of others."""
        self.run_dir = folder / "run"
        self.run_disk = power.Disk(self.run_dir / "checkpoints", self._at_disk)
        self.control: ControlServer | None = None
        self._bodies = {
            "learner": self._learner,
            "replay": self._shard,
            "actor": self._actor,
            "evaluator": self._evaluator,
        }
        for name in plan.services():
            world.after(0.2 * world.rng.random(), self.start, name)
        for fault in plan.faults:
            world.at(fault.at_s, self.strike, fault)

    # -- processes --

    def host(self, name: str) -> str:
        """Where a process runs."""
        return "main" if self.plan.shared_host and name.startswith(("learner", "replay")) else name

    def start(self, name: str) -> None:
        """Start a process, and again where it ends while the run goes on, or dies while the learner is there.

        At the end of a run the learner waits for the last evaluation, which a killed evaluator owes it.
        """
        name = self.called.get(name, name)
        before = self.nodes.get(name)
        if before is not None and not before.dead:
            return
        if self.complete and name != "learner" and self.nodes["learner"].dead:
            return
        node = self.world.node(name, self.host(name))
        self.nodes[name] = node
        self.ledger.last_start_s = self.world.now
        self.world.log("starts", name)
        role = name.partition("-")[0]
        node.start(lambda: self._bodies[role](node, name))
        node.at_exit.append(lambda: self._ended(node, name))

    def stop_the_rest(self) -> None:
        """The run is over: who has not heard of it gets a signal, as from whoever started the services."""
        for node, stop in self.stops.items():
            if self.complete and not node.dead:
                self.ledger.not_told(node.name)
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
            self.world.after(self.away_s.pop(name, RESTART_S), self.start, name)

    def opened(self, name: str, node: Node, replay: Any) -> Any:
        """A shard has opened its folder: note it, and have it die where a fault says so."""
        self.replays[name], self.openers[name] = replay, node
        address = shard_address(name)
        self.ledger.contents.opened(address, replay)
        for method in ("insert", "take", "count_sampled", "put_back", "update"):
            setattr(replay, method, self._mortal(name, node, getattr(replay, method)))
        insert = replay.insert

        def noted(each: Any) -> bool:
            stored: bool = insert(each)
            if stored:
                self.ledger.contents.stored(address, each)
            return stored

        replay.insert = noted
        return replay

    def make_replay(self, *args: Any, **options: Any) -> Replay:
        """What a shard makes of its folder."""
        if options["durable"] == "power":
            options["pager"] = self.disks[self.world.here().node.name].pager
        return Replay(*args, **options)

    def _sync(self) -> None:
        """A disk takes some time, now and then a lot."""
        world, node = self.world, self.world.here().node
        takes_s = world.rng.expovariate(1 / (SLOW_SYNC_S if world.rng.random() < 0.05 else SYNC_S))
        fault = self.doomed.get(node.name)
        if fault is not None and fault.amount == IN_SYNC:
            del self.doomed[node.name]
            world.after(takes_s * world.rng.random(), self._cut_power, node.host)
        world.sleep(takes_s)

    def _mortal(self, name: str, node: Node, call: Any) -> Any:
        def mortal(*args: Any, **options: Any) -> Any:
            fault = self.doomed.get(name)
            if fault is None or fault.amount == IN_SYNC or node.dead:
                return call(*args, **options)
            lines, begun = 0, fault.other != COMMIT

            def trace(frame: Any, event: str, _: Any) -> Any:
                nonlocal lines, begun
                where = frame.f_code.co_filename
                if "/tests/" in where or not ("/replay/storage/" in where or "/common/data/" in where):
                    return None
                begun |= frame.f_code is ChunkStore.commit.__code__
                if event == "line" and begun:
                    lines += 1
                    if lines == fault.amount:
                        self._tear(name, node, fault)
                return trace

            sys.settrace(trace)
            try:
                return call(*args, **options)
            finally:
                sys.settrace(None)

        return mortal

    def _tear(self, name: str, node: Node, fault: Fault) -> None:
        """Kill a shard in the midst of a change."""
        del self.doomed[name]
        if fault.kind == "power_cut":
            self._cut_power(self.host(name))
        else:
            self.kills[name] += 1
            self._move(name)
            node.kill(leave=False)
        raise GreenletExit

    def _move(self, name: str) -> None:
        """Let the next process have a copy, which handlers of exceptions in this one leave alone."""
        self.moves += 1
        old = self.data_dirs[name]
        self.data_dirs[name] = self.folder / f"{name}.{self.moves}"
        if old.exists():
            shutil.copytree(old, self.data_dirs[name])

    def _cut_power(self, host: str) -> None:
        """End all processes of a host, and leave of what they have not synced whatever it may be."""
        for name, node in list(self.nodes.items()):
            if node.host == host and not node.dead:
                self.kills[name] += 1
                node.kill(leave=False)
        shards = [name for name in self.disks if self.host(name) == host]
        for name in shards:
            if name in self.replays:
                self.ledger.contents.loses_power(shard_address(name), self.replays[name], self.kills[name])
            self._move(name)
            self.disks[name].cut(self.world.rng.randrange, self.data_dirs[name])
        if self.host("learner") == host:
            self._cut_run()
        self.world.reboot(host)
        if shards:
            self.ledger.cuts_s.append(self.world.now)

    def _cut_run(self) -> None:
        """Leave of the checkpoints what their disk may have of them, and all else of the run."""
        self.moves += 1
        disk, old = self.run_disk, self.run_dir
        self.run_dir = self.folder / f"run.{self.moves}"
        if old.exists():
            shutil.copytree(old, self.run_dir, ignore=shutil.ignore_patterns("checkpoints"))
            disk.cut(len(disk.events), self.run_dir / "checkpoints", self.world.rng.randrange)
        disk.go_on(self.run_dir / "checkpoints")

    def sends_last(self, node: Node) -> None:
        """A learner is about to send the last of an update; some of that may be under way when it dies."""
        fault = self.doomed.get(node.name)
        if fault is not None and fault.other == UPDATE:
            del self.doomed[node.name]
            self.world.after(LAST_S * self.world.rng.random(), self.strike, replace(fault, other=""))

    def _at_disk(self) -> None:
        """The learner's disk has done something: a name, or a sync; it may be the last."""
        world, fault = self.world, self.doomed.get("learner")
        if fault is not None and fault.kind == "power_cut":
            self.doomed["learner"] = replace(fault, amount=fault.amount - 1)
            if fault.amount <= 1:
                del self.doomed["learner"]
                world.after(0.0, self._cut_power, self.host("learner"))
        world.sleep(world.rng.expovariate(1 / SYNC_S))

    def _shard(self, node: Node, name: str) -> None:
        options = ShardOptions(
            bind=shard_address(name),
            data_dir=self.data_dirs[name],
            tables=(TableConfig(),),
            max_bytes=1 << 20,
            volatile=False,
            durable=None,
            seed=None,
            learner=CONTROL,
            advertise=None,
            index=int(name.rpartition("-")[2]),
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
        service = SimulatedActor(context, CONTROL, name, stop, join_timeout_s=30.0, security=OPEN)  # type: ignore[arg-type]
        service.ledger = self.ledger
        service.run()
        context.destroy(linger=2000)

    def _evaluator(self, node: Node, name: str) -> None:
        context = Context(node, self.network)
        stop = self.stops[node] = threads.StopSignal()
        client = ControlClient(
            context,  # type: ignore[arg-type]
            CONTROL,
            role="evaluator",
            name=name,
            incarnation=new_incarnation(),
            connect_timeout_s=30.0,
            security=OPEN,
        )
        try:
            if client.join_unless(lambda: stop.requested) is not None:
                SimulatedEvaluator(self.config, client, stop).run()
        finally:
            client.close()
            context.destroy(linger=2000)

    def _learner(self, node: Node, name: str) -> None:
        if name != "learner":
            run_joined(self, node, name)
        else:
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
            elif fault.kind == "torn" or fault.other == UPDATE:
                self.doomed[fault.target] = fault
            else:
                self.kills[fault.target] += 1
                if self.plan.learners > 1 and fault.target.startswith("learner"):
                    self.away_s[node.name] = max(RESTART_S, fault.amount)
                if fault.kind == "replace":
                    self.called[fault.target] = f"{fault.target}.{self.kills[fault.target]}"
                    self.called[node.name] = self.called[fault.target]
                node.kill()
        elif fault.kind == "power_cut":
            if fault.amount:
                self.doomed[fault.target] = fault
            else:
                self._cut_power(self.host(fault.target))
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
