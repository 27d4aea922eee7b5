"""What the services rely on, of every algorithm: a new one is tested as soon as it is in the registry."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.agents.contract import (
    ITEMS,
    PIXELS,
    VECTORS,
    agent_of,
    batch,
    config_of,
    copied,
    env_of,
    every_algorithm,
    played,
)
from tests.agents.replayed import batch_of, windows
from troupe.common.agents import make_agent
from troupe.common.agents.base import Batch
from troupe.common.data.schema import check_chunk
from troupe.common.envs import make_vector
from troupe.common.errors import CheckpointError, ConfigError
from troupe.common.wire.control.params import decode_params, encode_params
from troupe.services.actor.local_inference import Rollout


def all_usable(priorities):
    return (np.isfinite(priorities) & (priorities > 0)).all()


@every_algorithm
def test_its_section_says_its_name(name):
    algorithm = name.partition(",")[0]
    assert config_of(name).algorithm == algorithm
    with pytest.raises(ValueError, match=algorithm):
        config_of(name, algorithm="another")


@every_algorithm
@pytest.mark.parametrize("env", [VECTORS, PIXELS], ids=["vectors", "pixels"])
def test_it_stores_what_its_fields_say(name, env):
    agent = agent_of(name, env=env)
    for chunk in played(agent, env):
        check_chunk(chunk, agent.fields)
        for spec in agent.fields:
            assert spec.bad_rows(chunk.fields[spec.name]) is None, spec
        assert agent.item_steps[0] <= chunk.lengths.min() <= chunk.lengths.max() <= agent.item_steps[1]
        assert chunk.version == 3
        assert all_usable(chunk.priorities)


@every_algorithm
def test_it_learns_from_what_it_stores_and_gives_the_priorities_that_its_table_takes(name):
    agent = agent_of(name)
    before, arguments = copied(agent.params()), batch(agent)
    update = agent.update(arguments)
    assert any((before[key] != array).any() for key, array in agent.params().items())
    assert np.isfinite(list(update.metrics.values())).all()
    assert update.metrics
    assert all(metric.startswith("learner/") for metric in update.metrics)
    assert agent.update(replace(arguments, measure=False)).metrics == {}
    if agent.config.table.kind == "queue":
        assert update.priorities is None
    else:
        assert update.priorities.shape == (ITEMS,)
        assert all_usable(update.priorities)


@every_algorithm
def test_another_acts_and_values_alike_with_its_parameters(name):
    first, second = agent_of(name), agent_of(name, seed=1)
    first.update(batch(first))
    second.load_params(copied(first.params()))
    rollout = Rollout(first, make_vector(env_of(name), 3, 0), 6, seed=0)
    for _ in range(9):
        inputs, epsilon = rollout._slots.inputs, np.full(3, 0.5, np.float32)
        acts = [agent.act(inputs, epsilon, np.random.default_rng(0)) for agent in (first, second)]
        np.testing.assert_array_equal(*(act.action for act in acts))
        np.testing.assert_allclose(*(agent.values(inputs) for agent in (first, second)), rtol=1e-5)
        assert acts[0].action.dtype == (np.float32 if first.spec.actions.reals else np.int64)
        if first.memory_size:
            assert acts[0].memory.shape == (3, first.memory_size)
        rollout.step(0)
    some = first.params().popitem()[0]
    with pytest.raises(ConfigError, match="do not fit"):
        second.load_params({key: array for key, array in first.params().items() if key != some})


@every_algorithm
def test_statistics_of_pixels_come_from_the_learner_and_are_exact_where_weights_are_rounded(name):
    learner, actor = agent_of(name, env=PIXELS), agent_of(name, seed=1, env=PIXELS)
    arguments = batch(learner, PIXELS)
    learner.update(arguments)
    params = copied(learner.params())
    statistics = {key: array for key, array in params.items() if key.startswith("inputs.")}
    assert sorted(statistics) == ["inputs.count", "inputs.mean", "inputs.variance"]
    seen = arguments.fields["obs"]
    assert 0 < statistics["inputs.count"][0] < seen.shape[0] * seen.shape[1]
    actor.load_params(decode_params(*encode_params(params, bfloat16=True)))
    for key, array in statistics.items():
        np.testing.assert_array_equal(actor.params()[key], array)
    played(actor, PIXELS)
    for key, array in statistics.items():
        np.testing.assert_array_equal(actor.params()[key], array, err_msg="acting has changed it")


@every_algorithm
def test_pixels_can_be_left_as_they_are_and_their_statistics_freeze(name):
    spec = agent_of(name, env=PIXELS).spec
    plain = make_agent(config_of(name, normalize_pixels=False), spec)
    assert not [key for key in plain.params() if key.startswith("inputs.")]
    frozen = make_agent(config_of(name, normalize_pixels_frames=1), plain.spec)
    arguments = batch(frozen, PIXELS)
    frozen.update(arguments)
    before = copied(frozen.params())
    arguments.fields["obs"] = 255 - arguments.fields["obs"]
    frozen.update(arguments)
    np.testing.assert_array_equal(frozen.params()["inputs.mean"], before["inputs.mean"])


@every_algorithm
def test_the_generators_of_the_process_are_left_alone(name):
    torch.manual_seed(1)
    np.random.seed(1)
    torchs, numpys = torch.get_rng_state(), np.random.get_state()[1].copy()
    agent = agent_of(name, seed=3)
    agent.update(batch(agent, VECTORS))
    agent.load_state(*agent.state())
    assert torch.equal(torch.get_rng_state(), torchs)
    assert np.array_equal(np.random.get_state()[1], numpys)
    first, same, other = (agent_of(name, seed=seed).params() for seed in (3, 3, 4))
    assert all(np.array_equal(first[key], same[key]) for key in first)
    assert not all(np.array_equal(first[key], other[key]) for key in first)


@every_algorithm
def test_for_acting_the_network_of_a_checkpoint_is_enough(name):
    learned, actor = agent_of(name), agent_of(name, seed=1)
    learned.update(batch(learned, VECTORS))
    arrays, meta = learned.state()
    needed = {key: array for key, array in arrays.items() if key.startswith("net/")}
    assert set(needed) < set(arrays)
    actor.load_state(needed, meta, to_learn=False)
    for key, array in actor.params().items():
        np.testing.assert_array_equal(array, learned.params()[key])
    assert "learner" not in vars(actor), "an optimiser was made for nothing"
    with pytest.raises(CheckpointError, match="another"):
        actor.load_state(needed, {**meta, "algorithm": "another"}, to_learn=False)


@every_algorithm
@pytest.mark.parametrize("env", [VECTORS, PIXELS], ids=["vectors", "pixels"])
def test_resumed_it_learns_as_if_it_had_not_stopped(name, env):
    first, second = agent_of(name, env=env), agent_of(name, seed=1, env=env)
    arguments = batch(first, env)
    first.update(arguments)
    arrays, meta = first.state()
    saved, meta = copied(arrays), json.loads(json.dumps(meta))
    assert meta["algorithm"] == name.partition(",")[0]
    for agent in (first, second):
        if agent is second:
            second.load_state(arrays, meta)
        agent.update(arguments)
    for key, array in second.params().items():
        np.testing.assert_allclose(array, first.params()[key], rtol=1e-4, atol=1e-6)
    for key, array in arrays.items():
        np.testing.assert_array_equal(array, saved[key], err_msg="what was saved has changed since")
    with pytest.raises(CheckpointError, match="another"):
        second.load_state(arrays, {**meta, "algorithm": "another"})
    with pytest.raises(CheckpointError, match="does not describe its agent"):
        second.load_state(arrays, "x")
    with pytest.raises(CheckpointError, match="does not fit"):
        second.load_state({}, meta)


@every_algorithm
def test_it_learns_from_batches_of_any_size(name):
    agent = agent_of(name)
    fields, lengths = batch_of(windows(played(agent), agent.fields)[:ITEMS])
    for size in (1, ITEMS, 3):
        batch = {field: array[:size] for field, array in fields.items()}
        update = agent.update(Batch(batch, np.ones(size, np.float32), lengths=lengths[:size]))
        assert np.isfinite(list(update.metrics.values())).all()


@every_algorithm
@pytest.mark.parametrize("env", [VECTORS, PIXELS], ids=["vectors", "pixels"])
def test_whatever_keeps_to_its_bounds_leaves_its_weights_finite(name, env):
    """Whoever has an actor's key may store the least and largest value of every field."""
    agent, rng = agent_of(name, env=env), np.random.default_rng(0)
    shortest, longest = agent.item_steps
    for steps in (shortest, longest):
        for places in ((0, 0), (1, 1), (0, 1)):
            fields = {}
            for spec in agent.fields:
                least, most = spec.limits() or (0, 255)
                ends = np.array([(least, most)[place] for place in places])
                shape = (ITEMS, spec.entries(steps), *spec.shape)
                fields[spec.name] = rng.choice(ends, shape).astype(spec.dtype)
                assert spec.bad_rows(fields[spec.name]) is None
            weights, lengths = np.ones(ITEMS, np.float32), np.full(ITEMS, steps, np.int32)
            update = agent.update(Batch(fields, weights, lengths=lengths))
            numbers = {**agent.params(), **update.metrics}
            assert [key for key, array in numbers.items() if not np.isfinite(array).all()] == []
