"""Histograms of what is learned: the values are those of the network, its gradients and the batch."""

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from troupe.common.agents import make_agent
from troupe.common.config import load_config
from troupe.common.envs import make_spec
from troupe.common.runtime.metrics import MetricsWriter
from troupe.services.learner.record.histograms import Histograms


@pytest.fixture
def agent():
    config = load_config("cartpole-apex", None, {}, {})
    return make_agent(config.agent, make_spec(config.env), seed=3)


def test_weights_gradients_and_actions_are_taken(agent):
    rng = np.random.default_rng(1)
    for parameter in agent.net.parameters():
        parameter.grad = torch.from_numpy(rng.normal(size=parameter.shape).astype(np.float32))
    actions = rng.integers(0, 2, (8, 4))
    found, norms = Histograms(agent, 1).take({"action": actions, "reward": np.zeros(8)})
    params = agent.params()
    assert found.keys() == (
        {f"weights/{name}" for name in params}
        | {f"gradients/{name}" for name, _ in agent.net.named_parameters()}
        | {"learner/actions"}
    )
    for name, parameter in agent.net.named_parameters():
        np.testing.assert_array_equal(found[f"weights/{name}"], params[name])
        gradient = parameter.grad.numpy()
        np.testing.assert_array_equal(found[f"gradients/{name}"], gradient)
        assert norms[f"learner/grad_norm/{name}"] == pytest.approx(np.sqrt((gradient**2).sum()), rel=1e-5)
    assert found["learner/actions"] is actions


def test_before_the_first_update_there_are_no_gradients(agent):
    found, norms = Histograms(agent, 1).take({})
    assert not norms
    assert all(name.startswith("weights/") for name in found)


def test_they_are_due_every_so_often_or_never(agent):
    assert [n for n in range(1, 10) if Histograms(agent, 4).due(n)] == [4, 8]
    assert not any(Histograms(agent, 0).due(n) for n in range(10))


def test_tensorboard_has_a_bar_for_each_whole_number(tmp_path):
    writer = MetricsWriter(tmp_path)
    values = np.array([[0.0, 0.5], [np.nan, 1.0]], np.float32)
    given = {"learner/actions": np.array([0, 2, 2, 3]), "weights/a": values, "none": np.full(3, np.inf)}
    writer.add_histograms(given, steps=7)
    at = {"steps": 9, "frames": 0, "updates": 0}
    writer.add_evaluation(1, [[5.0, 1], [5.0, 1], [6.0, 2]], **at)
    writer.close()
    shown = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"histograms": 0})
    shown.Reload()
    assert set(shown.Tags()["histograms"]) == {"learner/actions", "weights/a", "eval/returns"}
    (event,) = shown.Histograms("learner/actions")
    assert event.step == 7
    bars = dict(zip(event.histogram_value.bucket_limit, event.histogram_value.bucket, strict=True))
    assert {limit: count for limit, count in bars.items() if count} == {0.5: 1, 2.5: 2, 3.5: 1}
    (weights,) = shown.Histograms("weights/a")
    assert weights.histogram_value.num == 3
    assert weights.histogram_value.sum == 1.5
    (returns,) = shown.Histograms("eval/returns")
    assert (returns.step, returns.histogram_value.num, returns.histogram_value.sum) == (9, 3, 16.0)
