"""What is measured of any agent while it learns, against values known beforehand."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.agents.contract import PIXELS, VECTORS, agent_of, batch, copied, every_algorithm
from tests.agents.transitions import VECTOR, batch_of
from troupe.common.agents import make_agent
from troupe.common.agents.base import Batch
from troupe.common.agents.inspection import Ends, Inspection, steps_of
from troupe.common.config.algorithms import agent_model
from troupe.common.config.env_section import EnvConfig
from troupe.common.envs import make_spec
from troupe.common.rl.returns import explained_variance


@every_algorithm
@pytest.mark.parametrize("env", [VECTORS, PIXELS], ids=["vectors", "pixels"])
def test_learning_is_the_same_to_the_last_bit_and_figures_are_finite(name, env):
    looked, plain = agent_of(name, env=env), agent_of(name, env=env)
    arguments = batch(plain, env)
    inspection = Inspection(looked, period_s=0.0)
    for _ in range(2):
        found, expected = inspection.update(arguments), plain.update(arguments)
    for key, array in plain.params().items():
        np.testing.assert_array_equal(looked.params()[key], array)
    assert {key: found.metrics[key] for key in expected.metrics} == expected.metrics
    names = ("seen_mean", "seen_deviation", "reward_size", "step_size", "learning_rate")
    assert {f"learner/{each}" for each in names} <= found.metrics.keys()
    assert any(key.startswith("learner/dead_share/") for key in found.metrics)
    assert np.isfinite(list(found.metrics.values())).all()
    assert "learner/explained_variance" in found.metrics


def test_it_looks_when_it_is_time_and_metrics_are_wanted():
    agent = agent_of("impala")
    arguments, inspection = batch(agent), Inspection(agent, period_s=1e6)
    assert not inspection.update(replace(arguments, measure=False)).metrics
    assert "learner/step_size" in inspection.update(arguments).metrics
    assert "learner/step_size" not in inspection.update(arguments).metrics


def small(algorithm="apex", spec=VECTOR, **fields):
    return make_agent(agent_model(algorithm)(mlp_units=(8, 4), **fields), spec)


def figures(agent, fields):
    size = len(fields["action"])
    metrics = Inspection(agent).update(Batch(fields, np.ones(size, np.float32))).metrics
    return {name.removeprefix("learner/"): value for name, value in metrics.items()}


def test_units_that_never_switch_are_counted_by_layer():
    fields = batch(agent_of("policy_gradient")).fields
    agent = make_agent(
        agent_model("policy_gradient")(mlp_units=(8, 4), activation="relu"), agent_of("impala").spec
    )
    with torch.no_grad():
        first, last = (module for module in agent.net.torso.modules() if isinstance(module, torch.nn.Linear))
        first.bias[:6] = -1e6
        first.weight[6:] = 1.0
        first.bias[6:] = 1.0
        last.bias[:] = 1e3  # on for everything, but not the same for everything
        last.weight[:] = 1.0
    found = figures(agent, fields)
    assert found["dead_share/torso.layers.1"] == pytest.approx(6 / 8)
    assert found["dead_share/torso.layers.3"] == 0.0


def test_saturated_units_are_those_at_the_ends_of_tanh():
    agent = make_agent(agent_model("policy_gradient")(mlp_units=(8, 4)), agent_of("impala").spec)
    with torch.no_grad():
        agent.net.torso.layers[1].bias[:2] = 50.0
    fields = batch(agent_of("policy_gradient")).fields
    fields["obs"] = fields["obs"] * np.float32(1e-3)
    found = figures(agent, fields)
    assert found["saturated_share/torso.layers.1"] == pytest.approx(2 / 8)


def test_an_activation_of_one_number_for_each_row_is_looked_at_as_one_unit():
    agent = small()
    torso = agent.net.torso
    torso.last = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Flatten(0), torch.nn.Tanh())
    forward = torso.forward
    torso.forward = lambda *seen: forward(*seen) + 0.0 * torso.last(torch.ones(8, 4)).sum()
    assert figures(agent, batch_of(np.random.default_rng(1), VECTOR, 8))["dead_share/torso.last.0"] == 1.0


def test_what_the_network_sees_and_what_it_is_paid():
    fields = batch_of(np.random.default_rng(0), VECTOR, 64)
    fields["reward"][:] = 0.0
    fields["reward"][:32] = -300.0
    fields["discount"][:] = 0.9
    fields["discount"][:37] = 0.0
    found = figures(small(double=False, n_steps=3), fields)
    seen = fields["obs"][:, 0]
    assert found["seen_mean"] == pytest.approx(seen.mean(), rel=1e-5)
    assert found["seen_deviation"] == pytest.approx(seen.std(), rel=1e-5)
    assert (found["seen_least"], found["seen_most"]) == (seen.min(), seen.max())
    assert found["reward_size"] == 300.0
    # Of windows of three steps: a half of them has a reward, so 1 - 0.5^(1/3) of the steps.
    assert found["reward_share"] == pytest.approx(1 - 0.5 ** (1 / 3))
    assert found["terminated_share"] == pytest.approx(1 - (27 / 64) ** (1 / 3))


def test_rewards_as_they_are_learned_from_and_how_far_a_step_goes():
    spec = agent_of("impala").spec
    fields = batch(agent_of("policy_gradient")).fields
    fields["reward"][:] = -7.0
    options = {"mlp_units": (8, 4), "reward_clip": "abs_one", "reward_scale": 0.25, "learning_rate": 0.5}
    agent = make_agent(agent_model("policy_gradient")(**options), spec)
    weights = [array for array in copied(agent.params()).values() if array.dtype == "f4"]
    size = np.sqrt(sum(np.square(array).sum() for array in weights))
    found = figures(agent, fields)
    assert (found["reward_size"], found["reward_size_learned"]) == (7.0, 0.25)
    # The first step of Adam moves nearly every weight by the learning rate.
    count = sum(array.size for array in weights)
    assert found["step_size"] == pytest.approx(0.5 * np.sqrt(count) / size, rel=0.15)
    assert found["learning_rate"] == 0.5


def test_numbers_of_actions_at_their_bounds():
    spec = make_spec(EnvConfig(id="gym:Pendulum-v1", reward_clip="none"))
    agent = small("sac", spec)
    fields = {
        "obs": np.random.default_rng(0).normal(size=(20, 2, 3)).astype(np.float32),
        "action": np.linspace(0.0, 0.5, 20, dtype=np.float32).reshape(20, 1, 1),
        "reward": np.ones((20, 1), np.float32),
        "discount": np.ones((20, 1), np.float32),
        "bootstrap_steps": np.ones((20, 1), np.uint8),
    }
    fields["action"][:15] = -1.0
    assert figures(agent, fields)["action_at_bounds_share"] == 0.75


def test_the_steps_of_unrolls_are_what_was_done_at_what_was_seen():
    agent = agent_of("impala")
    arguments = batch(agent)
    steps = steps_of(arguments, agent)
    fields = arguments.fields
    count = fields["action"].shape[1] - 1
    assert len(steps.rewards) == len(steps.obs) == len(steps.actions) == len(fields["action"]) * count
    np.testing.assert_array_equal(steps.obs[:count], fields["obs"][0, :count])
    np.testing.assert_array_equal(steps.actions[:count, 0], fields["action"][0, 1:])
    np.testing.assert_array_equal(steps.rewards[:count], fields["reward"][0, 1:])


@pytest.mark.parametrize("width", [2, 300])
@pytest.mark.parametrize("shows", [True, False])
def test_whether_observations_show_that_an_episode_ends(width, shows):
    rng, ends = np.random.default_rng(0), Ends()
    for _ in range(4):
        obs = rng.normal(size=(300, width)).astype(np.float32)
        ended = np.zeros(300, np.uint8)
        ended[:10] = 1
        if shows:
            obs[:10, 0] += 30.0
        ends.take(obs, ended, again=False)
    share = ends.seen_share()
    assert share > 0.9 if shows else 0.3 < share < 0.65


def test_ends_that_are_replayed_count_once():
    ends, obs = Ends(), np.random.default_rng(0).normal(size=(100, 2)).astype(np.float32)
    ended = np.zeros(100, np.uint8)
    ended[:3] = 1
    for _ in range(10):
        ends.take(obs, ended, again=True)
    assert ends.seen_share() is None


def test_explained_variance():
    targets = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert explained_variance(torch.full((4,), 7.0), targets) == 1.0  # a constant is no variance
    assert explained_variance(targets - 2.5, targets) == 0.0
    assert explained_variance(0.5 * (targets - 2.5), targets) == pytest.approx(0.75)
    assert explained_variance(100 * targets, torch.ones(4)) == -1.0
