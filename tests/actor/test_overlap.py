"""Which version acts where `agent.max_staleness` limits it: one for a whole batch, and exactly so old."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

import pytest
import zmq

from tests.harness import InThread, Shard, control_server, until
from troupe.common.agents import make_agent
from troupe.common.agents.policy_gradient import PolicyGradientAgent
from troupe.common.config import Config, load_config, structural_hash
from troupe.common.envs import make_spec
from troupe.common.runtime.lifecycle import StopSignal
from troupe.common.wire.link import new_incarnation
from troupe.common.wire.replay.codec import SampleBatch
from troupe.common.wire.replay.sharded import ShardedReplayClient
from troupe.services.actor import service as module
from troupe.services.actor.service import ActorService

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"
SLOTS, BATCHES = 4, 12


def config_of(staleness: int) -> Config:
    queue = {"name": "default", "limiter": "queue", "capacity": SLOTS}
    fields = {
        "replay.tables": [queue],
        "replay.batch_size": SLOTS,
        "actor.slots": SLOTS,
        "agent.unroll_steps": 512,
    }
    return load_config("cartpole-ppo", None, {**fields, "agent.max_staleness": staleness})


class Versions:
    """Networks by their number, none like another."""

    def __init__(self, config: Config) -> None:
        spec = make_spec(config.env)
        made = [make_agent(config.agent, spec, seed=number) for number in range(BATCHES + 1)]
        self.agents = [agent for agent in made if isinstance(agent, PolicyGradientAgent)]

    def which(self, batch: SampleBatch) -> list[int]:
        """Those that may have chosen every single action of a batch."""
        unrolls = self.agents[0].stored.read(batch.fields)
        policies = [agent.learner.evaluated(unrolls)[0][:-1] for agent in self.agents]
        off = [float((policy - unrolls.behaviour).abs().max()) for policy in policies]
        return [number for number, most in enumerate(off) if most < 1e-4]


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_batch_is_of_one_version_exactly_so_old(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staleness: int
) -> None:
    config = config_of(staleness)
    versions = Versions(config)
    table = {"limiter": "queue", "capacity": SLOTS, "max_times_sampled": 1}
    shard = Shard(context, tmp_path, "tcp://127.0.0.1:*", **table)
    monkeypatch.setattr(module.ControlClient, "shards", property(lambda self: [shard.endpoint]))
    control = control_server(
        context, config=config.to_dict(), structural_hash=structural_hash(config), total_slots=SLOTS
    )
    learner = ShardedReplayClient(
        [shard.endpoint], ctx=context, name="learner", incarnation=new_incarnation()
    )
    stop = StopSignal()
    control.start()
    control.publish(0, versions.agents[0].params())
    actor = InThread(ActorService(context, control.control_endpoint, "actor-0", stop), stop)
    try:
        acted = []
        for number in range(BATCHES):
            if number % 3 == 2 and staleness:  # a slow learner: actors wait with the next batch
                until(lambda: shard.table.size == SLOTS)
            learner.request_sample(SLOTS)
            batch = until(lambda: learner.receive(0.05))
            acted.append(versions.which(batch))
            assert set(batch.versions) == set(acted[-1])
            control.publish(number + 1, versions.agents[number + 1].params())
        assert acted == [[max(0, number - staleness)] for number in range(BATCHES)]
    finally:
        stop.set()
        actor.join()
        learner.close()
        control.stop()
        shard.end()
