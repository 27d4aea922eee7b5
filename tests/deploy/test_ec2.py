"""EC2 in a box: a whole run from Terraform to its end, on machines that are network namespaces of this host.

Terraform applies `examples/minimal` to the stand-in for AWS. Every instance that its groups start becomes a
machine: a namespace with the instance's address, a root of its own as the provisioning scripts leave it, and
a systemd that boots it with the instance's user data. From there everything is as shipped: boot agent, units,
keys from the parameter store, names from the private zone, copies to the bucket, spot notices. The tests
follow each other, as the life of a run does.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy import machines
from tests.deploy.conftest import ROOT, Cloud, init_words, run
from tests.deploy.fleet import Fleet
from tests.deploy.machines import Machine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
HOOKS_HOLD = True

RUN = "cartpole"
ACTORS = "troupe-cartpole-actor"
SOLVED = 475.0
LEARNING_S = float(os.environ.get("TROUPE_EC2_LEARNING_S", "1800"))
PATIENCE_S = (
    300.0  # a service starts within seconds on a machine of its own; here all of them share two cores
)

# Merged by Terraform into the example: two machines of one actor each, and an end that is far away.
OVERRIDE = """
module "troupe" {
  actors             = 2
  actors_per_machine = 1
  max_actor_machines = 3
  learners           = %d
  overrides = {
    "run.total_steps"           = "%d"
    "replay.samples_per_insert" = "16" # steps are cheaper than updates where cores are few
    "evaluator.video"           = "false"
  }
}
"""


class Cluster:
    """A run in the box.

    Attributes:
        fleet: its machines.
        bucket: its bucket.
    """

    def __init__(self, folder: Path, terraform: str, env: dict[str, str], fleet: Fleet, bucket: str) -> None:
        self._folder, self._terraform, self._env = folder, terraform, env
        self.fleet, self.bucket = fleet, bucket

    @property
    def learner(self) -> Machine:
        [machine] = self.fleet.of("learner")
        return machine

    def status(self, machine: Machine | None = None) -> dict[str, Any]:
        """What the learner wrote last; zeros before that."""
        try:
            text = (run_dir(machine or self.learner) / "status.json").read_text()
        except FileNotFoundError:
            return {"steps": 0, "updates": 0, "peers": []}
        return dict(json.loads(text))

    def peers(self, role: str) -> set[str]:
        """Names of the services of a role that the learner sees."""
        return {peer["name"] for peer in self.status()["peers"] if peer["role"] == role}

    def acting(self) -> set[str]:
        """Names of the actors that have slots; one that waits for some is a member of the run as well."""
        return {peer["name"] for peer in self.status()["peers"] if peer["role"] == "actor" and peer["slots"]}

    def evaluations(self) -> list[float]:
        """All mean returns so far."""
        try:
            with (run_dir(self.learner) / "metrics.csv").open() as rows:
                found = [row["value"] for row in csv.DictReader(rows) if row["name"] == "eval/episode_return"]
        except FileNotFoundError:
            return []
        return [float(value) for value in found if value]

    def wait(self, condition: Callable[[], object], timeout_s: float, what: str) -> None:
        """Wait until it is so; machines that AWS starts meanwhile are booted."""

        def look() -> object:
            self.fleet.follow()
            return condition()

        try:
            machines.wait_until(look, timeout_s, what, poll_s=3.0)
        except TimeoutError as error:
            pytest.fail(f"{error}\n{self.story()}")

    def wait_for_updates(self, more: int) -> None:
        """Wait until the learner has made `more` updates."""
        goal = self.status()["updates"] + more
        self.wait(lambda: self.status()["updates"] >= goal, PATIENCE_S, f"{more} updates more")

    def apply(self, learners: int, total_steps: int) -> None:
        """Make apply."""
        (self._folder / "box_override.tf").write_text(OVERRIDE % (learners, total_steps))
        words = ["apply", "-auto-approve", "-input=false", "-no-color"]
        run(self._terraform, *words, cwd=self._folder, env=self._env)

    def story(self) -> str:
        """The end of every log, for a test that failed."""
        parts = [json.dumps(self.status() | {"metrics": None}) if self.fleet.of("learner") else ""]
        for machine in self.fleet.machines.values():
            logs = machine.log("*.log").splitlines()[-15:]
            parts += [f"== {machine.role} {machine.address}", machine.journal()[-3000:], *logs]
        return "\n".join(parts)


def run_dir(machine: Machine) -> Path:
    """Directory of the run on a machine, as this host sees it."""
    return machine.root / "var" / "lib" / "troupe" / "runs" / RUN


@pytest.fixture(scope="module")
def cluster(
    terraform: str,
    deploy_python: str,
    cloud: Cloud,
    workspace: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Cluster]:
    """The example, applied; its machines boot."""
    if why := machines.missing():
        pytest.skip(f"NOT TESTED: {why}")
    keys = tmp_path_factory.mktemp("run") / "keys"
    words = [sys.executable, "-m", "troupe", "keys", "new", str(keys)]
    subprocess.run(words, cwd=ROOT, check=True, timeout=120, stdout=subprocess.DEVNULL)
    box = tmp_path_factory.mktemp("box")
    box.chmod(0o755)
    image = machines.make_image(box / "image", deploy_python)
    shutil.copytree(workspace, box / "terraform")  # the other tests apply the example as it is
    example = box / "terraform" / "examples" / "minimal"
    env = cloud.env | {"TF_VAR_keys_dir": str(keys), "TF_VAR_cpu_image_id": "ami-0aaaaaaaaaaaaaaaa"}
    run(terraform, *init_words(), cwd=example, env=env)
    (example / "box_override.tf").write_text(OVERRIDE % (1, 1_000_000))
    run(terraform, "apply", "-auto-approve", "-input=false", "-no-color", cwd=example, env=env)
    outputs = json.loads(run(terraform, "output", "-json", cwd=example, env=env))["troupe"]["value"]
    try:
        with Fleet(cloud, deploy_python, image, box, RUN) as fleet:
            cluster = Cluster(example, terraform, env, fleet, outputs["bucket"])
            fleet.follow()
            yield cluster
            print(cluster.story())
    finally:
        shutil.rmtree(box, ignore_errors=True)


def test_every_instance_boots_and_joins(cluster: Cluster) -> None:
    roles = sorted(machine.role for machine in cluster.fleet.machines.values())
    assert roles == ["actor", "actor", "evaluator", "learner", "replay"]
    cluster.wait(lambda: len(cluster.peers("actor")) == 2, PATIENCE_S, "both actors have joined")
    cluster.wait(lambda: cluster.peers("replay"), PATIENCE_S, "replay has joined")
    cluster.wait(lambda: cluster.peers("evaluator"), PATIENCE_S, "the evaluator has joined")
    assert cluster.peers("actor") == {f"actor-{one.instance}-0" for one in cluster.fleet.of("actor")}
    for machine in cluster.fleet.machines.values():
        assert machine.execute("systemctl", "is-failed", "troupe-node.service").strip() == "active"
    cluster.wait_for_updates(100)


def test_it_learns(cluster: Cluster) -> None:
    cluster.wait(
        lambda: max(cluster.evaluations(), default=0.0) >= SOLVED, LEARNING_S, f"a return of {SOLVED}"
    )
    print(f"evaluations: {[round(value) for value in cluster.evaluations()]}")


def test_the_bucket_has_a_copy(cluster: Cluster) -> None:
    def copied() -> bool:
        keys = cluster.fleet.keys(cluster.bucket)
        parts = ("/config.toml", "/metrics.csv", "/MANIFEST.json", "/tensorboard/")
        return all(any(part in key for key in keys) for part in parts)

    cluster.wait(copied, PATIENCE_S, "checkpoint, metrics and TensorBoard events in the bucket")
    # Without them the alarm says that the learner is silent.
    metrics = cluster.fleet.ask("cloudwatch", "list_metrics", Namespace="Troupe")["Metrics"]
    assert {"Steps", "Updates"} <= {one["MetricName"] for one in metrics}


def test_what_reaches_the_credentials_is_neither_root_nor_a_service(cluster: Cluster) -> None:
    """What waits for a spot notice runs all the time."""
    learner = cluster.learner
    service = learner.execute("systemctl", "show", "troupe-learner.service", "--value", "-p", "MainPID")
    watcher = learner.execute("systemctl", "show", "troupe-notice.service", "--value", "-p", "MainPID")
    said = [learner.execute("cat", f"/proc/{pid.strip()}/status") for pid in (service, watcher)]
    users = [re.findall(r"^Uid:\s+(\d+)", text, re.MULTILINE) for text in said]
    assert users[0] == [str(machines.UID)], said
    assert users[1] not in (users[0], ["0"], []), said
    assert re.search(r"^CapEff:\s+0+$", said[1], re.MULTILINE), said[1]
    assert re.search(r"^NoNewPrivs:\s+1$", said[1], re.MULTILINE), said[1]


def test_a_host_that_is_cut_off_is_given_up_and_comes_back(cluster: Cluster) -> None:
    lost = cluster.fleet.of("actor")[0]
    name = f"actor-{lost.instance}-0"
    lost.set_link(up=False)
    cluster.wait(lambda: name not in cluster.peers("actor"), PATIENCE_S, "the lease has run out")
    assert cluster.peers("actor")
    cluster.wait_for_updates(500)
    lost.set_link(up=True)
    cluster.wait(lambda: name in cluster.peers("actor"), PATIENCE_S, "it has joined again")
    assert "NRestarts=0" in lost.execute("systemctl", "show", "troupe-actor@0.service", "-p", "NRestarts")


def test_a_spot_notice_drains_and_an_actor_that_waits_takes_the_slots(cluster: Cluster) -> None:
    fleet = cluster.fleet
    fleet.ask("autoscaling", "set_desired_capacity", AutoScalingGroupName=ACTORS, DesiredCapacity=3)
    fleet.follow()
    taken, spare = fleet.of("actor")[1:]
    line = "slots that actor-"  # ... wants are free
    cluster.wait(lambda: line in spare.log("actor-*.log"), PATIENCE_S, "an actor too many waits and says so")
    there = f"actor-{spare.instance}-0"
    acting = cluster.acting()
    assert len(acting) == 2
    assert there not in acting
    notice = {"action": "terminate", "time": "2030-01-01T00:00:00Z"}
    taken.metadata.values["spot/instance-action"] = json.dumps(notice)
    unit = ("systemctl", "show", "troupe-actor@0.service", "-p", "ActiveState,Result,ExecMainStatus")

    def ended() -> bool:
        return "ActiveState=inactive" in taken.execute(*unit)

    cluster.wait(ended, PATIENCE_S, "the actor has ended")
    said = taken.execute(*unit).split()
    assert {"Result=success", "ExecMainStatus=0"} <= set(said), said
    assert " ends after " in taken.log("actor-*.log")
    cluster.wait(lambda: there in cluster.acting(), PATIENCE_S, "the one that waited has the slots")
    fleet.terminate(taken)
    assert len(fleet.of("actor")) == 3  # the group has started one in its place
    cluster.wait_for_updates(500)


def test_a_spot_notice_ends_in_a_last_copy_of_the_learner(cluster: Cluster) -> None:
    learner = cluster.learner
    (run_dir(learner) / "a-secret-of-root").touch(0o600)  # what nobody may copy stops no copy
    notice = {"action": "terminate", "time": "2030-01-01T00:00:00Z"}
    learner.metadata.values["spot/instance-action"] = json.dumps(notice)

    def journal(unit: str) -> str:
        return learner.execute("journalctl", "--unit", unit, "--output", "cat", "--no-pager")

    last = "troupe-last-sync.service"
    for unit in ("troupe-notice.service", last):
        cluster.wait(lambda unit=unit: f"Finished {unit}" in journal(unit), PATIENCE_S, f"the end of {unit}")
    assert "troupe-learner.service: Deactivated successfully" in journal("troupe-learner.service")
    steps = cluster.status()["steps"]
    keys = cluster.fleet.keys(cluster.bucket)
    assert any(f"{steps:012d}/MANIFEST.json" in key for key in keys), (steps, sorted(keys))
    assert f"runs/{RUN}/a-secret-of-root" not in keys
    assert "a-secret-of-root is not copied" in journal(last)


def test_a_new_learner_resumes(cluster: Cluster) -> None:
    old = cluster.learner
    before = cluster.status()["updates"]
    cluster.fleet.terminate(old)
    new = cluster.learner
    assert new.address != old.address
    cluster.wait(lambda: "resumed from step-" in new.log("learner.log"), PATIENCE_S, "it resumes")
    cluster.wait(lambda: len(cluster.peers("actor")) == 2, PATIENCE_S, "actors join it")
    resumed = re.search(r"resumed from \S+: \d+ steps, (\d+) updates", new.log("learner.log"))
    assert resumed is not None
    assert int(resumed[1]) == before, "what the one before wrote last was lost"
    cluster.wait(
        lambda: cluster.status()["updates"] > before, PATIENCE_S, "it is further than the one before"
    )


def test_another_learner_joins_and_is_replaced(cluster: Cluster) -> None:
    together = "2 learners share each batch"
    cluster.apply(2, 1_000_000)
    cluster.wait(lambda: cluster.fleet.of("learner-peer"), PATIENCE_S, "a machine for it")
    learner = cluster.learner
    learner.execute("systemctl", "restart", "troupe-node", "troupe-learner")  # as docs/aws.md says
    for there in range(2):
        [peer] = cluster.fleet.of("learner-peer")
        cluster.wait(lambda peer=peer: together in peer.log("learner-*.log"), PATIENCE_S, "it shares batches")
        cluster.wait(
            lambda there=there: learner.log("learner.log").count(together) > there, PATIENCE_S, "both"
        )
        cluster.wait_for_updates(200)
        if not there:
            cluster.fleet.terminate(peer)


def test_a_learner_that_is_replaced_takes_over_the_state_of_the_other(cluster: Cluster) -> None:
    before = cluster.status()["updates"]
    cluster.fleet.terminate(cluster.learner)
    new, found = cluster.learner, r"2 learners share each batch, at update (\d+); took over the state"
    cluster.wait(lambda: re.search(found, new.log("learner.log")), PATIENCE_S, "it takes over the state")
    [update] = re.findall(found, new.log("learner.log"))[:1]
    assert int(update) >= before
    cluster.wait_for_updates(200)


def test_the_end_stops_all_machines(cluster: Cluster) -> None:
    learner = cluster.learner
    total = cluster.status()["steps"] + 10_000
    cluster.apply(2, total)
    learner.execute("systemctl", "restart", "troupe-node", "troupe-learner")  # as docs/aws.md says
    cluster.wait(lambda: not cluster.fleet.machines, 3 * PATIENCE_S, "all machines are gone")
    final = cluster.status(learner)
    assert final["steps"] >= total
    groups = cluster.fleet.ask("autoscaling", "describe_auto_scaling_groups")["AutoScalingGroups"]
    assert [group["DesiredCapacity"] for group in groups] == [0, 0, 0, 0, 0]
    # What the learner wrote last is in the bucket.
    assert any(f"{final['steps']:012d}" in key for key in cluster.fleet.keys(cluster.bucket))
