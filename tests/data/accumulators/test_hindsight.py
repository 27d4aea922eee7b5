"""Relabelled steps against what was done, goal by goal."""

from collections import Counter

import numpy as np
import pytest

from troupe.common.data.accumulators.hindsight import HindsightAccumulator
from troupe.common.data.accumulators.n_step import NStepAccumulator, n_step_fields
from troupe.common.data.schema import SlotStep, check_chunk
from troupe.common.spaces import ActionSpec

GAMMA = 0.5


class Places:
    """Observations are [where one is, where one should be, time]; steps cost 1, and end at the goal."""

    def replaced(self, obs, reached):
        return np.array([obs[0], reached[0], obs[2]], np.int32)

    def outcome(self, obs, terminated):
        there = bool(obs[0] == obs[1])
        return (0.0 if there else -1.0), there


def accumulators(n=1, copies=2, window=100, chunk=5, seed=0):
    inner, plain = (NStepAccumulator(n, GAMMA, chunk, 0) for _ in range(2))
    goals = Places()
    rng = np.random.default_rng(seed)
    return plain, HindsightAccumulator(
        inner, goals, copies=copies, window_steps=window, chunk_steps=chunk, rng=rng
    )


def episode(accumulator, places, *, terminated=True, end=True):
    """Goes from place to place, towards place 99; the action of a step is its time."""
    accumulator.start(np.array([places[0], 99, 0], np.int32))
    chunks = []
    for time, place in enumerate(places[1:]):
        last = end and time == len(places) - 2
        chunks += accumulator.add(SlotStep(
            time, -1.0, {"value_taken": 0.0, "value_max": 7.0}, np.array([place, 99, time + 1], np.int32),
            last and terminated, last and not terminated, 3.0, 4,
        ))  # fmt: skip
    return chunks


def items(chunks, n):
    for chunk in chunks:
        check_chunk(chunk, n_step_fields((3,), "int32", 0, n, ActionSpec.discrete(100)))
        for offset in chunk.offsets:
            row = {name: array[offset] for name, array in chunk.fields.items()}
            yield row | {"obs": chunk.fields["obs"][offset : offset + n + 1], "priority": chunk.priorities[0]}


@pytest.mark.parametrize("n", [1, 3])
def test_goals_are_those_that_were_reached_later_and_outcomes_are_theirs(n):
    places = [5, 3, 8, 3, 6, 2, 7]
    plain, accumulator = accumulators(n, copies=40)
    originals, chunks = episode(plain, places), episode(accumulator, places)
    for one, other in zip(originals, chunks, strict=False):
        assert all(np.array_equal(one.fields[name], other.fields[name]) for name in one.fields)
    relabelled = list(items(chunks[len(originals) :], n))
    assert Counter(int(item["action"]) for item in relabelled) == dict.fromkeys(range(6), 40)
    assert all(len(chunk.offsets) <= 5 for chunk in chunks[len(originals) :])
    for item in relabelled:
        time, goal = int(item["action"]), int(item["obs"][0, 1])
        assert goal in places[time + 1 :]
        total, ended, steps = 0.0, False, 0
        for ahead in range(n):
            if ended or time + ahead == len(places) - 1:
                break
            ended = places[time + ahead + 1] == goal
            total += GAMMA**ahead * (0.0 if ended else -1.0)
            steps = ahead + 1
        assert item["bootstrap_steps"] == steps
        assert item["reward"] == pytest.approx(total)
        assert item["discount"] == pytest.approx(0.0 if ended else GAMMA**steps)
        assert [row.tolist() for row in item["obs"][: steps + 1]] == [
            [places[time + ahead], goal, time + ahead] for ahead in range(steps + 1)
        ]
    first = Counter(int(item["obs"][0, 1]) for item in relabelled if item["action"] == 0)
    assert set(first) == set(places[1:])  # any of them, for a step at the beginning
    assert first[3] > first[8]  # which was reached twice


def test_a_window_bounds_how_far_goals_are_looked_for_and_nothing_links_episodes():
    places = list(range(10))
    _, accumulator = accumulators(copies=30, window=4)
    chunks = [c for c in episode(accumulator, places, end=False) if c.fields["obs"][0, 1] != 99]
    chunks += [c for c in accumulator.flush() if c.fields["obs"][0, 1] != 99]
    again = episode(accumulator, [50, 51, 52], terminated=False)
    ahead = Counter()
    for item in items(chunks, 1):
        time, goal = int(item["action"]), int(item["obs"][0, 1])
        assert time < goal <= min(9, time - time % 4 + 4)
        ahead[goal - time] += 1
    assert set(ahead) == {1, 2, 3, 4}
    assert sum(ahead.values()) == 9 * 30
    later = [item for item in items(again, 1) if item["obs"][0, 1] != 99]
    assert {int(item["obs"][0, 1]) for item in later} == {51, 52}
    assert len(later) == 2 * 30


def test_what_was_reached_before_a_failure_counts_and_priorities_are_the_largest():
    _, accumulator = accumulators(copies=1)
    chunks = episode(accumulator, [1, 2, 3], end=False)
    assert chunks == []
    chunks = accumulator.discard()
    originals = [chunk for chunk in chunks if chunk.fields["obs"][0, 1] == 99]
    assert sum(len(chunk.offsets) for chunk in chunks) - len(originals[0].offsets) == 2
    # |-1 + 0.5 * 7 - 0|
    assert [float(item["priority"]) for item in items(chunks, 1)] == pytest.approx(
        [2.5] * len(originals[0].offsets) + [2.5] * 2
    )
    assert accumulator.discard() == []
