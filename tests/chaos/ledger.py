"""An independent ledger of a replay shard, written from docs/protocol.md alone, without anything of Troupe.

`python -m tests.chaos.ledger JSON` inserts numbered chunks into a shard until SIGTERM as that page says:
credit, questions, sending again, new sockets. It notes every number that the shard acknowledges; afterwards
`audit` reads from the shard's files, whose format is on that page too, which numbers are there.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import zmq

STEPS = 2
UNSETTLED = 16
ASK_S, SILENCE_S, PAUSE_S, FLUSH_S = 1.0, 10.0, 0.5, 120.0
AGAIN = ("gap", "memory", "internal", "too_many")
RECORD_BYTES, SUM_BYTES = 48, 8
COMMITS_BEGIN = 2**48
SUMMED_WORDS = 64
MASK = 2**64 - 1


def content(name: str, dtype: str, shape: list[int], entries: int, number: int) -> np.ndarray:
    """What a field of chunk `number` holds: harmless to who learns from it, and told apart from others."""
    array = np.zeros((entries, *shape), dtype)
    if name == "obs":
        array += np.asarray((number % 997) / 997, dtype)
    elif name == "action":
        array += np.asarray(number % 2, dtype)
    elif name == "bootstrap_steps":
        array += np.asarray(1, dtype)
    return array


class Ledger:
    """One producer.

    Attributes:
        made: the newest number.
        acknowledged: how many were.
        refused: numbers with a final ERROR, and why.
        unsettled: numbers that are neither, in order, and when each was last sent.
    """

    def __init__(self, words: dict[str, Any]) -> None:
        self._words = words
        self._context = zmq.Context()
        self._journal = Path(words["journal"]).open("a", buffering=1)  # noqa: SIM115  until the process ends
        self._incarnation = int.from_bytes(os.urandom(7), "little") | 1
        self._journal.write(f"{self._incarnation}\n")
        self._fields: list[Any] | None = None
        self._credit, self._session = 0, None
        self._question = 0
        self._asked_s = self._heard_s = self._made_s = 0.0
        self._stopping = False
        self.made = self.acknowledged = self.sockets = 0
        self.refused: dict[int, str] = {}
        self.unsettled: dict[int, float] = {}

    def run(self) -> None:
        """Insert until a stop is asked for, then until everything is settled."""
        signal.signal(signal.SIGTERM, self._stop)
        self._connect()
        end_s = float("inf")
        while not (self._stopping and not self.unsettled) and time.monotonic() < end_s:
            if self._stopping and end_s == float("inf"):
                end_s = time.monotonic() + FLUSH_S
            self._turn()
        print(
            json.dumps(
                {
                    "made": self.made,
                    "acknowledged": self.acknowledged,
                    "refused": self.refused,
                    "unsettled": list(self.unsettled),
                    "sockets": self.sockets,
                }
            )
        )

    def _stop(self, *_: object) -> None:
        self._stopping = True

    def _turn(self) -> None:
        now_s = time.monotonic()
        if now_s - self._heard_s > SILENCE_S:
            self._connect()
            self._send_again(0)
        if now_s - self._asked_s > ASK_S:
            self._ask()
        due = now_s - self._made_s > self._words["period_s"]
        if due and self._fields and not self._stopping and len(self.unsettled) < min(self._credit, UNSETTLED):
            self.made += 1
            self._made_s = now_s
            self._insert(self.made)
        while self._socket.poll(5):
            self._take(self._socket.recv_multipart())

    def _connect(self) -> None:
        if self.sockets:
            self._socket.close(linger=0)
        self.sockets += 1
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.IMMEDIATE, 1)
        self._socket.curve_serverkey = self._words["server_key"].encode()
        secret = self._words["secret_key"].encode()
        self._socket.curve_secretkey, self._socket.curve_publickey = secret, zmq.curve_public(secret)
        self._socket.connect(self._words["endpoint"])
        self._heard_s = time.monotonic()

    def _send(self, kind: str, number: int, fields: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        table = [{"n": n, "d": a.dtype.name, "s": list(a.shape)} for n, a in arrays.items()]
        header = msgpack.packb({"v": 1, "t": kind, "i": number, "f": fields, "a": table})
        with contextlib.suppress(zmq.Again):  # nobody is there: it is sent again when a question is answered
            self._socket.send_multipart([header, *(a.tobytes() for a in arrays.values())], zmq.NOBLOCK)

    def _ask(self) -> None:
        self._question += 1
        self._asked_s = time.monotonic()
        self._send("CREDIT", self._question, {"incarnation": self._incarnation, "name": "ledger"}, {})

    def _insert(self, number: int) -> None:
        self.unsettled[number] = time.monotonic()
        arrays = {
            "items/offsets": np.array([0], np.int32),
            "items/lengths": np.array([1], np.int32),
            "items/priorities": np.array([1.0]),
        }
        assert self._fields is not None
        for name, dtype, shape, before, after, codec in self._fields:
            assert codec == "raw", "the ledger packs nothing"
            arrays[f"chunk/{name}"] = content(name, dtype, shape, before + STEPS + after, number)
        fields = {
            "incarnation": self._incarnation,
            "name": "ledger",
            "oldest": min(self.unsettled),
            "steps": STEPS,
            "fields": self._fields,
        }
        self._send("INSERT", number, fields, arrays)

    def _send_again(self, until_s: float, below: int | None = None) -> None:
        """Send what is not settled and was sent before a moment (0: all of it), in order."""
        for number, sent_s in sorted(self.unsettled.items()):
            if (not until_s or sent_s < until_s) and (below is None or number < below):
                self._insert(number)

    def _take(self, frames: list[bytes]) -> None:
        header = msgpack.unpackb(frames[0], strict_map_key=False)
        kind, number, fields = header["t"], header["i"], header["f"]
        self._heard_s = time.monotonic()
        if kind == "INSERTED":
            self._credit = fields["credit"]
            if self.unsettled.pop(number, None) is not None:
                self.acknowledged += 1
                self._journal.write(f"{number}\n")
        elif kind == "CREDIT":
            self._credit = fields["credit"]
            self._fields = fields.get("fields", self._fields)
            if fields["session"] != self._session and self._session is not None and number != self._question:
                self._ask()
            self._session = fields["session"]
            if number == self._question and self._fields:
                self._send_again(self._asked_s, fields.get("held"))
        elif kind == "ERROR" and fields.get("about") == "INSERT":
            self._failed(number, fields)

    def _failed(self, number: int, fields: dict[str, Any]) -> None:
        if fields["kind"] not in AGAIN:
            self.refused[number] = f"{fields['kind']}: {fields['detail']}"
            self.unsettled.pop(number, None)
            return
        if fields["kind"] != "gap":
            time.sleep(PAUSE_S)
        for each in sorted(self.unsettled):
            if each >= fields.get("expected", number):
                self._insert(each)


@dataclass(frozen=True)
class Audit:
    """What of a ledger is in a shard's files.

    Attributes:
        acknowledged: numbers in the journal.
        lost: of them, those that are not there though an older one is, or though nothing may leave.
        left: of them, those that have left before all others, as the oldest do.
        doubled: inserts, of any producer, that are there more than once.
        changed: of the ledger's, those whose content is another.
        rows: chunks of all producers.
        gone: chunks of all producers that are not there and were stored before all that are.
        gaps: those that are not there between others: what was being written when the shard was killed.
    """

    acknowledged: int
    lost: list[int]
    left: int
    doubled: list[tuple[int, int]]
    changed: list[int]
    rows: int
    gone: int
    gaps: int


def audit(folder: Path, journal: Path, *, removes: bool) -> Audit:
    """Compare a journal with the files of a shard that has ended; `removes`: it has let its oldest go."""
    incarnation, *numbers = (int(line) for line in journal.read_text().split())
    signature = json.loads((folder / "signature.json").read_text())
    fields = signature["fields"]
    lanes = 1 + len(fields)
    names = ["commit", "incarnation", "number", "version", "time", "steps"]
    places: tuple[str, tuple[int]] = ("<i8", (lanes,))
    formats: list[Any] = ["<u8", "<u8", "<u8", "<i8", "<f8", "<i8", places, places, "<u8"]
    dtype = np.dtype({"names": [*names, "starts", "sizes", "sum"], "formats": formats})
    assert dtype.itemsize == RECORD_BYTES + 16 * lanes + SUM_BYTES
    records = np.fromfile(folder / "chunks.records", dtype)
    records = records[records["commit"] != 0]
    # Bytes read as another format than they have look like thousands of lost and doubled chunks.
    wrong = [row for row in records if int(row["sum"]) != _checksum(row.tobytes())]
    assert not wrong, f"{len(wrong)} records do not match their checksums"
    pairs = collections.Counter(zip(records["incarnation"].tolist(), records["number"].tolist(), strict=True))
    own = records[records["incarnation"] == incarnation]
    there = {int(row["number"]): row for row in own}
    missing = [number for number in numbers if number not in there]
    oldest = min(there, default=0)
    left = [number for number in missing if removes and number < oldest]
    commits = records["commit"].tolist()
    first, last = min(commits, default=COMMITS_BEGIN + 1), max(commits, default=COMMITS_BEGIN)
    return Audit(
        acknowledged=len(numbers),
        lost=sorted(set(missing) - set(left)),
        left=len(left),
        doubled=[pair for pair, count in pairs.items() if count > 1],
        changed=_changed(folder, fields, there),
        rows=len(records),
        gone=first - 1 - COMMITS_BEGIN,
        gaps=last - first + 1 - len(records),
    )


def _checksum(record: bytes) -> int:
    """What the page says that the last eight bytes of a record are."""
    words = np.frombuffer(record[:-SUM_BYTES], "<u8").tolist()
    total = 1
    for first in range(0, len(words), SUMMED_WORDS):
        part = words[first : first + SUMMED_WORDS]
        total = 3 * total + sum(word * key for word, key in zip(part, KEYS, strict=False))
    return total & MASK


def _split_mix(count: int) -> list[int]:
    """The first outputs of SplitMix64 begun with 0, their lowest bit set."""
    outputs = []
    for i in range(1, count + 1):
        z = i * 0x9E3779B97F4A7C15 & MASK
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
        outputs.append(z ^ z >> 31 | 1)
    return outputs


KEYS = _split_mix(SUMMED_WORDS)


def _changed(folder: Path, fields: list[dict[str, Any]], there: dict[int, Any]) -> list[int]:
    changed = set()
    for lane, field in enumerate(fields, 1):
        name, type_name, shape = field["name"], field["dtype"], field["shape"]
        stored = np.memmap(folder / f"{name}.raw", type_name, "r").reshape(-1, *shape)
        entries = field["before"] + STEPS + field["after"]
        for number, row in there.items():
            start = int(row["starts"][lane])
            found = stored[start : start + entries]
            if not np.array_equal(found, content(name, type_name, shape, entries, number)):
                changed.add(number)
    return sorted(changed)


if __name__ == "__main__":
    Ledger(json.loads(sys.argv[1])).run()
