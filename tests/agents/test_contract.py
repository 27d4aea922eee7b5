"""What the services rely on, of every algorithm: a new one is tested as soon as it is in the registry."""

import json

import numpy as np
import pytest
import torch

from common.agents import make_agent
from common.config import EnvConfig
from common.config.algorithms import ALGORITHMS, agent_model
from common.data.fields import check_chunk
from common.envs import make_vector
from common.errors import CheckpointError, ConfigError
from services.actor.rollout import Rollout
from tests.agents.replayed import batch_of, windows

ITEMS = 4
VECTORS = EnvConfig(
    id="tests.envs.counting:Counting-v0", reward_clip="none", kwargs={"length": 7, "ends_by": "truncation"}
)
PIXELS = EnvConfig(id="tests.envs.catch:Catch-v0", frame_skip=1, noop_max=0, fire_reset=False)

every_algorithm = pytest.mark.parametrize("name", ALGORITHMS)


def agent_of(name, seed=0, env=VECTORS):
    vector = make_vector(env, 1, 0)
    vector.close()
    return make_agent(agent_model(name)(), vector.spec, seed=seed)


def played(agent, env=VECTORS):
    """The first chunks that an agent's play brings: at least `ITEMS` items."""
    rollout, chunks = Rollout(agent, make_vector(env, 2, 0), 6, seed=0), []
    rollout.explore([0, 1], 2)
    while sum(len(chunk.offsets) for chunk in chunks) < ITEMS:
        assert rollout.timing.calls < 2000, "plays on and on, and nothing can be inserted"
        chunks += rollout.step(version=3)
    return chunks


def batch(agent):
    """Arguments of `update`, as replay hands out the first items."""
    items = windows(played(agent), agent.fields)[:ITEMS]
    fields, lengths = batch_of(items)
    return {"batch": fields, "weights": np.ones(ITEMS, np.float32), "progress": 0.5, "lengths": lengths}


def all_usable(priorities):
    return (np.isfinite(priorities) & (priorities > 0)).all()


def copied(arrays):
    return {name: array.copy() for name, array in arrays.items()}


@every_algorithm
def test_its_section_says_its_name(name):
    assert agent_model(name)().algorithm == name
    with pytest.raises(ValueError, match=name):
        agent_model(name)(algorithm="another")


@every_algorithm
@pytest.mark.parametrize("env", [VECTORS, PIXELS], ids=["vectors", "pixels"])
def test_it_stores_what_its_fields_say(name, env):
    agent = agent_of(name, env=env)
    for chunk in played(agent, env):
        check_chunk(chunk, agent.fields)
        assert chunk.version == 3
        assert all_usable(chunk.priorities)


@every_algorithm
def test_it_learns_from_what_it_stores_and_gives_the_priorities_that_its_table_takes(name):
    agent = agent_of(name)
    before, arguments = copied(agent.params()), batch(agent)
    update = agent.update(**arguments)
    assert any((before[key] != array).any() for key, array in agent.params().items())
    assert np.isfinite(list(update.metrics.values())).all()
    assert update.metrics
    assert all(metric.startswith("learner/") for metric in update.metrics)
    assert agent.update(**arguments, want_metrics=False).metrics == {}
    if agent.config.table.kind == "queue":
        assert update.priorities is None
    else:
        assert update.priorities.shape == (ITEMS,)
        assert all_usable(update.priorities)


@every_algorithm
def test_another_acts_and_values_alike_with_its_parameters(name):
    first, second = agent_of(name), agent_of(name, seed=1)
    first.update(**batch(first))
    second.load_params(copied(first.params()))
    rollout = Rollout(first, make_vector(VECTORS, 3, 0), 6, seed=0)
    for _ in range(9):
        inputs, epsilon = rollout._slots.inputs, np.full(3, 0.5, np.float32)
        acts = [agent.act(inputs, epsilon, np.random.default_rng(0)) for agent in (first, second)]
        np.testing.assert_array_equal(*(act.action for act in acts))
        np.testing.assert_allclose(*(agent.values(inputs) for agent in (first, second)), rtol=1e-5)
        assert acts[0].action.dtype == np.int64
        if first.memory_size:
            assert acts[0].memory.shape == (3, first.memory_size)
        rollout.step(0)
    some = first.params().popitem()[0]
    with pytest.raises(ConfigError, match="do not fit"):
        second.load_params({key: array for key, array in first.params().items() if key != some})


@every_algorithm
def test_resumed_it_learns_as_if_it_had_not_stopped(name):
    first, second = agent_of(name), agent_of(name, seed=1)
    arguments = batch(first)
    first.update(**arguments)
    arrays, meta = first.state()
    saved, meta = copied(arrays), json.loads(json.dumps(meta))
    assert meta["algorithm"] == name
    for agent in (first, second):
        if agent is second:
            second.load_state(arrays, meta)
        torch.manual_seed(5)  # the learner saves torch's generator beside the agent's state
        agent.update(**arguments)
    for key, array in second.params().items():
        np.testing.assert_allclose(array, first.params()[key], rtol=1e-4, atol=1e-6)
    for key, array in arrays.items():
        np.testing.assert_array_equal(array, saved[key], err_msg="what was saved has changed since")
    with pytest.raises(CheckpointError, match="another"):
        second.load_state(arrays, {**meta, "algorithm": "another"})
    with pytest.raises(CheckpointError, match="does not fit"):
        second.load_state({}, meta)
