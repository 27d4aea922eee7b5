"""Updates as CUDA graphs make them, on a CPU: on tensors that stay where they are, and nothing is read.

Nothing is recorded without a GPU: what a graph would repeat is run each time.
"""

import functools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.agents.contract import (
    OPTIONS,
    PIXELS,
    VECTORS,
    agent_of,
    batch,
    config_of,
    copied,
)
from troupe.common.agents import make_agent
from troupe.common.agents.learners.graphed import GraphedUpdates
from troupe.common.nets.pixels import NormalizedPixels, stacked
from troupe.common.nets.recurrent import LstmCore
from troupe.common.rl.fixed import fixed_shapes
from troupe.common.rl.normalizers import Normalizer, ReturnScale, RunningMoments
from troupe.common.rl.returns import explained_variance

FIELDS = {
    "apex": [
        {"quantiles": 4, "noise": 0.5},
        {"normalize_rewards": True, "optimizer": "adam"},
        {"munchausen_alpha": 0.9},
    ],
    "r2d2": [{"burn_in_steps": 2, "normalize_rewards": True}],
    "impala": [
        {"lstm_units": 8, "normalize_returns": True},
        {"behaviour_features": "head", "optimizer": "adam", "target_entropy": 0.5},
    ],
    "policy_gradient": [
        {"learning_rate_schedule": "kl", "minibatch_steps": 16, "normalize_returns": True, "decoupled": True},
        {"target_period_updates": 2, "lstm_units": 8, "compute_dtype": "bfloat16"},
        {"normalize_vectors": True, "shared_torso": False, "learning_rate_schedule": "linear"},
    ],
    "pqn": [{"lstm_units": 8, "learning_rate_schedule": "linear"}],
    "sac": [{"bootstrap": "v", "normalize_rewards": True, "target_update_period_updates": 2}],
}
CASES = [(name, fields) for name, several in FIELDS.items() for fields in [{}, *several]]
cases = pytest.mark.parametrize(
    ("name", "fields"), CASES, ids=lambda each: each if isinstance(each, str) else "-".join(each)
)


TINY = {"apex": {}, "sac": {}, "r2d2": {"lstm_units": 8, "sequence_steps": 6, "sequence_period_steps": 3}}


def agents_of(name, fields, env, count=3, device="cpu"):
    fields = {"hidden_units": 16} | TINY.get(name, {"unroll_steps": 8}) | fields
    fields |= {"torso": "small"} if env is PIXELS else {}
    spec = agent_of(name, env=env).spec
    return [make_agent(config_of(name, **fields), spec, seed=1, device=device) for _ in range(count)]


@functools.cache
def first_batch(algorithm, fields, env):
    (agent,) = agents_of(algorithm, json.loads(fields), PIXELS if env else VECTORS, count=1)
    return batch(agent, PIXELS if env else VECTORS)


def batches(agent, env):
    """Some of different length, one without a row, and such as change branches and rates."""
    config = agent.config.model_dump(exclude_unset=True, mode="json")
    whole = first_batch(agent.config.algorithm, json.dumps(config), env is PIXELS)
    some = replace(
        whole,
        fields={name: array[1:] for name, array in whole.fields.items()},
        weights=whole.weights[1:],
        lengths=whole.lengths[1:],
    )
    return [replace(some if k == 2 else whole, progress=k / 8, measure=k != 1) for k in range(4)]


def assert_same(one, other, tolerance=0.0):
    assert one.keys() == other.keys()
    for name, array in one.items():
        if tolerance:
            np.testing.assert_allclose(array, other[name], tolerance, tolerance, err_msg=name)
        else:
            np.testing.assert_array_equal(array, other[name], err_msg=name)


@cases
def test_through_tensors_that_stay_an_update_is_the_plain_one(name, fields):
    """Bit by bit; with fixed shapes up to rounding: what masks and memory sum up has another order there."""
    env = VECTORS if fields else PIXELS
    plain, other, fixed = agents_of(name, fields, env)
    graphed, of_fixed = GraphedUpdates(other), GraphedUpdates(fixed)
    tolerance = 1e-2 if "compute_dtype" in fields else 1e-4  # bfloat16 has eight bits
    for each in batches(plain, env):
        expected, got = plain.update(each), graphed.update(each).settled()
        assert got.metrics == expected.metrics
        np.testing.assert_array_equal(got.priorities, expected.priorities)
        with fixed_shapes():
            got = of_fixed.update(each).settled()
        assert_same(got.metrics, expected.metrics, tolerance)
        if expected.priorities is not None:
            np.testing.assert_allclose(got.priorities, expected.priorities, tolerance)
    assert graphed.graphs >= 2
    assert plain.state()[1] == other.state()[1] == fixed.state()[1]
    assert_same(other.state()[0], plain.state()[0])
    assert_same(fixed.params(), plain.params(), tolerance)


class Looks(TorchDispatchMode):
    """Finds operations that a graph cannot repeat: they read, or have a shape that is what they find."""

    READ = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal")

    def __init__(self):
        super().__init__()
        self.found, self.off = [], False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(
            each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1]
        )
        copied_in = name == "lift_fresh" and args[0].dim()
        if not self.off and (name in self.READ or by_mask or copied_in):
            self.found.append(name)
        return result


@cases
def test_nothing_is_read_within_what_a_graph_repeats(name, fields):
    env = VECTORS if fields else PIXELS
    (agent,) = agents_of(name, fields, env, count=1)
    graphed, looks, each = GraphedUpdates(agent), Looks(), batches(agent, env)[0]
    # On a CPU optimisers count their steps in Python; on a GPU they are told not to (`make_capturable`).
    agent.learner.optimizer.register_step_pre_hook(lambda *_: setattr(looks, "off", True))
    agent.learner.optimizer.register_step_post_hook(lambda *_: setattr(looks, "off", False))
    with fixed_shapes():
        graphed.update(each).settled()
        told = {key: torch.as_tensor(array) for key, array in agent.told(each).items()}
        with looks:
            agent.learn(told, measure=True)
    assert not looks.found
    with looks:
        torch.ones(2)[torch.tensor([True, False])].sum().item()
    assert looks.found == ["lift_fresh", "index", "_local_scalar_dense"]


@pytest.mark.parametrize("name", ["apex", "policy_gradient"])
def test_it_goes_on_from_a_saved_state(name):
    plain, other = agents_of(name, {}, VECTORS, count=2)
    graphed, (first, *rest) = GraphedUpdates(other), batches(plain, VECTORS)
    graphed.update(first)
    arrays, meta = plain.state()
    other.load_state(copied(arrays), meta)
    for each in rest:
        assert graphed.update(each).settled().metrics == plain.update(each).metrics
    assert_same(other.state()[0], plain.state()[0])


def test_what_cannot_be_a_graph_says_why_and_learns_all_the_same(caplog):
    with_memory = make_agent(config_of("sac, with memory"), agent_of("sac").spec)
    better_half = make_agent(config_of("policy_gradient", policy_loss="vmpo"), with_memory.spec)
    caplog.set_level("INFO")
    for agent, why in ((with_memory, "SAC with memory picks"), (better_half, "V-MPO picks")):
        graphed = GraphedUpdates(agent)
        assert why in graphed.no_graph_because
        assert graphed.update(batch(agent)).metrics
        assert why in caplog.text
        assert not graphed.graphs
    assert OPTIONS  # the one with memory is among them

    class Own(type(better_half)):
        def update(self, batch):
            return super().update(batch)

    own = GraphedUpdates(Own(config_of("policy_gradient"), with_memory.spec))
    assert own.no_graph_because == "policy_gradient has an update in one piece"


# ------------------------------------------------------------------ the parts


@pytest.mark.parametrize("limit", [None, 20, 0])
@pytest.mark.parametrize("window", [None, 16])
def test_statistics_take_in_by_weights_what_they_pick_by_masks(limit, window):
    rng = np.random.default_rng(0)
    one, other = (RunningMoments((3,), window=window, limit=limit) for _ in range(2))
    for count in (12, 5, 9, 3):
        samples = torch.from_numpy(rng.normal(5.0, 2.0, (count, 2, 3)))
        counts = torch.from_numpy(rng.random((count, 2)) < 0.5 * (count != 5))  # once none at all
        one.update(samples, counts)
        with fixed_shapes():
            other.update(samples, counts)
        for name, buffer in one.named_buffers():
            torch.testing.assert_close(other.get_buffer(name), buffer, rtol=1e-12, atol=1e-12)
    assert bool(one.count) == (limit != 0)


def test_scales_and_normalisers_of_some_steps_only():
    rng = np.random.default_rng(0)
    rewards, discounts = (torch.from_numpy(rng.random((4, 5))) for _ in range(2))
    counts = torch.from_numpy(rng.random((4, 5)) < 0.5)
    scales, normalizers = [ReturnScale(), ReturnScale()], [Normalizer(()), Normalizer(())]
    for scale, normalizer, fixed in zip(scales, normalizers, (False, True), strict=True):
        with fixed_shapes() if fixed else torch.no_grad():
            scale.observe(rewards, discounts, counts)
            normalizer.observe(rewards, counts)
            variance = explained_variance(rewards, discounts, counts)
    torch.testing.assert_close(scales[0].size, scales[1].size)
    torch.testing.assert_close(normalizers[0].mean, normalizers[1].mean)
    torch.testing.assert_close(variance, explained_variance(rewards[counts], discounts[counts]))


def test_stacks_and_padding_where_episodes_begin():
    rng = np.random.default_rng(0)
    frames = torch.from_numpy(rng.integers(1, 255, (8, 3, 20, 24), dtype=np.uint8))
    real = torch.tensor([[4, 1, 4], [4, 2, 1], [1, 3, 2], [2, 4, 3], [3, 4, 4]], dtype=torch.uint8)
    pixels = NormalizedPixels((20, 24), 4)
    pixels.observe(frames[:, :, None].expand(-1, -1, 4, -1, -1))
    plain = stacked(frames, real, 4)
    seen = pixels(plain.flatten(0, 1))
    with fixed_shapes():
        assert torch.equal(stacked(frames, real, 4), plain)
        assert torch.equal(pixels(plain.flatten(0, 1)), seen)
    assert (seen.flatten(2).abs().amax(2) == 0).any()  # there is padding


@pytest.mark.parametrize("layers", [1, 2])
def test_memory_is_forgotten_step_by_step(layers):
    torch.manual_seed(0)
    core, first = LstmCore(3, 5, layers), torch.rand(9, 4) < 0.2
    inputs, state = torch.randn(9, 4, 3, requires_grad=True), torch.randn(4, core.state_size)

    def found():
        outputs, after = core(inputs, first, state)
        (gradient,) = torch.autograd.grad(outputs.square().sum() + after.sum(), inputs)
        return outputs, after, gradient

    plain = found()
    with fixed_shapes():
        for one, other in zip(found(), plain, strict=True):
            torch.testing.assert_close(one, other)
    assert first.any()
