"""A machine's boot, its copies to S3 and its spot notice, against stand-ins for AWS and its metadata."""

from __future__ import annotations

import base64
import json
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.conftest import ROOT, Cloud, run
from tests.deploy.vpc_services import Metadata, bound, instance_metadata

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PREFIX = "/troupe/test"


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    service = Metadata(bound("127.0.0.1", 0), instance_metadata("i-0123456789abcdef0", "10.20.0.7", "node"))
    yield service
    service.close()


class Machine:
    """One machine's folders, and how its agent is called."""

    def __init__(self, root: Path, role: str, cloud: Cloud, metadata: Metadata, python: str) -> None:
        self.root, self.python = root, python
        (root / "bin").mkdir(parents=True)
        for name in ("systemctl", "troupe"):
            file = root / "bin" / name
            file.write_text(f'#!/bin/sh\necho {name} "$@" >>{root}/calls\necho "# made by troupe"\n')
            file.chmod(0o755)
        self.env = cloud.env | {
            "PATH": f"{root}/bin:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "deploy" / "node"),
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": metadata.url,
            "TROUPE_RUN": "test",
            "TROUPE_ROLE": role,
            "TROUPE_INDEX": "0",
            "TROUPE_LEARNER": "tcp://learner.test.troupe.internal:5550",
            "TROUPE_PARAMETERS": PREFIX,
            "TROUPE_ETC": str(root / "etc"),
            "TROUPE_STATE": str(root / "state"),
            "TROUPE_LOGS": str(root / "logs"),
            "TROUPE_BIN": str(root / "bin"),
        }

    @property
    def run_dir(self) -> Path:
        return self.root / "state" / "runs" / "test"

    @property
    def calls(self) -> str:
        file = self.root / "calls"
        return file.read_text() if file.exists() else ""

    def node(self, *words: str, ok: tuple[int, ...] = (0,)) -> str:
        return run(
            self.python, "-m", "troupe_node", *words, cwd=self.root, env=self.env, ok=ok, timeout_s=120
        )


@pytest.fixture
def machine(tmp_path: Path, cloud: Cloud, metadata: Metadata, deploy_python: str) -> Any:
    """Makes machines of a run that is described in the parameter store."""
    cloud.reset()
    setup = f"""
import base64, boto3, json
zone = boto3.client("route53").create_hosted_zone(
    Name="test.troupe.internal", CallerReference="1", VPC={{"VPCRegion": "us-east-1", "VPCId": "vpc-0"}},
)["HostedZone"]["Id"].rsplit("/", 1)[1]
boto3.client("s3").create_bucket(Bucket="bucket")
config = dict(preset="cartpole-apex", overrides={{"run.seed": "7"}}, bucket="bucket", zone_id=zone,
              modules=["my.env", "other"], domain="test.troupe.internal", log_groups={{}},
              groups=["test-actor", "test-learner"],
              actor={{"processes": 3}}, learner={{}}, replay={{}})
encode = lambda text: base64.b64encode(text.encode()).decode()
put = boto3.client("ssm", region_name="us-east-1").put_parameter
put(Name="{PREFIX}/config", Type="String", Value=json.dumps(config))
for role in ("learner", "replay", "actor"):
    put(Name="{PREFIX}/keys/secret/" + role, Type="SecureString", Value=encode(role + "{{{{}}}}"))
for name in ("learner.public", "replay.public", "allowed"):
    put(Name="{PREFIX}/keys/public/" + name, Type="String", Value=encode(name))
"""
    run(deploy_python, "-c", setup, cwd=tmp_path, env=cloud.env)
    return lambda role, name="m": Machine(tmp_path / f"{role}-{name}", role, cloud, metadata, deploy_python)


def ask(machine: Machine, code: str) -> Any:
    """Ask the stand-in with boto3: the JSON value of the expression."""
    words = (machine.python, "-c", f"import boto3, json; print(json.dumps({code}, default=str))")
    return json.loads(run(*words, cwd=machine.root, env=machine.env))


def test_actor_boots(machine: Any) -> None:
    actor = machine("actor")
    actor.node("prepare")
    keys = actor.root / "etc" / "keys"
    assert {file.name for file in keys.iterdir()} == {
        "actor.secret",
        "learner.public",
        "replay.public",
        "allowed",
    }
    # Two braces in a row went through the parameter store unharmed, and only the owner reads them.
    assert (keys / "actor.secret").read_text() == "actor{{}}"
    assert stat.S_IMODE((keys / "actor.secret").stat().st_mode) == 0o600
    assert stat.S_IMODE(keys.stat().st_mode) == 0o700
    started = actor.calls.split()
    assert [f"troupe-actor@{i}.service" in started for i in range(4)] == [True, True, True, False]
    assert "troupe-notice.service" in started
    text = (actor.root / "etc" / "service.env").read_text()
    assert "TROUPE_LEARNER=tcp://learner.test.troupe.internal:5550\n" in text
    assert "TROUPE_HOST=i-0123456789abcdef0\n" in text
    assert "TROUPE_MODULES=my.env,other\n" in text


def test_a_learner_that_joins_has_the_key_of_the_learner_and_nothing_else_of_it(machine: Any) -> None:
    peer = machine("learner-peer")
    peer.node("prepare")
    keys = {file.name: file.read_text() for file in (peer.root / "etc" / "keys").iterdir()}
    assert keys.keys() == {"learner.secret", "learner.public", "replay.public", "allowed"}
    assert keys["learner.secret"] == "learner{{}}"
    started = peer.calls.split()
    assert {"troupe-learner-peer.service", "troupe-notice.service"} <= set(started)
    assert "troupe-learner.service" not in started
    assert not (peer.run_dir / "config.toml").exists()  # the learner that has the run tells it
    zone = "boto3.client('route53').list_hosted_zones()['HostedZones'][0]['Id']"
    records = ask(peer, f"boto3.client('route53').list_resource_record_sets(HostedZoneId={zone})")
    assert "A" not in {one["Type"] for one in records["ResourceRecordSets"]}
    (peer.run_dir / "last").write_text("not of the run")
    peer.node("sync", "--last")
    assert ask(peer, "boto3.client('s3').list_objects_v2(Bucket='bucket')['KeyCount']") == 0


def test_replay_takes_its_name(machine: Any, metadata: Metadata) -> None:
    shard = machine("replay")
    shard.node("prepare")
    metadata.values["local-ipv4"] = "10.20.0.8"  # its successor
    shard.node("prepare")
    zone = "boto3.client('route53').list_hosted_zones()['HostedZones'][0]['Id']"
    records = ask(shard, f"boto3.client('route53').list_resource_record_sets(HostedZoneId={zone})")
    found = [one for one in records["ResourceRecordSets"] if one["Type"] == "A"]
    assert [(one["Name"], one["ResourceRecords"]) for one in found] == [
        ("replay-0.test.troupe.internal.", [{"Value": "10.20.0.8"}])
    ]
    text = (shard.root / "etc" / "service.env").read_text()
    assert "TROUPE_ADVERTISE=tcp://replay-0.test.troupe.internal:5560\n" in text


def test_a_new_learner_has_what_the_old_one_copied(machine: Any) -> None:
    old = machine("learner", "old")
    old.node("prepare")
    assert "config show cartpole-apex --run.seed 7" in old.calls
    first, second = (old.run_dir / "checkpoints" / f"step-{n:012d}" for n in (100, 200))
    for folder in (first, second):
        folder.mkdir(parents=True)
        (folder / "arrays.safetensors").write_bytes(b"weights of " + folder.name.encode())
        (folder / "MANIFEST.json").write_text("{}")
    (old.run_dir / "tensorboard").mkdir()
    (old.run_dir / "tensorboard" / "events").write_text("a curve")
    (old.run_dir / "replay").mkdir()
    (old.run_dir / "replay" / "items").write_text("too many")
    (old.run_dir / "status.json").write_text(json.dumps({"steps": 200, "updates": 40, "metrics": {}}))
    old.node("sync")
    for file in first.iterdir():
        file.unlink()
    first.rmdir()  # the learner keeps the newest ones
    old.node("sync")

    new = machine("learner", "new")
    new.node("prepare")
    restored = {str(path.relative_to(new.run_dir)) for path in new.run_dir.rglob("*") if path.is_file()}
    step = "checkpoints/step-000000000200"
    assert {f"{step}/arrays.safetensors", f"{step}/MANIFEST.json", "tensorboard/events"} <= restored
    assert not any("step-000000000100" in path or path.startswith("replay/") for path in restored)
    assert (new.run_dir / step / "arrays.safetensors").read_bytes() == b"weights of step-000000000200"
    metrics = ask(new, "boto3.client('cloudwatch').list_metrics(Namespace='Troupe')['Metrics']")
    assert {one["MetricName"] for one in metrics} == {"Steps", "Updates"}


def test_a_learner_takes_the_run_file_of_the_run(machine: Any) -> None:
    learner, text = machine("learner"), 'preset = "cartpole-apex"\n[env]\nkwargs = {a = {b = 1}}\n'
    encoded = base64.b64encode(text.encode()).decode()
    change = f"""
import boto3, json
ssm = boto3.client("ssm", region_name="us-east-1")
name = "{PREFIX}/config"
config = json.loads(ssm.get_parameter(Name=name)["Parameter"]["Value"]) | dict(run_file="{encoded}")
ssm.put_parameter(Name=name, Type="String", Value=json.dumps(config), Overwrite=True)
"""
    run(learner.python, "-c", change, cwd=learner.root, env=learner.env)
    learner.node("prepare", "--no-start")
    file = learner.root / "etc" / "run.toml"
    assert file.read_text() == text
    assert f"config show {file} --run.seed 7" in learner.calls


def test_a_reboot_keeps_what_the_learner_wrote_since(machine: Any) -> None:
    learner = machine("learner")
    learner.node("prepare")
    (learner.run_dir / "metrics.csv").write_text("old\n")
    learner.node("sync")
    (learner.run_dir / "metrics.csv").write_text("old\nnew\n")
    learner.node("prepare")
    assert (learner.run_dir / "metrics.csv").read_text() == "old\nnew\n"


def test_the_end_of_a_run_stops_its_machines(machine: Any) -> None:
    learner = machine("learner")
    groups = """[
    boto3.client('autoscaling').create_launch_configuration(
        LaunchConfigurationName='one', ImageId='ami-0', InstanceType='t3.medium'),
    *[boto3.client('autoscaling').create_auto_scaling_group(
        AutoScalingGroupName=name, LaunchConfigurationName='one', MinSize=0, MaxSize=2, DesiredCapacity=1,
        AvailabilityZones=['us-east-1a']) for name in ('test-actor', 'test-learner', 'stranger')]]"""
    ask(learner, groups)
    capacities = """{one['AutoScalingGroupName']: one['DesiredCapacity'] for one in
    boto3.client('autoscaling').describe_auto_scaling_groups()['AutoScalingGroups']}"""
    run_dir = learner.run_dir
    learner.node("prepare", "--no-start")
    (run_dir / "config.toml").write_text("[run]\ntotal_steps = 1000\n")

    # A status from before the total was raised; a learner that is still there, or has failed.
    for steps, words in ((999, ("sync", "--last")), (1000, ("sync",))):
        (run_dir / "status.json").write_text(json.dumps({"steps": steps, "total_steps": 900, "updates": 4}))
        learner.node(*words)
        assert set(ask(learner, capacities).values()) == {1}

    (run_dir / "last").write_text("written at the end")
    learner.node("sync", "--last")
    assert ask(learner, capacities) == {"test-actor": 0, "test-learner": 0, "stranger": 1}
    assert ask(
        learner, "boto3.client('s3').get_object(Bucket='bucket', Key='runs/test/last')['ContentLength']"
    )


def test_a_large_file_that_grows_is_not_copied_every_minute(machine: Any) -> None:
    """The bucket keeps every copy for days."""
    learner = machine("learner")
    learner.node("prepare", "--no-start")
    (learner.run_dir / "config.toml").write_text("[run]\ntotal_steps = 1000\n")
    events, small = learner.run_dir / "events", learner.run_dir / "small"

    def sizes() -> list[int]:
        objects = "boto3.client('s3').list_objects_v2(Bucket='bucket')['Contents']"
        found = ask(learner, f"{{one['Key']: one['Size'] for one in {objects}}}")
        return [found[f"runs/test/{file.name}"] for file in (events, small)]

    for part in (1, 2):
        events.write_bytes(bytes(part * 20_000_000))  # a minute per megabyte, but no more than 15
        small.write_bytes(bytes(part))
        learner.node("sync")
    assert sizes() == [20_000_000, 2]
    (learner.run_dir / "status.json").write_text(json.dumps({"steps": 1000, "updates": 4}))
    learner.node("sync", "--last")  # groups that do not exist do not keep it from ending
    assert sizes() == [40_000_000, 2]


def test_progress_is_that_of_a_learner_that_reports(machine: Any) -> None:
    learner = machine("learner")
    learner.node("prepare")
    status = learner.run_dir / "status.json"
    metrics = "boto3.client('cloudwatch').list_metrics(Namespace='Troupe')['Metrics']"
    names = f"[one['MetricName'] for one in {metrics}]"
    values = {"steps": 200, "updates": 40, "metrics": {"train/episode_return": float("nan")}}
    status.write_text(json.dumps(values))
    os.utime(status, (1e9, 1e9))  # the learner hangs, or is gone: its alarm shall hear of it
    learner.node("sync")
    assert ask(learner, names) == []
    status.write_text(json.dumps(values))
    learner.node("sync")  # and CloudWatch refuses what is no number
    assert sorted(ask(learner, names)) == ["Steps", "Updates"]


def test_a_key_cannot_leave_the_run_directory(machine: Any) -> None:
    learner = machine("learner")
    put = "boto3.client('s3').put_object(Bucket='bucket', Key='runs/test/../../../../evil', Body=b'x')"
    ask(learner, put)
    assert "leads out" in learner.node("prepare", ok=(1,))
    assert not list(learner.root.parent.rglob("evil"))


@pytest.mark.parametrize(
    ("path", "notice"),
    [
        ("spot/instance-action", '{"action": "terminate", "time": "2030-01-01T00:00:00Z"}'),
        ("autoscaling/target-lifecycle-state", "Terminated"),
    ],
)
def test_the_watcher_ends_when_a_notice_comes_and_touches_nothing(
    machine: Any, metadata: Metadata, path: str, notice: str
) -> None:
    """What follows is the unit's next command: the watcher needs no rights."""
    metadata.values["autoscaling/target-lifecycle-state"] = "InService"
    actor = machine("actor")
    words = [actor.python, "-m", "troupe_node", "watch-notice", "--poll-s", "0.1"]
    watch = subprocess.Popen(words, cwd=actor.root, env=actor.env)
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            watch.wait(3)  # no notice yet
        metadata.values[path] = notice
        assert watch.wait(60) == 0
    finally:
        watch.kill()
        watch.wait(10)
    assert actor.calls == ""


def test_the_group_ends_the_learner_after_its_last_copy(machine: Any, metadata: Metadata) -> None:
    learner, actor = machine("learner"), machine("actor")
    hook = """{'learner': {'hook': {'group': 'test-learner', 'name': 'last-copy'}}}"""
    put = f"""[
    (ssm := boto3.client('ssm')),
    ssm.put_parameter(Name='{PREFIX}/config', Type='String', Overwrite=True, Value=json.dumps(
        json.loads(ssm.get_parameter(Name='{PREFIX}/config')['Parameter']['Value']) | {hook})),
    boto3.client('autoscaling').put_lifecycle_hook(LifecycleHookName='last-copy',
        AutoScalingGroupName='test-learner', LifecycleTransition='autoscaling:EC2_INSTANCE_TERMINATING')]"""
    ask(learner, put)
    hooks = "boto3.client('autoscaling').describe_lifecycle_hooks(AutoScalingGroupName='test-learner')"
    told = f"{hooks}['LifecycleHooks'][0].get('NotificationMetadata', '')"
    learner.node("prepare", "--no-start")
    (learner.run_dir / "last").write_text("written at the end")
    learner.node("sync", "--last")  # the learner has ended, and its machine stays
    metadata.values["autoscaling/target-lifecycle-state"] = "Terminated"
    actor.node("sync", "--last")  # its notice begins the same unit
    learner.node("sync")
    assert ask(learner, told) == ""
    learner.node("sync", "--last")
    assert ask(learner, told) == "let go: i-0123456789abcdef0"
    ask(
        learner,
        "boto3.client('autoscaling').delete_lifecycle_hook(AutoScalingGroupName='test-learner', "
        "LifecycleHookName='last-copy')",
    )
    assert "No active Lifecycle Action" in learner.node("sync", "--last")  # and that is no failure


def test_incomplete_user_data_is_one_line(machine: Any) -> None:
    actor = machine("actor")
    del actor.env["TROUPE_RUN"]
    lines = actor.node("prepare", ok=(1,)).strip().splitlines()
    assert lines == ["troupe-node: error: user data is incomplete: 'TROUPE_RUN'"]
