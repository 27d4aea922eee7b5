import contextlib

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from troupe.common.wire.codec import DTYPES, Limits, Message, WireError, decode, encode

FIELDS = st.dictionaries(
    st.text(max_size=20),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats(allow_nan=False)
        | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
        max_leaves=10,
    ),
    max_size=6,
)
ARRAYS = st.dictionaries(
    st.text(min_size=1, max_size=20),
    hnp.arrays(
        st.sampled_from([dtype.newbyteorder("=") for dtype in DTYPES.values()]),
        hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
    ),
    max_size=5,
)
SAMPLE = Message("INSERT", {"a": 1}, {"x": np.arange(6, dtype=np.float32).reshape(2, 3)}, 7)


def wire(message: Message) -> list[bytes]:
    return [bytes(frame) for frame in encode(message)]


def header(**changes: object) -> bytes:
    array = {"n": "x", "d": "uint8", "s": [3], "c": "raw"}
    return msgpack.packb({"v": 1, "t": "X", "i": 0, "f": {}, "a": [array], **changes})


@given(FIELDS, ARRAYS, st.integers(0, 2**64 - 1))
@settings(max_examples=80, deadline=None)
def test_what_is_encoded_comes_back(fields, arrays, request_id):
    back = decode(wire(Message("ANY", fields, arrays, request_id)))
    assert (back.type, back.fields, back.request_id) == ("ANY", fields, request_id)
    assert list(back.arrays) == list(arrays)
    for name, array in arrays.items():
        assert back.arrays[name].dtype == array.dtype
        assert back.arrays[name].shape == array.shape
        np.testing.assert_array_equal(back.arrays[name], array)


def test_arrays_in_any_layout_arrive_in_c_order():
    square = np.arange(12, dtype=np.int32).reshape(3, 4)
    arrays = {
        "transposed": square.T,
        "strided": square[:, ::2],
        "big": square.astype(">i4"),
        "back": square[::-1],
    }
    back = decode(wire(Message("X", {}, arrays)))
    for name, array in arrays.items():
        np.testing.assert_array_equal(back.arrays[name], array)
        assert back.arrays[name].flags.c_contiguous


def test_neither_side_copies():
    pixels = np.zeros((100, 1000), np.uint8)
    frames = encode(Message("X", {}, {"pixels": pixels}))
    assert np.shares_memory(np.frombuffer(frames[1], np.uint8), pixels)
    decoded = decode(frames).arrays["pixels"]
    assert np.shares_memory(decoded, pixels)
    assert not decoded.flags.writeable


def test_an_unaligned_frame_becomes_an_aligned_array():
    raw = memoryview(b"\0" + np.arange(3.0).tobytes())[1:]
    head = header(a=[{"n": "x", "d": "float64", "s": [3]}])
    array = decode([head, raw]).arrays["x"]
    assert array.flags.aligned
    np.testing.assert_array_equal(array, [0.0, 1.0, 2.0])


@pytest.mark.parametrize(
    ("kind", "frames"),
    [
        ("frame_count", []),
        ("frame_count", [header()]),
        ("frame_count", [header(), b"abc", b"abc"]),
        ("bad_header", [b""]),
        ("bad_header", [b"GET / HTTP/1.1\r\n\r\n"]),
        ("bad_header", [msgpack.packb([1, 2])]),
        ("bad_header", [msgpack.packb({"v": 1})]),
        ("bad_header", [msgpack.packb({1: 2})]),
        ("bad_header", [header() + b"more"]),
        ("bad_header", [header()[:-1], b"abc"]),
        ("bad_header", [b"\x91" * 5000]),
        ("bad_header", [header(f={"time": msgpack.Timestamp(1)}), b"abc"]),
        ("bad_header", [header(f={"code": msgpack.ExtType(5, b"x")}), b"abc"]),
        ("bad_header", [header(t=""), b"abc"]),
        ("bad_header", [header(t="X" * 33), b"abc"]),
        ("bad_header", [header(t="a\nb"), b"abc"]),
        ("bad_header", [header(i=-1), b"abc"]),
        ("bad_header", [header(i=True), b"abc"]),
        ("bad_header", [header(f=[]), b"abc"]),
        ("bad_header", [header(a={}), b"abc"]),
        ("header_too_large", [header(f={"x": "y" * 70_000}), b"abc"]),
        ("version", [header(v=2), b"abc"]),
        ("version", [header(v=True), b"abc"]),
        ("version", [header(v=1.0), b"abc"]),
        ("version", [header(v=None), b"abc"]),
        ("bad_array", [header(a=[5]), b"abc"]),
        ("bad_array", [header(a=[{"n": "", "d": "uint8", "s": [3]}]), b"abc"]),
        ("bad_array", [header(a=[{"n": "x", "d": "uint8", "s": [3], "c": "zip"}]), b"abc"]),
        ("bad_array", [header(a=[{"n": "x", "d": "uint8", "s": [3]}] * 2), b"abc", b"abc"]),
        ("bad_dtype", [header(a=[{"n": "x", "d": "object", "s": [3]}]), b"abc"]),
        ("bad_dtype", [header(a=[{"n": "x", "d": "O", "s": [3]}]), b"abc"]),
        ("bad_dtype", [header(a=[{"n": "x", "d": ["uint8"], "s": [3]}]), b"abc"]),
        ("bad_shape", [header(a=[{"n": "x", "d": "uint8", "s": [4]}]), b"abc"]),
        ("bad_shape", [header(a=[{"n": "x", "d": "uint8", "s": [-3]}]), b"abc"]),
        ("bad_shape", [header(a=[{"n": "x", "d": "uint8", "s": [-1, -3]}]), b"abc"]),
        ("bad_shape", [header(a=[{"n": "x", "d": "uint8", "s": [3.0]}]), b"abc"]),
        ("bad_shape", [header(a=[{"n": "x", "d": "uint8", "s": [1] * 9}]), b"a"]),
        ("bad_shape", [header(a=[{"n": "x", "d": "uint8", "s": [2**47] * 4 + [0]}]), b""]),
        ("too_large", [header(a=[{"n": "x", "d": "uint8", "s": [2**33, 2**33]}]), b"abc"]),
        ("too_large", [header(a=[{"n": str(n), "d": "uint8", "s": [0]} for n in range(65)])] + [b""] * 65),
    ],
)
def test_what_is_no_message_is_named(kind, frames):
    with pytest.raises(WireError) as caught:
        decode(frames)
    assert caught.value.kind == kind
    assert "\n" not in str(caught.value)


def test_the_limits_of_a_socket_hold():
    frames = wire(SAMPLE)
    decode(frames, limits=Limits(array_bytes=24, total_bytes=24))
    with pytest.raises(WireError, match="too_large"):
        decode(frames, limits=Limits(array_bytes=23))
    with pytest.raises(WireError, match="too_large"):
        decode(frames, limits=Limits(total_bytes=23))
    with pytest.raises(WireError, match="too_large"):
        encode(SAMPLE, limits=Limits(total_bytes=23))


@pytest.mark.parametrize(
    "message",
    [
        Message("X", {"x": object()}),
        Message("X", {"x": 2**64}),
        Message("X", {"x": "y" * 70_000}),
        Message("X", {}, {"x": np.array([object()])}),
        Message("X", {}, {"x": np.array(["text"])}),
        Message("X", {}, {"x": np.zeros(2, np.complex64)}),
    ],
)
def test_what_the_wire_does_not_carry_is_not_encoded(message):
    with pytest.raises(WireError):
        encode(message)


@given(st.lists(st.binary(max_size=200), max_size=4))
@settings(max_examples=200, deadline=None)
def test_random_frames_never_do_worse_than_a_wire_error(frames):
    with contextlib.suppress(WireError):
        decode(frames)


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 2**64 - 1)
    | st.floats()
    | st.text(max_size=9)
    | st.binary(max_size=9)
    | st.sampled_from([*DTYPES, "object", "raw", "x"]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("vtifandsc"), inner, max_size=5)
    ),
    max_leaves=12,
)


@given(JUNK, JUNK, JUNK, JUNK, st.binary(max_size=16))
@settings(max_examples=150, deadline=None)
def test_nearly_right_headers_never_do_worse_than_a_wire_error(kind, request_id, fields, array, payload):
    for frames in (
        [msgpack.packb({"v": 1, "t": kind, "i": request_id, "f": fields, "a": array}), payload],
        [header(a=[array]), payload],
        [header(a=[{"n": "x", "d": "uint8", "s": array}]), payload],
    ):
        try:
            message = decode(frames)
        except WireError:
            continue
        assert all(array.nbytes <= 16 for array in message.arrays.values())


@given(st.integers(0, 10_000), st.integers(1, 255))
@settings(max_examples=200, deadline=None)
def test_a_flipped_byte_never_does_worse_than_a_wire_error(position, flip):
    frames = wire(SAMPLE)
    damaged = bytearray(frames[0])
    damaged[position % len(damaged)] ^= flip
    with contextlib.suppress(WireError):
        decode([bytes(damaged), *frames[1:]])
