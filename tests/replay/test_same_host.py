"""A peer on the same host reads the shard's files, and gets windows sent where it cannot."""

import threading
import time

import numpy as np
import pytest
import zmq

from tests.harness import CHAOS, PATIENCE_S, Shard, until
from tests.replay import processes
from troupe.common.wire import messages
from troupe.common.wire.codec import Message, decode, encode
from troupe.common.wire.replay import files as replay_files
from troupe.common.wire.replay.client import ReplayClient

ENOUGH = 2000 if CHAOS else 20
"""Batches that have to be overwritten before they are read, and batches that have to be read."""


@pytest.fixture
def server(tmp_path, context):
    """A function that starts a shard in the place of the last one, and returns its address."""
    endpoint = f"ipc://{tmp_path}/replay"

    def make(**options):
        make.shard = Shard(context, tmp_path / "data", endpoint, **{"capacity": 100, **options})
        return endpoint

    yield make
    make.shard.end()


@pytest.fixture
def client(context):
    clients = []

    def make(endpoint, **options):
        clients.append(ReplayClient(endpoint, ctx=context, **options))
        return clients[-1]

    yield make
    for each in clients:
        each.close(0)


def fill(client, chunks, first=0):
    for number in range(first, first + chunks):
        processes.insert(client, number)
    assert client.flush(60)


def test_batches_after_the_first_are_read_from_the_files(server, client):
    endpoint = server()
    actor, learner = client(endpoint), client(endpoint)
    remote = client(endpoint, map_files=False)
    fill(actor, 5)
    for _ in range(4):
        batch = learner.sample(64)
        processes.check(batch)
        learner.update_priorities(batch.ids, np.ones(64))
    assert learner.counters["mapped_batches"] >= 2  # the first was asked for before anything was known
    mapped_bytes = learner.batch_bytes
    for _ in range(3):
        processes.check(remote.sample(64))
    assert remote.counters["mapped_batches"] == 0
    assert mapped_bytes < 64 * 60 < remote.batch_bytes
    assert learner.status()["updated_priorities"] == 256


@pytest.mark.parametrize("hindrance", ["another host", "another folder", "no token", "another token"])
def test_who_cannot_have_the_files_gets_windows(server, client, monkeypatch, tmp_path, hindrance):
    endpoint = server()
    learner = client(endpoint)
    fill(learner, 5)
    if hindrance == "another host":
        monkeypatch.setattr(replay_files, "boot_id", lambda: "somewhere else")
    elif hindrance == "another folder":
        monkeypatch.setattr(replay_files, "Arena", lambda _: (_ for _ in ()).throw(OSError("not here")))
    elif hindrance == "no token":
        (tmp_path / "data" / "token").unlink()
    else:  # a folder of the same name that holds something else
        (tmp_path / "data" / "token").write_text("0" * 32)
    stranger = client(endpoint)
    for _ in range(4):
        processes.check(stranger.sample(64))
    assert stranger.counters["mapped_batches"] == 0


@pytest.mark.parametrize("empty", [False, True])
def test_a_restarted_shard_is_mapped_anew(server, client, tmp_path, empty):
    endpoint = server()
    learner = client(endpoint, liveness_s=1.0)
    fill(learner, 5)
    for _ in range(3):
        processes.check(learner.sample(64))
    before = learner.counters["mapped_batches"]
    assert before > 0
    server.shard.end()
    if empty:
        for file in (tmp_path / "data").iterdir():
            file.unlink()
    server()
    # Other chunks under the same numbers, where the files are new.
    fill(learner, 5, first=20)

    def read():
        batch = learner.sample(64)
        processes.check(batch)
        if empty:
            assert batch.fields["action"].min() >= 20 * processes.STEPS

    until(lambda: learner.counters["mapped_batches"] >= before + 3, step=read)


def test_a_wrong_token_and_a_long_one_get_windows(server, client, context):
    endpoint = server()
    fill(client(endpoint), 2)
    dealer = context.socket(zmq.DEALER)
    dealer.connect(endpoint)
    for number, token in enumerate(("", "f" * 32, "ä" * 32)):
        dealer.send_multipart(
            encode(Message(messages.Sample.TYPE, {"batch_size": 4, "token": token}, {}, number))
        )
        assert dealer.poll(60_000)
        answer = decode(dealer.recv_multipart())
        assert answer.type == messages.Batch.TYPE
        assert "rows" not in answer.arrays
        assert "field/obs" in answer.arrays
    dealer.send_multipart(encode(Message(messages.Sample.TYPE, {"batch_size": 4, "token": "f" * 999}, {}, 9)))
    assert dealer.poll(60_000)
    assert decode(dealer.recv_multipart()).fields["kind"] == "bad_field"
    dealer.close(linger=0)


def test_arrays_are_used_again(server, client):
    endpoint = server()
    learner = client(endpoint)
    fill(learner, 5)
    learner.sample(16)
    used = []
    for _ in range(3):
        batch = learner.sample(16)
        processes.check(batch)
        used.append({name: id(array) for name, array in batch.fields.items()})
        learner.recycle(batch)
        assert not batch.fields
    assert used[0] == used[1] == used[2]


def test_no_read_is_torn_while_the_shard_evicts(tmp_path, client):
    """Batches are read late from a shard that keeps few chunks and gets many."""
    endpoint = f"ipc://{tmp_path}/replay"
    # Room for so few chunks that even those that are kept for readers have to go.
    process = processes.start(
        tmp_path / "data", endpoint, "--table", "default:capacity=60", "--max-bytes", "20000"
    )
    learner = client(endpoint)
    stop = threading.Event()

    def write():
        actor = ReplayClient(endpoint, name="writer", max_outstanding=32)
        number = 4
        while not stop.is_set():
            number += actor.insert(processes.chunk(number))
            actor.poll(0)
        actor.close(0)

    thread = threading.Thread(target=write)
    rng = np.random.default_rng(0)
    counters = learner.counters

    def read():
        for _ in range(int(rng.integers(1, 12))):
            learner.request_sample(32)
        time.sleep(float(rng.choice([0.0, 0.001, 0.02])))
        while learner.outstanding_samples:
            batch = learner.receive(60)
            assert batch is not None, learner.wait_reason
            processes.check(batch)
            learner.recycle(batch)

    try:
        fill(learner, 4)
        learner.sample(8)
        thread.start()
        until(
            lambda: min(counters["gone_batches"], counters["mapped_batches"]) >= ENOUGH,
            PATIENCE_S + ENOUGH,
            step=read,
            why=lambda: counters,
        )
    finally:
        stop.set()
        process.kill()
        process.wait()
        if thread.ident is not None:
            thread.join(60)
    assert counters["bad_messages"] == 0
