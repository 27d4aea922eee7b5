"""A folder belongs to a run: what one run has stored, another does not get unless it asks for it."""

import json
import shutil
import subprocess
import sys

import pytest

from tests.harness import control_server, until
from tests.replay import processes
from tests.replay.learners import learnable, run_learner
from troupe.common.errors import ConfigError
from troupe.common.wire.replay.client import ReplayRefusedError

CONFIG = {"replay": {"capacity_items": 1000, "min_items": 10}, "run": {"seed": 1}}


@pytest.fixture
def learner(context, tmp_path):
    """A function that has a learner of a run at the same address as the former one."""
    servers = []

    def begin(run, config=CONFIG):
        if servers:
            servers[-1].stop()
        addresses = f"ipc://{tmp_path}/control", f"ipc://{tmp_path}/announce"
        servers.append(
            control_server(
                context,
                *addresses,
                config=config,
                structural_hash="abc",
                total_slots=4,
                heartbeat_s=0.2,
                liveness_s=5.0,
                run=run,
            )
        )
        servers[-1].start()
        return servers[-1]

    yield begin
    for each in servers:
        each.stop()


@pytest.fixture
def member(server, tmp_path):
    """A function that starts a shard as part of the learner's run."""
    return lambda *options, **more: server("--learner", f"ipc://{tmp_path}/control", *options, **more)


def stopped(process):
    """The exit code after SIGTERM."""
    process.terminate()
    return process.wait(120)


def fill(client, endpoint, first=0):
    """Three chunks of ten items each."""
    actor = client(endpoint)
    for number in range(first, first + 3):
        processes.insert(actor, number)
    assert actor.flush(60)
    return actor


def refusal(tmp_path, *options):
    """The one line with which a shard ends with exit code 2."""
    words = ["--bind", f"ipc://{tmp_path}/refused", "--log-level", "warning", *map(str, options)]
    done = subprocess.run(
        [sys.executable, "-m", "troupe.services.replay", "serve", *words],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_items_of_an_old_run_stay_out_of_a_new_one(learner, member, server, client, tmp_path):
    folder = tmp_path / "data"
    learner("first")
    fill(client, member())
    assert stopped(server.process) == 0
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    learner("second")
    run = "--learner", f"ipc://{tmp_path}/control", "--data-dir", folder
    line = refusal(tmp_path, *run)
    assert "holds items of run first, and this is run second" in line
    assert "--data-dir, --volatile to start empty, or --adopt" in line
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert "holds items of run first, and this is no run" in refusal(tmp_path, "--data-dir", folder)

    learner("first")
    again = client(member())
    assert again.status(60)["restored_items"] == 30
    processes.check(again.sample(16, timeout_s=60))
    assert stopped(server.process) == 0

    learner("second")
    status = client(member("--volatile")).status(60)
    assert (status["restored_items"], status["run"]) == (0, "second")


@pytest.mark.parametrize(
    ("replay", "problem"),
    [
        ({"capacity_items": 10**12}, "replay.capacity_items = 1000000000000 (the run)"),
        ({"tables": [{"name": "../../pwn"}]}, "replay.tables"),
        ("nonsense", "replay"),
        (None, "replay"),
    ],
)
def test_a_run_that_cannot_be_is_refused_in_one_line(learner, tmp_path, replay, problem):
    learner("first", {**CONFIG, "replay": replay})
    line = refusal(tmp_path, "--learner", f"ipc://{tmp_path}/control", "--data-dir", tmp_path / "data")
    assert problem in line
    assert "Traceback" not in line


def test_a_shard_does_not_follow_its_address_into_another_run(learner, member, server, client):
    """The learner is replaced under a running shard, which has items of the former run."""
    learner("first")
    fill(client, member())
    control = learner("second")
    assert server.process.wait(120) == 3
    assert control.shards() == []


def test_a_snapshot_is_of_a_run_too(learner, member, server, client, tmp_path):
    learner("first")
    actor = fill(client, member())
    snapshot = tmp_path / "snapshot"
    assert actor.snapshot(str(snapshot), 60)["items"] == 30
    assert stopped(server.process) == 0
    restore = "--restore", str(snapshot)
    assert client(member(*restore, folder="same")).status(60)["restored_items"] == 30
    assert stopped(server.process) == 0

    learner("second")
    run = "--learner", f"ipc://{tmp_path}/control"
    line = refusal(tmp_path, *run, *restore, "--data-dir", tmp_path / "other")
    assert "holds items of run first" in line
    assert not (tmp_path / "other").exists()
    endpoint = member("--adopt", *restore, folder="other")
    assert client(endpoint).status(60)["restored_items"] == 30
    fill(client, endpoint, first=3)
    assert stopped(server.process) == 0
    # It is the new run's from now on.
    assert client(member(folder="other")).status(60)["restored_items"] == 60


def test_items_of_no_run_are_adopted_only_on_request(learner, member, server, client, tmp_path):
    fill(client, server("--table", "default:capacity=1000"))
    assert stopped(server.process) == 0
    learner("first")
    run = "--learner", f"ipc://{tmp_path}/control", "--data-dir", tmp_path / "data"
    assert "holds items of no run, and this is run first" in refusal(tmp_path, *run)
    assert client(member("--adopt")).status(60)["restored_items"] == 30


def test_a_learner_on_another_machine_goes_on_with_the_run(member, server, client, tmp_path):
    """All that it has of the run is the checkpoints."""
    running = run_learner(tmp_path, tmp_path / "here")
    actor = client(member(), specs=running.service.agent.fields)
    until(lambda: actor.insert(learnable(actor.specs, 30)))
    assert actor.flush(60)
    running.end()
    assert stopped(server.process) == 0
    shutil.copytree(tmp_path / "here" / "checkpoints", tmp_path / "there" / "checkpoints")
    replacement = run_learner(tmp_path, tmp_path / "there", resume=True)
    assert replacement.service.checkpoints.run_id == running.service.checkpoints.run_id
    assert client(member()).status(60)["restored_items"] == 30
    replacement.end()
    assert stopped(server.process) == 0
    signature = json.loads((tmp_path / "data" / "signature.json").read_text())
    assert signature["layout"]["run"] == running.service.checkpoints.run_id

    anew = run_learner(tmp_path, tmp_path / "anew")
    run = "--learner", f"ipc://{tmp_path}/control", "--data-dir", tmp_path / "data"
    assert f"this is run {anew.service.checkpoints.run_id}" in refusal(tmp_path, *run)
    anew.end()


def test_whoever_inserts_first_does_not_choose_the_fields(member, server, client, tmp_path):
    running = run_learner(tmp_path, tmp_path / "run")
    endpoint = member()
    stranger, actor = client(endpoint), client(endpoint, specs=running.service.agent.fields)
    processes.insert(stranger, 0)
    with pytest.raises(ConfigError, match="this server stores"):
        stranger.flush(60)
    items = learnable(actor.specs, 10)
    until(lambda: actor.insert(items))
    assert actor.flush(60)
    until(lambda: actor.insert(learnable(actor.specs, 10, length=2)))
    with pytest.raises(ReplayRefusedError, match="1 to 1 steps"):
        actor.flush(60)
    running.end()
