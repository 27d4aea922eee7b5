import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from troupe.common.data.accumulators.sequences import BETWEEN, Layout, SequenceAccumulator, sequence_fields
from troupe.common.data.schema import SlotStep, check_chunk
from troupe.common.spaces import ActionSpec

MEMORY, STACK = 5, 3


def layouts():
    return st.builds(
        lambda burn_in, steps, period: Layout(burn_in, steps, min(period, steps)),
        st.integers(0, 7), st.integers(1, 7), st.integers(1, 7),
    )  # fmt: skip


def telling(rewards, taken, best, ended):
    """A priority that tells the steps and what follows them apart."""
    assert len(rewards) == len(taken) == len(best) == len(ended)
    steps = ended != BETWEEN
    return float(np.sum(taken[steps]) + 1000 * np.sum(best[steps]))


class Episode:
    """Steps whose every number says which episode and step they belong to."""

    def __init__(self, number, length, stack, truncated, before=0.0):
        self.number, self.length, self.truncated = number, length, truncated
        frames = [np.full((2,), 100 * number + t + 1, np.float32) for t in range(length + 1)]
        padding = [np.full((2,), before, np.float32)] * (stack - 1 if stack else 0)
        self.frames = padding + frames
        self.stack = stack

    def obs(self, t):
        return np.stack(self.frames[t : t + self.stack]) if self.stack else self.frames[t]

    def row(self, t):
        """Action, reward and end of step `t`; of what was before the episode for -1."""
        ended = (2 if self.truncated else 1) if t == self.length - 1 else 0
        return (0, 0.0, 1) if t < 0 else (t, self.number + t / 64, ended)

    def extras(self, t):
        memory = np.array([self.number, t, 1, 2, 3], np.float32)
        return {"value_taken": float(t), "value_max": t / 1024, "memory": memory}


def play(accumulator, lengths, stack, truncated=False, running=0):
    chunks = []
    for number, length in enumerate(lengths):
        episode = Episode(number, length, stack, truncated)
        accumulator.start(episode.obs(0))
        for t in range(running if running and number == len(lengths) - 1 else length):
            action, reward, ended = episode.row(t)
            new = accumulator.add(
                SlotStep(
                    action,
                    reward,
                    episode.extras(t),
                    episode.obs(t + 1),
                    ended == 1,
                    ended == 2,
                    0.5,
                    version=t,
                )
            )
            chunks += [(episode, chunk) for chunk in new]
    return chunks


def items(chunks, specs):
    for episode, chunk in chunks:
        check_chunk(chunk, specs)
        for offset, length, priority in zip(chunk.offsets, chunk.lengths, chunk.priorities, strict=True):
            cut = {f.name: chunk.fields[f.name][offset : offset + f.entries(length)] for f in specs}
            yield episode, cut, int(length), priority


@settings(max_examples=150, deadline=None)
@given(
    layouts(), st.lists(st.integers(1, 30), min_size=1, max_size=3), st.booleans(), st.booleans(),
    st.integers(1, 20),
)  # fmt: skip
def test_sequences_hold_every_step_as_it_was_seen_and_never_cross_episodes(
    layout, lengths, stack, truncated, chunk_steps
):
    depth = STACK if stack else 0
    accumulator = SequenceAccumulator(layout, chunk_steps, depth, MEMORY, telling)
    specs = sequence_fields(
        (STACK, 2) if stack else (2,), "float32", depth, ActionSpec.discrete(3), layout.period, MEMORY
    )
    times_learned = {}
    begins = {}
    for episode, cut, length, priority in items(play(accumulator, lengths, depth, truncated), specs):
        first = int(cut["obs"][depth - 1 if stack else 0][0]) - 100 * episode.number - 1
        assert first >= 0
        for t in range(
            length + 1
        ):  # all of one episode, one after the other, up to the true last observation
            seen = cut["obs"][t : t + depth] if stack else cut["obs"][t]
            np.testing.assert_array_equal(seen, episode.obs(first + t))
            action, reward, ended = episode.row(first + t - 1)
            assert (cut["action"][t], cut["ended"][t]) == (action, ended)
            assert cut["reward"][t] == np.float32(reward)
        starts = cut["ended"][0] != 0
        assert starts == (first == 0)
        if not starts:  # the state that the actor had before the very first step of the sequence
            memory = cut["memory"][: layout.period].ravel()[:MEMORY]
            np.testing.assert_array_equal(memory, episode.extras(first)["memory"])
        missing = int(layout.missing_burn_in(np.array([length]), np.array([starts]))[0])
        learned = range(first + layout.burn_in - missing, first + length)
        assert 1 <= len(learned) <= layout.steps
        assert learned[0] % layout.period == 0
        assert len(learned) == layout.steps or learned[-1] == episode.length - 1
        following = [(t + 1) / 1024 if t + 1 < episode.length else 0.5 * truncated for t in learned]
        assert priority == pytest.approx(sum(learned) + 1000 * sum(following), rel=1e-5)
        begins.setdefault(episode.number, []).append(learned[0])
        for t in learned:
            times_learned[episode.number, t] = times_learned.get((episode.number, t), 0) + 1
    assert sorted(times_learned) == [(n, t) for n, length in enumerate(lengths) for t in range(length)]
    for starts in begins.values():
        assert starts == [k * layout.period for k in range(len(starts))]


def positions_of(episodes, stack):
    """The stream by hand: of every place its observation (None: none is seen), what led there, the memory."""
    for number, episode in enumerate(episodes):
        if number:  # as many rows as the first stack has frames, of which the last leads to the observation
            yield from [(None, (0, 0.0, 3), None)] * (stack - 1 if stack else 0)
        for t in range(episode.length + 1):
            row = episode.row(t - 1) if t or not number else (0, 0.0, 3)
            memory = episode.extras(t)["memory"] if 0 < t < episode.length else None
            yield episode.obs(t), row, memory


def learned_by_hand(episodes, stack):
    """Of every step of the stream (None between episodes): the value taken and the best that follows."""
    for number, episode in enumerate(episodes):
        yield from [None] * ((stack or 1) if number else 0)
        for t in range(episode.length):
            at_end = 0.5 * episode.truncated
            yield t, (t + 1) / 1024 if t + 1 < episode.length else at_end


@settings(max_examples=150, deadline=None)
@given(
    layouts(), st.lists(st.tuples(st.integers(1, 12), st.booleans()), min_size=1, max_size=6), st.booleans(),
    st.integers(1, 20), st.booleans(),
)  # fmt: skip
def test_across_episodes_sequences_are_windows_of_the_stream(layout, plan, stacks, chunk_steps, flushes):
    stack = STACK if stacks else 0
    # The first stack of an episode is padded with zeros, or goes on with what was seen before.
    episodes = [Episode(n, length, stack, cut, before=50.0 * (n % 2)) for n, (length, cut) in enumerate(plan)]
    accumulator = SequenceAccumulator(layout, chunk_steps, stack, MEMORY, telling, across_episodes=True)
    specs = sequence_fields(
        (STACK, 2) if stack else (2,), "float32", stack, ActionSpec.discrete(13), layout.period, MEMORY
    )
    chunks = []
    for episode in episodes:
        accumulator.start(episode.obs(0))
        for t in range(episode.length):
            action, reward, ended = episode.row(t)
            new = accumulator.add(
                SlotStep(action, reward, episode.extras(t), episode.obs(t + 1), ended == 1, ended == 2, 0.5)
            )
            new += accumulator.flush() if flushes else []
            chunks += [(episode, chunk) for chunk in new]
    chunks += [(None, chunk) for chunk in accumulator.discard()]
    stream, learned = list(positions_of(episodes, stack)), list(learned_by_hand(episodes, stack))
    cut_out = list(items(chunks, specs))
    # A sequence is complete when the value of what follows it is known, a step later.
    assert len(cut_out) == max(0, (len(learned) - 1 - layout.steps) // layout.period + 1)
    for k, (_, cut, length, priority) in enumerate(cut_out):
        first, end = max(0, k * layout.period - layout.burn_in), k * layout.period + layout.steps
        assert length == end - first
        for t in range(length + 1):
            obs, (action, reward, ended), _ = stream[first + t]
            if first + t == 0:
                ended = 1
            assert (cut["action"][t], cut["ended"][t]) == (action, ended)
            assert cut["reward"][t] == np.float32(reward)
            if obs is not None:
                np.testing.assert_array_equal(cut["obs"][t : t + stack] if stack else cut["obs"][t], obs)
        if stream[first][2] is not None:
            memory = cut["memory"][: layout.period].ravel()[:MEMORY]
            np.testing.assert_array_equal(memory, stream[first][2])
        starts = np.array([cut["ended"][0] != 0])
        missing = int(layout.missing_burn_in(np.array([length]), starts)[0])
        assert first + layout.burn_in - missing == k * layout.period
        steps = [step for step in learned[k * layout.period : end] if step is not None]
        wanted = sum(taken for taken, _ in steps) + 1000 * sum(follows for _, follows in steps)
        assert priority == pytest.approx(wanted, rel=1e-5)


def test_a_failed_environment_begins_the_stream_anew():
    accumulator = SequenceAccumulator(Layout(2, 4, 2), 100, 0, MEMORY, telling, across_episodes=True)
    play(accumulator, [5, 20], 0, running=3)
    (chunk,) = accumulator.discard()  # 9 rows, of which the last is not followed by a value
    assert chunk.lengths.tolist() == [4, 6, 6]
    (begun,) = (chunk for _, chunk in play(accumulator, [120], 0))
    assert (begun.fields["ended"][0], begun.offsets[0], begun.lengths[0]) == (1, 0, 4)


def test_a_chunk_holds_several_sequences_and_stores_their_steps_once():
    layout = Layout(4, 8, 4)
    accumulator = SequenceAccumulator(layout, 12, 0, MEMORY, telling)
    (_, first), (_, second), (_, last) = play(accumulator, [33], 0)
    # Complete one step after its last: the value of what follows comes with the next action.
    assert (first.steps, first.version) == (16, 0)
    assert first.offsets.tolist() == [0, 0, 4]
    assert first.lengths.tolist() == [8, 12, 12]
    assert (second.steps, second.version) == (20, 8)
    assert second.offsets.tolist() == [0, 4, 8]
    assert (last.steps, last.version) == (13, 20)
    assert (last.offsets.tolist(), last.lengths.tolist()) == ([0, 4], [12, 9])


def test_flush_gives_what_is_complete_and_the_episode_goes_on():
    specs, got = sequence_fields((2,), "float32", 0, ActionSpec.discrete(3), 2, MEMORY), []
    for flushes in (False, True):
        accumulator, episode, chunks = (
            SequenceAccumulator(Layout(2, 4, 2), 100, 0, MEMORY, telling), Episode(0, 15, 0, False), []
        )  # fmt: skip
        accumulator.start(episode.obs(0))
        for t in range(15):
            action, reward, ended = episode.row(t)
            chunks += accumulator.add(
                SlotStep(action, reward, episode.extras(t), episode.obs(t + 1), ended == 1, False)
            )
            if flushes and t < 14:
                chunks += accumulator.flush()
        got.append([(episode, chunk) for chunk in chunks])
    assert (len(got[0]), len(got[1])) == (1, 6)
    for (_, one, length, priority), (_, other, *rest) in zip(
        items(got[0], specs), items(got[1], specs), strict=True
    ):
        assert [length, priority] == rest
        for name in one:
            entries = 2 if name == "memory" else len(one[name])  # behind the state there is anything
            np.testing.assert_array_equal(one[name][:entries], other[name][:entries])


def test_a_failed_environment_voids_what_is_not_complete():
    accumulator = SequenceAccumulator(Layout(2, 4, 2), 100, 0, MEMORY, telling)
    assert play(accumulator, [20], 0, running=8) == []
    (chunk,) = accumulator.discard()
    assert chunk.lengths.tolist() == [4, 6]
    assert accumulator.flush() == []


def test_gaps_between_sequences_are_refused():
    with pytest.raises(ValueError, match="leave none out"):
        SequenceAccumulator(Layout(0, 4, 5), 1, 0, MEMORY, telling)
