"""Agents learn to act in every space, and refuse in a line what they cannot."""

import numpy as np
import pytest

from tests.agents.in_process import evaluate, learn_through_a_queue
from tests.agents.matches import match
from tests.envs.matching import ACTIONS
from tests.harness import CHAOS, only_in_chaos
from troupe.common.agents import make_agent
from troupe.common.agents.apex import ApexConfig
from troupe.common.agents.impala import ImpalaConfig
from troupe.common.agents.policy_gradient import PolicyGradientConfig
from troupe.common.agents.r2d2 import R2d2Config
from troupe.common.config.env_section import EnvConfig
from troupe.common.envs import make_spec
from troupe.common.errors import ConfigError

PPO = {
    "mlp_units": (64,), "unroll_steps": 16, "gamma": 0.0, "epochs": 6, "minibatch_steps": 128,
    "learning_rate": 3e-3, "learning_rate_schedule": "linear", "entropy_cost": 0.0, "eval_epsilon": 0.0,
}  # fmt: skip


def learned(config, env, steps, **arguments):
    """Mean score of 200 games after so many steps."""
    arguments = {"slots": 32, "batch": 32, "seed": 1, **arguments}
    agent, _ = learn_through_a_queue(config, env, steps=steps, **arguments)
    return evaluate(agent, env, episodes=200)


LEARNED = [("box", "tanh_normal"), ("tuple", "normal"), ("dict", "normal")]
if CHAOS:
    LEARNED += [("multi", "normal"), ("box", "normal"), ("tuple", "tanh_normal")]


@pytest.mark.slow
@pytest.mark.parametrize(("actions", "distribution"), LEARNED)
def test_ppo_learns_to_act_in_every_space(actions, distribution):
    """Any action alike scores a half at most."""
    config = PolicyGradientConfig(
        **PPO, action_distribution=distribution, deviation_of_input=distribution != "normal",
        deviation_start=0.5,
    )  # fmt: skip
    assert learned(config, match(actions), 6_000) > 0.85


@pytest.mark.slow
@only_in_chaos
def test_impala_learns_a_nest_of_choices_and_numbers():
    config = ImpalaConfig(
        mlp_units=(64,), unroll_steps=16, gamma=0.0, optimizer="adam", learning_rate=3e-3, entropy_cost=0.0,
        eval_epsilon=0.0, deviation_start=0.5, reward_clip="none",
    )  # fmt: skip
    assert learned(config, match("tuple"), 60_000, batch=8) > 0.8


@pytest.mark.slow
def test_bins_make_choices_of_numbers():
    env = match("box", action_bins=9, action_bins_ratio=50.0)
    assert make_spec(env).actions.choices == (9, 9)
    assert learned(PolicyGradientConfig(**PPO), env, 6_000) > 0.75


@pytest.mark.parametrize("config", [ApexConfig(), R2d2Config()], ids=["apex", "r2d2"])
def test_agents_that_learn_values_need_one_choice(config):
    for actions in ACTIONS:
        with pytest.raises(ConfigError, match="one choice of several") as refused:
            make_agent(config, make_spec(match(actions)))
        assert "\n" not in str(refused.value)
        assert "policy_gradient" in str(refused.value)
    pendulum = EnvConfig(id="gym:Pendulum-v1", action_bins=5)
    assert make_agent(config, make_spec(pendulum)).act
    with pytest.raises(ConfigError, match=r"--env.action_bins 11"):
        make_agent(config, make_spec(EnvConfig(id="gym:Pendulum-v1")))


def test_unbounded_numbers_are_not_squashed():
    with pytest.raises(ConfigError, match="take normal"):
        make_agent(PolicyGradientConfig(action_distribution="tanh_normal"), make_spec(match("dict")))


@pytest.mark.parametrize("actions", ACTIONS)
@pytest.mark.parametrize("config", [PolicyGradientConfig, ImpalaConfig], ids=["ppo", "impala"])
def test_the_learner_sees_the_very_policy_and_memory_that_acted(config, actions):
    """With an LSTM that is fed the last action, its parameters and probabilities are those of acting."""
    import torch

    from tests.agents.in_process import stacked_fields
    from troupe.common.envs import make_vector
    from troupe.services.actor.local_inference import Rollout

    env = match(actions)
    vector = make_vector(env, 3, 0)
    agent = make_agent(
        config(mlp_units=(8,), lstm_units=4, see_last_step=True, unroll_steps=5), vector.spec, seed=2
    )
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in agent.net.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    rollout, chunks = Rollout(agent, vector, 0, 1), []
    rollout.explore([0, 1, 2], 3)
    while len(chunks) < 6:
        chunks += rollout.step(1)
    vector.close()
    for chunk in chunks:
        for spec in agent.fields:
            assert chunk.fields[spec.name].dtype == np.dtype(spec.dtype)
            assert spec.bad_rows(chunk.fields[spec.name]) is None
    unrolls = agent.stored.read(stacked_fields(chunks))
    with torch.no_grad():
        params, _, _ = agent.net(
            unrolls.obs, unrolls.last_action, unrolls.last_reward, unrolls.ended != 0, unrolls.memory
        )
    assert params.std() > 0.05
    np.testing.assert_allclose(params[:-1].numpy(), unrolls.behaviour.numpy(), rtol=1e-3, atol=1e-4)
