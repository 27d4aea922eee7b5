import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from troupe.common.data.accumulators.n_step import PRIORITY_FLOOR, NStepAccumulator, n_step_fields
from troupe.common.data.schema import SlotStep, check_chunk

STACK = 4
ZEROS = {"value_taken": 0.0, "value_max": 0.0}


def stacked(frames, t):
    """The observation at time t of an episode whose reset stack is zero-padded."""
    padded = [np.zeros((2, 2), np.uint8)] * (STACK - 1) + frames
    return np.stack(padded[t : t + STACK])


def collect(accumulator, lengths, endings, rng, stack):
    """Runs episodes through the accumulator; returns its items and what each of them should be."""
    got, episodes = [], []
    for length, terminated in zip(lengths, endings, strict=True):
        frames = [rng.integers(1, 255, (2, 2), dtype=np.uint8) for _ in range(length + 1)]
        rewards, taken, best = rng.normal(size=(3, length))
        actions = rng.integers(0, 5, length)
        final_value = float(rng.normal())
        observe = (lambda t, f=frames: stacked(f, t)) if stack else (lambda t, f=frames: f[t])
        accumulator.start(observe(0))
        chunks = []
        for t in range(length):
            last = t == length - 1
            chunks += accumulator.add(SlotStep(
                int(actions[t]), rewards[t], {"value_taken": taken[t], "value_max": best[t]}, observe(t + 1),
                terminated=last and terminated, truncated=last and not terminated, final_value=final_value,
            ))  # fmt: skip
        got.append(chunks)
        episodes.append((observe, actions, rewards, taken, best, terminated, final_value))
    return got, episodes


def expected_item(episode, t, n, gamma):
    """Straight from the definition of the n-step return, one step at a time."""
    _, actions, rewards, taken, best, terminated, final_value = episode
    length, total, discount, steps = len(rewards), 0.0, 1.0, 0
    for k in range(t, min(t + n, length)):
        total += discount * rewards[k]
        discount *= gamma
        steps += 1
    end = t + steps
    value = best[end] if end < length else final_value
    if end == length and terminated:
        discount = 0.0
    return actions[t], total, discount, steps, abs(total + discount * value - taken[t])


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    n=st.integers(1, 5),
    chunk=st.integers(1, 9),
    stack=st.sampled_from([0, STACK]),
    seed=st.integers(0, 2**16),
)
def test_every_step_becomes_one_right_item(lengths, n, chunk, stack, seed):
    rng = np.random.default_rng(seed)
    endings = [bool(rng.integers(2)) for _ in lengths]
    accumulator = NStepAccumulator(n, 0.9, chunk, stack)
    shape = (STACK, 2, 2) if stack else (2, 2)
    specs = n_step_fields(shape, "uint8", stack, n)
    got, episodes = collect(accumulator, lengths, endings, rng, stack)
    for chunks, episode in zip(got, episodes, strict=True):
        observe, length = episode[0], len(episode[2])
        t = 0
        for piece in chunks:
            check_chunk(piece, specs)
            for offset, priority in zip(piece.offsets, piece.priorities, strict=True):
                action, total, discount, steps, error = expected_item(episode, t, n, 0.9)
                fields = piece.fields
                assert fields["action"][offset] == action
                assert fields["reward"][offset] == pytest.approx(total, rel=1e-5, abs=1e-6)
                assert fields["discount"][offset] == pytest.approx(discount)
                assert fields["bootstrap_steps"][offset] == steps
                assert priority == pytest.approx(error + PRIORITY_FLOOR)
                window = fields["obs"][offset : offset + max(stack, 1) + n]
                now = window[:stack] if stack else window[0]
                then = window[steps : steps + stack] if stack else window[steps]
                np.testing.assert_array_equal(now, observe(t))
                np.testing.assert_array_equal(then, observe(t + steps))
                t += 1
        assert t == length, "the last steps of an episode must not be dropped"


def test_flush_keeps_the_running_window():
    accumulator = NStepAccumulator(3, 0.9, 10, 0)
    accumulator.start(np.zeros(1, np.float32))
    for t in range(5):
        assert accumulator.add(SlotStep(0, 1.0, ZEROS, np.full(1, t + 1, np.float32), False, False)) == []
    (chunk,) = accumulator.flush()
    assert chunk.steps == 2
    assert accumulator.flush() == []
    (rest,) = accumulator.add(SlotStep(0, 1.0, ZEROS, np.full(1, 6, np.float32), True, False))
    assert rest.steps == 4
    np.testing.assert_allclose(rest.fields["reward"], [2.71, 2.71, 1.9, 1.0], rtol=1e-6)


def test_observations_are_copied():
    accumulator = NStepAccumulator(1, 0.9, 1, 0)
    buffer = np.zeros(1, np.float32)
    accumulator.start(buffer)
    buffer[0] = 7.0
    (chunk,) = accumulator.add(SlotStep(0, 0.0, ZEROS, buffer, True, False))
    assert chunk.fields["obs"][:, 0].tolist() == [0.0, 7.0]


def test_a_chunk_has_the_version_of_its_first_step_and_no_zero_priority():
    accumulator = NStepAccumulator(1, 0.9, 2, 0)
    accumulator.start(np.zeros(1, np.float32))
    versions = []
    for t in range(7):
        for chunk in accumulator.add(
            SlotStep(0, 0.0, ZEROS, np.zeros(1, np.float32), False, False, version=10 + t)
        ):
            versions.append(chunk.version)
            assert (chunk.priorities > 0).all()
    assert versions == [10, 12, 14]
