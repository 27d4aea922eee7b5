"""Single steps through a writer and a real server, compared with windows that are cut by hand."""

import numpy as np
import pytest

from troupe.common.data.schema import FieldSpec
from troupe.common.errors import ConfigError, PeerError
from troupe.writer import NStepWriter, Writer

QUEUE = ("--table", "default:limiter=queue,capacity=1000", "--table", "other:limiter=queue,capacity=1000")
SPECS = (
    FieldSpec("obs", "float32", (2,), before=2, after=3),
    FieldSpec("action", "int64", ()),
    FieldSpec("reward", "float32", (), after=1),
)


def take(client, count, table="default"):
    """The next `count` items of a queue, in order, one by one: field to window."""
    for _ in range(count):
        batch = client.sample(1, table, timeout_s=120)
        yield {name: array[0] for name, array in batch.fields.items()}, int(batch.versions[0])


def window(entries, begin, end, before, after):
    """What an item sees of an episode's entries; the first and the last stand for what is not there."""
    places = np.clip(np.arange(begin - before, end + after), 0, len(entries) - 1)
    return np.asarray(entries)[places]


@pytest.mark.parametrize("chunk_steps", [1, 7, 30])
def test_items_hold_the_steps_that_they_were_cut_from(server, client, chunk_steps):
    endpoint = server(*QUEUE)
    rng = np.random.default_rng(chunk_steps)
    mine = client(endpoint, specs=SPECS)
    writer = Writer(mine, item_steps=6, chunk_steps=chunk_steps)
    expected = {"default": [], "other": []}
    for length in (1, 25, 4, 60):
        obs = rng.normal(size=(length + 1, 2)).astype(np.float32)
        actions, rewards = rng.integers(0, 9, length), rng.normal(size=length).astype(np.float32)
        for t in range(length):
            writer.append({"obs": obs[t], "action": int(actions[t]), "reward": rewards[t].item()})
            while rng.random() < 0.4:
                steps = int(rng.integers(1, min(6, t + 1) + 1))
                table = "other" if rng.random() < 0.4 else "default"
                writer.item(steps, priority=rng.random(), table=table)
                begin = t + 1 - steps
                expected[table].append(
                    {
                        "obs": window(obs, begin, t + 1, 2, 3),
                        "action": window(actions, begin, t + 1, 0, 0),
                        "reward": window(rewards, begin, t + 1, 0, 1),
                    }
                )
        writer.end_episode({"obs": obs[-1].tolist()})
    assert writer.flush(60)
    assert min(map(len, expected.values())) > 5
    for table, items in expected.items():
        for item, (found, _) in zip(items, take(mine, len(items), table), strict=True):
            for name, array in item.items():
                assert found[name].dtype == array.dtype
                np.testing.assert_array_equal(found[name], array)


def test_steps_that_items_share_are_sent_once(server, client):
    mine = client(server(*QUEUE))
    writer = Writer(mine, item_steps=20, chunk_steps=40)
    for t in range(100):
        writer.append({"x": np.float32(t)}, version=t)
        if writer.steps >= 20 and writer.steps % 10 == 0:
            writer.item(20)
    writer.end_episode()
    assert writer.steps == 0
    assert writer.flush(60)
    assert mine.status(60)["chunks"] == mine.counters["inserts"] <= 4  # of 9 items
    found = [fields["x"][0] for fields, _ in take(mine, 9)]
    assert found == list(range(0, 90, 10))


def test_rare_items_do_not_keep_all_steps(server, client):
    """A chunk goes when its first item has waited long enough, whatever comes after it."""
    mine = client(server(*QUEUE))
    writer = Writer(mine, chunk_steps=10)
    writer.append({"x": 0.0})
    writer.item()
    for t in range(1, 30):
        writer.append({"x": float(t)})
    assert mine.flush(60)
    assert mine.counters["inserts"] == 1
    assert next(take(mine, 1))[0]["x"] == [0.0]


def n_step_items(obs, rewards, n, gamma, terminated):
    """By hand: first observation, return, discount, observation that is bootstrapped from."""
    for t in range(len(rewards)):
        end = min(t + n, len(rewards))
        value = sum(gamma ** (k - t) * rewards[k] for k in range(t, end))
        discount = 0.0 if terminated and end == len(rewards) else gamma ** (end - t)
        yield obs[t], value, discount, obs[end]


@pytest.mark.parametrize("terminated", [True, False])
def test_n_step_items_are_those_of_the_episode(server, client, terminated):
    mine = client(server(*QUEUE))
    rng = np.random.default_rng(1)
    writer = NStepWriter(mine, n_steps=3, gamma=0.9, chunk_steps=5)
    writer.priority = 2.5
    expected = []
    for length in (2, 17):
        obs, rewards = rng.normal(size=(length + 1, 3)), rng.normal(size=length)
        actions = rng.normal(size=(length, 2)).astype(np.float32)
        writer.start(obs[0].tolist())
        for t in range(length):
            last = t == length - 1
            writer.append(
                actions[t], rewards[t], obs[t + 1].tolist(), last and terminated, last and not terminated
            )
        items = n_step_items(obs, rewards, 3, 0.9, terminated)
        expected += [(*item, action) for item, action in zip(items, actions, strict=True)]
    assert writer.flush(60)
    for item, (found, _) in zip(expected, take(mine, len(expected)), strict=True):
        first, value, discount, following, action = item
        np.testing.assert_array_equal(found["obs"][0], first)
        np.testing.assert_array_equal(found["obs"][found["bootstrap_steps"][0]], following)
        np.testing.assert_array_equal(found["action"][0], action)
        assert found["reward"] == pytest.approx([value], rel=1e-6)
        assert found["discount"] == pytest.approx([discount], rel=1e-6)


def test_new_items_have_the_priority_of_their_writer(server, client):
    mine = client(server("--table", "default:capacity=100,priority_exponent=1"))
    writer = NStepWriter(mine, n_steps=1, gamma=0.9, priority=4.0)
    writer.start([0.0])
    for _ in range(10):
        writer.append(0, 1.0, [0.0], False)
    assert writer.flush(60)
    assert mine.sample(4, timeout_s=120).total_priority == 36.0  # the newest step has no successor's yet


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ({"x": 1.0}, "fields"),
        ({"x": 1.0, "y": [1, 2], "z": 0}, "fields"),
        ({"x": 1.0, "y": [1, 2, 3]}, r"field y is int64\(3,\), expected int64\(2,\)"),
        ({"x": 1.0, "y": [[1], [2, 3]]}, "field y: lists that differ in length"),
        ({"x": 1.0, "y": [1.5, 2]}, "field y is float64"),
        ({"x": np.float32(1), "y": np.zeros(2)}, "field y is float64"),
        ({"x": None, "y": [1, 2]}, "field x is object"),
    ],
)
def test_a_step_that_differs_is_refused_and_not_taken(server, client, step, words):
    mine = client(server(*QUEUE))
    writer = Writer(mine)
    writer.append({"x": 1.0, "y": [1, 2]})
    with pytest.raises(ConfigError, match=words):
        writer.append(step)
    assert writer.steps == 1
    writer.item()
    writer.end_episode()
    assert writer.flush(60)
    assert next(take(mine, 1))[0]["y"].tolist() == [[1, 2]]


def test_impossible_items_are_refused(server, client):
    writer = Writer(client(server(*QUEUE)), item_steps=2)
    with pytest.raises(ConfigError, match="of 0 in the episode"):
        writer.item()
    for _ in range(5):
        writer.append({"x": 1.0})
    with pytest.raises(ConfigError, match="item_steps is 2"):
        writer.item(3)
    with pytest.raises(ConfigError, match="priority"):
        writer.item(1, priority=float("nan"))


def test_impossible_steps_are_refused(client, tmp_path):
    steps = NStepWriter(client(f"ipc://{tmp_path}/nobody"), n_steps=1, gamma=0.9)
    with pytest.raises(ConfigError, match="start"):
        steps.append(0, 0.0, [0.0], False)
    steps.start([0.0])
    with pytest.raises(ConfigError, match="reward of nan"):
        steps.append(0, float("nan"), [0.0], False)
    with pytest.raises(ConfigError, match="field obs"):
        steps.append(0, 0.0, [0.0, 1.0], False)


def test_what_replay_does_not_take_in_time_is_kept(server, client):
    mine = client(server("--table", "default:limiter=queue,capacity=1"))
    mine.status(60)  # now it is there
    writer = Writer(mine, chunk_steps=1, timeout_s=2.0)
    sent = 0

    def go_on():
        nonlocal sent
        for sent in range(1, 20):
            writer.append({"x": float(sent)})
            writer.item()

    with pytest.raises(PeerError, match=r"no chunk for 2 s: (queue is full|inserts are not ackn)"):
        go_on()
    found = [fields["x"][0] for fields, _ in take(mine, sent - 2)]
    assert found == list(range(1, sent - 1))
    assert writer.flush(60)
    assert next(take(mine, 1))[0]["x"] == [sent - 1]
