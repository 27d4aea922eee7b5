"""Ways to unpack one batch of replay: libraries and codecs, on Pong frames, into memory that is there.

`python -m benchmarks.unpack --json [--seconds S]`. A batch is 512 windows of 7 frames of 84x84, 25 MB. Each
way packs the same frames one by one, as replay stores them, and unpacks them on one thread; medians of CPU
time, taken in turns. A library that is not installed is left out: `pip install cramjam imagecodecs numcodecs
blosc2 zstandard`.

In one call for the batch: `blosc`, as Troupe does; `lz4`, the package of that name, into memory of its own;
`cramjam`; `imagecodecs_frame`. With a call for each frame: `imagecodecs` and `numcodecs`, LZ4 blocks;
`zstandard` at level 1; `blosc2`, LZ4 in its own form. `copy` is a plain copy of as many bytes.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import lz4.block
import lz4.frame
import numpy as np
from numpy.typing import NDArray

from benchmarks.common import parser, report
from benchmarks.replay_rig import BATCH, FRAME, WINDOW, pong_frames
from troupe.common.data.packing import join_frame, pack_entries, unpack_frame

SIZE = FRAME[0] * FRAME[1]
Way = tuple[Callable[[], object], int]
"""Unpacks a batch, and the bytes that it was packed to."""


def batch_of(frames: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Windows from everywhere, `[512 x 7, 84 x 84]`."""
    starts = np.random.default_rng(0).integers(0, len(frames) - WINDOW, BATCH)
    return np.concatenate([frames[start : start + WINDOW] for start in starts]).reshape(-1, SIZE)


def frame_ways(batch: NDArray[np.uint8], out: NDArray[np.uint8]) -> dict[str, Way]:
    """Those that unpack a whole batch in one call."""
    blocks, _ = pack_entries(batch)
    frame = join_frame([blocks.data], SIZE, batch.nbytes)
    ways: dict[str, Way] = {
        "blosc": (lambda: unpack_frame(frame, out.shape, "uint8", out), len(frame)),
        "lz4": (lambda: lz4.frame.decompress(frame), len(frame)),
    }
    flat = out.reshape(-1)
    with suppress(ImportError):
        cramjam: Any = importlib.import_module("cramjam")
        ways["cramjam"] = (lambda: cramjam.lz4.decompress_into(frame, flat.data), len(frame))
    with suppress(ImportError):
        codecs: Any = importlib.import_module("imagecodecs")
        ways["imagecodecs_frame"] = (lambda: codecs.lz4f_decode(frame, out=flat), len(frame))
    return ways


def entry_ways(batch: NDArray[np.uint8], out: NDArray[np.uint8]) -> dict[str, Way]:
    """Those that unpack frame by frame."""
    rows = list(out)

    def each(pack: Callable[[bytes], Any], unpack: Callable[[Any, NDArray[np.uint8]], object]) -> Way:
        packed = [bytes(pack(row.tobytes())) for row in batch]

        def run() -> None:
            for source, row in zip(packed, rows, strict=True):
                unpack(source, row)

        return run, sum(len(source) for source in packed)

    ways = {}
    with suppress(ImportError):
        codecs: Any = importlib.import_module("imagecodecs")
        ways["imagecodecs"] = each(codecs.lz4_encode, lambda source, row: codecs.lz4_decode(source, out=row))
    with suppress(ImportError):
        lz4_of: Any = importlib.import_module("numcodecs.lz4")
        ways["numcodecs"] = each(lz4_of.compress, lz4_of.decompress)
    with suppress(ImportError):
        zstandard: Any = importlib.import_module("zstandard")
        reader = zstandard.ZstdDecompressor()
        pack = zstandard.ZstdCompressor(level=1).compress
        ways["zstandard"] = each(pack, lambda source, row: reader.stream_reader(source).readinto(row))
    with suppress(ImportError):
        blosc2: Any = importlib.import_module("blosc2")
        blosc2.set_nthreads(1)
        options = {"typesize": 1, "codec": blosc2.Codec.LZ4, "filter": blosc2.Filter.NOFILTER}
        ways["blosc2"] = each(lambda raw: blosc2.compress(raw, **options), blosc2.decompress)
    return ways


def main() -> None:
    """The command line."""
    options = parser(__doc__, seconds=20.0).parse_args()
    batch = batch_of(pong_frames(20_000))
    out = np.empty_like(batch)
    ways = (
        frame_ways(batch, out)
        | entry_ways(batch, out)
        | {"copy": (lambda: np.copyto(out, batch), batch.nbytes)}
    )
    for name, (unpack, _) in ways.items():
        out[:] = 0
        unpack()
        if name != "lz4" and not np.array_equal(out, batch):
            raise SystemExit(f"{name} unpacks something else")
    times: dict[str, list[float]] = {name: [] for name in ways}
    deadline = time.monotonic() + options.seconds
    while time.monotonic() < deadline:
        for name, (unpack, _) in ways.items():
            began = time.thread_time()
            unpack()
            times[name].append(time.thread_time() - began)
    figures: dict[str, float | int | str] = {}
    for name, spent in times.items():
        figures[f"{name}_ms"] = round(1e3 * statistics.median(spent), 2)
        figures[f"{name}_mb"] = round(ways[name][1] / 1e6, 2)
    report("unpack", figures)


if __name__ == "__main__":
    main()
