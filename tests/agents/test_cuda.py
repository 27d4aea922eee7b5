"""Acting and learning on a GPU, against the same on the CPU. Skipped where torch finds none."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.agents.contract import PIXELS, VECTORS, agent_of, batch, config_of, copied, every_algorithm, played
from tests.agents.test_graphed import agents_of, assert_same, batches, cases
from troupe.common.agents import make_agent
from troupe.common.agents.learners.graphed import WARM_UPS, GraphedUpdates
from troupe.services.learner.batches.staging import Staging

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")


@pytest.fixture(autouse=True)
def exact():
    """Products and convolutions in float32, not in TF32, which has ten bits."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def arrays_of(agent):
    return {name: array.astype(np.float64) for name, array in agent.params().items()}


@cases
def test_an_update_on_a_gpu_is_that_of_a_cpu(name, fields):
    """With a graph and kernel by kernel, up to the order of sums."""
    env = VECTORS if fields else PIXELS
    (on_cpu,) = agents_of(name, fields, env, count=1)
    plain, other = agents_of(name, fields, env, count=2, device=DEVICE)
    graphed = GraphedUpdates(other)
    tolerance = 5e-2 if "compute_dtype" in fields else 5e-3
    for _ in range(WARM_UPS):
        for each in batches(on_cpu, env):
            expected = on_cpu.update(each)
            for got in (plain.update(each), graphed.update(each).settled()):
                assert_same(got.metrics, expected.metrics, tolerance)
                if expected.priorities is not None:
                    np.testing.assert_allclose(got.priorities, expected.priorities, tolerance, tolerance)
    assert not graphed.no_graph_because
    assert graphed.graphs or DEVICE == "cpu"
    for agent in (plain, other):
        assert_same(arrays_of(agent), arrays_of(on_cpu), tolerance)


@every_algorithm
def test_it_acts_on_a_gpu_as_on_a_cpu_and_learns_from_that(name):
    agent = make_agent(config_of(name), agent_of(name).spec, device=DEVICE)
    assert played(agent)
    assert GraphedUpdates(agent).update(batch(agent)).settled().metrics


@pytest.mark.parametrize("name", ["apex", "policy_gradient", "sac"])
def test_a_state_goes_from_a_gpu_to_a_cpu_and_back(name):
    (on_cpu,) = agents_of(name, {}, VECTORS, count=1)
    (other,) = agents_of(name, {}, VECTORS, count=1, device=DEVICE)
    graphed, (first, *_) = GraphedUpdates(other), batches(on_cpu, VECTORS)
    for _ in range(WARM_UPS + 3):
        graphed.update(first).settled()
    arrays, meta = other.state()
    on_cpu.load_state(copied(arrays), meta)
    assert_same(on_cpu.state()[0], arrays)
    on_cpu.update(first)
    arrays, meta = on_cpu.state()
    other.load_state(copied(arrays), meta)
    for _ in range(WARM_UPS + 3):
        graphed.update(first).settled()
        on_cpu.update(first)
    assert_same(arrays_of(other), arrays_of(on_cpu), 5e-3)


class Sampled:
    """A batch from replay, as far as `Staging` looks at it: `fields` in page-locked memory."""

    def __init__(self, fields, staging):
        self.fields = {}
        for name, array in fields.items():
            self.fields[name] = staging.allocate(array.shape, array.dtype.name)
            self.fields[name][...] = array


@pytest.mark.parametrize("name", ["apex", "policy_gradient"])
def test_batches_that_were_copied_ahead_are_learned_from(name):
    """Each is copied while the update before runs; its arrays are written over once it was dropped."""
    staging = Staging(DEVICE)
    (plain,) = agents_of(name, {}, PIXELS, count=1)
    (other,) = agents_of(name, {}, PIXELS, count=1, device=DEVICE)
    graphed, (whole, *_), rng = GraphedUpdates(other), batches(plain, PIXELS), np.random.default_rng(0)
    fields = [
        {
            key: rng.permuted(array, axis=0) if array.ndim == 2 else array
            for key, array in whole.fields.items()
        }
        for _ in range(12)
    ]
    ahead, pending = Sampled(fields[0], staging), None
    staging.put(ahead)
    for now, after in zip(fields, [*fields[1:], fields[0]], strict=True):
        plain.update(replace(whole, fields=now))
        sampled, ahead = ahead, Sampled(after, staging)
        staging.put(ahead)
        update = graphed.update(replace(whole, fields=sampled.fields, placed=staging.take(sampled)))
        if pending is not None:
            pending.settled()
        pending = update
        staging.drop(sampled)
        for array in sampled.fields.values():
            array[...] = 0
    assert graphed.graphs == 1
    assert_same(arrays_of(other), arrays_of(plain), 5e-3)
