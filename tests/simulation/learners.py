"""Learners that share batches: the real joined learner, the real team around the loop of `learner.py`."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch

from tests.simulation import threads
from tests.simulation.actors import CHUNK_STEPS, SPECS
from tests.simulation.central import SPEC
from tests.simulation.groups import simulated_groups
from tests.simulation.learner import CONTROL, OPEN, Learner
from tests.simulation.sockets import Context
from tests.simulation.world import Node
from troupe.common import system
from troupe.common.agents import Batch, Update
from troupe.common.agents.learners.reduction import ALONE, Reduction
from troupe.services.learner.batches.mixture import Mixture
from troupe.services.learner.control.epochs import Epochs
from troupe.services.learner.peers import member
from troupe.services.learner.peers import team as teams
from troupe.services.learner.peers.seats import OwnSeats
from troupe.services.learner.peers.shares import Shares, Wish
from troupe.services.learner.peers.team import Learned, Rules, Share, Team
from troupe.services.learner.saving.counters import RunCounters

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

START_S = 60.0
"""How long a run waits for the learners that it begins with; see `troupe.services.learner.service`."""
TOGETHER_S = 200.0
"""How long after the last fault all learners may take to share batches again."""


class ChainAgent:
    """Its state tells of every update, and of every share in it, that has led to it.

    An update changes it in two steps, with several reductions before, between and after them.
    """

    spec, fields, item_steps = SPEC, SPECS, (1, CHUNK_STEPS)

    def __init__(self, cluster: Cluster, node: Node) -> None:
        self.node = node
        self._cluster, self._lineage = cluster, cluster.ledger.lineage
        self._reduction = ALONE
        self._chain = np.zeros(32, np.uint8)
        self._weights = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3))]
        self.parent, self.ids = "", [0]
        self._lineage.begins_with(self.digest(), 0)

    def learn_with(self, reduction: Reduction) -> None:
        self._reduction = reduction

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        weights = torch.cat([each.detach() for each in self._weights]).numpy()
        return {"chain": self._chain.copy(), "weights": weights}, {}

    def load_state(self, arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> None:
        self._chain = np.array(arrays["chain"])
        weights = torch.from_numpy(np.array(arrays["weights"])).split([2, 3])
        for parameter, values in zip(self._weights, weights, strict=True):
            parameter.data = values.clone()

    def digest(self) -> str:
        """Of the whole state."""
        arrays, _ = self.state()
        data = b"".join(arrays[name].tobytes() for name in sorted(arrays))
        return hashlib.blake2b(data, digest_size=8).hexdigest()

    def update(self, batch: Batch) -> Update:
        reduction, parent, number = self._reduction, self.digest(), 0
        count = len(batch.weights) if reduction.alone else reduction.rows
        if count:
            assert batch.lengths is not None
            number = self._lineage.shares(self.node, batch.fields, batch.lengths)
        told = np.array([[number]])
        if not reduction.alone:
            told = reduction.exchange(reduction.rows, reduction._window, [number])
        self.parent, self.ids = parent, [int(each) for each in told[:, 0] if each]
        mean = float(np.mean(batch.fields["number"] % 97))
        with reduction.averaging(self._weights):
            for parameter in self._weights:
                parameter.grad = None
            self._work()
            (mean * sum(parameter.sum() for parameter in self._weights)).backward()  # type: ignore[union-attr]
        for parameter in self._weights:
            assert parameter.grad is not None
            parameter.data -= 0.01 * parameter.grad
            parameter.grad = None
        self._work()
        moments = reduction.moments(count, torch.tensor([mean]), torch.tensor([1.0]))
        means = reduction.means([(mean, count)])
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


class Owner(Learner):
    """The learner that has the run."""

    def __init__(self, cluster: Cluster, node: Node) -> None:
        self.agent = ChainAgent(cluster, node)
        self._is_first = True
        super().__init__(cluster, node)
        config, stop = cluster.config, threads.StopSignal()
        if cluster.checkpoint is not None:
            self.agent.load_state(*cluster.agent_checkpoint)
        seats = OwnSeats(self.control, config.net.learner_network, stop)
        self.team = WatchedTeam(self.agent, self.counters, seats, Rules.of(config, owner=True))  # type: ignore[arg-type]
        self.shares = Shares(config, self.agent, self.prefetch, Mixture(config), self.team)  # type: ignore[arg-type]

    @functools.cached_property
    def counters(self) -> RunCounters:
        return RunCounters(1, self.budget)

    @property
    def updates(self) -> int:
        return self.counters.updates

    @updates.setter
    def updates(self, count: int) -> None:
        self.counters.updates = count

    @property
    def version(self) -> int:
        return self.counters.version

    @version.setter
    def version(self, version: int) -> None:
        self.counters.version = version

    def _epochs(self) -> Epochs:
        return Epochs(expected=self.cluster.plan.learners, start_s=START_S)

    def _first_shares(self) -> dict[str, int]:
        return {}

    def _learn(self, timeout_s: float) -> bool:
        lesson = self.shares.learn(timeout_s, Wish)
        self._collect()
        if self.inference is not None:
            self.inference.check()
            self.inference.metrics()
        if self.team.moved:
            self.team.moved = False
            self._publish()
        if lesson is None:
            return False
        if self.updates % 5 == 0:
            self._publish()
        self.control.set_state(updates=self.updates)
        return True

    def _publish(self) -> None:
        if self.team.learners:
            self.ledger.lineage.published(self.agent.digest())
        super()._publish()

    def _come_together(self) -> None:
        plan, lineage = self.cluster.plan, self.ledger.lineage
        while system.monotonic() - self.agent.node.boot_s < plan.end_s + TOGETHER_S:
            together = self.team.learners == plan.learners and self.ledger.now_s > plan.end_s
            # Once all steps are made, a queue and a ratio of samples to inserts may give no more.
            if lineage.together_after or (together and plan.table in ("queue", "ratio")):
                return
            self._learn(0.25)
        here = f"{self.team.learners} of {plan.learners} learners share batches"
        self.ledger.wrong(f"{here} {TOGETHER_S:.0f} s after the last fault")

    def _part(self) -> None:
        self.ledger.lineage.check_end(self.agent.digest(), self.cluster.config.replay.batch_size)
        self.team.close()

    def _save(self) -> None:
        self.cluster.agent_checkpoint = self.agent.state()
        super()._save()


def run_joined(cluster: Cluster, node: Node, name: str) -> None:
    """A process of `troupe learner --join`."""
    stop = cluster.stops[node] = threads.StopSignal()
    member.JoinedLearner(CONTROL, name, stop, join_timeout_s=30.0, security=OPEN).run()  # type: ignore[arg-type]


@contextlib.contextmanager
def several_learners(cluster: Cluster) -> Iterator[None]:
    """Put what is simulated in the place of what learners take from torch and from the machine."""
    if cluster.plan.learners == 1:
        yield
        return
    world = cluster.world
    changes = (
        (member, "zmq", types.SimpleNamespace(Context=lambda: Context(world.here().node, cluster.network))),
        (member, "make_agent", lambda *args, **options: ChainAgent(cluster, world.here().node)),
        (member, "make_spec", lambda config: SPEC),
        (member, "secrets", types.SimpleNamespace(randbits=lambda bits: system.random.getrandbits(bits))),
        (member, "torch", types.SimpleNamespace(set_num_threads=lambda count: None)),
        (member, "check_device", lambda device: None),
        (member, "usable_cores", lambda: 1),
        (member, "Team", WatchedTeam),
        (teams, "equalize", watched_equalize),
    )
    with contextlib.ExitStack() as undo:
        undo.enter_context(simulated_groups(cluster.network)).wrong = cluster.ledger.wrong
        for module, name, value in changes:
            undo.enter_context(mock.patch.object(module, name, value))
        yield
