"""The learner's protocol around a loop that learns nothing."""

from __future__ import annotations

import contextlib
import json
import queue
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import UNSET

from tests.simulation.actors import CHUNK_STEPS, SPECS
from tests.simulation.central import SPEC, SameAgent
from tests.simulation.sockets import Context
from tests.simulation.world import Node
from troupe.common import system
from troupe.common.wire.link import new_incarnation
from troupe.common.wire.replay.codec import specs_to_wire
from troupe.common.wire.replay.sharded import ShardedReplayClient
from troupe.common.wire.sockets import Security
from troupe.services.learner.batches.prefetch import Prefetcher
from troupe.services.learner.control.budget import StepBudget
from troupe.services.learner.control.epochs import Epochs
from troupe.services.learner.control.evaluations import Evaluations
from troupe.services.learner.control.server import ControlServer, SlotRules, Terms
from troupe.services.learner.inference.service import CentralInference
from troupe.services.learner.record.gathered import Gathered

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

CONTROL, ANNOUNCE, INFERENCE = (f"tcp://10.0.0.1:500{i}" for i in range(3))
OPEN = Security(insecure=True)
EVALUATION_S = 60.0
"""How long the end of a run waits for the last evaluation."""


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
            evaluations=Evaluations(*config.evaluator.division()),
            epochs=self._epochs(),
        )
        self.gathered = Gathered(config)
        self.evaluated_version = -1
        shares, queued = config.replay.shares(), plan.table == "queue"
        self.prefetch = Prefetcher(
            self.context,  # type: ignore[arg-type]
            self.control.shards,
            shares=self._first_shares(),
            kept=() if queued else tuple(shares),
            depth=2,
            incarnation=system.random.getrandbits(63),
            fields=SPECS,
            security=OPEN,
        )
        self.inference = self._make_inference() if plan.central else None
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

    # What follows is for several learners: see `learners.py`.

    def _epochs(self) -> Epochs | None:
        return None

    def _first_shares(self) -> dict[str, int]:
        return self.cluster.config.replay.shares()

    def _come_together(self) -> None:
        pass

    def _part(self) -> None:
        pass

    def _make_inference(self) -> CentralInference:
        config = self.cluster.config
        return CentralInference(
            self.context,  # type: ignore[arg-type]
            config,
            SameAgent(),  # type: ignore[arg-type]
            SPEC,
            leases=self.control.leases,
            shards=self.control.shards,
            replay=ShardedReplayClient(
                ctx=self.context,
                name="inference",
                incarnation=new_incarnation(),
                specs=SPECS,
                max_outstanding=max(1, config.actor.max_outstanding_inserts // config.replay.shards),
                security=OPEN,
                tolerate_refusals=True,
            ),
            seed=1,
            security=OPEN,
        )

    def run(self) -> None:
        self.cluster.begin_again()
        if self.cluster.checkpoint is None:
            self._save()
        if self.inference is not None:
            self.inference.start()
            self.control.inference_endpoint = self.inference.endpoint
        self.control.start()
        self.prefetch.start()
        self._publish()
        saved_s = system.monotonic()
        while self.budget.steps < self.total:
            self._learn(0.25)
            if system.monotonic() - saved_s > 2.0:
                saved_s = system.monotonic()
                self._save()
        self._come_together()
        end_s = system.monotonic() + (5.0 if self.cluster.plan.table == "queue" else 0.5)
        while system.monotonic() < end_s:
            if self._learn(0.25) and self.cluster.plan.table == "queue":
                end_s = system.monotonic() + 5.0
        self._publish()
        self.cluster.complete = True
        self.control.set_state(updates=self.updates, stopping=True)
        self._part()
        if self.cluster.plan.evaluators:
            self._wait_for_evaluation()
        end_s = system.monotonic() + 8.0
        while system.monotonic() < end_s and (
            self.control.has("actor", "evaluator") or self.control.untold("replay")
        ):
            system.sleep(0.05)
        self.budget.close()
        self._save()
        self.ledger.finished(self.budget.steps, self.updates)
        if self.inference is not None:
            self.inference.stop()
        self.prefetch.stop()
        self.control.stop()
        self.context.destroy(linger=1000)
        self.cluster.world.after(10.0, self.cluster.stop_the_rest)

    def _learn(self, timeout_s: float) -> bool:
        batch = self.prefetch.get(timeout_s=timeout_s)
        self._collect()
        if self.inference is not None:
            self.inference.check()
            self.inference.metrics()
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

    def _collect(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                report = self.control.telemetry.get_nowait()
                if report.fields.part is not UNSET:
                    complete = self.budget.steps >= self.total
                    for each in self.gathered.add(report, report.fields.part, complete=complete):
                        self.ledger.evaluated(each, self.evaluated_version)
                        self.evaluated_version = each.version

    def _wait_for_evaluation(self) -> None:
        began_s = system.monotonic()
        while self.evaluated_version < self.version and system.monotonic() < began_s + EVALUATION_S:
            self._collect()
            system.sleep(0.1)
        if self.evaluated_version < self.version:
            self.ledger.not_evaluated(self.version, EVALUATION_S)

    def _publish(self) -> None:
        self.version += 1
        params = {"version": np.array([self.version], np.float32)}
        self.control.publish(self.version, params)
        if self.inference is not None:
            self.inference.offer(self.version, params)

    def _save(self) -> None:
        saved = {"budget": self.budget.to_meta(), "version": self.version, "updates": self.updates}
        self.cluster.checkpoint = json.dumps(saved)
