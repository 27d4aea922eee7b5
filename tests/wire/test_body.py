"""The structs of the messages: what is decoded is what they say, and an error names the wrong field."""

import numpy as np
import pytest

from troupe.common.wire import messages
from troupe.common.wire.codec import Message, WireError, decode, encode
from troupe.common.wire.control.messages import Game, TelemetryFields

INSERT = {"incarnation": 5, "steps": 1, "fields": [["x", "float64", [], 0, 0, "raw"]]}
ARRAYS = {
    "items/offsets": np.zeros(1, np.int32),
    "items/lengths": np.ones(1, np.int32),
    "items/priorities": np.ones(1),
    "chunk/x": np.ones(1),
}


def read(body, fields, arrays=()):
    return body.of(decode(encode(Message(body.TYPE, fields, dict(arrays), 1))))


def test_what_is_absent_has_its_default_and_what_is_unknown_is_ignored():
    arrays = {**ARRAYS, "new": np.zeros(3), "chunk/y": np.zeros(2)}
    insert = read(messages.Insert, {**INSERT, "new": [1], "offsets": "no array"}, arrays)
    assert (insert.oldest, insert.version, insert.counts()) == (1, 0, {"default": 1})
    assert list(insert.data) == ["x", "y"]
    assert not insert.sizes


def test_a_body_and_its_message_are_the_same():
    insert = read(messages.Insert, INSERT, ARRAYS)
    frames = encode(insert.message(7))
    again = decode(frames)
    assert again.request_id == 7
    assert set(again.arrays) == set(ARRAYS)
    assert "table" not in again.fields
    assert [bytes(frame) for frame in encode(messages.Insert.of(again).message(7))] == [*map(bytes, frames)]


@pytest.mark.parametrize(
    ("body", "fields", "arrays", "says"),
    [
        (messages.Insert, {"incarnation": 0}, {}, r"INSERT.incarnation: expected `int` >= 1"),
        (messages.Insert, {"incarnation": True}, {}, r"INSERT.incarnation: expected `int`, got `bool`"),
        (messages.Insert, {"fields": [["x", [], [], 0, 0, "raw"]]}, {}, r"INSERT.fields\[0\]\[1\]: "),
        (messages.Insert, {"fields": [["x", "object", [], 0, 0, "raw"]]}, {}, r"INSERT.fields\[0\]\[1\]: "),
        (messages.Insert, {"fields": [["x", "int8", [-1], 0, 0, "raw"]]}, {}, r"fields\[0\]\[2\]\[0\]: "),
        (messages.Insert, {"fields": [["x\n", "int8", [], 0, 0, "raw"]]}, {}, r"INSERT.fields\[0\]\[0\]: "),
        (messages.Insert, {"fields": [["x", "int8", [], 0, 0]]}, {}, r"INSERT.fields\[0\]: .*length 6"),
        (messages.Insert, {"fields": INSERT["fields"] * 2}, {}, r"INSERT: two fields of one name"),
        (messages.Insert, {"fields": []}, {}, r"INSERT.fields: "),
        (messages.Insert, {"tables": [["a", 1], ["a", 1]]}, {}, r"INSERT: a table twice"),
        (messages.Insert, {"tables": [["a", 2]]}, {}, r"INSERT: the tables and the items differ in length"),
        (messages.Insert, {}, {"items/offsets": np.zeros(1)}, r"INSERT.items/offsets: expected `int32`"),
        (messages.Insert, {}, {"lengths/x": np.zeros((1, 1), np.uint32)}, r"lengths/x: expected 1 dim"),
        (messages.Insert, {}, {"items/offsets": None}, r"INSERT: .*missing required field `items/offsets`"),
        (messages.Sample, {}, {}, r"SAMPLE: neither"),
        (messages.Sample, {"batch_size": 2**20 + 1}, {}, r"SAMPLE.batch_size: "),
        (
            messages.Sample,
            {"shares": [["a", 1], ["b", 0]]},
            {},
            r"SAMPLE.shares\[1\]\[1\]: expected `int` >= 1",
        ),
        (messages.SnapshotRequest, {"destination": "/a\0b"}, {}, r"SNAPSHOT.destination: "),
        (messages.SnapshotRequest, {"destination": "x" * 1025}, {}, r"SNAPSHOT.destination: .*1024"),
        (messages.Telemetry, {"metrics": {"a": "b"}}, {}, r"TELEMETRY.metrics\[...\]: expected `float`"),
        (
            messages.Infer,
            {"incarnation": 1, "group": 64, "after": 1},
            {},
            r"INFER.group: expected `int` <= 63",
        ),
        (messages.Infer, {"incarnation": 1, "group": 0}, {}, r"INFER: either"),
        (messages.Hello, {"role": "actor", "name": "n" * 65, "incarnation": 1}, {}, r"HELLO.name: "),
    ],
)
def test_the_error_names_what_is_wrong(body, fields, arrays, says):
    if body is messages.Insert:
        fields = {**INSERT, **fields}
        arrays = {name: array for name, array in {**ARRAYS, **arrays}.items() if array is not None}
    with pytest.raises(WireError, match=says) as caught:
        read(body, fields, arrays)
    assert caught.value.kind == "bad_field"
    assert "\n" not in str(caught.value)


def test_a_further_field_of_a_report_is_sent_without_a_word_elsewhere():
    class More(TelemetryFields):
        level: str = ""

    report = messages.Telemetry(metrics={}, fields=More([Game(1.0, 2)], level="x"), blobs={})
    sent = report.message().fields["fields"]
    assert sent == {"episodes": [[1.0, 2]], "level": "x"}
