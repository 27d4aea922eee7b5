"""IMPALA learns from fresh and replayed unrolls through the tables of a run, without processes."""

import numpy as np

from benchmarks.forgetting import learned, make_config, mean_return
from troupe.common.agents import make_agent
from troupe.common.envs import make_spec
from troupe.services.replay.storage.replay import Replay

STEPS = 6000


def test_impala_learns_catch_from_a_queue_and_a_uniform_table(tmp_path):
    config = make_config(**{"run.total_steps": str(STEPS), "agent.trust_region": "0.5"})
    agent = make_agent(config.agent, make_spec(config.env), seed=1)
    seen, update = [], agent.update

    def noted(batch):
        seen.append(batch.replayed.tolist())
        return update(batch)

    agent.update = noted
    replay = Replay(tmp_path, config.replay.shard_tables(1), budget_bytes=1 << 26, seed=1)
    before = mean_return(agent, config.env)
    for env in learned(config, agent, replay, [config.env], seed=1):
        assert mean_return(agent, env) > max(0.0, before + 0.8)
    replay.close()
    assert np.all(np.array(seen) == [False] * 4 + [True] * 4)
    # Every unroll was fresh in one update, four of them in each.
    unrolls = STEPS // config.agent.unroll_steps
    assert unrolls - 40 < 4 * len(seen) <= unrolls
