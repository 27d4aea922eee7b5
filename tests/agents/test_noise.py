"""Noisy weights as an option of Ape-X: acting, targets by hand, resuming, and that noise alone explores."""

import numpy as np
import pytest
import torch

from tests.agents.replayed import learn_by_replay
from tests.agents.transitions import PIXELS, VECTOR, batch_of
from tests.envs.lure import LureEnv
from troupe.common.agents import Inputs, make_agent
from troupe.common.agents.apex import ApexConfig
from troupe.common.agents.base import Batch
from troupe.common.config import load_config
from troupe.common.data.accumulators.n_step import PRIORITY_FLOOR
from troupe.common.errors import ConfigError
from troupe.common.nets.spectral import spectral_layers

SMALL = {"hidden_units": 6, "mlp_units": (5,), "noise": 0.5}


def q_by_hand(net, obs, noise):
    """Q `[B, A]` of a dueling net on vectors, layer by layer, with one draw of noise or none."""
    state = {name: array.double().numpy() for name, array in net.state_dict().items()}
    root = np.sign(noise) * np.sqrt(np.abs(noise))
    used = 0

    def through(name, x):
        nonlocal used
        weight, bias = state[f"{name}.weight"], state[f"{name}.bias"]
        outputs, inputs = weight.shape
        into, out = np.split(root[used : used + inputs + outputs], [inputs])
        used += inputs + outputs
        weight = weight + state[f"{name}.weight_deviation"] * np.outer(out, into)
        return x @ weight.T + bias + state[f"{name}.bias_deviation"] * out

    seen = np.tanh(obs @ state["torso.layers.1.weight"].T + state["torso.layers.1.bias"])
    left, right = np.split(np.maximum(through("hidden", seen), 0.0), 2, axis=1)
    advantage, value = through("advantage", left), through("value", right)
    assert used == len(noise) == net.draws
    return value + advantage - advantage.mean(1, keepdims=True)


@pytest.mark.parametrize("kind", ["double", "plain", "munchausen"])
def test_an_update_by_hand_draws_for_network_target_and_choice(kind):
    rng, rows = np.random.default_rng(0), np.arange(7)
    munchausen = {"munchausen_alpha": 0.8, "munchausen_tau": 0.5, "munchausen_least": -0.6}
    options = munchausen if kind == "munchausen" else {"double": kind == "double"}
    agent = make_agent(ApexConfig(**SMALL, **options, learning_rate=1e-3), VECTOR, seed=4)
    for _ in range(3):  # move the online network away from the target
        batch = batch_of(rng, VECTOR, 7)
        agent.update(Batch(batch, np.ones(7, np.float32)))
    generator = torch.Generator().manual_seed(4)
    own, of_target, choice = [torch.randn(3, 1, agent.net.draws, generator=generator) for _ in range(4)][-1]
    now = batch["obs"][:, 0]
    then = batch["obs"][rows, batch["bootstrap_steps"][:, 0]]
    action, reward, discount = (batch[name][:, 0] for name in ("action", "reward", "discount"))
    target = agent.learner.target
    following = q_by_hand(target, then, of_target[0].numpy())
    if kind == "munchausen":
        chances = [
            np.exp(q / 0.5) / np.exp(q / 0.5).sum(1, keepdims=True)
            for q in (q_by_hand(target, now, of_target[0].numpy()), following)
        ]
        value = (chances[1] * (following - 0.5 * np.log(chances[1]))).sum(1)
        reward = reward + 0.8 * np.maximum(-0.6, 0.5 * np.log(chances[0][rows, action]))
    else:
        chooses = q_by_hand(agent.net, then, choice[0].numpy()) if kind == "double" else following
        value = following[rows, chooses.argmax(1)]
    taken = q_by_hand(agent.net, now, own[0].numpy())[rows, action]
    priorities = agent.update(Batch(batch, np.ones(7, np.float32))).priorities
    wanted = np.abs(reward + discount * value - taken) + PRIORITY_FLOOR
    np.testing.assert_allclose(priorities, wanted, rtol=1e-4, atol=1e-5)


def test_quantiles_have_the_noise_of_their_row():
    agent = make_agent(ApexConfig(**SMALL, quantiles=4), VECTOR)
    obs, shares = torch.randn(2, 3), torch.rand(2, 5)
    noise = torch.randn(2, agent.net.draws)
    with torch.no_grad():
        both = agent.net.quantiles(obs, shares, noise)
        for row in range(2):
            alone = agent.net.quantiles(obs[[row]], shares[[row]], noise[[row]])
            np.testing.assert_allclose(both[[row]], alone, rtol=1e-5, atol=1e-6)
        assert not np.allclose(both, agent.net.quantiles(obs, shares), atol=1e-2)


def test_each_slot_draws_its_own_as_often_as_told_and_a_seed_repeats_it():
    agent, slots = make_agent(ApexConfig(**SMALL), VECTOR, seed=1), 4000
    np.testing.assert_array_equal(agent.slot_epsilons([0, 7], 9), [1.0, 1.0])
    inputs = Inputs.start(np.ones((slots, 3), np.float32), 0, VECTOR.actions)

    def acted(epsilon, seed=0):
        return agent.act(inputs, np.full(slots, epsilon, np.float32), np.random.default_rng(seed))

    best = acted(0.0)
    # One value of one observation: nothing is drawn. Rows of a batch may differ in the last bit.
    np.testing.assert_allclose(best.extras["value_max"], best.extras["value_max"][0], rtol=1e-5)
    np.testing.assert_allclose(agent.values(inputs), best.extras["value_max"], rtol=1e-5)
    noisy = acted(1.0)
    assert len(np.unique(noisy.extras["value_max"])) > 0.99 * slots
    assert len(np.unique(noisy.action)) == VECTOR.actions.count
    np.testing.assert_array_equal(noisy.extras["value_taken"], noisy.extras["value_max"])
    np.testing.assert_array_equal(noisy.action, acted(1.0).action)
    assert (noisy.action != acted(1.0, seed=1).action).any()
    share = (np.abs(acted(0.25).extras["value_max"] - best.extras["value_max"][0]) > 1e-5).mean()
    assert share == pytest.approx(0.25, abs=0.03)


def test_a_state_goes_on_exactly_with_all_of_btr():
    config = ApexConfig(torso="btr", hidden_units=8, noise=0.5, quantiles=4, munchausen_alpha=0.9)
    first, second = (make_agent(config, PIXELS, seed=seed) for seed in (0, 5))
    batch = Batch(batch_of(np.random.default_rng(0), PIXELS, 3), np.ones(3, np.float32))
    before = [layer.left.clone() for layer in spectral_layers(first.net)]
    first.update(batch)
    for layer, left in zip(spectral_layers(first.net), before, strict=True):
        assert not torch.equal(layer.left, left)
    second.load_state(*first.state())
    for _ in range(2):
        one, two = first.update(batch), second.update(batch)
        np.testing.assert_array_equal(one.priorities, two.priorities)
    for name, array in first.state()[0].items():
        np.testing.assert_array_equal(array, second.state()[0][name], err_msg=name)
    # Who acts by what was published sees as the learner does.
    actor = make_agent(config, PIXELS, seed=9)
    actor.load_params(first.params())
    obs = np.random.default_rng(1).integers(0, 255, (2, *PIXELS.obs_shape)).astype(np.uint8)
    inputs = Inputs.start(obs, 0, PIXELS.actions)
    acted = [
        agent.act(inputs, np.ones(2, np.float32), np.random.default_rng(2)).extras["value_max"]
        for agent in (first, actor)
    ]
    np.testing.assert_array_equal(*acted)


def test_noise_without_quantiles_goes_on_where_it_stopped():
    first, second = (make_agent(ApexConfig(**SMALL), VECTOR, seed=seed) for seed in (0, 5))
    batch = Batch(batch_of(np.random.default_rng(0), VECTOR, 4), np.ones(4, np.float32))
    first.update(batch)
    second.load_state(*first.state())
    np.testing.assert_array_equal(first.update(batch).priorities, second.update(batch).priorities)


def test_a_ladder_of_random_actions_beside_it_is_refused():
    with pytest.raises(ConfigError, match="epsilon_base has no effect with noise"):
        load_config("cartpole-apex", None, {"agent.noise": "0.5", "agent.epsilon_base": "0.2"}, {})


@pytest.mark.parametrize("seed", [1, 3])
def test_noise_alone_finds_what_the_greedy_never_do(seed):
    """The first place's lure pays at once: who only ever takes the best action so far stays with it."""
    chosen = {
        "env.id": f"{LureEnv.__module__}:Lure-v0",
        "agent.noise": "1.0",
        "agent.hidden_units": "32",
        "agent.mlp_units": "[32]",
        "agent.eval_epsilon": "0",
        "actor.slots": "4",
        "actor.chunk_steps": "4",
        "replay.min_items": "64",
        "replay.batch_size": "32",
        "replay.samples_per_insert": "8",
    }
    config = load_config("cartpole-apex", None, chosen, {})
    agent, rollout = learn_by_replay(config, updates=300, seed=seed)
    returns = [episode.return_raw for episode in rollout.episodes]
    assert max(returns) == 1.0
    obs = np.eye(4, dtype=np.float32)
    inputs = Inputs.start(obs, 0, agent.spec.actions)
    act = agent.act(inputs, np.zeros(4, np.float32), np.random.default_rng(0))
    np.testing.assert_array_equal(act.action, [1, 1, 1, 1])
