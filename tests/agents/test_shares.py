"""Several learners that share a batch learn what one learns from all of it: in real processes."""

import multiprocessing

import numpy as np
import pytest
import torch

from tests.agents.shares import (
    CASES,
    ONE_STEP,
    ROUNDED,
    ROWS,
    agent_for,
    learn_shares,
    learned,
    write_batches,
)
from troupe.common.agents.learners.buckets import parts_of
from troupe.common.agents.learners.reduction import Reduction
from troupe.common.config.algorithms import ALGORITHMS, agent_model
from troupe.common.config.fields import AgentConfig
from troupe.common.errors import ConfigError
from troupe.services.learner.peers.group import Meeting

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SIZES = (4, 2)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Where the batches of all cases are."""
    made = tmp_path_factory.mktemp("shares")
    write_batches(made)
    return made


@pytest.fixture(scope="module")
def processes(directory):
    """Four that have learned together, of which two have then learned without the others."""
    meeting, context = Meeting("127.0.0.1"), multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=learn_shares, args=(rank, SIZES, meeting.port, str(directory)), daemon=True)
        for rank in range(max(SIZES))
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0] * len(processes)


@pytest.fixture(scope="module", params=SIZES)
def shared(request, directory, processes):
    """What each of several learners has learned, by case and rank."""
    size = request.param
    return {
        name: [dict(np.load(directory / f"{number}-{rank}-of-{size}.npz")) for rank in range(size)]
        for number, name in enumerate(CASES)
    }


@pytest.fixture(scope="module")
def alone(directory):
    """What one learner has learned from the whole batches, by case."""
    return {name: learned(name, Reduction(), slice(0, ROWS), directory) for name in CASES}


def difference(got, wanted):
    """Of two arrays, relative to the length of the second."""
    got, wanted = got.astype(np.float64).ravel(), wanted.astype(np.float64).ravel()
    return np.linalg.norm(got - wanted) / max(np.linalg.norm(wanted), 1e-12)


def weights(arrays):
    """All float32 weights, of network, target and multipliers."""
    of = [
        arrays[key].ravel()
        for key in sorted(arrays)
        if key.startswith(("net/", "target/", "learning/", "log_"))
    ]
    return np.concatenate([array for array in of if array.dtype == np.float32])


@pytest.mark.parametrize("name", CASES)
def test_they_learn_what_one_learns_from_the_whole_batch(name, shared, alone):
    for got in shared[name]:
        assert got.keys() == alone[name].keys()
        if name in ONE_STEP:
            assert difference(got["gradient"], alone[name]["gradient"]) <= 1e-6
        assert difference(weights(got), weights(alone[name])) <= 1e-6
        for key, wanted in alone[name].items():
            if key.endswith((".mean", ".variance", ".size")) or key == "learning_rate":
                np.testing.assert_allclose(got[key], wanted, rtol=1e-5, atol=1e-6, err_msg=key)
            elif key in ("generator", "noise", "shares") or key.endswith(".count"):
                np.testing.assert_array_equal(got[key], wanted, err_msg=key)


@pytest.mark.parametrize("name", CASES)
def test_a_state_holds_nothing_that_others_would_refuse(name, alone):
    for key, array in alone[name].items():
        assert array.dtype.kind != "f" or np.isfinite(array).all(), key


@pytest.mark.parametrize("name", CASES)
def test_all_have_the_same_bits_afterwards(name, shared):
    first, *others = shared[name]
    for other in others:
        for key, array in first.items():
            assert array.tobytes() == other[key].tobytes(), key


@pytest.mark.parametrize("size", SIZES)
def test_gradients_in_bfloat16_are_rounded_and_the_same_for_all(size, directory, processes, alone):
    first, *others = [dict(np.load(directory / f"rounded-{rank}-of-{size}.npz")) for rank in range(size)]
    # Each part is rounded to 8 bits, and each sum of two again.
    assert 1e-6 < difference(first["gradient"], alone[ROUNDED]["gradient"]) < 2**-8 * size
    for other in others:
        assert weights(other).tobytes() == weights(first).tobytes()


def test_every_algorithm_is_among_the_cases():
    assert not [name for name in ALGORITHMS if agent_model(name)().one_learner_because]
    assert {fields["algorithm"] for fields, _ in CASES.values()} == set(ALGORITHMS)


class Two:
    rank, size = 0, 2


def test_an_algorithm_that_cannot_share_a_batch_says_why():
    agent = agent_for("ppo")
    agent.config = agent_model("policy_gradient")(policy_loss="vmpo")
    with pytest.raises(ConfigError, match="vmpo weighs each step against all others"):
        agent.learn_with(Reduction(Two()))
    assert "does not say how the shares" in AgentConfig(algorithm="someones").one_learner_because


def test_gradients_are_sent_in_few_parts_of_which_the_last_is_small():
    layers = [torch.nn.Parameter(torch.zeros(size)) for size in (3, 90_000, 2_000_000, *[125_000] * 14)]
    parts = parts_of(layers)
    assert [each for part in parts for each in part] == layers[::-1]
    sizes = [sum(each.nbytes for each in part) for part in parts]
    assert sizes == [4_000_000, 3_000_000, 8_000_000, 360_012]
