"""Pixels of one bit, packed: what is sent and stored is an eighth, and agents do as with whole pixels."""

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.agents.contract import actions_of
from tests.agents.replayed import batch_of, windows
from tests.cli.exported import onnx, torchscript
from troupe.common.agents import make_agent
from troupe.common.agents.base import Batch
from troupe.common.agents.policy_gradient import PolicyGradientConfig
from troupe.common.config import EnvConfig
from troupe.common.config.algorithms import ALGORITHMS, agent_model
from troupe.common.envs.base import EnvSpec
from troupe.common.envs.pictures import push_frame
from troupe.common.envs.slots import SlotVector
from troupe.common.errors import ConfigError
from troupe.common.nets.pixels import NormalizedPixels
from troupe.common.spaces import ActionSpec
from troupe.services.actor.local_inference import Rollout
from troupe.services.export import formats
from troupe.services.export.acting import Acting

WHOLE = EnvSpec(
    id="tests:planes",
    obs_shape=(3, 2, 40, 40),
    obs_dtype="uint8",
    actions=ActionSpec.discrete(3),
    stack=3,
    frames_per_step=1,
    pixels=True,
)
PACKED = replace(WHOLE, obs_shape=(3, 2, 40, 5), packed_bits=True)


class Planes:
    """Dots here and there, episodes of seven steps."""

    def __init__(self, spec):
        self._spec, self._rng = spec, np.random.default_rng(5)

    def _push(self):
        planes = np.where(self._rng.random((2, 40, 40)) < 0.1, 255, 0).astype(np.uint8)
        frame = np.packbits(planes, axis=-1) if self._spec.packed_bits else planes
        self.obs = push_frame(self.obs, frame)
        return self.obs

    def reset(self, seed=None):
        self.obs, self._steps = np.zeros(self._spec.obs_shape, np.uint8), 0
        return self._push()

    def step(self, action):
        self._steps += 1
        return self._push(), 0.5 * float(np.ravel(action)[0]), self._steps == 7, False

    def close(self):
        pass


def rollout_of(agent):
    vector = SlotVector(
        EnvConfig(id="tests:planes", reward_clip="none"),
        agent.spec,
        [Planes(agent.spec)],
        1,
        1,
        evaluation=False,
    )
    rollout = Rollout(agent, vector, 6, seed=0)
    rollout.explore([0], 1)
    return rollout


def same(packed, whole):
    """Whether two agents have the same parameters and statistics."""
    params = {name.replace("inputs.pixels.", "inputs."): array for name, array in packed.params().items()}
    assert params.keys() == whole.params().keys()
    for name, array in whole.params().items():
        np.testing.assert_array_equal(params[name], array, err_msg=name)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_agent_acts_and_learns_as_with_whole_pixels(name, normalize):
    config = agent_model(name)(normalize_pixels=normalize)
    specs = [replace(spec, actions=actions_of(name)) for spec in (PACKED, WHOLE)]
    agents = [make_agent(config, spec, seed=1) for spec in specs]
    chunks, taken = [[], []], 0
    rollouts = [rollout_of(agent) for agent in agents]
    while taken < 4:
        for of_one, rollout in zip(chunks, rollouts, strict=True):
            of_one += rollout.step(0)
        taken = sum(len(chunk.offsets) for chunk in chunks[0])
    obs = [chunk.fields["obs"] for chunk in (chunks[0][0], chunks[1][0])]
    np.testing.assert_array_equal(np.unpackbits(obs[0], axis=-1) * 255, obs[1])
    for agent, of_one in zip(agents, chunks, strict=True):
        fields, lengths = batch_of(windows(of_one, agent.fields)[:4])
        agent.update(Batch(fields, np.ones(4, np.float32), lengths, progress=0.5, measure=False))
    same(*agents)
    inputs = [rollout._slots.inputs for rollout in rollouts]
    values = [agent.values(of_one) for agent, of_one in zip(agents, inputs, strict=True)]
    np.testing.assert_array_equal(*values)


@pytest.mark.parametrize("load", [torchscript, onnx])
def test_an_exported_policy_takes_the_bytes(load):
    if load is onnx:
        pytest.importorskip("onnx", reason="needs the extra troupe[export]")
    agent, rng = make_agent(PolicyGradientConfig(torso="shallow"), PACKED, seed=1), np.random.default_rng(0)
    inputs = rollout_of(agent)._slots.inputs
    acting = Acting(agent, 1).eval()
    run = load(formats.WRITERS[load.__name__](acting, agent, json.dumps({"algorithm": "x"})), acting)
    for _ in range(8):
        obs = rng.integers(0, 255, (1, *PACKED.obs_shape), np.uint8)
        act = agent.act(replace(inputs, obs=obs), np.zeros(1, np.float32), rng)
        results = dict(zip(acting.outputs, run({"obs": obs}), strict=True))
        np.testing.assert_array_equal(results["action"], act.action)


def test_a_torso_is_found_by_what_is_seen_and_not_by_what_is_sent():
    agent = make_agent(PolicyGradientConfig(), PACKED, seed=1)
    assert isinstance(agent.net.inputs.pixels, NormalizedPixels)
    assert agent.net.inputs.pixels.shape == (2, 40, 40)
    with pytest.raises(ConfigError, match="9,600 unrelated numbers"):
        make_agent(PolicyGradientConfig(torso="mlp"), PACKED, seed=1)
