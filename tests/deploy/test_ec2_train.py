"""`troupe cloud train` in EC2 in a box: spot machines are taken away, and the budget ends the run.

`TROUPE_EC2_INTERRUPTIONS` says how often one is taken (3 without it), `TROUPE_EC2_MINUTES` how long the
budget lasts (15 at least): they are spread over most of it. `TROUPE_EC2_REPORT` names a file for figures.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.ledger import audit
from tests.deploy import machines
from tests.deploy.conftest import ROOT, Cloud
from tests.deploy.fleet import Fleet
from tests.deploy.machines import Machine
from tests.deploy.test_cloud_train import IMAGE, Command, left_in
from troupe.common.config import load_config
from troupe.common.runtime.checkpoint import check, newest_first
from troupe.common.runtime.files import read_status
from troupe.services.cloud.estimate import estimate, hourly_usd, total_usd
from troupe.services.cloud.layout import layout_of, parse_variables
from troupe.services.cloud.prices import read_prices
from troupe.services.cloud.record import read_record

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]
HOOKS_HOLD = True

INTERRUPTIONS = int(os.environ.get("TROUPE_EC2_INTERRUPTIONS") or 3)
MINUTES = float(os.environ.get("TROUPE_EC2_MINUTES") or 15)
PATIENCE_S = 900.0
MACHINES = ("actors=2", "actors_per_machine=1", "nat_gateway=false")
FIELDS = ("--run.total_steps=100000000", "--replay.capacity_items=1000000", "--evaluator.video=false")


def budget() -> float:
    """Dollars for so many minutes, with what ending takes."""
    layout = layout_of(load_config("cartpole-apex"), parse_variables(MACHINES))
    lines = estimate(layout, read_prices({}), bucket_gb=1.0)
    return hourly_usd(lines) * (MINUTES + 15.5) / 60 + total_usd(lines, 0.0)


class Box:
    """The command, the machines that it has, and who boots them.

    Attributes:
        command: `troupe cloud train`.
        fleet: its machines.
    """

    def __init__(self, command: Command, fleet: Fleet) -> None:
        self.command, self.fleet = command, fleet
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def _follow(self) -> None:
        while not self._ended.wait(2.0):
            self.follow()

    def follow(self) -> None:
        with self._lock:
            self.fleet.follow()

    def of(self, role: str) -> list[Machine]:
        """The running machines of a role, the oldest first."""
        with self._lock:
            return self.fleet.of(role)

    def interrupt(self, machine: Machine) -> None:
        """Take a spot machine: a notice, then, when its service has left or two minutes are over, the end."""
        notice = {"action": "terminate", "time": "2030-01-01T00:00:00Z"}
        machine.metadata.values["spot/instance-action"] = json.dumps(notice)
        unit = "troupe-actor@0.service" if machine.role == "actor" else "troupe-evaluator.service"
        deadline_s = time.monotonic() + 120
        while time.monotonic() < deadline_s:
            said = machine.execute("systemctl", "show", unit, "--value", "-p", "ActiveState")
            if said.strip() in ("inactive", "failed"):
                break
            time.sleep(1.0)
        with self._lock:
            self.fleet.terminate(machine)

    def wait_for_updates(self, more: int) -> None:
        """Wait until the learner has learned further, and has heard from every actor and evaluator."""
        [learner] = self.of("learner")
        before, deadline_s = updates(learner), time.monotonic() + PATIENCE_S
        while updates(learner) < before + more or self._missing(learner):
            assert time.monotonic() < deadline_s, learner.log("*.log")[-3000:] + learner.journal()
            assert self.command.process.poll() is None, self.command.told
            time.sleep(1.0)

    def _missing(self, learner: Machine) -> list[str]:
        """Machines whose service the learner does not know, or all where there are none."""
        peers = " ".join(peer["name"] for peer in status(learner).get("peers", ()))
        there = [machine for role in ("actor", "evaluator") for machine in self.of(role)]
        return [one.instance for one in there if one.instance not in peers] if there else ["all"]

    def close(self) -> None:
        self._ended.set()
        self._thread.join(120)


def status(learner: Machine) -> dict[str, Any]:
    """What the learner wrote last; nothing before that."""
    found = (learner.root / "var/lib/troupe/runs").glob("*/status.json")
    return next((read_status(file.parent) for file in found), {})


def updates(learner: Machine) -> int:
    return int(status(learner).get("updates", 0))


@pytest.fixture
def box(terraform: str, deploy_python: str, cloud: Cloud, tmp_path: Path) -> Iterator[Box]:
    if why := machines.missing():
        pytest.skip(f"NOT TESTED: {why}")
    if not Path(deploy_python).with_name("aws").exists():
        pytest.skip(f"NOT TESTED: {Path(deploy_python).parent}/aws is missing; `make test-ec2` installs it")
    folder = tmp_path / "box"
    folder.mkdir()
    for parent in (folder, *list(folder.parents)[:3]):
        parent.chmod(0o755)
    image = machines.make_image(folder / "image", deploy_python)
    env = cloud.env | {"PATH": f"{os.environ['PATH']}:{Path(deploy_python).parent}"}
    if mirror := os.environ.get("TROUPE_TERRAFORM_PLUGINS"):
        env["TF_CLI_ARGS_init"] = f"-plugin-dir={mirror}"
    variables = [word for each in MACHINES for word in ("--var", each)]
    words = ("--budget", f"{budget():.4f}", "--period-s", "10", "--run-dir", str(tmp_path / "run"))
    command = Command(tmp_path / "run", env, "train", "cartpole-apex", *words, *variables, *IMAGE, *FIELDS)
    try:
        command.wait_for("machines are starting")
        record = read_record(command.folder)
        assert record is not None
        with Fleet(cloud, deploy_python, image, folder, record.run) as fleet:
            found = Box(command, fleet)
            try:
                yield found
            finally:
                found.close()
    finally:
        command.close()
        shutil.rmtree(folder, ignore_errors=True)


def ledger(box: Box, folder: Path) -> subprocess.Popen[str]:
    """A producer in the network of the machines; it knows nothing but docs/protocol.md."""
    [replay] = box.of("replay")
    keys = box.command.folder / "cloud" / "keys"
    words = {
        "endpoint": f"tcp://{replay.address}:5560",
        "server_key": (keys / "replay.public").read_text().strip(),
        "secret_key": (keys / "actor.secret").read_text().strip(),
        "journal": str(folder / "journal"),
        "period_s": 0.1,
    }
    inside = ["ip", "netns", "exec", box.fleet.vpc.name, sys.executable, "-P", "-m", "tests.chaos.ledger"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([*inside, json.dumps(words)], env=env, text=True, stdout=subprocess.PIPE)


def test_spot_machines_are_taken_nothing_is_lost_and_the_budget_holds(box: Box, tmp_path: Path) -> None:
    box.command.wait_for("1 learner")
    box.wait_for_updates(100)
    [replay], [learner] = box.of("replay"), box.of("learner")
    notes = ledger(box, tmp_path)
    record = read_record(box.command.folder)
    assert record is not None
    began_s, heals_s = time.monotonic(), list[float]()
    pause_s = 0.75 * (record.stop_s - time.time()) / INTERRUPTIONS  # most of the time that the budget lasts
    try:
        for number in range(INTERRUPTIONS):
            while time.monotonic() < began_s + number * pause_s:
                assert box.command.process.poll() is None, box.command.told
                time.sleep(1.0)
            # The evaluator now and then; else the actor that has been there longest.
            [taken, *_] = box.of("evaluator" if number % 5 == 4 else "actor")
            box.interrupt(taken)
            ended_s = time.monotonic()
            box.wait_for_updates(10)
            heals_s.append(time.monotonic() - ended_s)
            print(f"{taken.role} {number} is replaced after {heals_s[-1]:.0f} s", flush=True)
        minutes = (time.monotonic() - began_s) / 60
        notes.send_signal(signal.SIGTERM)
        noted = json.loads(notes.communicate(timeout=PATIENCE_S)[0])
    finally:
        notes.kill()
        notes.wait()
    assert box.command.status() == 0
    box.follow()
    assert not box.fleet.machines
    assert left_in(box.fleet.ask) == []
    told = box.command.told
    assert re.search(r"budget: [\d.]+ dollars\n", told), "before"
    assert re.search(r"[\d.]+ of [\d.]+ dollars, [\d.]+ an hour \| machines: \d+ actors?, ", told), "during"
    assert re.search(r"[\d.]+ of [\d.]+ dollars in [\d.]+ hours, [\d,]+ steps", told), "after"
    assert "the budget is used up: ending the run" in told
    record = read_record(box.command.folder)
    assert record is not None
    [items] = (replay.root / "var/lib/troupe/runs").glob("*/replay/shard-0")
    found = audit(items, tmp_path / "journal", removes=False)
    figures = {
        "interruptions": INTERRUPTIONS,
        "minutes": round(minutes, 1),
        "replaced_after_s": [round(heal_s, 1) for heal_s in heals_s],
        "acknowledged": found.acknowledged,
        "lost": len(found.lost),
        "doubled": len(found.doubled),
        "changed": len(found.changed),
        "budget_usd": round(record.budget_usd, 4),
        "spent_usd": round(record.usd, 4),
    }
    print(json.dumps(figures))
    if report := os.environ.get("TROUPE_EC2_REPORT"):
        Path(report).write_text(json.dumps(figures) + "\n")
    assert record.usd <= record.budget_usd
    assert noted["acknowledged"] == found.acknowledged > 0
    assert not noted["unsettled"]
    assert not found.lost
    assert not found.doubled
    assert not found.changed
    # What the learner wrote last, as its machine went.
    newest = next(newest_first(box.command.folder / "checkpoints"))
    [last, *_] = newest_first(next((learner.root / "var/lib/troupe/runs").iterdir()) / "checkpoints")
    assert newest.name == last.name
    check(newest)
