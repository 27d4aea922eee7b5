"""Runs one plan from its beginning to its end, and says what was wrong with it."""

from __future__ import annotations

import contextlib
import gc
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

from tests.simulation.cluster import SETTLE_S, Cluster, shard_address
from tests.simulation.learner import TOGETHER_S
from tests.simulation.learners import simulated_learners
from tests.simulation.machine import simulated_machine
from tests.simulation.plan import Plan, make_plan
from tests.simulation.world import Deadlock
from troupe.services.replay import shard

LOOK_S = 0.5
CLINGS_S = 25.0
"""So long after a connection has died in silence nobody who asks something keeps to it."""
CALM_S = 10.0
"""So long after the last fault there are updates, and inserts are acknowledged."""


@dataclass
class Outcome:
    """What came of a plan."""

    plan: Plan
    problems: list[str]
    digest: str
    simulated_s: float
    took_s: float
    events: int
    lines: list[str] | None = None


@contextlib.contextmanager
def collected_once() -> Iterator[None]:
    """Look for garbage at the end alone, and not among what was there before: a sixth of the time."""
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # a process that was killed has closed nothing
            gc.collect()
        gc.unfreeze()
        gc.enable()


def run_plan(plan: Plan, *, keep_log: bool = False) -> Outcome:
    """Run a plan, and leave nothing of it open."""
    with collected_once():
        return _run(plan, keep_log)


def _run(plan: Plan, keep_log: bool) -> Outcome:
    """Apart, so that nothing holds the world any more where garbage is looked for."""
    began_s = time.process_time()
    with simulated_machine(plan.seed, keep_log=keep_log) as (world, network, folder):
        cluster = Cluster(world, network, folder, plan)
        ledger = cluster.ledger
        real = shard.open_replay

        def open_replay(options, *args):  # type: ignore[no-untyped-def]
            node = world.here().node
            return cluster.opened(node.name, node, real(options, *args))

        def look() -> None:
            for name, replay in cluster.replays.items():
                if plan.table == "ratio" and not cluster.nodes[name].dead:
                    ledger.check_ratio(replay.tables["default"].limiter, cluster.kills[name])
            ledger.lineage.look()
            for label in network.clung_to(CLINGS_S):
                ledger.wrong(f"{label} has kept to a dead connection for {CLINGS_S:.0f} s")
            world.after(LOOK_S, look)

        with (
            mock.patch.object(shard, "open_replay", open_replay),
            mock.patch.object(shard, "Replay", cluster.make_replay),
            simulated_learners(cluster),
        ):
            look()
            try:
                world.run(plan.end_s + _patience_s(plan), lambda: _over(cluster) or bool(ledger.problems))
            except Deadlock as error:
                ledger.wrong(str(error))
        if not ledger.problems:
            _judge(cluster)
        problems = ledger.problems + [f"touches the real machine: {each}" for each in set(world.violations)]
        digest, simulated_s, events, lines = world.digest(), world.now, world.events, world.lines
    return Outcome(plan, problems, digest, simulated_s, time.process_time() - began_s, events, lines)


def _patience_s(plan: Plan) -> float:
    """How long a run may take after its last fault: with a ratio there is an update for each step."""
    together_s = TOGETHER_S if plan.learners > 1 else 0.0
    return SETTLE_S + plan.total_steps * plan.update_s + together_s


def _over(cluster: Cluster) -> bool:
    """Whether the run is complete and everybody has left."""
    return (
        cluster.ledger.steps is not None and cluster.complete and all(n.dead for n in cluster.nodes.values())
    )


def _judge(cluster: Cluster) -> None:
    ledger = cluster.ledger
    if not _over(cluster):
        waiting = [name for name, node in cluster.nodes.items() if not node.dead]
        steps = cluster.control._budget.steps if cluster.control else 0
        patience_s = _patience_s(cluster.plan)
        ledger.wrong(
            f"not complete {patience_s:.0f} s after the last fault: {steps} steps; {waiting} are there"
        )
        return
    ledger.check_steps(cluster.kills)
    ledger.check_order()
    for name, replay in cluster.replays.items():
        node = cluster.nodes[name]
        if not node.finished or node is not cluster.openers[name]:
            continue  # killed within a change, perhaps, that its successor would mend, or has yet to
        ledger.contents.check(shard_address(name), replay, cluster.kills[name])
    # A cut within a change may come as late as the last insert of all, and several learners may still look
    # for each other when the last inserts come; whether those learn is for `lineage` to say.
    killed = not all(cluster.nodes[name].finished for name in cluster.replays)
    calm = cluster.world.now - ledger.calm_from_s > CALM_S and not killed
    if calm and not (ledger.acked and (ledger.updates or cluster.plan.learners > 1)):
        ledger.wrong(f"{ledger.updates} updates, {len(ledger.acked)} inserts")


def run_seed(seed: int, **options: object) -> Outcome:
    """Run what a seed says."""
    return run_plan(make_plan(seed), **options)  # type: ignore[arg-type]
