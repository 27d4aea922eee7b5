"""The number format in which an actor's network computes."""

import logging

import numpy as np
import pytest
import torch

from troupe.common.agents import formats, make_agent
from troupe.common.agents.base import Inputs
from troupe.common.config import load_config
from troupe.common.envs import make_vector
from troupe.common.nets.torsos import PIXEL_TORSOS, Projected, compute_in, make_torso
from troupe.services.actor.local_inference import Rollout

SLOTS = 3
FORMATS = [torch.float32, torch.bfloat16]


def rollout_of(preset):
    config = load_config(preset, None, {"actor.slots": SLOTS})
    env = make_vector(config.env, SLOTS, 1)
    agent = make_agent(config.agent, env.spec, seed=1)
    rollout = Rollout(agent, env, config.actor.chunk_steps, 1)
    rollout.explore(list(range(SLOTS)), SLOTS)
    return agent, rollout


def policies(agent):
    """What the network says of the same pictures."""
    pictures = np.random.default_rng(3).integers(0, 256, (SLOTS, *agent.spec.obs_shape), np.uint8)
    inputs = Inputs.start(pictures, agent.memory_size, agent.spec.actions)
    return agent.act(inputs, np.ones(SLOTS, np.float32), np.random.default_rng(0)).extras["behaviour"]


@pytest.mark.parametrize("kind", PIXEL_TORSOS)
def test_every_torso_over_images_computes_in_bfloat16_and_back(kind):
    torch.manual_seed(1)
    torso, images = make_torso(kind, (4, 84, 84), ()), torch.rand(2, 4, 84, 84)
    with torch.inference_mode():
        exact = torso(images)
        assert compute_in(torso, torch.bfloat16)
        short = torso(images)
        assert compute_in(torso, torch.float32)
        assert torch.equal(torso(images), exact)
    assert short.dtype == exact.dtype == torch.float32
    assert not torch.equal(short, exact)
    assert (short - exact).norm() < 0.05 * exact.norm()


def test_so_does_the_layer_on_top_of_a_torso():
    torch.manual_seed(1)
    projected, images = Projected(make_torso("small", (4, 84, 84), ()), 32), torch.rand(2, 4, 84, 84)
    formats, said = [], []
    projected.project.register_forward_hook(lambda layer, inputs, output: formats.append(output.dtype))
    with torch.inference_mode():
        for dtype in FORMATS:
            assert compute_in(projected, dtype)
            said.append(projected(images))
    assert formats == FORMATS
    exact, short = said
    assert short.dtype == torch.float32
    assert 0 < (short - exact).norm() < 0.05 * exact.norm()


def test_a_network_of_vectors_has_nothing_to_choose(caplog):
    caplog.set_level(logging.INFO)
    assert not compute_in(make_torso("mlp", (4,), (8,)), torch.bfloat16)
    rollout_of("cartpole-ppo")[1].choose_dtype("auto")
    assert "acting computes" not in caplog.text


def test_what_is_wanted_is_computed_in():
    agent, rollout = rollout_of("pong-ppo")
    exact = policies(agent)
    rollout.choose_dtype("bfloat16")
    short = policies(agent)
    assert not np.array_equal(short, exact)
    assert np.allclose(short, exact, atol=0.05)
    rollout.choose_dtype("float32")
    assert np.array_equal(policies(agent), exact)


@pytest.mark.parametrize("faster", FORMATS)
def test_a_trial_decides_and_changes_nothing_else(monkeypatch, caplog, faster):
    """Each format is really tried; only how long that took is made up."""
    caplog.set_level(logging.INFO)
    agent, rollout = rollout_of("pong-ppo")
    exact, tried, now_s = policies(agent), [], [0.0]

    def found(wanted, device, step, **words):
        def timed(dtype):
            step(dtype)
            tried.append(policies(agent))
            now_s[0] += 0.001 if dtype == faster else 1.0

        ways = {"has_units": lambda: True, "clock": lambda: now_s[0]}
        return formats.faster_dtype(wanted, device, timed, **words | ways)

    monkeypatch.setattr("troupe.services.actor.local_inference.faster_dtype", found)
    rollout.choose_dtype("auto")
    assert f"acting computes in {str(faster).removeprefix('torch.')}" in caplog.text
    assert [np.array_equal(said, exact) for said in tried] == [True, False] * 4
    assert np.array_equal(policies(agent), exact) == (faster is torch.float32)
    # What is played afterwards is what would have been played without a trial.
    rollout.choose_dtype("float32")
    _, other = rollout_of("pong-ppo")
    for _ in range(5):
        rollout.step(0)
        other.step(0)
    mine, others = rollout._slots.inputs, other._slots.inputs
    assert np.array_equal(mine.obs, others.obs)
    assert np.array_equal(mine.last_action, others.last_action)
