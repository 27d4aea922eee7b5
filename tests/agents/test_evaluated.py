"""What a network says of a whole batch of unrolls, which is computed in parts."""

import numpy as np
import pytest
import torch

from tests.agents.unrolled import random_batch
from troupe.common.agents import make_agent
from troupe.common.agents.policy_gradient import PolicyGradientConfig
from troupe.common.envs import EnvSpec
from troupe.common.nets.convolution import Convolution
from troupe.common.spaces import ActionSpec

PICTURES = EnvSpec("test:pictures", (4, 24, 20), "uint8", ActionSpec.discrete(3), 4, 1, True)
STEPS, ROWS = 5, 7


@pytest.mark.parametrize(("lstm_units", "parts"), [(0, 4), (6, 4)])
def test_parts_say_what_the_whole_does_and_images_stay_as_they_lie(lstm_units, parts):
    """Images that came in another layout would be converted by the first convolution, each time."""
    config = PolicyGradientConfig(
        torso="small", hidden_units=8, unroll_steps=STEPS, minibatch_steps=12, lstm_units=lstm_units
    )
    agent = make_agent(config, PICTURES, seed=1)
    rng = np.random.default_rng(2)
    batch = random_batch(rng, agent, ROWS)
    for name, least, most in (("obs", 0, 255), ("frames", 1, 4)):
        batch[name] = rng.integers(least, most + 1, batch[name].shape).astype(np.uint8)
    unrolls = agent.learner.prepared(agent.stored.read(batch))
    convolution = next(module for module in agent.net.modules() if isinstance(module, Convolution))
    seen = []
    convolution.register_forward_hook(lambda layer, images, out: seen.append(images[0]))
    found = agent.learner.evaluated(unrolls)
    assert len(seen) == parts
    assert sum(map(len, seen)) == (STEPS + 1) * ROWS
    assert all(images.is_contiguous(memory_format=torch.channels_last) for images in seen)
    with torch.no_grad():
        inputs = unrolls.obs, unrolls.last_action, unrolls.last_reward, unrolls.ended != 0, unrolls.memory
        whole = agent.net(*inputs)[:-1]
    for one, other in zip(found, whole, strict=True):
        assert one.shape[:2] == (STEPS + 1, ROWS)
        torch.testing.assert_close(one, other)
