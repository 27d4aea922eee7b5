"""Messages that are almost right, made from docs/protocol.md alone: nothing of Troupe is imported here.

A message is made from a seed and its number, so that the one which does harm can be made again.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np

Frames = list[bytes]
SERVERS = ("replay", "control", "inference", "announce")
ROLES = ("actor", "replay", "evaluator", "viewer")
NAMES = {
    np.dtype(name): name for name in ("float32", "float64", "int32", "int64", "uint8", "uint32", "uint64")
}
"""Numpy takes longer to name a type than all else takes."""


@dataclass
class Draft:
    """A message before it is packed: arrays are [name, dtype, shape, bytes]."""

    kind: str
    number: int = 0
    fields: dict[str, Any] = field(default_factory=dict)
    arrays: list[list[Any]] = field(default_factory=list)

    def add(self, name: str, array: np.ndarray) -> None:
        """Append an array."""
        type_name = NAMES.get(array.dtype) or array.dtype.name
        self.arrays.append([name, type_name, list(array.shape), array.tobytes()])

    def pack(self) -> tuple[dict[str, Any], Frames]:
        """The header, and the frames of the arrays."""
        described = [{"n": n, "d": d, "s": s, "c": "raw"} for n, d, s, _ in self.arrays]
        header = {"v": 1, "t": self.kind, "i": self.number, "f": self.fields, "a": described}
        return header, [data for *_, data in self.arrays]


# ---------------------------------------------------------------- messages that are right


def insert(rng: random.Random, specs: list[list[Any]]) -> Draft:
    """An INSERT of a few steps, of the fields that the shard has said that it stores."""
    specs = [
        [name, dtype, list(shape), *rest] for name, dtype, shape, *rest in specs
    ]  # not to be mutated for ever
    steps, items = rng.randint(1, 4), rng.randint(1, 3)
    fields = {"incarnation": rng.randint(1, 5), "name": "fuzz", "steps": steps, "version": rng.randint(0, 9)}
    draft = Draft("INSERT", rng.randint(1, 40), fields | {"oldest": rng.randint(1, 40), "fields": specs})
    if rng.random() < 0.2:
        fields["tables"] = [["default", items]]
    offsets = np.array([rng.randrange(steps) for _ in range(items)], np.int32)
    draft.add("items/offsets", offsets)
    draft.add("items/lengths", np.ones(items, np.int32))
    draft.add("items/priorities", np.array([rng.random() + 0.1 for _ in range(items)], np.float64))
    for name, dtype, shape, before, after, codec in specs:
        entries = np.zeros((before + steps + after, *shape), dtype)
        if codec == "raw":
            draft.add("chunk/" + name, entries)
            continue
        size = entries[0].nbytes
        block = (size | 1 << 31).to_bytes(4, "little") + rng.randbytes(size)
        draft.add("chunk/" + name, np.frombuffer(block * len(entries), np.uint8))
        draft.add("lengths/" + name, np.full(len(entries), size + 4, np.uint32))
    return draft


def replay(rng: random.Random, specs: list[list[Any]]) -> Draft:
    """A message for a shard."""
    kind = rng.choice(("INSERT", "INSERT", "SAMPLE", "PRIORITIES", "CREDIT", "STATUS", "SNAPSHOT"))
    if kind == "INSERT":
        return insert(rng, specs)
    draft = Draft(kind, rng.randint(0, 99))
    if kind == "SAMPLE":
        draft.fields = {"table": "default", "batch_size": rng.randint(1, 16), "plain": False, "token": ""}
        if rng.random() < 0.3:
            draft.fields["shares"] = [["default", rng.randint(1, 9)]]
        if rng.random() < 0.3:
            draft.fields["suspects"] = [rng.randrange(1 << 31) for _ in range(rng.randint(1, 64))]
    elif kind == "PRIORITIES":
        draft.fields = {"table": "default"}
        draft.add("ids", np.array([rng.randrange(1 << 20) for _ in range(3)], np.uint64))
        draft.add("priorities", np.array([rng.random() for _ in range(3)], np.float64))
    elif kind == "CREDIT":
        draft.fields = {"incarnation": rng.randint(1, 5), "name": "fuzz"}
    elif kind == "SNAPSHOT":
        draft.fields = {
            "destination": rng.choice(("../up", "/nowhere/at/all", "s3://none/x", "a" * 300, "\0"))
        }
    return draft


def control(rng: random.Random, role: str) -> Draft:
    """A message for the learner's control socket."""
    kind = rng.choice(("HELLO", "HELLO", "HEARTBEAT", "PARAMS_GET", "TELEMETRY", "TELEMETRY", "BYE"))
    draft = Draft(kind, rng.randint(0, 99))
    if kind == "HELLO":
        role = role if role in ROLES and rng.random() < 0.8 else rng.choice(ROLES)
        draft.fields = {
            "role": role,
            "name": f"fuzz-{rng.randrange(9)}",
            "incarnation": rng.randrange(1 << 64),
            "hash": "",
            "slots_wanted": rng.choice((0, 1)) if role == "actor" else 0,
            "slots_held": [],
            "replay_endpoint": "tcp://127.0.0.1:1" if role == "replay" else "",
            "host": "box",
            "pid": 1,
            "software": "fuzz",
            "run": "",
        }
    elif kind == "TELEMETRY":
        draft.fields = {"metrics": {"fuzz/x": rng.random()}, "fields": {"episodes": [[1.0, 9], [2.0, 8]]}}
        if rng.random() < 0.3:
            draft.add("video", np.frombuffer(b"GIF89a" + rng.randbytes(60), np.uint8))
    elif kind == "BYE":
        draft.fields = {"reason": "fuzz"}
    else:
        draft.fields = {"version": rng.randint(-1, 9), "error": ""}
        if kind == "HEARTBEAT" and rng.random() < 0.1:
            draft.fields["epoch_ended"] = rng.randint(-1, 9)
    return draft


def inference(rng: random.Random) -> Draft:
    """A message for the learner's inference socket, about slots of CartPole that are not leased."""
    rows = rng.randint(1, 4)
    draft = Draft(
        "INFER", rng.randint(1, 99), {"incarnation": rng.randrange(1 << 64), "group": rng.randint(0, 3)}
    )
    if rng.random() < 0.5:
        draft.fields["slots"] = sorted(rng.sample(range(16), rows))
        draft.add("first", np.zeros((rows, 4), np.float32))
    else:
        draft.fields["after"] = rng.randint(0, 99)
        draft.add("obs", np.zeros((rows, 4), np.float32))
        draft.add("reward", np.ones(rows, np.float32))
        draft.add("ended", np.zeros(rows, np.uint8))
    return draft


# ---------------------------------------------------------------- and what is done to them


def weird(rng: random.Random) -> Any:
    """A value that is likely to be wrong wherever it stands."""
    deep: Any = "deep"
    choice = rng.randrange(12)
    if choice == 0:
        return rng.choice((None, True, False))
    if choice == 1:
        return rng.choice((-1, 0, 1, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**64 - 1, -(2**63)))
    if choice == 2:
        return rng.choice((float("nan"), float("inf"), -float("inf"), 1e308, -1e-308, 1e30, 0.5))
    if choice == 3:
        return rng.choice(
            ("", "\0", "x" * 5000, "../../x", "fuzz", "\n", "\ud7ff", "default", "a/b", "é" * 99)
        )
    if choice == 4:
        return rng.choice(
            ("ipc:///nowhere", "tcp://127.0.0.1:1", "tcp://*:99999", "inproc://zeromq.zap.01", "a")
        )
    if choice == 5:
        return rng.choice(([], {}, [[]], [{}], [None] * 70, [0] * 20_000, {"": ""}, {1: 2}, {"x": {1: [2]}}))
    if choice == 6:
        return rng.randbytes(rng.choice((0, 1, 8, 300)))
    if choice == 7:
        for _ in range(rng.choice((3, 40, 300, 500))):
            deep = [deep] if rng.random() < 0.5 else {"k": deep}
        return deep
    if choice == 8:
        return msgpack.ExtType(rng.randrange(128), rng.randbytes(rng.choice((1, 4, 9))))
    if choice == 9:
        return [weird(rng) for _ in range(rng.randrange(4))]
    if choice == 10:
        return ["x", [], [], 0, 0, "raw"]
    return rng.randrange(-(1 << 40), 1 << 40)


def nodes(value: Any) -> list[tuple[Any, Any]]:
    """Every place inside a value, as its container and its key or index."""
    places: list[tuple[Any, Any]] = []
    inside = [value]
    while inside:
        container = inside.pop()
        keys = list(container) if isinstance(container, dict) else range(len(container))
        places += [(container, key) for key in keys]
        inside += [container[key] for key in keys if isinstance(container[key], dict | list)]
    return places


def mutate_fields(rng: random.Random, draft: Draft) -> None:
    """Replace, remove or add a value, however deep it is."""
    places = nodes(draft.fields)
    choice = rng.random()
    if choice < 0.15 or not places:
        draft.fields[rng.choice(("extra", "", "shares", "slots", "video", "config"))] = weird(rng)
        return
    container, key = rng.choice(places)
    if choice < 0.3:
        del container[key]
    elif choice < 0.4:
        others = container if isinstance(container, dict) else [key]
        # Not a role as the name: services may be called by it, and their key permits to take their place.
        container[key] = container[rng.choice([each for each in others if (key, each) != ("name", "role")])]
    else:
        container[key] = weird(rng)


def mutate_arrays(rng: random.Random, draft: Draft) -> None:
    """Another name, type, shape or content of an array; arrays that are missing, twice, or too many."""
    arrays = draft.arrays
    choice = rng.randrange(9)
    if not arrays or choice == 0:
        for _ in range(rng.choice((1, 1, 1, 70))):
            draft.add(f"extra{rng.randrange(99)}", np.zeros(rng.randrange(5), np.float64))
        return
    at = rng.randrange(len(arrays))
    array = arrays[at] = list(arrays[at])
    if choice == 1:
        array[0] = rng.choice(
            ("", "x" * 200, "video", "first", 7, None, "chunk/", "lengths/obs", arrays[-1][0])
        )
    elif choice == 2:
        array[1] = rng.choice(
            ("float64", "uint8", "bool", "object", "complex64", "V8", "", 3, "float16", ">i4")
        )
    elif choice == 3:
        array[2] = rng.choice(
            ([], [0], [-1], [2**62, 4], [1] * 9, ["a"], [2**32, 2**32], None, [1.5], [3, 0, 2**60])
        )
    elif choice == 4:
        sizes = array[2] if isinstance(array[2], list) else []
        array[2] = [size + rng.choice((-1, 1, 100)) for size in sizes if isinstance(size, int)]
    elif choice == 5:
        del arrays[at]
    elif choice == 6:
        arrays.append(list(array))
    elif choice == 7:  # whole in form, with other numbers in it
        special = {"float64": np.nan, "float32": np.inf}.get(str(array[1]))
        size = len(array[3])
        if special is not None:
            array[3] = np.full(size // np.dtype(array[1]).itemsize, special, array[1]).tobytes()
        else:
            array[3] = rng.choice((b"\xff" * size, b"\0" * size, b"\x80" * size, rng.randbytes(size)))
    else:
        array[3] = array[3][: rng.randrange(len(array[3]) + 1)] if rng.random() < 0.5 else array[3] + b"more"


def mutate_header(rng: random.Random, header: dict[str, Any]) -> None:
    """Wrong, missing and unknown keys of the header."""
    key = rng.choice(("v", "t", "i", "f", "a", "z"))
    if rng.random() < 0.3:
        header.pop(key, None)
    else:
        header[key] = weird(rng)


def mutate_frames(rng: random.Random, frames: Frames) -> Frames:
    """Frames that are missing, twice, cut, empty, or no part of it; bits of the header turned over."""
    choice = rng.randrange(8)
    at = rng.randrange(len(frames))
    if choice == 0:
        frames[at] = frames[at][: rng.randrange(len(frames[at]) + 1)]
    elif choice == 1:
        del frames[at]
    elif choice == 2:
        frames.insert(at, frames[rng.randrange(len(frames))])
    elif choice == 3:
        frames[at] = rng.randbytes(rng.choice((0, 1, 100, 5000)))
    elif choice == 4:
        frames += [b""] * rng.choice((1, 3, 80))
    elif choice == 5:
        rng.shuffle(frames)
    else:
        head = bytearray(frames[0])
        for _ in range(rng.randint(1, 4)):
            if head:
                head[rng.randrange(len(head))] ^= 1 << rng.randrange(8)
        frames[0] = bytes(head)
    return frames or [b""]


def message(
    server: str, seed: int, number: int, *, role: str = "", specs: list[list[Any]] | None = None
) -> tuple[str, Frames]:
    """The kind that message `number` to the socket `server` was made from, and its frames.

    With other `specs` an INSERT is another one.
    """
    rng = random.Random(seed << 40 | number)
    if server == "announce":  # a subscription, or what no subscriber sends
        start = rng.choice((b"\1", b"\0", b"\2", b""))
        frames = [start + rng.randbytes(rng.choice((0, 0, 3, 50))) for _ in range(rng.choice((1, 1, 3)))]
        return "SUBSCRIPTION", frames
    makers = {
        "replay": lambda: replay(rng, specs or [["x", "float32", [2], 0, 0, "raw"]]),
        "control": lambda: control(rng, role),
        "inference": lambda: inference(rng),
    }
    draft = makers[server if rng.random() < 0.97 else rng.choice(list(makers))]()
    whole = rng.random() < 0.05
    for _ in range(0 if whole else rng.choice((1, 1, 1, 2, 3))):
        rng.choice((mutate_fields, mutate_fields, mutate_arrays))(rng, draft)
    header, frames = draft.pack()
    if not whole and rng.random() < 0.1:
        mutate_header(rng, header)
    try:
        frames = [msgpack.packb(header), *frames]
    except (ValueError, OverflowError):  # deeper than msgpack packs
        frames = [b"\x91" * 2000, *frames]
    if not whole and rng.random() < 0.2:
        frames = mutate_frames(rng, frames)
    return draft.kind, frames
