"""A peer that sends nonsense: the server counts it, and goes on serving the others meanwhile.

Some thousand messages by default; `TROUPE_CHAOS=1` makes it a hundred thousand.
"""

import os
import socket
import threading
import time

import msgpack
import numpy as np
import zmq

from common.wire.codec import PROTOCOL_VERSION
from common.wire.replay_client import ReplayClient
from tests.replay import processes

MESSAGES = 100_000 if os.environ.get("TROUPE_CHAOS") else 2000
KINDS = 10
ENOUGH = 11
"""Rounds in which the others have to be served meanwhile, however long they take."""


def header(kind, fields, arrays=(), version=PROTOCOL_VERSION):
    return msgpack.packb({"v": version, "t": kind, "i": 1, "f": fields, "a": list(arrays)})


def hostile_frames(rng, good):
    """One multipart message of some kind of nonsense."""
    kind = rng.integers(0, KINDS)
    if kind == 0:  # noise
        return [rng.bytes(int(rng.integers(0, 200))) for _ in range(rng.integers(1, 5))]
    if kind == 1:  # a header that ends too early
        return [good[0][: rng.integers(0, len(good[0]))], *good[1:]]
    if kind == 2:  # frames that are missing
        return good[: rng.integers(1, len(good))]
    if kind == 3:  # flipped bytes
        broken = bytearray(good[0])
        for _ in range(rng.integers(1, 4)):
            broken[rng.integers(0, len(broken))] = rng.integers(0, 256)
        return [bytes(broken), *good[1:]]
    if kind == 4:  # numbers out of range
        size = int(rng.choice([-(2**40), 0, 2**21, 2**62]))
        return [header("SAMPLE", {"table": "default", "batch_size": size, "token": "../" * 9, "plain": True})]
    if kind == 5:  # noise in the place of an array
        frames = list(good)
        at = rng.integers(1, len(frames))
        frames[at] = rng.bytes(len(bytes(frames[at])))
        return frames
    if kind == 6:  # no map, deep, or another version
        return (
            [msgpack.packb([[[]] * 1000]), b"x" * 10] if rng.random() < 0.5 else [header("STATUS", {}, (), 9)]
        )
    if kind == 7:  # an oversized header
        return [header("INSERT", {"name": "x" * 70_000}), *good[1:]]
    if kind == 8:  # shapes and sizes that lie
        shape = [int(2 ** rng.integers(0, 47)) for _ in range(rng.integers(1, 10))]
        return [header("PRIORITIES", {}, [{"n": "ids", "d": "uint64", "s": shape, "c": "raw"}]), b"12345678"]
    ids = np.array([2**64 - 1, 0, 1], np.uint64)  # ids that never were, priorities that are none
    bad = np.array([np.nan, -1.0, np.inf])
    arrays = [{"n": n, "d": d, "s": [3]} for n, d in (("ids", "uint64"), ("priorities", "float64"))]
    return [header("PRIORITIES", {}, arrays), ids.tobytes(), bad.tobytes()]


class Attacker(threading.Thread):
    """Sends ``MESSAGES`` as fast as they are taken, over one connection after the other, and more until
    ``enough`` is set.
    """

    def __init__(self, context, port):
        super().__init__()
        self.sent = 0
        self.failure = None
        self.enough, self.stopped = threading.Event(), threading.Event()
        self._context, self._port = context, port

    def run(self):
        rng = np.random.default_rng(0)
        good = processes.good_insert()
        try:
            while not (self.sent >= MESSAGES and self.enough.is_set()) and not self.stopped.is_set():
                self._one_connection(rng, good)
        except BaseException as error:
            self.failure = error

    def _one_connection(self, rng, good):
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 5000)
        dealer.connect(f"tcp://127.0.0.1:{self._port}")
        for _ in range(500):
            if not dealer.poll(10_000, zmq.POLLOUT):
                raise TimeoutError("the server takes nothing any more")
            dealer.send_multipart(hostile_frames(rng, good))
            self.sent += 1
            while dealer.poll(0):
                dealer.recv_multipart()
        dealer.close()
        # Not even ZeroMQ, and a connection that is opened for nothing.
        with socket.create_connection(("127.0.0.1", self._port)) as raw:
            raw.sendall(rng.bytes(300))
        socket.create_connection(("127.0.0.1", self._port)).close()


def test_garbage_harms_nobody(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    endpoint = f"tcp://127.0.0.1:{port}"
    context = zmq.Context()
    process = processes.start(tmp_path / "data", endpoint, "--capacity", "1000")
    client = ReplayClient(endpoint, ctx=context, name="actor-0")
    attacker = Attacker(context, port)
    try:
        processes.insert(client, 0)
        assert client.flush(20)
        attacker.start()
        served = number = 0
        while attacker.is_alive():
            number += 1
            processes.insert(client, number)
            batch = client.sample(32, timeout_s=30)
            # Broken inserts that are whole inserts all the same are the stranger's own.
            ours = batch.fields["producer"][:, 0] == 0
            action = batch.fields["action"][ours, 0]
            assert np.array_equal(batch.versions[ours], action // processes.STEPS)
            assert np.array_equal(batch.fields["obs"][ours, 3, 0, 0], action % 251)
            client.update_priorities(batch.ids[ours], np.ones(ours.sum()))
            served += 1
            if served == ENOUGH:
                attacker.enough.set()
        assert attacker.failure is None
        assert attacker.sent >= MESSAGES
        assert served >= ENOUGH
        assert client.flush(30)
        deadline = time.monotonic() + 60  # the server takes turns, so it may have answered us first
        while sum((rejected := client.status(20)["rejected"]).values()) < 0.3 * MESSAGES:
            assert time.monotonic() < deadline, rejected
            time.sleep(0.05)
        assert len(rejected) >= 5
        by_peer = client.status(20)["rejected_by_peer"]
        assert 2 <= len(by_peer) <= 64
        assert not any(peer.startswith("actor-0") for peer in by_peer)
        assert client.status(20)["inserted_chunks"] >= number + 1
        assert process.poll() is None
    finally:
        attacker.stopped.set()
        client.close(0)
        process.kill()
        process.wait()
        if attacker.ident:
            attacker.join(30)
        context.destroy(linger=0)
