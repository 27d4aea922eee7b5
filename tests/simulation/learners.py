"""What learners are given in the place of networks, and of what they take from torch and from the machine."""

from __future__ import annotations

import contextlib
import hashlib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch

from tests.simulation import threads
from tests.simulation.central import SPEC, SameAgent
from tests.simulation.groups import simulated_groups
from tests.simulation.sockets import Context
from tests.simulation.world import Node
from troupe.common import system
from troupe.common.agents import Batch, Update
from troupe.common.agents.learners.reduction import ALONE, Reduction
from troupe.common.runtime import checkpoint, metrics
from troupe.common.runtime.checkpoint import save_checkpoint
from troupe.common.wire.sockets import Security
from troupe.services.learner import assembly, service
from troupe.services.learner.peers import member
from troupe.services.learner.peers import team as teams
from troupe.services.learner.peers.team import Learned, Share, Team
from troupe.services.learner.record.gathered import Evaluation, Gathered
from troupe.services.learner.saving.counters import RunCounters

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.ledger import Ledger

CONTROL, ANNOUNCE, INFERENCE = (f"tcp://10.0.0.1:500{i}" for i in range(3))
OPEN = Security(insecure=True)


class ChainAgent(SameAgent):
    """Its state tells of every update, and of every share in it, that has led to it.

    An update changes it in two steps, with several reductions before, between and after them.
    """

    publishes = 0
    """The version that its parameters go out as."""

    def __init__(self, cluster: Cluster, node: Node) -> None:
        self.node = node
        self._cluster, self._lineage = cluster, cluster.ledger.lineage
        self._reduction = ALONE
        self._chain = np.zeros(32, np.uint8)
        self._flat = np.zeros(5, np.float32)
        # Views of it.
        pieces = torch.from_numpy(self._flat).split([2, 3])
        self._weights = [torch.nn.Parameter(piece) for piece in pieces]
        self.parent, self.ids = "", [0]
        self._lineage.begins_with(self.digest(), 0)

    def learn_with(self, reduction: Reduction) -> None:
        self._reduction = reduction

    def params(self) -> dict[str, np.ndarray]:
        return {"version": np.array([self.publishes], np.float32)}

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        return {"chain": self._chain.copy(), "weights": self._flat.copy()}, {}

    def load_state(self, arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> None:
        self._chain = np.array(arrays["chain"])
        self._flat[:] = arrays["weights"]

    def digest(self) -> str:
        """Of the whole state."""
        data = self._chain.tobytes() + self._flat.tobytes()
        return hashlib.blake2b(data, digest_size=8).hexdigest()

    def update(self, batch: Batch) -> Update:
        reduction, parent, number = self._reduction, self.digest(), 0
        count = len(batch.weights) if reduction.alone else reduction.rows
        if count:
            assert batch.lengths is not None
            number = self._lineage.shares(self.node, batch.fields, batch.lengths)
        told = np.array([[number]])
        if not reduction.alone:
            told = reduction.exchange(reduction.rows, [number])
        self.parent, self.ids = parent, [int(each) for each in told[:, 0] if each]
        mean = float(np.mean(batch.fields["number"] % 97))
        with reduction.averaging(self._weights):
            for parameter in self._weights:
                parameter.grad = None
            self._work()
            # The backward pass of `mean` times the sum of all weights, without a forward one.
            torch.autograd.backward(self._weights, [torch.full((2,), mean), torch.full((3,), mean)])
        gradients = [np.asarray(parameter.grad) for parameter in self._weights]
        self._flat -= np.float32(0.01) * np.concatenate(gradients)
        for parameter in self._weights:
            parameter.grad = None
        self._work()
        moments = reduction.moments(count, torch.tensor([mean]), torch.tensor([1.0]))
        self._cluster.sends_last(self.node)
        means = reduction.means([(torch.tensor(mean), count)])
        words = [self._chain.tobytes(), str(self.ids), str(moments[0]), str(means.tolist())]
        text = b" ".join(word if isinstance(word, bytes) else word.encode() for word in words)
        self._chain = np.frombuffer(hashlib.blake2b(text, digest_size=32).digest(), np.uint8).copy()
        return Update(0.5 + np.arange(len(batch.weights)) / 7, {})

    def _work(self) -> None:
        system.sleep(self._cluster.plan.update_s * (0.25 + 0.5 * system.random.random()))


class WatchedTeam(Team):
    """Tells what becomes of shares."""

    @property
    def several(self) -> bool:
        agent: Any = self._agent
        agent._lineage.turns(agent.node)  # one that is alone and has no rows goes no further
        return super().several

    def learn(self, share: Share | None, *, progress: float = 0.0, beta: float = 0.0) -> Learned:
        agent: Any = self._agent
        lineage = agent._lineage
        lineage.turns(agent.node)
        learned = super().learn(share, progress=progress, beta=beta)
        if learned.moved:
            epoch = "" if self._group is None else self._group._group.key
            lineage.updated(
                agent.node, agent.digest(), agent.parent, self.updates, agent.ids, epoch, self.learners
            )
        return learned


def watched_equalize(group: Any, agent: Any, counters: RunCounters) -> bool:
    """Tell who comes to an epoch, and with what."""
    lineage, key = agent._lineage, group._group.key
    lineage.enters(agent.node, key, group.rank, agent.digest(), counters.updates)
    changed = _equalize(group, agent, counters)
    lineage.begins(agent.node, key, group.size, agent.digest(), counters.updates)
    return changed


_equalize = teams.equalize


def run_joined(cluster: Cluster, node: Node, name: str) -> None:
    """A process of `troupe learner --join`."""
    stop = cluster.stops[node] = threads.StopSignal()
    member.JoinedLearner(CONTROL, name, stop, join_timeout_s=30.0, security=OPEN).run()  # type: ignore[arg-type]


class WatchedGathered(Gathered):
    """Tells the ledger of every evaluation."""

    ledger: Ledger
    evaluated_version = -1
    told: Evaluation | None = None

    def add(self, report: Any, part: int, *, complete: bool = False) -> list[Evaluation]:
        return self._told(super().add(report, part, complete=complete))

    def expired(self) -> list[Evaluation]:
        return self._told(super().expired())

    def end(self) -> list[Evaluation]:
        return self._told(super().end())

    def _told(self, evaluations: list[Evaluation]) -> list[Evaluation]:
        for each in evaluations:
            if each is not self.told:  # one of these calls makes another
                self.ledger.evaluated(each, self.evaluated_version)
                self.told, self.evaluated_version = each, each.version
        return evaluations


class NoEvents:
    """TensorBoard's file, which another library writes, with its own clock."""

    def __init__(self, *args: Any) -> None:
        pass

    def nothing(self, *args: Any, **options: Any) -> None:
        pass

    scalar = image = text = histogram = flush = close = nothing


@contextlib.contextmanager
def simulated_learners(cluster: Cluster) -> Iterator[None]:
    """Put what is simulated in the place of what learners take from torch and from the machine."""
    world = cluster.world
    common = {
        "zmq": types.SimpleNamespace(Context=lambda: Context(world.here().node, cluster.network)),
        "make_agent": lambda *args, **options: ChainAgent(cluster, world.here().node),
        "make_spec": lambda config: SPEC,
        "torch": types.SimpleNamespace(set_num_threads=lambda count: None),
        "check_device": lambda device: None,
        "usable_cores": lambda: 1,
        "Team": WatchedTeam,
    }

    def gathered(*args: Any) -> WatchedGathered:
        made = WatchedGathered(*args)
        made.ledger = cluster.ledger
        return made

    def saved(directory: Path, *args: Any, **options: Any) -> Path:
        path = save_checkpoint(directory, *args, **options)
        if directory.name == "checkpoints":  # not the best one, which only acts
            cluster.ledger.checkpoints.saved(args[1])
        return path

    with contextlib.ExitStack() as undo:

        def put(module: Any, name: str, value: Any) -> None:
            undo.enter_context(mock.patch.object(module, name, value))

        for module in (service, member):
            for name, value in common.items():
                put(module, name, value)
        put(assembly, "make_agent", common["make_agent"])
        put(service, "Gathered", gathered)
        put(service, "make_security", lambda *args, **options: OPEN)
        put(checkpoint, "save_checkpoint", saved)
        put(metrics, "EventFile", NoEvents)
        put(teams, "equalize", watched_equalize)
        cluster.run_disk.watch(types.SimpleNamespace(setattr=put))
        if cluster.plan.learners > 1:
            undo.enter_context(simulated_groups(cluster.network)).wrong = cluster.ledger.wrong
        yield
