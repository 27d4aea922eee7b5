import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from troupe.common.data.accumulators.unrolls import (
    UnrollAccumulator,
    split_memory,
    unroll_fields,
)
from troupe.common.data.schema import SlotStep, check_chunk
from troupe.common.spaces import ActionSpec

ACTIONS, STACK = 3, 4


class Game:
    """Episodes of stacked frames; a new one is padded with zeros, or goes on as after a lost life."""

    def __init__(self, rng, stack):
        self.rng, self.stack, self.count = rng, stack, 0
        self.obs = self.reset(pad=True)

    def frame(self):
        self.count += 1
        return np.full((2, 2), 1 + self.count % 250, np.uint8)

    def reset(self, pad):
        if not self.stack:
            self.obs = self.frame()
        elif pad:
            self.obs = np.stack([np.zeros((2, 2), np.uint8)] * (STACK - 1) + [self.frame()])
        return self.obs

    def step(self):
        self.obs = np.concatenate([self.obs[1:], self.frame()[None]]) if self.stack else self.frame()
        return self.obs


def play(rng, accumulator, stack, steps, end=0.3, discard_at=()):
    """Plays `steps` steps; returns the chunks, and every step as it was seen."""
    game, chunks, seen = Game(rng, stack), [], []
    accumulator.start(game.obs)
    before = (0, 0.0, 1)
    for t in range(steps):
        obs = game.obs.copy()
        extras = {"behaviour": rng.normal(size=ACTIONS).astype(np.float32), "memory": rng.normal(size=5)}
        ending = int(rng.choice([0, 1, 2], p=[1 - end, end / 2, end / 2]))
        action, reward, final = int(rng.integers(ACTIONS)), float(rng.normal()), float(rng.normal())
        seen.append((obs, before, extras, final if ending == 2 else 0.0))
        last = game.step()
        if t in discard_at:
            chunks += accumulator.discard()
            game.reset(pad=True)
            accumulator.start(game.obs)
            seen, before = [], (0, 0.0, 1)
            continue
        chunks += accumulator.add(
            SlotStep(action, reward, extras, last, ending == 1, ending == 2, final, version=t)
        )
        before = (action, reward, ending)
        if ending:
            game.reset(pad=bool(rng.integers(2)))
            accumulator.start(game.obs)
    seen.append((game.obs.copy(), before, None, 0.0))
    return chunks + accumulator.flush(), seen


def stacked(chunk, t):
    """Observation t of an unroll, from the definition of its fields."""
    frames = chunk.fields["obs"][t : t + STACK].copy()
    frames[: STACK - chunk.fields["frames"][t]] = 0
    return frames


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 7),
    st.integers(0, 6),
    st.integers(0, 40),
    st.booleans(),
    st.sampled_from([0.0, 0.3, 0.9]),
    st.integers(0, 999),
)
def test_unrolls_hold_every_step_as_it_was_seen(length, skipped, steps, stack, end, seed):
    skipped = min(skipped, length - 1)
    rng = np.random.default_rng(seed)
    accumulator = UnrollAccumulator(length, STACK if stack else 0, 5, skipped)
    chunks, seen = play(rng, accumulator, stack, steps, end)
    shape = (STACK, 2, 2) if stack else (2, 2)
    specs = unroll_fields(
        shape, "uint8", STACK if stack else 0, ActionSpec.discrete(ACTIONS), ACTIONS, length, 5
    )
    assert len(chunks) == max(0, steps - skipped) // length
    for index, chunk in enumerate(chunks):
        check_chunk(chunk, specs)
        assert (chunk.offsets.tolist(), chunk.lengths.tolist(), chunk.steps) == ([0], [length], length)
        first = skipped + index * length
        assert chunk.version == first
        memory = chunk.fields["memory"].ravel()[:5]
        np.testing.assert_allclose(memory, seen[first][2]["memory"], rtol=1e-6)
        for t in range(length + 1):
            obs, (action, reward, ended), extras, final = seen[first + t]
            np.testing.assert_array_equal(stacked(chunk, t) if stack else chunk.fields["obs"][t], obs)
            assert chunk.fields["action"][t] == action
            assert chunk.fields["reward"][t] == np.float32(reward)
            assert chunk.fields["ended"][t] == ended
            if t < length:
                np.testing.assert_array_equal(chunk.fields["behaviour"][t], extras["behaviour"])
                assert chunk.fields["final_value"][t] == np.float32(final)


def test_a_failed_environment_voids_the_running_unroll_only():
    rng = np.random.default_rng(0)
    chunks, seen = play(rng, UnrollAccumulator(4, STACK, 5), True, 14, discard_at=[5])
    assert [chunk.version for chunk in chunks] == [0, 6, 10]
    np.testing.assert_array_equal(stacked(chunks[1], 0), seen[0][0])
    assert chunks[1].fields["ended"][0] == 1


@pytest.mark.parametrize(("size", "steps"), [(5, 2), (512, 20), (3, 9), (1, 1)])
def test_memory_is_spread_over_the_steps(size, steps):
    memory = np.random.default_rng(0).normal(size=(2, size)).astype(np.float32)
    entries = np.stack([split_memory(row, steps) for row in memory])
    assert entries.shape[1] == steps
    np.testing.assert_array_equal(entries.reshape(2, -1)[:, :size], memory)


def test_buffers_of_the_environment_are_copied():
    accumulator = UnrollAccumulator(1, 0, 0)
    obs = np.zeros(2, np.float32)
    accumulator.start(obs)
    obs[:] = 5
    accumulator.add(SlotStep(0, 0.0, {"behaviour": np.zeros(2)}, obs, False, False))
    obs[:] = 9
    (chunk,) = accumulator.flush()
    assert chunk.fields["obs"][:, 0].tolist() == [0.0, 5.0]
