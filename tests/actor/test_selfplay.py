"""Learning against oneself and earlier versions, in one process: the policy becomes stronger than they."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from tests.agents.in_process import learner_params, stacked_fields
from troupe.common.agents import Batch, make_agent
from troupe.common.agents.opponents import Opponents
from troupe.common.agents.policy_gradient import PolicyGradientConfig
from troupe.common.config.env_section import EnvConfig
from troupe.common.config.schema import ActorConfig
from troupe.common.envs import make_vector
from troupe.common.stats.ratings import OPPONENT_GAMES, OPPONENT_VERSION, OPPONENT_WIN_RATE
from troupe.common.wire.control.params import Published, decode_params, encode_params
from troupe.services.actor.local_inference import Rollout
from troupe.services.evaluator.matches import play_match
from troupe.services.learner.record.ratings import Ratings

COINS = EnvConfig(id="pettingzoo:tests.envs.coins:Coins", reward_clip="none")
AGENT = PolicyGradientConfig(
    mlp_units=(64,),
    unroll_steps=15,
    learning_rate=1e-2,
    gamma=0.8,
    epochs=4,
    minibatch_steps=120,
    baseline_cost=0.5,
)
SLOTS, UPDATES, PERIOD, GAMES = 16, 40, 10, 20


def test_elo_rises_in_a_game_that_is_learned_by_self_play(tmp_path: Path) -> None:
    env = make_vector(COINS, SLOTS, 1)
    agent, other = (make_agent(AGENT, env.spec, seed=1) for _ in range(2))
    config = ActorConfig(opponents="win_rate", opponents_period_versions=5)
    opponents = Opponents(config, env.spec, lambda: make_agent(AGENT, env.spec), 3)
    rollout, queue, version = Rollout(agent, env, 0, 1, opponents=opponents), deque(), 0
    first = learner_params(agent)
    offered: list[Published] = []
    ratings = Ratings(tmp_path, -1, lambda opponent: offered.append(opponent) if opponent else None)

    def rate() -> float:
        played = Published(version, *encode_params(learner_params(agent)), 0, version, 0.0)
        metrics: dict[str, float] = {}
        if offered:
            other.load_params(decode_params(offered[-1].manifest, offered[-1].blob))
            points = np.mean(match(other))
            metrics = {
                OPPONENT_VERSION: offered[-1].version,
                OPPONENT_GAMES: GAMES,
                OPPONENT_WIN_RATE: float(points),
            }
        return ratings.evaluated(played, metrics)["eval/elo"]

    def match(opponent: Any) -> list[float]:
        options: dict[str, Any] = {"slots": 20, "seed": version, "epsilon": 1.0, "max_episode_frames": 1000}
        scores = play_match(agent, opponent, COINS, games=GAMES, **options)
        assert scores is not None
        return scores

    elo = [rate()]
    while version < UPDATES:
        queue.extend(rollout.step(version))
        if len(queue) >= SLOTS:
            fields = stacked_fields([queue.popleft() for _ in range(SLOTS)])
            agent.update(Batch(fields, np.ones(SLOTS, np.float32), measure=False, progress=version / UPDATES))
            version += 1
            if version % PERIOD == 0:
                elo.append(rate())
    env.close()
    ratings.wait(60)
    assert opponents.metrics()["actor/opponent_games"] > 20
    assert elo[0] == 0
    assert elo[-1] > 250, elo
    # What Elo says is so: the last version beats the first one.
    other.load_params(first)
    assert np.mean(match(other)) > 0.8
