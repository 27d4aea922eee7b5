"""Terraform: style, its own tests, and both examples applied to a stand-in for AWS and destroyed again."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from tests.deploy.conftest import TERRAFORM, Cloud, init_words, run
from troupe.services.cloud.estimate import estimate
from troupe.services.cloud.layout import Layout
from troupe.services.cloud.prices import read_prices

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


def test_style(terraform: str) -> None:
    run(terraform, "fmt", "-check", "-recursive", "-diff", cwd=TERRAFORM, env=dict(os.environ))


def test_the_provider_is_the_one_that_was_tested(terraform: str, workspace: Path) -> None:
    """The lock file is committed, fits the versions that are asked for, and `init` leaves it as it is."""
    lock = TERRAFORM / ".terraform.lock.hcl"
    env = {name: text for name, text in os.environ.items() if not name.startswith("AWS_")}
    run(terraform, *init_words(), "-lockfile=readonly", cwd=workspace, env=env)
    assert (workspace / lock.name).read_text() == lock.read_text()
    text = lock.read_text()
    (version,) = re.findall(r'^  version += "5\.(\d+)\.\d+"$', text, re.MULTILINE)
    assert int(version) >= 100
    assert len(re.findall(r'"zh:[0-9a-f]{64}"', text)) >= 10  # of every platform, not of this one alone


def test_terraform_tests(terraform: str, workspace: Path) -> None:
    env = {name: text for name, text in os.environ.items() if not name.startswith("AWS_")}
    env.pop("TF_CLI_CONFIG_FILE", None)
    env["AWS_REGION"] = "us-east-1"
    run(terraform, *init_words(), cwd=workspace, env=env)
    run(terraform, "validate", "-no-color", cwd=workspace, env=env)
    output = run(terraform, "test", "-no-color", cwd=workspace, env=env)
    assert ", 0 failed" in output


def test_a_module_block_finds_it_in_a_repository_of_its_own(
    terraform: str, workspace: Path, cloud: Cloud, keys_dir: Path, tmp_path: Path
) -> None:
    """The block of the README, with the address of a tag in the place of the registry's."""
    module = shutil.copytree(
        workspace,
        tmp_path / "terraform-aws-troupe",
        ignore=shutil.ignore_patterns(".terraform", "*.tfstate*"),
    )
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"], ["tag", "v0.1.0"]):
        run(*git, *words, cwd=module, env=cloud.env)
    (block,) = re.findall(
        r"^```hcl\n(.*?)^```", (TERRAFORM / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    named = 'source  = "NAMESPACE/troupe/aws"'
    assert named in block
    text = block.replace(named, f'source = "git::file://{module}?ref=v0.1.0"').replace(
        '"keys/cartpole"', f'"{keys_dir}"'
    )
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "main.tf").write_text(re.sub(r"^  version = .*\n", "", text, flags=re.MULTILINE))
    run(terraform, *init_words(), cwd=folder, env=cloud.env)
    output = run(terraform, "plan", "-input=false", "-no-color", cwd=folder, env=cloud.env)
    assert re.search(r"Plan: \d+ to add, 0 to change, 0 to destroy", output)


def test_checkov_finds_nothing(deploy_python: str) -> None:
    checkov = os.environ.get("TROUPE_CHECKOV") or str(Path(deploy_python).with_name("checkov"))
    if shutil.which(checkov) is None:
        pytest.skip(
            "NOT TESTED: checkov is not installed; pip install checkov, and name it in TROUPE_CHECKOV"
        )
    words = ["-d", TERRAFORM, "--framework", "terraform", "--compact", "--quiet"]
    run(checkov, *words, cwd=TERRAFORM, env=dict(os.environ))


@pytest.mark.parametrize("example", ["minimal", "complete"])
def test_example_applies_stays_and_goes(
    example: str,
    terraform: str,
    workspace: Path,
    cloud: Cloud,
    deploy_python: str,
    keys_dir: Path,
    manifest: Path,
) -> None:
    folder = workspace / "examples" / example
    env = cloud.env | {"TF_VAR_keys_dir": str(keys_dir)}
    env |= (
        {"TF_VAR_packer_manifest": str(manifest)}
        if example == "complete"
        else {"TF_VAR_cpu_image_id": "ami-0aaaaaaaaaaaaaaaa"}
    )
    run(terraform, *init_words(), cwd=folder, env=env)
    run(terraform, "apply", "-auto-approve", "-input=false", "-no-color", cwd=folder, env=env)
    _no_secret_is_kept(folder / "terraform.tfstate", keys_dir)
    outputs = json.loads(run(terraform, "output", "-json", cwd=folder, env=env))["troupe"]["value"]
    _outputs_are_right(example, outputs)
    _missing_machines_are_an_alarm(deploy_python, folder, env, outputs["groups"])
    # Empty: 0, and not 2.
    run(terraform, "plan", "-detailed-exitcode", "-input=false", "-no-color", cwd=folder, env=env)
    destroy = ("destroy", "-auto-approve", "-input=false", "-no-color")
    if example == "minimal":  # the other one may delete what is in its bucket
        version = _put(deploy_python, outputs["bucket"], folder, env)
        output = run(terraform, *destroy, cwd=folder, env=env, ok=(1,))
        assert "BucketNotEmpty" in output
        # Who keeps the bucket keeps the key: without it nobody reads what is in there.
        assert {"aws_s3_bucket", "aws_kms_key"} <= {one["type"] for one in _resources(folder)}
        remove = "import boto3, sys; boto3.resource('s3').ObjectVersion(*sys.argv[1:]).delete()"
        run(deploy_python, "-c", remove, str(outputs["bucket"]), "x", version, cwd=folder, env=env)
    run(terraform, *destroy, cwd=folder, env=env)
    assert not _resources(folder)


LAYOUTS = {
    "minimal": Layout(
        learner_instance_type="c6i.large",
        learner_disk_gb=20,
        replay_instance_type="t3.medium",
        replay_disk_gb=20,
        actors=2,
        actors_per_machine=2,
        actor_instance_types=["c6i.large", "c6a.large"],
        nat_gateway=False,
    ),
    "complete": Layout(
        replay_shards=2,
        replay_volume_gb=50,
        actors=192,
        tensorboard_cidrs=["203.0.113.0/24"],
        availability_zones=["us-east-1a", "us-east-1b"],
    ),
}


RIGHTS = """
import boto3, json, sys
ask = boto3.client("iam").get_role_policy
def rights(role):
    found = boto3.client("iam").list_role_policies(RoleName=role)["PolicyNames"]
    policies = [ask(RoleName=role, PolicyName=name)["PolicyDocument"]["Statement"] for name in found]
    return {each["Sid"]: each["Resource"] for policy in policies for each in policy}
groups = boto3.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]
sizes = {each["AutoScalingGroupName"]: each["DesiredCapacity"] for each in groups}
print(json.dumps([rights(sys.argv[1]), rights(sys.argv[2]), sizes]))
"""


def test_learners_that_join_have_the_learners_key_and_no_other_right_of_it(
    terraform: str, workspace: Path, cloud: Cloud, deploy_python: str, keys_dir: Path
) -> None:
    state = shutil.ignore_patterns(".terraform*", "*.tfstate*")
    folder = workspace / "examples" / "learners"
    shutil.copytree(workspace / "examples" / "minimal", folder, ignore=state)
    (folder / "more_override.tf").write_text('module "troupe" {\n  learners = 3\n}\n')
    env = cloud.env | {"TF_VAR_keys_dir": str(keys_dir), "TF_VAR_cpu_image_id": "ami-0aaaaaaaaaaaaaaaa"}
    run(terraform, *init_words(), cwd=folder, env=env)
    run(terraform, "apply", "-auto-approve", "-input=false", "-no-color", cwd=folder, env=env)
    outputs = json.loads(run(terraform, "output", "-json", cwd=folder, env=env))["troupe"]["value"]
    groups = outputs["groups"]
    words = ("-c", RIGHTS, groups["learner"], groups["learner-peer"])
    learner, peer, sizes = json.loads(run(deploy_python, *words, cwd=folder, env=env))
    assert sizes[groups["learner-peer"]] == 2
    assert peer["OwnSecretKey"] == learner["OwnSecretKey"]
    assert peer["Logs"] != learner["Logs"]
    assert learner.keys() - peer.keys() == OF_THE_LEARNER_ALONE
    assert peer.keys() <= learner.keys()
    _counts_the_same(
        LAYOUTS["minimal"].model_copy(update={"learners": 3}), outputs["hourly_cost_usd"]["parts"]
    )
    run(terraform, "plan", "-detailed-exitcode", "-input=false", "-no-color", cwd=folder, env=env)
    run(terraform, "destroy", "-auto-approve", "-input=false", "-no-color", cwd=folder, env=env)


OF_THE_LEARNER_ALONE = {
    *("OwnName", "ListRun", "CopyRun", "EncryptCopies", "Progress"),
    *("StopMachinesAtTheEnd", "LetGoOfItself"),
}


def _counts_the_same(layout: Layout, parts: dict[str, float]) -> None:
    """`troupe cloud estimate` and Terraform's own output."""
    lines = estimate(layout, read_prices({}), bucket_gb=0.0)
    counted = {line.part.replace("actors", "actor"): line.hourly_usd for line in lines if line.hourly_usd}
    assert counted == pytest.approx(parts, abs=0.001)


def _missing_machines_are_an_alarm(
    python: str, folder: Path, env: dict[str, str], groups: dict[str, object]
) -> None:
    """Actors and the learner: each group's own numbers, which the group has to publish."""
    code = "import boto3, json; ask = boto3.client('autoscaling').describe_auto_scaling_groups"
    code += "; alarms = boto3.client('cloudwatch').describe_alarms()['MetricAlarms']"
    code += "; print(json.dumps([alarms, ask()['AutoScalingGroups']], default=str))"
    alarms, there = json.loads(run(python, "-c", code, cwd=folder, env=env))
    published = {one["AutoScalingGroupName"]: one.get("EnabledMetrics", []) for one in there}
    missing = [each for each in alarms if each["AlarmName"].endswith("-missing")]
    for role in ("actor", "learner"):
        name = str(groups[role])
        (alarm,) = [each for each in missing if f"'{name}'" in str(each)]
        asked = [each["MetricStat"]["Metric"] for each in alarm["Metrics"] if "MetricStat" in each]
        wanted = {each["Metric"] for each in published[name]}
        assert {each["MetricName"] for each in asked} == wanted != set()
        assert all({"Name": "AutoScalingGroupName", "Value": name} in each["Dimensions"] for each in asked)


def _resources(folder: Path) -> list[dict[str, str]]:
    return list(json.loads((folder / "terraform.tfstate").read_text())["resources"])


def _put(deploy_python: str, bucket: object, folder: Path, env: dict[str, str]) -> str:
    """Put an object `x` into the bucket; its version."""
    code = "import boto3, sys; put = boto3.client('s3').put_object"
    code += "; print(put(Bucket=sys.argv[1], Key='x', Body=b'x')['VersionId'])"
    return run(deploy_python, "-c", code, str(bucket), cwd=folder, env=env).strip()


def _no_secret_is_kept(state: Path, keys_dir: Path) -> None:
    text = state.read_text()
    assert base64.b64encode((keys_dir / "learner.public").read_bytes()).decode() in text
    for file in keys_dir.glob("*.secret"):
        for form in (file.read_text().strip(), base64.b64encode(file.read_bytes()).decode()):
            assert form not in text, f"{file.name} is in the state"


def _outputs_are_right(example: str, outputs: dict[str, object]) -> None:
    if example == "complete":
        assert outputs["actor_machines"] == 48
        assert str(outputs["tensorboard_url"]).startswith("http://")
        assert "localhost" not in str(outputs["tensorboard_url"])
    else:
        assert outputs["actor_machines"] == 1
        assert outputs["tensorboard_url"] == "http://localhost:6006"
    cost = outputs["hourly_cost_usd"]
    assert isinstance(cost, dict)
    assert cost["total"] == pytest.approx(sum(cost["parts"].values()), abs=0.005)
    _counts_the_same(LAYOUTS[example], cost["parts"])
    commands = outputs["session_manager_commands"]
    assert isinstance(commands, dict)
    assert all(command.startswith("aws ") for command in commands.values())
    data = outputs["user_data"]
    assert isinstance(data, dict)
    for role in ("learner", "actor", "evaluator"):
        assert f"TROUPE_ROLE={role}\n" in data[role]
        assert "SECRET" not in data[role]
