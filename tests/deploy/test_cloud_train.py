"""`troupe cloud train` with the real Terraform and the stand-in for AWS, from the first dollar to the last.

The machines are entries of the stand-in only: the tests write into the bucket what a learner's machine would.
`test_ec2.py` has machines.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.deploy.client import Client
from tests.deploy.conftest import ROOT, Cloud
from tests.harness import end_tree
from troupe.common.runtime.checkpoint import check, newest_first, save_checkpoint
from troupe.services.cloud.record import Record, read_record

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

PATIENCE_S = 1500.0
# The number of actors follows from less than a minute instead of five.
PROGRAM = """
import sys
from troupe.services.cloud import appetite, keeping
appetite.SETTLE_S = keeping.SETTLE_S = 40.0
from troupe.services.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


class Command:
    """A `troupe cloud` command at work.

    Attributes:
        folder: the run directory.
        process: the command.
    """

    def __init__(self, folder: Path, env: dict[str, str], *words: str) -> None:
        self.folder, self._lines = folder, list[str]()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", PROGRAM, "cloud", *words],
            cwd=ROOT,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            print(line, end="", flush=True)
            self._lines.append(line)

    @property
    def told(self) -> str:
        return "".join(self._lines)

    def wait_for(self, words: str) -> None:
        """Wait until it has said so."""
        deadline_s = time.monotonic() + PATIENCE_S
        while words not in self.told:
            assert self.process.poll() is None, f"it ended before {words!r}:\n{self.told}"
            assert time.monotonic() < deadline_s, f"no {words!r}:\n{self.told}"
            time.sleep(0.2)

    def status(self) -> int:
        """Wait for its end; its exit status."""
        self.process.wait(PATIENCE_S)
        self._reader.join(60)
        return self.process.returncode

    def close(self) -> None:
        end_tree(self.process)
        self._reader.join(60)
        assert self.process.stdout is not None
        self.process.stdout.close()


def left_in(ask: Callable[..., dict[str, Any]]) -> list[str]:
    """What is still in AWS and costs something."""
    reservations = ask("ec2", "describe_instances")["Reservations"]
    machines = [one for group in reservations for one in group["Instances"]]
    groups = ask("autoscaling", "describe_auto_scaling_groups")["AutoScalingGroups"]
    return [
        *(one["InstanceId"] for one in machines if one["State"]["Name"] != "terminated"),
        *(one["AutoScalingGroupName"] for one in groups),
        *(one["Name"] for one in ask("s3", "list_buckets")["Buckets"]),
        *(one["VpcId"] for one in ask("ec2", "describe_vpcs")["Vpcs"] if not one["IsDefault"]),
        *(one["Name"] for one in ask("route53", "list_hosted_zones")["HostedZones"]),
        *(one["AlarmName"] for one in ask("cloudwatch", "describe_alarms")["MetricAlarms"]),
    ]


class Aws:
    """The stand-in, and the runs that are in it."""

    def __init__(self, cloud: Cloud, client: Client, env: dict[str, str], folder: Path) -> None:
        self.cloud, self.ask, self._env, self._folder = cloud, client.ask, env, folder
        self.commands: list[Command] = []

    def command(self, *words: str) -> Command:
        self.commands.append(Command(self._folder / "run", self._env, *words))
        return self.commands[-1]

    def train(self, *words: str, budget: float = 5.0) -> Command:
        """Begin a run that looks at itself every second, or go on with it."""
        common = ("--budget", str(budget), "--period-s", "1", "--run-dir", str(self._folder / "run"))
        return self.command("train", "cartpole-apex", *common, *words)

    def groups(self) -> dict[str, int]:
        """Machines that each group of the run is to have, by role."""
        found = self.ask("autoscaling", "describe_auto_scaling_groups")["AutoScalingGroups"]
        return {
            tag["Value"]: group["DesiredCapacity"]
            for group in found
            for tag in group["Tags"]
            if tag["Key"] == "Role"
        }

    def ends(self) -> dict[str, float]:
        """When AWS itself ends the machines of each group, in seconds since 1970."""
        found = self.ask("autoscaling", "describe_scheduled_actions")["ScheduledUpdateGroupActions"]
        assert all(one["DesiredCapacity"] == 0 for one in found)
        times = {one["AutoScalingGroupName"]: str(one["StartTime"]) for one in found}
        return {name: datetime.datetime.fromisoformat(text).timestamp() for name, text in times.items()}

    def left(self) -> list[str]:
        """See `left_in`."""
        return left_in(self.ask)

    def copy(self, record: Record, source: Path) -> None:
        """What a learner's machine does every minute."""
        target = f"s3://{record.bucket}/runs/{record.run}"
        words = ["aws", "s3", "cp", "--recursive", "--only-show-errors", source, target]
        subprocess.run(words, env=self._env, check=True, timeout=300)


@pytest.fixture
def aws(cloud: Cloud, deploy_python: str, terraform: str, tmp_path: Path) -> Iterator[Aws]:
    beside = Path(deploy_python).parent
    if not (beside / "aws").exists():
        pytest.skip(f"NOT TESTED: {beside}/aws is missing; `make test-deploy` installs it")
    cloud.reset()
    env = cloud.env | {"PATH": f"{os.environ['PATH']}:{beside}"}
    if mirror := os.environ.get("TROUPE_TERRAFORM_PLUGINS"):
        env["TF_CLI_ARGS_init"] = f"-plugin-dir={mirror}"
    client = Client(cloud, deploy_python)
    found = Aws(cloud, client, env, tmp_path)
    try:
        yield found
    finally:
        for command in found.commands:
            command.close()
        client.close()


IMAGE = ("--var", "cpu_image_id=ami-0aaaaaaaaaaaaaaaa")
GOAL = ("--until", "return>=475")


def begun(command: Command) -> Record:
    """Wait for the first look at the machines; what is known of the run."""
    command.wait_for("machines: 1 actor, 1 evaluator, 1 learner, 1 replay")
    record = read_record(command.folder)
    assert record is not None
    return record


def status_of(steps: int, wait_share: float, **metrics: float) -> dict[str, Any]:
    peers = [{"role": "actor", "name": f"actor-{i}"} for i in range(4)]
    waits = {"learner/wait_share": wait_share}
    counters = {"steps": steps, "updates": steps, "updates_since_start": steps, "wall_s": float(steps)}
    return {**counters, "metrics": {**waits, **metrics}, "peers": peers}


def write_run(folder: Path, steps: int, **metrics: float) -> None:
    """A run directory as a learner leaves it, small."""
    save_checkpoint(folder / "checkpoints", {"weights": np.zeros(3)}, {"steps": steps})
    (folder / "metrics.csv").write_text("wall_s,steps,name,value\n")
    (folder / "status.json").write_text(json.dumps(status_of(steps, 0.1, **metrics)))


def test_a_goal_ends_a_run_whose_actors_have_followed_its_appetite(aws: Aws, tmp_path: Path) -> None:
    command = aws.train(*IMAGE, *GOAL)
    record = begun(command)
    first_end = set(aws.ends().values())
    assert set(aws.ends()) == {
        f"troupe-{record.run}-{name}" for name in ("actor", "evaluator", "learner", "replay-0")
    }
    [end_s] = first_end
    # Were this computer to vanish now, AWS would end the machines within the budget: an hour costs 53 cents.
    assert 8.5 < (end_s - time.time()) / 3600 < 9.1
    learner = tmp_path / "learner"
    learner.mkdir()
    steps = 0
    while aws.groups()["actor"] < 2:
        steps += 100
        (learner / "status.json").write_text(json.dumps(status_of(steps, 0.5)))
        aws.copy(record, learner)
        assert command.process.poll() is None, command.told
        time.sleep(1)
    command.wait_for("the learner waits for actors: 1 -> 2")
    [later_s] = set(aws.ends().values())
    assert later_s < end_s, "more machines, a sooner end"
    write_run(learner, steps + 1, **{"eval/episode_return": 480.0})
    aws.copy(record, learner)
    assert command.status() == 0
    assert "eval/episode_return >= 475 is reached (480)" in command.told
    assert aws.left() == []
    newest = next(newest_first(command.folder / "checkpoints"))
    check(newest)
    assert f"checkpoint {newest.name} is here and complete" in command.told
    assert (command.folder / "metrics.csv").exists()
    spent = re.search(r"([\d.]+) of 5.00 dollars in [\d.]+ hours, ([\d,]+) steps", command.told)
    assert spent is not None
    assert 0.0 < float(spent[1]) < 1.0
    ended = read_record(command.folder)
    assert ended is not None
    assert ended.ended


def test_who_comes_after_a_crash_counts_what_it_cost_and_ends_within_the_budget(
    aws: Aws, tmp_path: Path
) -> None:
    command = aws.train(*IMAGE, *GOAL)
    record = begun(command)
    os.kill(command.process.pid, signal.SIGKILL)
    command.status()
    assert aws.groups() == {"actor": 1, "evaluator": 1, "learner": 1, "replay": 1}, "the run goes on"
    write_run(tmp_path / "learner", 1000)
    aws.copy(record, tmp_path / "learner")
    # As if it had happened nine hours ago.
    record = read_record(command.folder) or record
    record.counted_s -= 9 * 3600
    record.stop_s = record.counted_s + 9 * 3600 + 60
    record.write(command.folder)
    after = aws.train(*GOAL)
    assert after.status() == 1, "it did not reach its goal"
    assert "the budget is used up: ending the run" in after.told
    assert "machines are starting" not in after.told
    assert aws.left() == []
    assert next(newest_first(after.folder / "checkpoints")).name == "step-000000001000"


def test_a_start_that_fails_half_way_leaves_nothing(aws: Aws) -> None:
    command = aws.train(*IMAGE)
    while len(aws.left()) < 3:  # a network, a bucket
        assert command.process.poll() is None, command.told
        time.sleep(0.1)
    allow(aws.cloud, 0)  # from now on these credentials may do nothing
    command.wait_for("the start has failed")
    command.wait_for("cannot destroy everything yet")
    allow(aws.cloud, 1_000_000)
    assert command.status() == 3
    assert "nothing of it is left in AWS" in command.told
    assert "machines are starting" not in command.told
    assert aws.left() == []


def allow(cloud: Cloud, requests: int) -> None:
    """Let moto refuse what comes after so many requests: its credentials are nobody's."""
    url, kind = f"{cloud.url}/moto-api/reset-auth", {"Content-Type": "text/plain"}
    ask = urllib.request.Request(url, data=str(requests).encode(), headers=kind, method="POST")
    urllib.request.urlopen(ask, timeout=30).close()


def test_asked_twice_it_leaves_at_once_and_says_how_it_ends(aws: Aws, tmp_path: Path) -> None:
    command = aws.train(*IMAGE)
    record = begun(command)
    # A second command would change the same things.
    other = aws.command("stop", str(command.folder))
    assert other.status() == 2
    assert "another `troupe cloud` command is at work" in other.told
    write_run(tmp_path / "learner", 500)
    aws.copy(record, tmp_path / "learner")
    command.process.send_signal(signal.SIGINT)
    command.wait_for("stopping the machines, with a last checkpoint")
    time.sleep(1.0)  # together they would count as one
    command.process.send_signal(signal.SIGINT)
    assert command.status() == 130
    assert "given up" in command.told
    assert re.search(r"AWS ends the machines at \S+Z at the latest; `.*cloud stop ", command.told)
    assert aws.left(), "it has left"
    again = aws.command("stop", str(command.folder))
    assert again.status() == 0
    assert aws.left() == []
    assert next(newest_first(command.folder / "checkpoints")).name == "step-000000000500"
