"""One message as multipart frames: a small msgpack header, then one raw frame per array.

The header is a map of five keys::

    {"v": 1, "t": "INSERT", "i": 7, "f": {...fields...},
     "a": [{"n": name, "d": dtype, "s": shape, "c": "raw"}, ...]}

Array `k` of `a` is frame `k + 1`: its elements in C order, little-endian, nothing else. The codec knows no
compression: compressed data travel as a `uint8` array beside an array of lengths, which keeps this file dumb
and the decoder easy to trust. Nothing here can run code from the wire (no pickle, no eval, no msgpack
extension types), and whatever is malformed ends as a `WireError` with a kind to count it by.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

import msgpack
import numpy as np
import zmq

from troupe.common.errors import RefusedError

PROTOCOL_VERSION = 1

Buffer: TypeAlias = bytes | memoryview
"""What a frame may be made of: anything that ZeroMQ sends without looking inside."""

Dtype = Literal[
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "float32",
    "float64",
]
DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(name).newbyteorder("<") for name in get_args(Dtype)}
"""The only element types on the wire. Objects, strings, records and dates are not among them."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_NAMES |= {dtype.newbyteorder(">"): name for name, dtype in DTYPES.items()}
"""A dtype works its name out anew each time, which takes longer than the rest of an array's entry."""


class WireError(RefusedError):
    """A message that cannot be encoded, or frames that are no message.

    Attributes:
        about: type of the message, as far as it could be read.
        request_id: its request id, likewise.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(kind, detail)
        self.about = ""
        self.request_id = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """What a decoder refuses, before it allocates anything.

    Attributes:
        header_bytes: largest header.
        arrays: most arrays in one message.
        dims: most dimensions of one array.
        array_bytes: largest single array.
        total_bytes: largest sum over the arrays.
        entries: most entries of one list or map in the header.
    """

    header_bytes: int = 64 * 1024
    arrays: int = 64
    dims: int = 8
    array_bytes: int = 1 << 30
    total_bytes: int = 1 << 31
    entries: int = 16 * 1024


DEFAULT = Limits()


@dataclass(slots=True)
class Message:
    """One decoded (or not yet encoded) message.

    Attributes:
        type: one of the constants of `troupe.common.wire.messages`.
        fields: small values: numbers, strings, booleans, None, and lists or maps of them.
        arrays: bulk data. Decoded arrays are read-only views of the received frames.
        request_id: chosen by the asker, repeated in the answer; 0 where no answer is awaited (u64).
    """

    type: str
    fields: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    request_id: int = 0


def encode(message: Message, *, limits: Limits = DEFAULT) -> list[Buffer]:
    """Turn `message` into frames that share memory with its arrays.

    Send them with `copy=False`, and leave the arrays alone afterwards: ZeroMQ reads them later, in its own
    thread. Arrays that are not contiguous or not little-endian are copied here.
    """
    table: list[dict[str, Any]] = []
    frames: list[Buffer] = [b""]
    total = sum(array.nbytes for array in message.arrays.values())
    if len(message.arrays) > limits.arrays or total > limits.total_bytes:
        raise WireError("too_large", f"{message.type} has {len(message.arrays)} arrays of {total} bytes")
    for name, array in message.arrays.items():
        kind = _NAMES.get(array.dtype)
        if kind is None:
            raise WireError("bad_dtype", f"array {name} is {array.dtype}, which the wire does not carry")
        table.append({"n": name, "d": kind, "s": array.shape, "c": "raw"})
        frames.append(_raw(array))
    header = {
        "v": PROTOCOL_VERSION,
        "t": message.type,
        "i": message.request_id,
        "f": message.fields,
        "a": table,
    }
    try:
        packed = msgpack.packb(header)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WireError("unencodable", f"{message.type}: {error}") from error
    if len(packed) > limits.header_bytes:
        raise WireError("header_too_large", f"{message.type} has a header of {len(packed)} bytes")
    frames[0] = packed
    return frames


def fits(message: Message) -> bool:
    """Whether `encode` takes this message."""
    try:
        encode(message)
    except WireError:
        return False
    return True


def decode(frames: Sequence[zmq.Frame | Buffer], *, limits: Limits = DEFAULT) -> Message:
    """Turn frames (without the routing identity) into a message whose arrays are views of them.

    Raises `WireError` for whatever is not exactly a message of this protocol version within `limits`.
    """
    if not frames:
        raise WireError("frame_count", "no frames")
    header = _header(_view(frames[0]), limits)
    kind, request_id, fields, table = header["t"], header["i"], header["f"], header["a"]
    if not isinstance(kind, str) or not 0 < len(kind) <= 32 or not kind.isascii() or not kind.isprintable():
        raise WireError("bad_header", "the message type is not a short word")
    if not isinstance(request_id, int) or isinstance(request_id, bool) or not 0 <= request_id < 2**64:
        raise WireError("bad_header", "the request id is not an unsigned 64-bit integer")
    try:
        return Message(kind, _fields(fields), _arrays(table, frames[1:], limits), request_id)
    except WireError as error:
        error.about, error.request_id = kind, request_id
        raise


def _fields(fields: Any) -> dict[str, Any]:
    if not isinstance(fields, dict) or not all(isinstance(name, str) for name in fields):
        raise WireError("bad_header", "the fields are not a map with string keys")
    return fields


def _arrays(table: Any, frames: Sequence[zmq.Frame | Buffer], limits: Limits) -> dict[str, np.ndarray]:
    """The frames as the arrays that `table` says."""
    if not isinstance(table, list):
        raise WireError("bad_header", "the arrays are not a list")
    if len(table) > limits.arrays:
        raise WireError("too_large", f"{len(table)} arrays, at most {limits.arrays} are allowed")
    if len(table) != len(frames):
        raise WireError("frame_count", f"{len(table)} arrays are declared, {len(frames)} frames follow")
    arrays: dict[str, np.ndarray] = {}
    total = 0
    for entry, frame in zip(table, frames, strict=True):
        view = _view(frame)
        total += view.nbytes
        if total > limits.total_bytes:
            raise WireError("too_large", f"more than {limits.total_bytes} bytes of arrays")
        name, array = _array(entry, view, limits)
        if name in arrays:
            raise WireError("bad_array", f"two arrays are called {name!r}")
        arrays[name] = array
    return arrays


def _raw(array: np.ndarray) -> Buffer:
    """The elements of `array` as one flat buffer of bytes, shared where that is possible."""
    if array.size == 0:
        return b""  # an empty memoryview cannot be flattened
    if array.dtype.byteorder == ">" or (sys.byteorder == "big" and array.dtype.itemsize > 1):
        array = array.astype(array.dtype.newbyteorder("<"))
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    return array.reshape(-1).view(np.uint8).data


def _view(frame: zmq.Frame | Buffer) -> memoryview:
    return frame.buffer if isinstance(frame, zmq.Frame) else memoryview(frame)


def _header(view: memoryview, limits: Limits) -> dict[str, Any]:
    """Unpack and check the outermost map of a header."""
    if view.nbytes > limits.header_bytes:
        raise WireError("header_too_large", f"{view.nbytes} bytes, at most {limits.header_bytes} are allowed")
    try:
        header = msgpack.unpackb(
            view,
            raw=False,
            strict_map_key=True,
            max_str_len=limits.header_bytes,
            max_bin_len=limits.header_bytes,
            max_array_len=limits.entries,
            max_map_len=limits.entries,
            max_ext_len=0,
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise WireError("bad_header", f"not msgpack within the limits ({type(error).__name__})") from error
    if not isinstance(header, dict):
        raise WireError("bad_header", "not a map")
    version = header.get("v")
    if type(version) is not int or version != PROTOCOL_VERSION:  # nor 1.0 or True, which are equal to it
        # Checked before anything else, because a later version may lay out the rest in another way.
        raise WireError(
            "version", f"the peer speaks protocol version {version!r:.20}, this is {PROTOCOL_VERSION}"
        )
    for key in ("t", "i", "f", "a"):
        if key not in header:
            raise WireError("bad_header", f"the key {key!r} is missing")
    return header


def _array(entry: Any, view: memoryview, limits: Limits) -> tuple[str, np.ndarray]:
    """Check one entry of the array table against its frame and wrap the frame."""
    if not isinstance(entry, dict):
        raise WireError("bad_array", "an entry of the array table is not a map")
    name, kind, shape, codec = entry.get("n"), entry.get("d"), entry.get("s"), entry.get("c", "raw")
    if not isinstance(name, str) or not 0 < len(name) <= 128:
        raise WireError("bad_array", "an array has no proper name")
    dtype = DTYPES.get(kind) if isinstance(kind, str) else None
    if dtype is None:
        raise WireError("bad_dtype", f"array {name!r} is of the type {kind!r:.40}")
    if codec != "raw":
        raise WireError("bad_array", f"array {name!r} has the unknown codec {codec!r:.40}")
    if not isinstance(shape, list) or len(shape) > limits.dims:
        raise WireError("bad_shape", f"array {name!r} has no shape of at most {limits.dims} dimensions")
    if not all(isinstance(size, int) and not isinstance(size, bool) and 0 <= size < 2**48 for size in shape):
        raise WireError("bad_shape", f"array {name!r} has the shape {shape!r:.80}")
    size_bytes = math.prod(shape) * dtype.itemsize  # Python integers: no overflow to hide in
    if size_bytes > limits.array_bytes:
        raise WireError("too_large", f"array {name!r} has {size_bytes} bytes")
    if size_bytes != view.nbytes:
        raise WireError("bad_shape", f"array {name!r} has {view.nbytes} bytes, {size_bytes} are declared")
    if size_bytes == 0:
        try:
            return name, np.zeros(shape, dtype)
        except ValueError as error:  # numpy multiplies the non-zero sizes, and has its own largest
            raise WireError("bad_shape", f"array {name!r} has the shape {shape!r:.80}") from error
    array = np.frombuffer(view, dtype).reshape(shape)
    # ZeroMQ hands out short frames at any address inside its receive buffer. Such arrays are small: one copy
    # spares every reader the slow unaligned path (and torch an error).
    if not array.flags.aligned:
        array = array.copy()
    array.flags.writeable = False
    return name, array
