"""Hindsight in whole: environments with goals, what is refused, and bits that nobody flips without it."""

import gymnasium
import numpy as np
import pytest

from tests.agents.in_process import evaluate
from tests.agents.replayed import learn_by_replay
from troupe.common.agents.hindsight import hindsight_of
from troupe.common.config import EnvConfig, load_config
from troupe.common.envs import make_spec, make_vector
from troupe.common.envs.bit_flip import BitFlipEnv
from troupe.common.envs.goals import EnvGoals
from troupe.common.errors import ConfigError
from troupe.common.spaces import packed, unpacked
from troupe.services.launcher.training import check_environment

BITS = EnvConfig(id="troupe.common.envs.bit_flip:BitFlip-v0", reward_clip="none", kwargs={"bits": 3})


class Raised(gymnasium.RewardWrapper):
    def reward(self, reward):
        return reward + 5


def test_outcomes_are_the_environments():
    spec = make_spec(BITS)
    goals, env = EnvGoals(BITS, spec), BitFlipEnv(3)
    here, there = (
        packed(
            spec.obs_leaves,
            {"observation": np.array(a), "achieved_goal": np.array(a), "desired_goal": np.array(b)},
        )
        for a, b in (([0, 1, 1], [1, 1, 1]), ([0, 0, 1], [1, 0, 0]))
    )
    shown = dict(
        zip(
            (leaf.path[0] for leaf in spec.obs_leaves),
            unpacked(spec.obs_leaves, goals.replaced(here, there)),
            strict=True,
        )
    )
    assert {name: array.tolist() for name, array in shown.items()} == {
        "observation": [0, 1, 1], "achieved_goal": [0, 1, 1], "desired_goal": [0, 0, 1],
    }  # fmt: skip
    assert goals.outcome(goals.replaced(here, there), True) == (-1.0, False)
    assert goals.outcome(goals.replaced(here, here), False) == (0.0, True)
    assert env.compute_reward(np.zeros(3), np.ones(3), {}) == -1.0


def test_a_reward_for_another_goal_goes_through_the_wrappers_of_rewards():
    wrappers = ["tests.agents.test_hindsight:Raised", "tests.envs.test_gymnasium_envs:Doubled"]
    env = BITS.model_copy(update={"wrappers": wrappers})
    vector = make_vector(env, 1, seed=1)
    vector.reset()
    step = vector.step(np.zeros(1, np.int64))
    assert EnvGoals(env, vector.spec).outcome(step.obs[0], False) == (step.reward[0], False) == (8.0, False)
    vector.close()


@pytest.mark.parametrize(
    ("preset", "fields", "why"),
    [
        ("cartpole-apex", {"actor.hindsight_copies": "4"}, "needs an environment with goals"),
        ("cartpole-ppo", {"env.id": BITS.id, "actor.hindsight_copies": "4"}, "take apex, or sac"),
        ("cartpole-impala", {"env.id": BITS.id, "actor.hindsight_copies": "1"}, "take apex, or sac"),
        ("bitflip-apex", {"env.wrappers": "['gymnasium.wrappers:NormalizeReward']"}, "leave one of them out"),
    ],
)
def test_what_has_no_goals_or_no_transitions_is_refused_in_a_line(preset, fields, why):
    from troupe.common.config import load_layers

    with pytest.raises(ConfigError, match=why) as refused:
        check_environment(load_layers(preset, None, fields, {}), play=False)
    assert "\n" not in str(refused.value)


def test_none_are_relabelled_unless_it_is_asked_for():
    config = load_config("bitflip-apex", None, {"actor.hindsight_copies": "0"}, {})
    assert hindsight_of(config, make_spec(config.env)) is None


@pytest.mark.slow
def test_bits_are_flipped_with_hindsight_and_not_without():
    """Eight bits, from the same number of updates; at random a goal is reached once in forty episodes."""
    fields = {
        "env.kwargs": "{bits = 8}",
        "agent.mlp_units": "[64, 64]",
        "agent.hidden_units": "64",
        "agent.learning_rate": "2e-3",
        "replay.batch_size": "64",
        "replay.min_items": "500",
    }
    returns = {}
    for copies in (4, 0):
        config = load_config("bitflip-apex", None, {**fields, "actor.hindsight_copies": str(copies)}, {})
        agent, _ = learn_by_replay(config, updates=900, seed=1)
        returns[copies] = evaluate(agent, config.env, episodes=100, epsilon=0.0)
    assert returns[4] > -4.5  # as good as can be is -3
    assert returns[0] < -6.0
