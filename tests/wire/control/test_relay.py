"""Processes of one host that fetch parameters through one of them."""

import fcntl
import itertools
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zmq

from tests.harness import Context, control_server, until
from troupe.common.errors import ConfigError
from troupe.common.wire.control.member import Member, Params
from troupe.common.wire.control.params import encode_params
from troupe.common.wire.control.relay import HostRelay

LIMIT_S = 90.0


class Fetcher:
    """One process, and the parameters that it has got: version, sum of the weights, relayed, relays."""

    def __init__(self, endpoint: str, name: str, directory: Path, patience_s: float) -> None:
        words = [sys.executable, "-m", "tests.wire.control.relay_process", endpoint, name, str(directory)]
        self.process = subprocess.Popen([*words, str(patience_s)], stdout=subprocess.PIPE, text=True)
        self._lines: queue.Queue[list[str]] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.split()[1:])

    def wait_for(self, version: int) -> tuple[float, int, bool]:
        """Waits for this version: sum of its weights, how many came by relay, and whether it is the relay."""
        while True:
            got, total, relayed, relays = self._lines.get(timeout=LIMIT_S)
            if int(got) == version:
                return float(total), int(relayed), relays == "1"

    def end(self) -> None:
        self.process.kill()
        self.process.wait(120)
        self._reader.join(60)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def server(tmp_path):
    context = Context()
    server = control_server(
        context,
        f"ipc://{tmp_path}/control",
        f"ipc://{tmp_path}/announce",
        config={"run": {"seed": 0}},
        structural_hash="h",
        total_slots=1,
        heartbeat_s=0.2,
        liveness_s=60.0,
    )
    server.start()
    yield server
    server.stop()
    context.destroy(linger=0)


@pytest.fixture
def fetchers(server, tmp_path):
    started = []

    def start(count, patience_s):
        for index in range(count):
            name = f"fetcher-{index}"
            started.append(Fetcher(server.control_endpoint, name, tmp_path / "relay", patience_s))
        return started

    yield start
    for fetcher in started:
        fetcher.end()


def weights(version):
    return {"w": np.full((100, 1000), version, np.float32)}


def settle(server, fetchers, version):
    """Publishes until only one process fetches from the learner: at the start some ask by themselves."""
    versions = itertools.count(version)

    def settled():
        version, before = next(versions), server.params_sent
        server.publish(version, weights(version))
        found = [fetcher.wait_for(version) for fetcher in fetchers]
        return server.params_sent == before + 1 and sum(relays for _, _, relays in found) == 1

    until(settled, why=lambda: "several processes still fetch from the learner")
    return next(versions)


def test_one_process_of_a_host_fetches_for_all(server, fetchers):
    four = fetchers(4, patience_s=60.0)
    version = settle(server, four, 1)
    before = server.params_sent
    for version in range(version, version + 5):  # noqa: B020  (the range stands before the first turn)
        server.publish(version, weights(version))
        found = [fetcher.wait_for(version) for fetcher in four]
        assert [total for total, _, _ in found] == [version * 100_000.0] * 4
    assert server.params_sent == before + 5
    assert sum(relays for _, _, relays in found) == 1
    assert all(relayed >= 5 for _, relayed, relays in found if not relays)


def test_a_dead_relay_is_replaced_and_nobody_goes_without(server, fetchers):
    four = fetchers(4, patience_s=1.0)
    server.publish(1, weights(1))
    found = [fetcher.wait_for(1) for fetcher in four]
    relay = next((i for i, (_, _, relays) in enumerate(found) if relays), None)
    assert relay is not None
    four[relay].process.send_signal(signal.SIGSTOP)  # hangs: the others fall back to the learner
    others = [fetcher for i, fetcher in enumerate(four) if i != relay]
    server.publish(2, weights(2))
    assert [fetcher.wait_for(2)[0] for fetcher in others] == [200_000.0] * 3
    four[relay].process.kill()  # a stopped process dies of it as well
    four[relay].process.wait(120)
    versions = itertools.count(3)

    def replaced():
        version = next(versions)
        server.publish(version, weights(version))
        found = [fetcher.wait_for(version) for fetcher in others]
        assert [total for total, _, _ in found] == [version * 100_000.0] * 3
        return sum(relays for _, _, relays in found) == 1 and any(relayed for _, relayed, _ in found)

    until(replaced, step=lambda: time.sleep(0.2), why=lambda: "no other process has become the relay")


def test_a_learner_that_publishes_faster_than_it_is_fetched_from_keeps_nobody_waiting(tmp_path):
    """What is announced is always one version newer than what has come."""
    context, member, poller = Context(), Member(), zmq.Poller()
    relay = HostRelay(context, tmp_path / "relay", member, "relay", poller)
    other = HostRelay(context, tmp_path / "relay", Member(), "other", zmq.Poller())

    def comes(version):
        encoded = encode_params(weights(version))
        member.params = Params(version, weights(version), 0, encoded)
        member.state = replace(member.state, version=version + 1)

    comes(5)
    until(lambda: other.ask(4, 1) or relay.serve(), LIMIT_S)
    until(lambda: relay.serve() or member.want_params, LIMIT_S)
    assert other.answer() is None  # newer than what it has, but older than what it asked for
    comes(6)
    got = until(lambda: relay.serve() or other.answer(), LIMIT_S)
    assert (got.fields["version"], got.request_id) == (6, 1)
    relay.close()
    other.close()
    context.destroy(linger=0)


def test_a_relay_that_leaves_while_another_process_tries_is_replaced_by_one(context, tmp_path, monkeypatch):
    lock = fcntl.flock

    def join():
        return HostRelay(context, tmp_path / "relay", Member(), "relay", zmq.Poller())

    relay = join()

    def leave_first(*arguments):
        relay.close()
        lock(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", leave_first)
        others = [join()]  # has opened a file that is gone when it is locked
    others.append(join())
    assert [other.serves for other in others] == [False, True]
    for other in others:
        other.close()


def test_a_directory_of_others_is_refused(tmp_path):
    directory = tmp_path / "open"
    directory.mkdir()
    os.chmod(directory, 0o755)
    with pytest.raises(ConfigError, match="should be yours alone: chmod 700"):
        HostRelay(zmq.Context.instance(), directory, Member(), "a", zmq.Poller())
    long = tmp_path / ("x" * 120)
    with pytest.raises(ConfigError, match="too long for a socket"):
        HostRelay(zmq.Context.instance(), long, Member(), "a", zmq.Poller())
