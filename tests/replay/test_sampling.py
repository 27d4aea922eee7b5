"""What a program of one's own does with a server: lists, weights, batches ahead of their use, mistakes."""

import itertools
import threading

import numpy as np
import pytest

from tests.harness import insert
from tests.replay import processes
from troupe.common.data.schema import Chunk, FieldSpec
from troupe.common.errors import ConfigError, PeerError
from troupe.common.wire.codec import WireError
from troupe.common.wire.replay import batch_reader
from troupe.common.wire.replay.sharded import ShardedReplayClient

QUEUE = ("--table", "default:limiter=queue,capacity=1000")


def listed(values, priorities):
    """A chunk without an array, an item for each step."""
    steps = len(values)
    return Chunk({"x": values}, steps, list(range(steps)), [1] * steps, priorities)


def store(client, chunk, table="default"):
    insert(client, chunk, table)
    assert client.flush(60)


def test_lists_are_as_good_as_arrays(server, client):
    mine = client(server("--table", "default:capacity=100,priority_exponent=1"))
    store(mine, listed([0.5, 1.5, 2.5], [1, 2, 3]))
    batch = mine.sample(30, timeout_s=120)
    assert batch.fields["x"].dtype == np.float64
    np.testing.assert_allclose(batch.probabilities, (batch.fields["x"][:, 0] + 0.5) / 6)
    mine.update(batch, [2.0] * 30)
    assert mine.sample(30, timeout_s=120).total_priority in (6.0, 5.0, 4.0)  # all that were drawn have 2


def test_lists_become_what_the_specs_say(server, client):
    mine = client(server(*QUEUE), specs=[FieldSpec("x", "uint8", (2,))])
    store(mine, listed([[1, 2], [3, 255]], [1.0, 1.0]))
    batch = mine.sample(2, timeout_s=120)
    assert batch.fields["x"].dtype == np.uint8
    assert batch.fields["x"][:, 0].tolist() == [[1, 2], [3, 255]]
    for values in ([[1, 2], [3, 256]], [[1, 2], [3, -1]], [[1, 2], [3, 0.5]]):
        with pytest.raises(ConfigError, match="expected uint8"):
            mine.insert(listed(values, [1.0, 1.0]))


@pytest.mark.parametrize(
    ("chunk", "words"),
    [
        (listed([1.0, 2.0], [1.0]), "differ in length"),
        (listed([[1.0], [2.0, 3.0]], [1.0, 1.0]), "field x: lists that differ in length"),
        (listed([None, 1], [1.0, 1.0]), "field x is of object"),
        (Chunk({"x": [1.0]}, 2, [0], [1], [1.0]), "too short for 2 steps"),
        (Chunk({"x": [1.0, 2.0]}, 2, [1], [2], [1.0]), "outside of its chunk"),
        (Chunk({"x": [1.0, 2.0]}, 2, [], [], []), "without items"),
    ],
)
def test_a_chunk_that_is_none_is_a_mistake_of_its_maker(server, client, chunk, words):
    mine = client(server(*QUEUE))
    with pytest.raises(ConfigError, match=words):
        store(mine, chunk)


def test_chunks_whose_fields_differ_from_the_first_are_refused_here(server, client):
    mine = client(server(*QUEUE))
    store(mine, listed([1.0], [1.0]))
    for values in ([[1.0]], ["a"]):
        with pytest.raises(
            ConfigError, match=r"field x is .* every chunk of a client has the fields of its first"
        ):
            mine.insert(listed(values, [1.0]))
    with pytest.raises(ConfigError, match="fields"):
        mine.insert(Chunk({"y": [1.0]}, 1, [0], [1], [1.0]))
    store(mine, listed([2.0], [1.0]))
    assert mine.sample(2, timeout_s=120).fields["x"][:, 0].tolist() == [1.0, 2.0]


def test_priorities_for_other_than_the_rows_are_refused(server, client):
    mine = client(server("--table", "default:capacity=100"))
    processes.insert(mine, 0)
    batch = mine.sample(4, timeout_s=120)
    for priorities in ([1.0] * 3, [1.0] * 5, [[1.0] * 4]):
        with pytest.raises(ConfigError, match="for a batch of 4"):
            mine.update(batch, priorities)
    with pytest.raises(ConfigError, match="shape"):
        mine.update_priorities(batch.ids, [1.0])


def test_weights_are_those_of_the_paper(server, client):
    """(N P)^-beta by the largest of the batch, Schaul et al. 2016, section 3.4."""
    mine = client(server("--table", "default:capacity=100,priority_exponent=1"))
    store(mine, listed(list(range(1, 21)), list(range(1, 21))))
    batch = mine.sample(64, timeout_s=120)
    probabilities = batch.fields["x"][:, 0] / 210
    for beta in (0.0, 0.4, 1.0):
        wanted = (20 * probabilities) ** -beta
        np.testing.assert_allclose(batch.weights(beta), wanted / wanted.max(), rtol=1e-6)
        assert batch.weights(beta).dtype == np.float32


def test_rows_of_several_tables_are_weighed_each_in_its_own(server, client, context):
    endpoint = server("--table", "a:priority_exponent=1", "--table", "b:sampler=uniform")
    mine = client(endpoint)
    chunk = listed([1.0, 2.0, 3.0], [1, 2, 3])
    chunk.more = {"b": chunk.items}
    store(mine, chunk, "a")
    several = ShardedReplayClient([endpoint], ctx=context)
    for each in (mine, several):
        batch = each.sample({"a": 32, "b": 4}, timeout_s=120)
        own = batch.fields["x"][:32, 0]
        np.testing.assert_allclose(batch.weights(1)[:32], own.min() / own, rtol=1e-6)
        assert batch.weights(1)[32:].tolist() == [1.0] * 4
    several.close(0)


def test_links_tell_how_long_batches_took_and_what_they_weighed(server, context):
    endpoint = server("--table", "default:capacity=10")
    mine = ShardedReplayClient([endpoint], ctx=context, map_files=False)
    mine.request_sample(4)
    assert mine.receive(0.2) is None  # it waits for items
    store(mine, listed([1.0, 2.0], [1.0, 1.0]))
    assert mine.receive(30) is not None
    (link,) = mine.links().values()
    assert link["batches"] == 1
    assert link["took_s"] >= 0.2
    assert link["bytes"] > 0
    assert mine.counters["unpack_us"] > 0
    mine.close(0)


@pytest.mark.parametrize("several", [False, True])
def test_batches_come_ahead_of_their_use(server, client, context, several):
    endpoint = server(*QUEUE)
    mine = ShardedReplayClient([endpoint], ctx=context) if several else client(endpoint)
    for number in range(4):
        store(mine, listed([2.0 * number, 2.0 * number + 1], [1.0, 1.0]))
    batches = mine.batches(1, prefetch=3, timeout_s=120)
    first = [batch.fields["x"][0, 0] for batch in itertools.islice(batches, 3)]
    assert first == [0.0, 1.0, 2.0]
    assert mine.outstanding_samples == 3
    batches.close()
    assert mine.outstanding_samples == 0
    ended = mine.batches(100, timeout_s=0.2)
    with pytest.raises(PeerError, match="no batch from replay"):
        next(ended)
    assert mine.outstanding_samples == 0
    mine.close(0)


def test_large_batches_are_read_by_threads_and_come_in_order(server, client, monkeypatch):
    mine = client(server(*QUEUE), specs=[FieldSpec("x", "uint8", (2048,), compress=True)])
    readers, decode = [], batch_reader.decode_batch

    def noted(*args, **options):
        readers.append(threading.current_thread().name)
        if len(readers) == 4:
            raise WireError("bad_batch", "made up")
        return decode(*args, **options)

    monkeypatch.setattr(batch_reader, "decode_batch", noted)
    monkeypatch.setattr(batch_reader, "LARGE_BYTES", 4096)
    for number in range(7):
        store(mine, listed(np.full((2, 2048), number, np.uint8), [1.0, 1.0]))
    batches = mine.batches(2, prefetch=4, timeout_s=120)
    found = [batch.fields["x"][:, 0, 0].tolist() for batch in itertools.islice(batches, 6)]
    assert readers[0] == threading.current_thread().name, "nothing says yet how large they are"
    assert all(name.startswith("unpack") for name in readers[1:])
    # What the fourth of them had was not to be read, and has left its queue.
    assert sorted(found) == found
    assert len({first for first, _ in found}) == 6
    assert all(first == second for first, second in found)
    batches.close()
