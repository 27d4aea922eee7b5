"""All who read chunks find damage: the reader on the same host, the shard, its scrubber, snapshots."""

import numpy as np
import pytest

from tests.harness import Shard, until
from tests.replay import processes
from troupe.common.errors import CheckpointError
from troupe.common.wire.replay.client import ReplayClient
from troupe.services.replay.storage.snapshot import Snapshot, restore_snapshot

CHUNKS = 8


class Chunks:
    """A shard with `CHUNKS` chunks that may be started again, and clients of it."""

    def __init__(self, folder, context):
        self.folder, self.context = folder, context
        self.endpoint = f"ipc://{folder.parent}/replay"
        self.shard, self.clients = None, []
        self.start()
        actor = self.client()
        for number in range(CHUNKS):
            processes.insert(actor, number)
        assert actor.flush(60)

    def start(self, **options):
        self.end()
        self.shard = Shard(self.context, self.folder, self.endpoint, capacity=200, **options)
        self.replay = self.shard.replay

    def end(self):
        for client in self.clients:
            client.close(0)
        self.clients = []
        if self.shard is not None:
            self.shard.end()

    def client(self, **options):
        self.clients.append(ReplayClient(self.endpoint, ctx=self.context, **options))
        return self.clients[-1]

    def flip(self, number, field="obs"):
        """Change one bit of the chunk of this number, behind everybody's back."""
        store = self.replay.store
        row = int(np.flatnonzero((store.versions == number) & (store.commits != 0))[0])
        column = store.columns[field]
        lane, ending = (2, "blocks") if column.spec.compress else (1, "raw")
        lane += sum(len(each.lanes) for each in list(store.columns.values())[: column.number])
        unit_bytes = 1 if ending == "blocks" else column.spec.entry_bytes
        begin, count = (int(store._known[name][row, lane]) * unit_bytes for name in ("starts", "counts"))
        with (self.folder / f"{field}.{ending}").open("r+b") as file:
            file.seek(begin + count // 2)
            byte = file.read(1)[0]
            file.seek(begin + count // 2)
            file.write(bytes([byte ^ 4]))

    def check_that_it_left(self, number, log):
        """Whoever samples gets the others; its items are gone, counted and named."""
        learner = self.client(map_files=False)
        seen = set()
        for _ in range(6):
            batch = learner.sample(64)
            processes.check(batch)
            seen |= set(batch.versions.tolist())
        assert seen == set(range(CHUNKS)) - {number}
        assert learner.status()["damaged_chunks"] == 1
        assert self.replay.damaged_items == processes.STEPS
        assert "is damaged: its items were removed: 10 of 'default'" in log.text


@pytest.fixture
def chunks(tmp_path, context):
    made = Chunks(tmp_path / "data", context)
    yield made
    made.end()


@pytest.mark.parametrize("field", ["obs", "action"])
def test_a_reader_on_the_same_host_finds_it(chunks, caplog, field):
    learner = chunks.client()
    until(lambda: learner.poll(10) or learner._reader.files.arena is not None or learner.sample(1) is None)
    chunks.flip(3, field)
    for _ in range(20):
        processes.check(learner.sample(64))
    assert learner.counters["mapped_batches"] > 0
    assert learner.counters["damaged_batches"] == 1
    chunks.check_that_it_left(3, caplog)


@pytest.mark.parametrize("field", ["obs", "action"])
def test_a_shard_finds_what_happened_while_it_was_down(chunks, caplog, field, monkeypatch):
    monkeypatch.setattr("troupe.services.replay.service.Scrubber.advance", lambda self: None)
    chunks.flip(3, field)
    chunks.start()
    chunks.check_that_it_left(3, caplog)


@pytest.mark.parametrize("field", ["obs", "action"])
def test_with_power_a_shard_finds_what_happens_while_it_runs(chunks, caplog, field, monkeypatch):
    monkeypatch.setattr("troupe.services.replay.service.Scrubber.advance", lambda self: None)
    chunks.start(durable="power")
    learner = chunks.client(map_files=False)
    for _ in range(5):  # it has looked at all of them once
        processes.check(learner.sample(64))
    chunks.flip(3, field)
    chunks.check_that_it_left(3, caplog)


def test_the_scrubber_finds_what_nobody_samples(chunks, caplog):
    chunks.flip(3)
    until(lambda: chunks.replay.counters.damaged_chunks == 1)
    chunks.check_that_it_left(3, caplog)


def test_a_chunk_whose_number_is_damaged_leaves_with_its_items(chunks, caplog):
    """What the record says is not believed: its items are found by what the shard knows."""
    row = int(np.flatnonzero(chunks.replay.store.versions == 3)[0])
    chunks.replay.store.commits[row] ^= np.uint64(4)
    until(lambda: chunks.replay.counters.damaged_chunks == 1)
    chunks.check_that_it_left(3, caplog)


def test_a_snapshot_is_without_it(chunks, tmp_path, monkeypatch):
    monkeypatch.setattr("troupe.services.replay.service.Scrubber.advance", lambda self: None)
    chunks.flip(3)
    chunks.shard.end()
    chunks.shard = None
    chunks.start()
    snapshot = Snapshot(chunks.replay, str(tmp_path / "snapshot"))
    snapshot.start()
    snapshot.join(60)
    assert (snapshot.progress.state, snapshot.progress.detail) == ("done", "without 1 damaged chunks")
    assert snapshot.progress.items == (CHUNKS - 1) * processes.STEPS


def test_a_flipped_bit_in_a_snapshot_is_found_when_it_is_restored(chunks, tmp_path):
    snapshot = Snapshot(chunks.replay, str(tmp_path / "snapshot"))
    snapshot.start()
    snapshot.join(60)
    path = tmp_path / "snapshot" / "action.raw"
    content = bytearray(path.read_bytes())
    content[100] ^= 4
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"damaged: action\.raw"):
        restore_snapshot(str(tmp_path / "snapshot"), tmp_path / "there")
    assert not (tmp_path / "there").exists()
