"""Which chunks of replay are one episode: what shards hold, put together again as far as that is certain.

A chunk of single transitions says neither of which slot it is, nor whether an episode begins with it, nor
whether a time limit ended one. That follows from the chunks beside it. The one that goes on where another
stops begins with the very observation that the other one ends with. And slots step together: between two
chunks of an episode, the others can have inserted only so many steps. Where more lie before a chunk, and none
of them leads to it, an episode begins with it. Imported episodes are marked instead (see `filling`).
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from troupe.common.data.arena import Arena, DamagedChunksError
from troupe.common.data.inserts import LAST, MORE

Flags = NDArray[np.bool_]
_OF_RECORDS = [("commit", "u8"), ("incarnation", "u8"), ("sequence", "u8"), ("steps", "i8"), ("time_s", "f8")]
_OWN = [
    ("shard", "i8"),
    ("row", "i8"),
    ("whole", "?"),
    ("terminated", "?"),
    ("first", "V16"),
    ("last", "V16"),
]
CHUNK = np.dtype([*_OF_RECORDS, *_OWN])
"""What is known of a chunk; `first` and `last` are digests of its first and last observations."""


@dataclass(frozen=True)
class Found:
    """What shards hold.

    Attributes:
        episodes: the chunks of each whole one, in order, as records of `CHUNK`.
        fragments: how many pieces of other episodes there are.
        fragment_steps: steps of these.
    """

    episodes: list[NDArray]
    fragments: int
    fragment_steps: int


def find_episodes(arenas: Sequence[Arena], slots: float, chunk_steps: int) -> Found:
    """The whole episodes, ordered by when they began.

    Args:
        arenas: the shards of a run, with single transitions (`NStepAccumulator` with `n_steps` 1).
        slots: most that step together in an actor; infinite where they do not step together.
        chunk_steps: `actor.chunk_steps`.
    """
    chunks = all_chunks(arenas)
    # Of each other slot: what was in its open chunk before, and what it did until the next one. Shards are
    # not equally fast, hence each has to hold as much.
    between = (slots - 1) * (2 * chunk_steps + 1) * len(arenas) if slots > 1 else 0
    imported = np.isin(chunks["incarnation"], (MORE, LAST))
    streams = [np.flatnonzero(imported)] if imported.any() else []
    acted = np.where(imported, 0, chunks["incarnation"])
    streams += [np.flatnonzero(acted == each) for each in np.unique(acted[~imported])]
    whole, fragments, fragment_steps = list[NDArray](), 0, 0
    for places in streams:
        stream = chunks[places]
        gaps = _gaps(stream, len(arenas))
        parts = _of_import(stream, gaps) if imported[places[0]] else _of_actor(stream, gaps, between)
        for chain, is_whole in _chains(*parts):
            if is_whole:
                whole.append(places[chain])
            else:
                fragments += 1
                fragment_steps += int(stream["steps"][chain].sum())
    whole.sort(key=lambda each: int(each[0]))
    return Found([chunks[each] for each in whole], fragments, fragment_steps)


def all_chunks(arenas: Sequence[Arena]) -> NDArray:
    """The chunks of all shards `[N]`, in the order in which they were inserted."""
    parts = [np.zeros(0, CHUNK)]
    for shard, arena in enumerate(arenas):
        rows, records = arena.chunks()
        found = np.zeros(len(rows), CHUNK)
        found["shard"], found["row"] = shard, rows
        for name, _ in _OF_RECORDS:
            found[name] = records[name]
        for chunk in found:
            fields = read_chunk(arena, chunk)
            if fields is not None:
                obs, steps = fields["obs"], int(chunk["steps"])
                chunk["whole"], chunk["terminated"] = True, fields["discount"][-1] == 0
                chunk["first"], chunk["last"] = _digest(obs[:-steps]), _digest(obs[steps:])
        parts.append(found)
    chunks = np.concatenate(parts)
    # A commit is a number of one shard.
    return chunks if len(arenas) == 1 else chunks[np.lexsort((chunks["commit"], chunks["time_s"]))]


def read_chunk(arena: Arena, chunk: np.void) -> dict[str, NDArray] | None:
    """The fields of a chunk, `[entries, ...]` each; None if it is damaged, or has left meanwhile."""
    steps = np.array([chunk["steps"]], np.int32)
    try:
        fields = arena.gather(
            np.array([chunk["row"]]), np.array([chunk["commit"]]), np.zeros(1, np.int32), steps
        )
    except (DamagedChunksError, ValueError):
        return None
    return None if fields is None else {name: array[0] for name, array in fields.items()}


def _digest(obs: NDArray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(obs).tobytes(), digest_size=16).digest()


def _gaps(chunks: NDArray, shards: int) -> Flags:
    """Whether a chunk may be missing before each of `chunks [N]`, and behind the last, `[N + 1]`.

    The inserts of an incarnation are numbered from 1 in each shard. Of an actor, a shard may lack what others
    have long got: it is on its way, or came after the shard was read.
    """
    gaps = np.zeros(len(chunks) + 1, bool)
    for incarnation in np.unique(chunks["incarnation"]):
        for shard in range(shards):
            places = np.flatnonzero((chunks["incarnation"] == incarnation) & (chunks["shard"] == shard))
            if incarnation not in (MORE, LAST):
                # Also where it has none: for all that is known, what it has inserted there has left.
                gaps[places[-1] + 1 if len(places) else 0 :] = True
            jumps = np.diff(chunks["sequence"][places].astype(np.int64), prepend=0) != 1
            before = np.concatenate([[-1], places])[:-1]
            for begin, end in zip(before[jumps].tolist(), places[jumps].tolist(), strict=True):
                gaps[begin + 1 : end + 1] = True
    bad = np.flatnonzero(~chunks["whole"])
    gaps[bad] = gaps[bad + 1] = True
    return gaps


def _of_import(chunks: NDArray, gaps: Flags) -> tuple[NDArray, Flags, Flags]:
    """As `_of_actor`: episodes came one after the other, and the last chunk of each says so."""
    last, good = chunks["incarnation"] == LAST, chunks["whole"]
    parted = np.append(chunks["last"][:-1] != chunks["first"][1:], True)  # by what is in no shard here
    follows = np.where(last | gaps[1:] | ~good | parted, -1, np.arange(1, len(chunks) + 1))
    after_last = np.concatenate([[True], last[:-1]])
    return follows, after_last & ~gaps[:-1], last & good


def _of_actor(chunks: NDArray, gaps: Flags, between: float) -> tuple[NDArray, Flags, Flags]:
    """What follows each chunk `[N]` (-1: nothing), and which begin and which end an episode, `[N]` each.

    Where two chunks could follow or precede one, nothing is certain: in an environment of few observations,
    many begin alike.
    """
    total = np.concatenate([[0], np.cumsum(chunks["steps"])])
    places, here = np.flatnonzero(gaps), np.arange(len(chunks))
    passed = np.searchsorted(places, here, side="right")
    # Steps before and after each chunk without a gap. Before the first insert of all there was nothing.
    before = total[:-1] - np.concatenate([[-math.inf], total[places]])[passed]
    after = np.concatenate([total[places], total[-1:]])[passed] - total[1:]
    goes_on = ~chunks["terminated"] & chunks["whole"]
    begins = ((before > between) | np.isposinf(before)) & chunks["whole"]
    ends = (after > between) & goes_on

    firsts, lasts = chunks["first"].tolist(), chunks["last"].tolist()
    heads, tails = Counter(firsts), Counter(last for last, on in zip(lasts, goes_on, strict=True) if on)
    place_of = {first: place for place, first in enumerate(firsts)}
    begins &= np.array([not tails[first] for first in firsts], bool)
    ends &= np.array([not heads[last] for last in lasts], bool)
    follows = np.full(len(chunks), -1)
    for place in np.flatnonzero(goes_on).tolist():
        last = lasts[place]
        then = place_of.get(last, 0)
        alone = heads[last] == tails[last] == 1
        if alone and then > place and passed[then] == passed[place]:
            follows[place] = then
    return follows, begins, ends | (chunks["terminated"] & chunks["whole"])


def _chains(follows: NDArray, begins: Flags, ends: Flags) -> Iterator[tuple[list[int], bool]]:
    """The places of the chunks of each piece, and whether it is a whole episode."""
    leads = np.ones(len(follows), bool)
    leads[follows[follows >= 0]] = False
    for place in np.flatnonzero(leads).tolist():
        chain = [place]
        while (then := int(follows[chain[-1]])) >= 0:
            chain.append(then)
        yield chain, bool(begins[chain[0]] and ends[chain[-1]])
