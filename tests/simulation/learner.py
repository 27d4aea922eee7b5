"""The learner, as it is, on a simulated machine: what learns is `ChainAgent`; the ledger is told of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.simulation import threads
from tests.simulation.learners import ChainAgent
from tests.simulation.world import Node
from troupe.common import system
from troupe.common.runtime.checkpoint import newest_first
from troupe.services.learner import service

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

TOGETHER_S = 200.0
"""How long after the last fault all learners may take to share batches again."""
LINGER_S = 5.0
"""How long one that is started again after the end of its run answers those who come."""


class Learner(service.Learner):
    """The learner that has the run."""

    def __init__(self, cluster: Cluster, node: Node) -> None:
        self.cluster, self.ledger = cluster, cluster.ledger
        stop: Any = threads.StopSignal()
        begun = next(newest_first(cluster.run_dir / "checkpoints"), None) is not None
        super().__init__(
            cluster.config, cluster.run_dir, resume=begun, stop=stop, write_config=True, linger_s=LINGER_S
        )
        cluster.control = self.control
        agent: Any = self.agent
        assert isinstance(agent, ChainAgent)
        self.chain = agent
        self.ledger.checkpoints.resumed(self.checkpoints.run_id, agent.digest(), self.counters)
        roster, expire = self.control._roster, self.control._roster.expire

        def watched(now_s: float) -> Any:
            gone = expire(now_s)
            for peer in gone:
                self.ledger.expired(peer.identity, cluster.config.net.liveness_s)
            self.ledger.leases(roster.leases())
            return gone

        roster.expire = watched  # type: ignore[method-assign]
        get = self.prefetch.get

        def watched_get(timeout_s: float) -> Any:
            batch = get(timeout_s)
            if batch is not None:
                self.ledger.learned(batch)
            return batch

        if cluster.plan.learners == 1:
            self.prefetch.get = watched_get  # type: ignore[method-assign]

    def run(self) -> None:
        if not self._complete_before:
            self.cluster.begin_again()
        super().run()
        self.ledger.finished(self.counters.steps, self.counters.updates)
        self.cluster.world.after(10.0, self.cluster.stop_the_rest)

    def _publish(self) -> None:
        self.chain.publishes = self.counters.version + 1
        if self.team.learners:
            self.ledger.lineage.published(self.chain.digest())
        super()._publish()

    def _learn_the_rest(self) -> None:
        if self.cluster.plan.learners > 1:
            self._come_together()
        super()._learn_the_rest()

    def _come_together(self) -> None:
        """Learn on until all learners share batches again."""
        plan, lineage = self.cluster.plan, self.ledger.lineage
        while not lineage.together_after:  # they may have done so long before all steps were made
            together = self.team.learners == plan.learners and self.ledger.now_s > plan.end_s
            # Once all steps are made, a queue and a ratio of samples to inserts may give no more.
            if together and plan.table in ("queue", "ratio"):
                return
            if self.ledger.now_s >= plan.end_s + TOGETHER_S:
                here = f"{self.team.learners} of {plan.learners} learners share batches"
                self.ledger.wrong(f"{here} {TOGETHER_S:.0f} s after the last fault")
                return
            self._learn()
            self._housekeeping()

    def _finish(self) -> None:
        self.ledger.lineage.check_end(self.chain.digest(), self.cluster.config.replay.batch_size)
        self.ledger.lineage.rests(self.chain.node)
        self.cluster.complete = True
        super()._finish()

    def _wait_for_evaluation(self) -> None:
        began_s = system.monotonic()
        super()._wait_for_evaluation()
        if self.reporter.evaluated_version < self.counters.version:
            self.ledger.not_evaluated(self.counters.version, system.monotonic() - began_s)
