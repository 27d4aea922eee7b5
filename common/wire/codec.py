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
from typing import Any, TypeAlias

import msgpack
import numpy as np
import zmq

from common.errors import TroupeError

PROTOCOL_VERSION = 1

Buffer: TypeAlias = bytes | memoryview
"""What a frame may be made of: anything that ZeroMQ sends without looking inside."""

_NAMES = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "float32", "float64"),
)
DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(name).newbyteorder("<") for name in _NAMES}
"""The only element types on the wire. Objects, strings, records and dates are not among them."""


class WireError(TroupeError):
    """A message that cannot be encoded, or frames that are no message. `kind` is what servers count by."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


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

TypeAny: TypeAlias = type  # inside `Message` the word `type` is a field
_MISSING: Any = object()


@dataclass(slots=True)
class Message:
    """One decoded (or not yet encoded) message.

    Attributes:
        type: one of the constants of `common.wire.messages`.
        fields: small values: numbers, strings, booleans, None, and lists or maps of them.
        arrays: bulk data. Decoded arrays are read-only views of the received frames.
        request_id: chosen by the asker, repeated in the answer; 0 where nobody waits for one (u64).
    """

    type: str
    fields: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    request_id: int = 0

    def integer(self, name: str, default: int = _MISSING, *, low: int = 0, high: int = 2**64 - 1) -> int:
        """The integer field `name`, inside [low, high]; `default` where it is absent."""
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise WireError("bad_field", f"{self.type}.{name} is not an integer")
        if value is not default and not low <= value <= high:
            raise WireError("bad_field", f"{self.type}.{name} is outside [{low}, {high}]")
        return value

    def number(self, name: str, default: float = _MISSING) -> float:
        """The number field `name` as a float; `default` where it is absent."""
        value = self._get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise WireError("bad_field", f"{self.type}.{name} is not a number")
        return float(value)

    def boolean(self, name: str, default: bool = _MISSING) -> bool:
        """The boolean field `name`; `default` where it is absent."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise WireError("bad_field", f"{self.type}.{name} is not a boolean")
        return value

    def text(self, name: str, default: str = _MISSING, *, max_chars: int = 4096) -> str:
        """The string field `name`, of at most `max_chars`; `default` where it is absent."""
        value = self._get(name, default)
        if not isinstance(value, str) or len(value) > max_chars:
            raise WireError(
                "bad_field", f"{self.type}.{name} is not a string of at most {max_chars} characters"
            )
        return value

    def mapping(self, name: str, default: dict[str, Any] = _MISSING) -> dict[str, Any]:
        """The map field `name`; `default` where it is absent."""
        value = self._get(name, default)
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise WireError("bad_field", f"{self.type}.{name} is not a map with string keys")
        return value

    def sequence(self, name: str, default: list[Any] = _MISSING, *, of: TypeAny = object) -> list[Any]:
        """The list field `name`, every entry an instance of `of`; `default` where it is absent."""
        value = self._get(name, default)
        if not isinstance(value, list) or not all(
            isinstance(entry, of) and not (of is int and isinstance(entry, bool)) for entry in value
        ):
            raise WireError("bad_field", f"{self.type}.{name} is not a list of {of.__name__}")
        return value

    def array(self, name: str, dtype: str | None = None, ndim: int | None = None) -> np.ndarray:
        """The array `name`, checked against `dtype` (a name in `DTYPES`) and `ndim` where they are given."""
        array = self.arrays.get(name)
        if array is None:
            raise WireError("bad_field", f"{self.type} lacks the array {name}")
        if dtype is not None and array.dtype != DTYPES[dtype]:
            raise WireError("bad_field", f"array {name} of {self.type} is {array.dtype}, not {dtype}")
        if ndim is not None and array.ndim != ndim:
            raise WireError(
                "bad_field", f"array {name} of {self.type} has {array.ndim} dimensions, not {ndim}"
            )
        return array

    def _get(self, name: str, default: Any) -> Any:
        value = self.fields.get(name, default)
        if value is _MISSING:
            raise WireError("bad_field", f"{self.type} lacks the field {name}")
        return value


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
        kind = array.dtype.name
        if kind not in DTYPES:
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
    if not isinstance(fields, dict) or not all(isinstance(name, str) for name in fields):
        raise WireError("bad_header", "the fields are not a map with string keys")
    if not isinstance(table, list):
        raise WireError("bad_header", "the arrays are not a list")
    if len(table) > limits.arrays:
        raise WireError("too_large", f"{len(table)} arrays, at most {limits.arrays} are allowed")
    if len(table) != len(frames) - 1:
        raise WireError("frame_count", f"{len(table)} arrays are declared, {len(frames) - 1} frames follow")
    arrays: dict[str, np.ndarray] = {}
    total = 0
    for entry, frame in zip(table, frames[1:], strict=True):
        view = _view(frame)
        total += view.nbytes
        if total > limits.total_bytes:
            raise WireError("too_large", f"more than {limits.total_bytes} bytes of arrays")
        name, array = _array(entry, view, limits)
        if name in arrays:
            raise WireError("bad_array", f"two arrays are called {name!r}")
        arrays[name] = array
    return Message(kind, fields, arrays, request_id)


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
    if version != PROTOCOL_VERSION or isinstance(version, bool):
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
