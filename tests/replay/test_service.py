"""One replay process at a time, through its client and without it."""

import json
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import zmq

from tests.harness import InThread, control_server, until
from tests.replay import processes
from tests.replay.ports import free_port
from tests.replay.storage.replays import open_replay
from troupe.common.data.schema import Chunk, FieldSpec
from troupe.common.errors import ConfigError, PeerError
from troupe.common.runtime.lifecycle import StopSignal
from troupe.common.wire import messages, sockets
from troupe.common.wire.codec import Message, decode, encode
from troupe.common.wire.replay.client import ReplayRefusedError
from troupe.services.replay import rates, shard
from troupe.services.replay.service import ReplayService
from troupe.services.replay.shard import address_towards


def test_insert_sample_update_status_and_stop(server, client):
    endpoint = server(
        "--table", "default:capacity=100,min_items=20", endpoint=f"tcp://127.0.0.1:{free_port()}"
    )
    actor, learner = client(endpoint, name="actor-0"), client(endpoint, name="learner")
    learner.request_sample(16)
    processes.insert(actor, 0)
    assert actor.flush(60)
    assert actor.outstanding == 0

    def nothing_comes():
        assert learner.receive(0.05) is None

    until(lambda: "min size: 10 of 20" in learner.wait_reason, step=nothing_comes)
    for number in range(1, 15):
        processes.insert(actor, number)
    assert actor.flush(60)
    for _ in range(3):
        learner.request_sample(64)
    sizes = []
    for _ in range(4):  # the first may have been told to wait, and asked for again
        batch = learner.receive(120)
        sizes.append(len(batch.ids))
        processes.check(batch)
    assert sorted(sizes) == [16, 64, 64, 64]
    assert batch.table_items == 100
    assert batch.fields["action"].min() >= 50, "the oldest items should have left"
    # Priorities: everything but three items becomes zero.
    keep = np.unique(batch.ids)[:3]
    newest = int(batch.ids.max())  # of those that were drawn; the hundred that are there end behind it
    everything = np.arange(newest - 99, newest + 100, dtype=np.uint64)
    learner.update_priorities(everything, np.zeros(len(everything)))
    learner.update_priorities(keep, np.array([1.0, 1.0, np.nan]))
    learner.update_priorities(keep[2:], np.array([2.0]))
    batch = learner.sample(256)
    assert set(batch.ids) == set(keep)
    weights = np.array([1.0, 1.0, 2**0.6])
    assert np.allclose(batch.probabilities, (weights / weights.sum())[np.searchsorted(keep, batch.ids)])
    status = learner.status()
    assert status["tables"]["default"]["items"] == 100
    assert status["inserted_chunks"] == 15
    assert status["invalid_priorities"] == 1
    assert status["unknown_priorities"] == 99
    assert status["sampled_batches"] == 5 + learner.counters["gone_batches"]
    words = [sys.executable, "-m", "troupe.services.replay", "status", "--json", endpoint]
    printed = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(printed.stdout)["tables"]["default"]["capacity"] == 100
    assert processes.stop(server.process) == 0


def test_writers_pause_while_samples_are_behind(server, client):
    endpoint = server(
        "--table",
        "default:capacity=1000,min_items=20,samples_per_insert=1,samples_per_insert_error=64",
    )
    actor, learner = client(endpoint, name="actor-0"), client(endpoint, name="learner")
    number = 0

    def write():
        nonlocal number
        number += actor.insert(processes.chunk(number))
        actor.poll(20)

    until(lambda: "samples per insert" in actor.blocked_reason, step=write, why=lambda: actor.blocked_reason)
    assert "waits for samples" in actor.blocked_reason
    assert actor.credit == 0
    assert not actor.insert(processes.chunk(number))
    assert actor.flush(60)
    assert 8 <= number < 90
    assert "waits for samples" in learner.status()["insert_blocked"]
    # Sampling lets it go on, and then waits for inserts itself.
    for _ in range(number):
        learner.request_sample(32)
    assert learner.receive(60) is not None
    received = 1
    while learner.receive(0.3) is not None:
        received += 1
    assert received < number
    while "waits for inserts" not in learner.wait_reason:
        learner.receive(0.3)
    for _ in range(
        4
    ):  # of ten items each: up to 32 are missing, which depends on how many were written before
        processes.insert(actor, number)
    assert learner.receive(60) is not None


def test_mistakes_are_told_and_counted(server, client, context):
    endpoint = server("--table", "default:capacity=100")
    actor = client(endpoint, name="actor-0")
    processes.insert(actor, 0)
    assert actor.flush(60)
    other = client(endpoint, name="other")
    wrong = Chunk({"obs": np.zeros((5, 3))}, 5, *(np.ones(1, np.int32),) * 2, np.ones(1))
    while not other.insert(wrong):
        other.poll(20)
    with pytest.raises(ConfigError, match="fields \\['obs'\\]"):
        other.flush(60)
    with pytest.raises(ReplayRefusedError, match="tables are"):
        actor.sample(4, table="nowhere", timeout_s=60)
    bad = processes.chunk(1)
    bad.priorities[3] = np.nan
    assert actor.insert(bad)
    with pytest.raises(ReplayRefusedError, match="NaN"):
        actor.flush(60)
    processes.insert(actor, 2)
    assert actor.flush(60)
    status = actor.status()
    assert status["rejected"].pop("signature") >= 1
    assert status["rejected"] == {"no_table": 1, "bad_priority": 1}
    by_name = {peer.split("-")[0]: kinds for peer, kinds in status["rejected_by_peer"].items()}
    assert by_name.pop("other")["signature"] >= 1
    assert by_name == {"actor": {"no_table": 1, "bad_priority": 1}}
    assert status["inserted_chunks"] == 2
    outside = processes.chunk(3)
    outside.lengths[-1] = 2
    with pytest.raises(ConfigError, match="outside"):
        actor.insert(outside)
    with pytest.raises(ConfigError, match="fields"):
        actor.insert(Chunk({"a": np.zeros(3)}, 3, np.array([2]), np.array([2]), np.ones(1)))


def test_incompressible_and_declared_fields(server, client):
    endpoint = server("--table", "default:capacity=100")
    rng = np.random.default_rng(0)
    obs = rng.integers(0, 256, (13, 64, 64), dtype=np.uint8)
    items = np.arange(10, dtype=np.int32)
    data = Chunk({"obs": obs}, 10, items, np.ones(10, np.int32), np.ones(10))
    actor = client(endpoint, specs=[FieldSpec("obs", "uint8", (64, 64), 2, 1, compress=True)])
    while not actor.insert(data):
        actor.poll(20)
    obs_sent = obs.copy()
    obs[:] = 0  # the caller may use its arrays again at once
    batch = actor.sample(64)
    assert batch.fields["obs"].shape == (64, 4, 64, 64)
    starts = {obs_sent[i : i + 4].tobytes() for i in range(10)}
    assert all(window.tobytes() in starts for window in batch.fields["obs"])


def test_a_strangers_client_by_hand(server, context):
    """Nothing but msgpack and the codec's frames: what the protocol's description promises."""
    endpoint = server("--table", "default:capacity=100")
    dealer = context.socket(zmq.DEALER)
    dealer.connect(endpoint)
    good = processes.good_insert()
    for _ in range(3):  # the same one: stored once, acknowledged each time
        dealer.send_multipart(good)
    dealer.send_multipart(
        encode(Message(messages.Sample.TYPE, {"table": "default", "batch_size": 8}, {}, 42))
    )
    kinds = []
    while len(kinds) < 4:
        assert dealer.poll(60_000)
        answer = decode(dealer.recv_multipart())
        kinds.append((answer.type, answer.request_id))
    assert kinds == [(messages.Inserted.TYPE, 1)] * 3 + [(messages.Batch.TYPE, 42)]
    assert answer.fields["table_items"] == 10
    dealer.send_multipart(encode(Message("NONSENSE", {}, {}, 7)))
    assert dealer.poll(60_000)
    answer = decode(dealer.recv_multipart())
    assert (answer.type, answer.fields["kind"], answer.request_id) == (messages.Error.TYPE, "bad_type", 7)


def test_nobody_there_is_said(client, tmp_path):
    lonely = client(f"ipc://{tmp_path}/nobody", name="actor-0")
    assert not lonely.insert(processes.chunk(0))
    lonely.poll(50)
    assert "does not answer" in lonely.blocked_reason
    with pytest.raises(PeerError, match="does not answer"):
        lonely.status(0.2)
    with pytest.raises(PeerError):
        lonely.sample(4, timeout_s=0.2)


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--bind", "tcp://0.0.0.0:5999"], 2, "without keys"),
        (
            ["--table", "a:capacity=10,min_items=11"],
            2,
            "min_items (11) should be from 1 to the capacity (10)",
        ),
        (["--table", "a:capasity=10"], 2, "table 'a' has no field 'capasity'; nearest: capacity"),
        (["--table", "a:queue"], 2, "write limiter=queue"),
        (["--table", "a", "--table", "a"], 2, "table 'a' is defined twice"),
        (["--min-items=11"], 2, "--min-items is a field of a table: --table default:min_items=VALUE"),
        (["--max-bytes", str(1 << 50)], 2, "more than 90 %"),
        (["--table", f"a:capacity={10**13}"], 2, "capacity (10000000000000) should be from 1 to"),
        (["--learner", "tcp://127.0.0.1:1", "--max-bytes", "9"], 2, "--max-bytes has no effect"),
        (["--learner", "tcp://127.0.0.1:1", "--table", "a:capacity=9"], 2, "--table has no effect"),
        (["--data-dir", "/proc/nowhere"], 2, "cannot write in /proc/nowhere"),
        (["--learner", "tcp://127.0.0.1:1", "--join-timeout-s", "0.5"], 3, "could not join the learner"),
        (
            ["--bind", "tcp://0.0.0.0:*", "--insecure", "--learner", "tcp://127.0.0.1:1"],
            2,
            "give --advertise",
        ),
    ],
)
def test_errors_are_one_line(tmp_path, words, code, text):
    command = ["serve", "--log-level", "error", "--bind", f"ipc://{tmp_path}/replay"]
    refused([*command, "--data-dir", str(tmp_path / "data"), *words], code, text)


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ([], 2, "needs a command: serve, status, snapshot"),
        (["--bind", "tcp://127.0.0.1:1"], 2, "stands before --bind: `troupe replay serve --bind ...`"),
        (["--status", "tcp://127.0.0.1:1"], 2, "--status is a command: `troupe replay status --help`"),
        (["--snapshot=tcp://127.0.0.1:1", "there"], 2, "--snapshot is a command: `troupe replay snapshot"),
        (["stauts", "tcp://127.0.0.1:1"], 2, "nearest: status"),
        (["status"], 2, "ADDRESS"),
        (["status", "tcp://127.0.0.1:1", "--jsn"], 2, "did you mean --json?"),
        (["snapshot", "tcp://127.0.0.1:1"], 2, "DEST"),
        (["status", "tcp://127.0.0.1:1"], 3, "does not answer"),
    ],
)
def test_errors_of_other_commands_are_one_line(words, code, text):
    refused(words, code, text)


def refused(words, code, text):
    """The command ends so, and says this."""
    command = [sys.executable, "-m", "troupe.services.replay", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code
    assert done.stderr.startswith("troupe: error: ")
    assert done.stderr.count("\n") == 1
    assert text in done.stderr


def test_a_shard_on_every_interface_says_which_one_others_can_use(monkeypatch):
    monkeypatch.setattr(
        shard, "_host_towards", lambda host, port: {"learner": "10.0.0.7", "v6": "fd00::7"}[host]
    )
    assert address_towards("tcp://learner:5550", "tcp://0.0.0.0:5560") == "tcp://10.0.0.7:5560"
    assert address_towards("tcp://v6:5550", "tcp://[::]:5560") == "tcp://[fd00::7]:5560"
    assert address_towards("tcp://learner:5550", "tcp://10.1.1.1:5560") == "tcp://10.1.1.1:5560"
    assert address_towards("ipc:///x", "ipc:///y") == "ipc:///y"
    with pytest.raises(ConfigError, match="give --advertise tcp://HOST:5560"):
        address_towards("ipc:///x", "tcp://0.0.0.0:5560")


def test_joins_a_run_and_ends_with_it(tmp_path, context, client):
    control = control_server(
        context,
        f"ipc://{tmp_path}/control",
        f"ipc://{tmp_path}/announce",
        config={"replay": {"capacity_items": 1000, "min_items": 10}, "run": {"seed": 1}},
        structural_hash="abc",
        total_slots=4,
    )
    control.start()
    process = processes.start(
        tmp_path / "data", f"ipc://{tmp_path}/replay", "--learner", f"ipc://{tmp_path}/control"
    )
    try:
        until(control.shards)
        assert control.shards() == [f"ipc://{tmp_path}/replay"]
        actor = client(control.shards()[0])
        processes.insert(actor, 0)
        assert actor.flush(60)
        assert actor.status()["tables"]["default"]["capacity"] == 1000
        metrics = {}
        while metrics.get("replay/items") != 10:
            metrics = control.telemetry.get(timeout=120).metrics
        assert {"replay/inserts_per_s", "replay/samples_total", "replay/bytes"} <= set(metrics)
        control.set_state(stopping=True)
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.wait()
        control.stop()


def test_it_reports_when_it_begins_to_serve(tmp_path, context, monkeypatch):
    """A resumed run of few steps was over before it heard what its replay had kept."""
    monkeypatch.setattr(rates, "PERIOD_S", 3600.0)
    told, stop = [], StopSignal()
    control = SimpleNamespace(
        check=lambda: None, state=SimpleNamespace(stopping=False), send_telemetry=told.append
    )
    replay = open_replay(tmp_path, 10)
    router = sockets.make_router(context, f"ipc://{tmp_path}/shard")
    running = InThread(ReplayService(replay, router, stop, control), stop)
    try:
        until(lambda: told)
    finally:
        running.end()
    assert told[0]["replay/restored_items"] == 0


def test_signals_end_it_at_once_and_its_last_line_says_so(server, client, tmp_path):
    log = tmp_path / "log"
    for number, inserted in ((signal.SIGTERM, 10), (signal.SIGINT, 0)):
        endpoint = server("--table", "default:capacity=100", "--log-file", str(log), "--log-level", "info")
        one = client(endpoint)
        if inserted:
            processes.insert(one, 0)
            assert one.flush(60)
        one.status(60)
        server.process.send_signal(number)
        assert server.process.wait(120) == 0
        assert f"stopped with 10 items, {inserted} inserted" in log.read_text().splitlines()[-1]
