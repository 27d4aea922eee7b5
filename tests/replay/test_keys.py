"""A replay process with keys: the whole way of a batch, and who gets what."""

import json
import subprocess
import sys

import pytest
import zmq

from tests.harness import Context, until
from tests.replay import processes
from tests.replay.ports import free_port
from troupe.common.errors import AuthError
from troupe.common.wire import messages
from troupe.common.wire.replay.client import ReplayClient
from troupe.common.wire.security.keys import load_keys, make_keys
from troupe.common.wire.sockets import Security


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys")
    make_keys(path)
    return path


@pytest.fixture(scope="module")
def endpoint(folder, tmp_path_factory):
    address = f"tcp://127.0.0.1:{free_port()}"
    process = processes.start(
        tmp_path_factory.mktemp("data"), address, "--keys", str(folder), "--table", "default:capacity=1000"
    )
    yield address
    assert processes.stop(process) == 0


@pytest.fixture
def client(folder):
    """A function that makes clients with the key of a role."""
    context: zmq.Context = Context()
    clients = []

    def make(address, role, keys=folder):
        security = Security(keys=load_keys(keys, role))
        clients.append(ReplayClient(address, ctx=context, name=role, security=security))
        return clients[-1]

    yield make
    for each in clients:
        each.close(0)
    context.destroy(linger=0)


def test_a_batch_goes_all_the_way(endpoint, client):
    actor, learner = client(endpoint, "actor"), client(endpoint, "learner")
    for number in range(5):
        processes.insert(actor, number)
    assert actor.flush(60)
    batch = learner.sample(64, timeout_s=120)
    processes.check(batch)
    learner.update_priorities(batch.ids, batch.probabilities)
    assert client(endpoint, "viewer").status(60)["tables"]["default"]["items"] == 50


def test_a_key_permits_what_its_role_does(endpoint, client):
    for role in ("actor", "viewer", "evaluator"):
        with pytest.raises(AuthError, match=f"SAMPLE needs a key for learner, and this one is for {role}"):
            client(endpoint, role).sample(8, timeout_s=120)
    viewer = client(endpoint, "viewer")
    processes.insert(viewer, 0)
    with pytest.raises(AuthError, match="INSERT needs a key for actor or learner"):
        viewer.flush(60)


def test_one_key_may_ask_for_the_status_so_often_and_another_still_can(endpoint, client):
    """A flood of questions took a fifth of a learner's updates: each answer takes a shard's time."""
    viewer, own = client(endpoint, "viewer"), client(endpoint, "evaluator")
    for number in range(1, 401):
        while not viewer._link.send(messages.Status(), number):
            viewer.poll(10)
    until(lambda: own.status(60)["rejected"].get("too_many", 0) >= 100)
    assert viewer.status(60)["uptime_s"] > 0  # asked again, it is answered a little later


def status_of(endpoint, *options):
    words = [sys.executable, "-m", "troupe.services.replay", "status", "--json", endpoint, *options]
    return subprocess.run(words, capture_output=True, text=True, timeout=120)


def test_the_command_line_says_why_and_ends_with_4(endpoint, folder, tmp_path):
    good = status_of(endpoint, "--keys", str(folder))
    assert json.loads(good.stdout)["uptime_s"] > 0
    make_keys(tmp_path / "other")
    for options, reason in (
        ([], "it requires keys"),
        (["--keys", str(tmp_path / "other")], "its key is not that in"),
        (["--keys", str(tmp_path / "nowhere")], "cannot read the keys"),
    ):
        refused = status_of(endpoint, *options)
        assert refused.returncode == 4
        assert refused.stderr.startswith("troupe: error: ")
        assert refused.stderr.count("\n") == 1
        assert reason in refused.stderr


def test_other_than_loopback_is_refused_without_keys(tmp_path):
    words = [sys.executable, "-m", "troupe.services.replay", "serve", "--data-dir", str(tmp_path / "data")]
    refused = subprocess.run(
        [*words, "--bind", f"tcp://0.0.0.0:{free_port()}"], capture_output=True, text=True, timeout=60
    )
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert "--insecure" in refused.stderr
