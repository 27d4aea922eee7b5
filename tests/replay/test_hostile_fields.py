"""Well-formed requests that would end a shard, or a client, if they were believed."""

import numpy as np
import pytest

from tests.replay.storage.replays import make_insert, open_replay, simple
from troupe.common.data.columns import Payload
from troupe.common.data.inserts import Insert, RefusedError
from troupe.common.data.schema import FieldSpec, Items
from troupe.common.wire import messages
from troupe.common.wire.codec import Message, WireError, decode, encode
from troupe.common.wire.replay.codec import decode_batch, decode_insert

BLOCK = np.frombuffer(b"\1\0\0\0x", np.uint8)  # says that it is one byte, which unpacks to whatever it should


def insert(name="a", shape=(1,), codec="raw", steps=1, before=0, data=None):
    """The first INSERT of a stranger, as it is decoded."""
    arrays = {
        "items/offsets": np.zeros(1, np.int32),
        "items/lengths": np.ones(1, np.int32),
        "items/priorities": np.ones(1),
        f"chunk/{name}": np.tile(BLOCK, steps) if data is None else data,
        f"lengths/{name}": np.full(steps, len(BLOCK), np.uint32),
    }
    fields = {
        "incarnation": 5,
        "steps": steps,
        "fields": [[name, "uint8", list(shape), before, 0, codec]],
    }
    message = decode(encode(Message(messages.Insert.TYPE, fields, arrays, 1)))
    return decode_insert(messages.Insert.of(message), message.request_id)


@pytest.mark.parametrize(
    "fields",
    [
        {"shape": (0,), "data": np.zeros((1, 0), np.uint8)},  # no file is so short
        {"shape": (0,), "before": 2**30, "data": np.zeros((2**30 + 1, 0), np.uint8)},
        {"name": "\U00010400" * 64, "data": np.zeros((1, 1), np.uint8)},  # nor has so long a name
        {"shape": (2**30, 2**30, 8), "codec": "lz4"},  # 2^63 bytes, which is negative for numpy
        {"shape": (2**16,) * 4, "codec": "lz4"},  # 2^64 bytes, which is none
        {"shape": (4 << 20,), "codec": "lz4", "steps": 100_000},  # 400 GB of 500 kB
    ],
)
def test_fields_that_cannot_be_stored_are_refused(tmp_path, fields):
    replay = open_replay(tmp_path)
    with pytest.raises((RefusedError, WireError)):
        replay.insert(insert(**fields))
    assert replay.store is None
    assert replay.insert(simple(1, 0, 4))


@pytest.mark.parametrize("places", [False, True])
def test_a_batch_beyond_all_memory_is_refused(tmp_path, places):
    specs = (FieldSpec("a", "uint8", (1 << 16,)),)
    items = Items(np.zeros(1, np.int32), np.ones(1, np.int32), np.ones(1))
    data = {"a": Payload(np.zeros((1, 1 << 16), np.uint8))}
    replay = open_replay(tmp_path)
    replay.insert(Insert(9, 1, 1, specs, data, 1, 4, {"default": items}))
    with pytest.raises(RefusedError, match="1 GiB"):
        replay.sample({"default": 1 << 20}, places=places)
    assert len(replay.sample({"default": 4}).ids) == 4


@pytest.mark.parametrize("reopened", [False, True])
def test_a_batch_that_is_too_large_is_refused_before_anything_is_drawn(tmp_path, reopened):
    """Drawing takes seconds for a million rows, and everybody else would wait for it in vain."""
    replay = open_replay(tmp_path)
    replay.insert(make_insert(1, 0, 40, [0], [40], [1.0]))
    if reopened:
        replay.close()
        replay = open_replay(tmp_path)
    rows = (1 << 30) // (45 * 30) + 1  # windows of 45 frames of 30 bytes
    before = replay.rng.bit_generator.state
    with pytest.raises(RefusedError, match="1 GiB"):
        replay.draw({"default": rows})
    assert replay.rng.bit_generator.state == before


@pytest.mark.parametrize(
    ("arrays", "fields", "says"),
    [
        ({"lengths": np.full(2, 2**31 - 1, np.int32)}, {}, "of the shape"),  # 2^31 entries of 4 MiB
        ({"lengths": np.full(2, -5, np.int32)}, {}, "without steps"),
        ({"ids": np.ones(3, np.uint64)}, {}, "differ in length"),
        ({"probabilities": np.ones(1)}, {}, "differ in length"),
        ({"probabilities": np.array([0.5, 0.0])}, {}, "probabilities from"),
        ({"probabilities": np.array([0.5, np.nan])}, {}, "probabilities from"),
        ({}, {"shares": [["a", 3, 1, 1.0], ["b", -1, 1, 1.0]]}, r"shares\[1\]\[1\]: expected"),
        ({}, {"shares": [["a", 2, 0, 1.0]]}, r"shares\[0\]\[2\]: expected"),
        ({}, {"shares": []}, "shares: expected"),
        ({}, {"table_items": 0}, "table_items: expected"),
    ],
)
def test_batches_that_make_no_sense_are_bad_messages(arrays, fields, says):
    good = {
        "ids": np.ones(2, np.uint64),
        "probabilities": np.ones(2),
        "versions": np.ones(2, np.int64),
        "lengths": np.ones(2, np.int32),
        "field/a": np.zeros(9, np.uint8),
    }
    header = {"table_items": 1, "fields": [["a", "uint8", [4 << 20], 0, 0, "lz4"]]}
    message = Message(messages.Batch.TYPE, header | fields, good | arrays, 1)
    with pytest.raises(WireError, match=says):
        decode_batch(decode(encode(message)))
