"""Hostile messages to every port, with every key and with none: nobody falls, and who behaves loses nothing.

`TROUPE_FUZZ_MESSAGES` says how many (100,000), `TROUPE_FUZZ_SEED` which; none begins after
`TROUPE_FUZZ_LIMIT_S`. `TROUPE_FUZZ_LOG` names a file that gets a line of JSON each minute: what was sent and
answered by kind, and what each service has.
"""

import collections
import json
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.harness import CHAOS, Context, insert, until
from tests.replay import processes
from tests.replay.ports import free_port
from troupe.common.wire.control.client import ControlClient
from troupe.common.wire.link import new_incarnation
from troupe.common.wire.replay.client import ReplayClient
from troupe.common.wire.security.keys import load_keys, make_keys
from troupe.common.wire.sockets import Security

MESSAGES = int(os.environ.get("TROUPE_FUZZ_MESSAGES", "10_000_000" if CHAOS else "100_000"))
SEED = int(os.environ.get("TROUPE_FUZZ_SEED") or secrets.randbits(20))
START_S = 600.0
LOG = os.environ.get("TROUPE_FUZZ_LOG")
LIMIT_S = float(os.environ.get("TROUPE_FUZZ_LIMIT_S") or 10**9)
PAUSE_S = 0.02 if MESSAGES < 1_000_000 else 0.5  # of who behaves, lest its table overflow
TELL_S = 60.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800 + int(min(MESSAGES / 100, LIMIT_S)))]

ROLES = ("learner", "replay", "actor", "evaluator", "viewer")
RUN = {
    "TROUPE_INFERENCE__MODE": "central",
    "TROUPE_RUN__TOTAL_STEPS": "1_000_000_000",
    "TROUPE_AGENT__MLP_UNITS": "[8]",
    "TROUPE_AGENT__HIDDEN_UNITS": "8",
    "TROUPE_ACTOR__SLOTS": "2",
    "TROUPE_EVALUATOR__ENABLED": "false",
    "TROUPE_NET__TENSORBOARD_PORT": "0",
    "TROUPE_REPLAY__CAPACITY_ITEMS": "5000",
}


class Services:
    """Processes of services, their logs, and what they had when they had started."""

    def __init__(self, folder):
        self.folder = folder
        self.running = {}
        self.first = {}

    def start(self, name, module, *words, **variables):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        with (self.folder / f"{name}.log").open("w") as log:
            command = [sys.executable, "-m", module, *map(str, words)]
            self.running[name] = psutil.Popen(command, env=environment, stdout=log, stderr=log)

    def log(self, name):
        return (self.folder / f"{name}.log").read_text()

    def remember(self):
        self.first = {name: self.use_of(name) for name in self.running}

    def use_of(self, name):
        """Anonymous memory in MB, and open files."""
        process = self.running[name]
        memory = process.memory_info()
        return (memory.rss - memory.shared) / 1e6, process.num_fds()

    def check(self):
        """All run, without an error of their own, and hold no more than when they had started."""
        for name, process in self.running.items():
            log = self.log(name)
            assert process.poll() is None, f"{name} ended with {process.returncode}:\n{log[-3000:]}"
            assert "Traceback" not in log, f"{name}:\n{log[-3000:]}"
            (before_mb, files), (memory_mb, _) = self.first[name], self.use_of(name)
            assert memory_mb < before_mb + 500, f"{name}: {before_mb:.0f} MB, then {memory_mb:.0f} MB"
            until(lambda name=name, files=files: self.use_of(name)[1] <= files + 40, START_S)

    def tell(self):
        """What they have, or how they ended."""
        return {
            name: "ended" if process.poll() is not None else "{:.0f} MB, {} files".format(*self.use_of(name))
            for name, process in self.running.items()
        }

    def stop(self):
        for process in self.running.values():
            process.kill()
            process.wait()


@pytest.fixture
def services(tmp_path):
    services = Services(tmp_path)
    yield services
    services.stop()


class Attack:
    """Attackers' processes, each with a share of the messages and with targets of its own."""

    def __init__(self, folder, count, *attackers):
        self.folder, self.processes, self._told_s = folder, [], time.monotonic()
        for index, targets in enumerate(attackers):
            words = {"seed": SEED, "first": 0, "count": count // len(attackers), "targets": targets}
            # pytest shows it where the test fails
            print(f"python -m tests.fuzz.attacker '{json.dumps(words)}'")
            command = [sys.executable, "-m", "tests.fuzz.attacker", json.dumps(words | {"limit_s": LIMIT_S})]
            with self.file("answers", index).open("w") as out, self.file("errors", index).open("w") as errors:
                self.processes.append(subprocess.Popen(command, stdout=out, stderr=errors))

    def file(self, name, index):
        return self.folder / f"{name}-{index}"

    def over(self, services):
        """Whether all have sent what they had to; tells the log now and then."""
        over = all(process.poll() is not None for process in self.processes)
        if LOG and (over or time.monotonic() > self._told_s + TELL_S):
            self._told_s = time.monotonic()
            sent = self.so_far("sent")
            line = {
                "at": time.strftime("%H:%M:%S"),
                "seed": SEED,
                "messages": sum(sent.values()),
                "over": over,
            }
            line |= {"sent": sent, "answers": self.so_far("answers"), "services": services.tell()}
            with Path(LOG).open("a") as log:
                log.write(json.dumps(line) + "\n")
        return over

    def so_far(self, what):
        """How many were sent or answered, of each kind."""
        total = collections.Counter()
        for index in range(len(self.processes)):
            whole, _, _ = self.file("answers", index).read_text().rpartition("\n")
            if whole:
                total.update(json.loads(whole.splitlines()[-1])[what])
        return total

    def answers(self):
        """How many answers there were of each kind, in the end."""
        for index, process in enumerate(self.processes):
            assert process.returncode == 0, self.file("errors", index).read_text()[-2000:]
        return self.so_far("answers")

    def stop(self):
        for process in self.processes:
            process.kill()
            process.wait()


class GoodClient:
    """Writes to a table of its own in a shard, and knows what it has written."""

    def __init__(self, endpoint, **options):
        self.client = ReplayClient(endpoint, name="good", **options)
        self.made = 0
        self.go_on(START_S)

    def go_on(self, timeout_s=60.0):
        """Write a chunk and read a batch."""
        insert(self.client, processes.chunk(self.made), "mine")
        self.made += 1
        batch = self.client.sample(8, table="mine", timeout_s=timeout_s)
        processes.check(batch)
        self.client.update(batch, np.ones(8))

    def check(self):
        """Everything that was written is there, once."""
        assert self.client.flush(120)
        table = self.client.status(60)["tables"]["mine"]
        assert table["items"] == table["inserted_total"] == self.made * processes.STEPS
        self.client.close(0)


TABLES = ("--table", "default:capacity=500", "--table", "mine:capacity=200_000")


def test_without_keys(services, tmp_path):
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    words = ("--bind", endpoint, "--data-dir", tmp_path / "data", "--max-bytes", 1 << 30)
    services.start("replay", "troupe.services.replay", "serve", *words, *TABLES)
    good = GoodClient(endpoint)
    services.remember()
    attack = Attack(tmp_path, MESSAGES // 2, [["replay", "", endpoint, "", ""]])
    try:
        while not attack.over(services):
            good.go_on()
            time.sleep(PAUSE_S)
        answers = attack.answers()
    finally:
        attack.stop()
    assert len(answers) > 10
    assert answers["INSERTED"] > 10, "not one of the hostile messages was almost right"
    good.check()
    services.check()


def test_with_every_key(services, tmp_path):
    keys, run_dir = tmp_path / "keys", tmp_path / "run"
    make_keys(keys)
    control, announce, inference, shard, other = (f"tcp://127.0.0.1:{free_port()}" for _ in range(5))
    sockets = ("--control", control, "--announce", announce, "--inference", inference)
    services.start(
        "learner",
        "troupe.services.learner",
        "cartpole-apex",
        "--run-dir",
        run_dir,
        *sockets,
        "--keys",
        keys,
        **RUN,
    )
    words = ("--learner", control, "--keys", keys, "--join-timeout-s", int(START_S))
    services.start(
        "replay", "troupe.services.replay", "serve", *words, "--bind", shard, "--data-dir", tmp_path / "shard"
    )
    services.start("actor", "troupe.services.actor", *words)
    words = ("--bind", other, "--data-dir", tmp_path / "other", "--keys", keys, "--max-bytes", 1 << 30)
    services.start("alone", "troupe.services.replay", "serve", *words, *TABLES)

    good = GoodClient(other, security=Security(keys=load_keys(keys, "learner")).toward("replay"))
    context = Context()
    viewer = ControlClient(
        context,
        control,
        role="viewer",
        name="good",
        incarnation=new_incarnation(),
        connect_timeout_s=START_S,
        security=Security(keys=load_keys(keys, "viewer")),
    )
    attack = None
    try:
        viewer.join(START_S)
        until(lambda: viewer.state.updates > 20, START_S)
        services.remember()

        def pair(server, role, endpoint, of):
            key = (keys / f"{of}.public").read_text().strip(), (keys / f"{role}.secret").read_text().strip()
            return [server, role, endpoint, *key]

        attackers = [[pair("replay", role, other, "replay") for role in ROLES]]
        for server, endpoint in (("control", control), ("inference", inference), ("announce", announce)):
            attackers.append([pair(server, role, endpoint, "learner") for role in ROLES])
        attack = Attack(tmp_path, MESSAGES - MESSAGES // 2, *attackers)
        before = viewer.state.updates
        while not attack.over(services):
            good.go_on()
            viewer.check()
            time.sleep(PAUSE_S)
        answers = attack.answers()
        assert len(answers) > 15
        assert answers["WELCOME"] > 10, "not one of the hostile messages was almost right"
        until(lambda: viewer.state.updates > before + 20, START_S)
        good.check()
        services.check()
    finally:
        if attack is not None:
            attack.stop()
        viewer.close()
        context.destroy(linger=0)
