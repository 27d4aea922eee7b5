"""Learners that share each batch, in real processes, some of which are killed."""

import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chaos import machines
from tests.harness import only_in_chaos, until
from troupe.common.wire.security.keys import make_keys

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PATIENCE_S = 240
MACHINES = ["learner", "other"]
COUNT = int(os.environ.get("TROUPE_LEARNERS", "3"))


class Learners:
    """Processes by name, and what they have written; on machines of their own if there is a network."""

    def __init__(self, directory, count, network=None):
        self.directory, self.count, self.network = directory, count, network
        self.endpoint = (
            f"tcp://{network.address('learner')}:5550" if network else f"ipc://{directory}/control"
        )
        self.processes = {}
        if network:
            make_keys(directory / "keys")

    def start(self, name):
        command = [sys.executable, "-m", "tests.learner.peers.one", name, self.endpoint, str(self.count)]
        command.append(str(self.directory))
        if self.network:
            machine = name if name in MACHINES else MACHINES[-1]
            command = self.network.inside(machine, *command, f"{machines.NETWORK}.0/24")
        with (self.directory / f"{name}.err").open("a") as errors:
            self.processes[name] = subprocess.Popen(command, stderr=errors, cwd=Path(__file__).parents[3])

    def kill(self, name):
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def lines(self, name):
        """`(update, hash, learners, second)` of each update that this process was in; whole lines only."""
        file = self.directory / f"{name}.log"
        text = file.read_text() if file.exists() else ""
        found = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [
            (int(update), digest, int(learners), float(second)) for update, digest, learners, second in found
        ]

    def newest(self, name):
        return max((line[0] for line in self.lines(name)), default=0)

    def wait(self, names, update, learners):
        """Until each of these has made `update`, in a group of so many."""

        def there():
            for name, process in self.processes.items():
                errors = self.directory / f"{name}.err"
                assert process.poll() is None, f"{name} has ended:\n{errors.read_text()[-2000:]}"
            return all(
                any(line[0] >= update and line[2] == learners for line in self.lines(name)) for name in names
            )

        until(there, PATIENCE_S)

    def tell_pause(self, what, name, began):
        """Print how long this learner stood still since `began`: a test never depends on it."""
        seconds = [line[3] for line in self.lines(name)]
        gaps = [(after - before, after) for before, after in itertools.pairwise(seconds)]
        longest = max(gap for gap, after in gaps if after >= began)
        typical = statistics.median(gap for gap, _ in gaps)
        print(f"{what}: {longest:.2f} s without an update, of which one takes {typical:.2f} s")

    def check(self):
        """All have had the same weights after every update, and no update is missing or made twice."""
        hashes = {}
        for file in self.directory.glob("*.log"):
            lines = self.lines(file.stem)
            for update, digest, *_ in lines:
                hashes.setdefault(update, set()).add(digest)
            updates = [line[0] for line in lines]
            assert updates == sorted(set(updates)), file.stem
        assert sorted(hashes) == list(range(1, max(hashes) + 1))
        assert all(len(found) == 1 for found in hashes.values())


@pytest.fixture
def run(tmp_path):
    with contextlib.ExitStack() as ends:

        def run(kill, count, network=None):
            if network:
                ends.callback(network.close)
            learners = Learners(tmp_path, count, network)
            ends.callback(lambda: [learners.kill(name) for name in list(learners.processes)])
            kill(learners)

        yield run


def test_any_learner_that_is_killed_costs_no_update_and_a_new_one_takes_its_place(run):
    run(kill_one_and_the_owner, COUNT)


@only_in_chaos
def test_each_of_four_is_killed_and_comes_back(run):
    run(kill_each, 4)


@only_in_chaos
@pytest.mark.skipif(bool(machines.missing()), reason=machines.missing())
def test_it_is_the_same_between_machines(run):
    run(kill_each, 4, machines.Network(MACHINES))


def kill_one_and_the_owner(learners):
    names = ["learner", *(f"learner-{number}" for number in range(1, COUNT))]
    for name in names:
        learners.start(name)
    learners.wait(names, 3, COUNT)

    learners.kill(names.pop())
    learners.wait(names, learners.newest("learner") + 3, COUNT - 1)

    names.append("learner-9")
    learners.start("learner-9")
    learners.wait(names, learners.newest("learner") + 3, COUNT)

    # The others go on without who has the run, and it begins again with nothing and goes on from there.
    learners.kill("learner")
    names.remove("learner")
    before = learners.newest(names[0])
    learners.wait(names, before + 3, COUNT - 1)
    learners.start("learner")
    names.append("learner")
    learners.wait(names, learners.newest(names[0]) + 3, COUNT)
    learners.check()


def kill_each(learners):
    """Kill one after the other, the one that has the run last; each has a successor before the next dies."""
    count = learners.count
    names = ["learner", *(f"learner-{number}" for number in range(1, count))]
    for name in names:
        learners.start(name)
    learners.wait(names, 3, count)
    for number, victim in enumerate(names[::-1], 1):
        others = [name for name in learners.processes if name != victim]
        began = time.monotonic()
        learners.kill(victim)
        learners.wait(others, max(map(learners.newest, others)) + 3, count - 1)
        learners.tell_pause(f"without {victim}", others[0], began)

        successor = "learner" if victim == "learner" else f"learner-{10 + number}"
        began = time.monotonic()
        learners.start(successor)
        learners.wait([*others, successor], max(map(learners.newest, others)) + 3, count)
        learners.tell_pause(f"{successor} joins", others[0], began)
    learners.check()
