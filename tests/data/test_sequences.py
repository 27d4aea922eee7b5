import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.data.schema import check_chunk
from common.data.sequences import Layout, SequenceAccumulator, sequence_fields
from common.data.unrolls import join_memory
from common.spaces import ActionSpec

MEMORY, STACK = 5, 3


def layouts():
    return st.builds(
        lambda burn_in, steps, period: Layout(burn_in, steps, min(period, steps)),
        st.integers(0, 7), st.integers(1, 7), st.integers(1, 7),
    )  # fmt: skip


def telling(rewards, taken, best):
    """A priority that tells the steps and what follows them apart."""
    assert len(rewards) == len(taken) == len(best)
    return float(np.sum(taken) + 1000 * np.sum(best))


class Episode:
    """Steps whose every number says which episode and step they belong to."""

    def __init__(self, number, length, stack, truncated):
        self.number, self.length, self.truncated = number, length, truncated
        frames = [np.full((2,), 100 * number + t + 1, np.float32) for t in range(length + 1)]
        padding = [np.zeros((2,), np.float32)] * (stack - 1 if stack else 0)
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
                action, reward, episode.extras(t), episode.obs(t + 1), ended == 1, ended == 2, 0.5, version=t
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
            memory = join_memory(cut["memory"][None, : layout.period], MEMORY)[0]
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
                action, reward, episode.extras(t), episode.obs(t + 1), ended == 1, False
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
