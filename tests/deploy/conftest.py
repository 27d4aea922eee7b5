"""What the deployment's tests need: tools that are not everywhere, and a stand-in for AWS on loopback."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TERRAFORM = ROOT / "deploy" / "terraform"
WANTED = "TROUPE_TEST_DEPLOY"
WANTED_EC2 = "TROUPE_TEST_EC2"
WANTED_SLURM = "TROUPE_TEST_SLURM"
VENV = ROOT / ".venv-deploy"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the slow tests to `make test-deploy`, `make test-ec2` and `make test-slurm`."""
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("slow"):
            own = dict.fromkeys(("test_ec2.py", "test_ec2_train.py"), (WANTED_EC2, "test-ec2"))
            own["test_slurm.py"] = (WANTED_SLURM, "test-slurm")
            name, target = own.get(item.path.name, (WANTED, "test-deploy"))
            if os.environ.get(name) != "1":
                reason = f"slow and needs other tools: `make {target}` (or {name}=1)"
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def terraform() -> str:
    """The terraform command."""
    command = shutil.which("terraform")
    if command is None:
        pytest.skip("NOT TESTED: terraform is not installed")
    return command


@pytest.fixture(scope="session")
def deploy_python() -> str:
    """A Python with moto and boto3."""
    python = Path(os.environ.get("TROUPE_DEPLOY_PYTHON", VENV / "bin" / "python"))
    if not python.exists():
        pytest.skip(f"NOT TESTED: {python} is missing; `make test-deploy` makes it")
    return str(python)


@pytest.fixture(scope="session")
def keys_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `troupe keys new` makes it; one key holds what the parameter store would refuse."""
    folder = tmp_path_factory.mktemp("keys")
    for role in ("learner", "replay", "actor", "evaluator", "viewer"):
        (folder / f"{role}.secret").write_text(f"SECRET-{role}".ljust(36, "s") + "{{}}\n")
        (folder / f"{role}.public").write_text(f"public-{role}".ljust(40, "p") + "\n")
    (folder / "allowed").write_text("learner public-learner\n")
    return folder


class Cloud:
    """The stand-in's address, and an environment in which every AWS client talks to it."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        # Without the user's own credentials and configuration: nothing here may reach a real account.
        self.env = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ} | {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",  # the name that boto3 reads
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_MAX_ATTEMPTS": "3",
            "CHECKPOINT_DISABLE": "1",
            "TF_IN_AUTOMATION": "1",
        }

    def reset(self) -> None:
        """Forget everything."""
        ask = urllib.request.Request(f"{self.url}/moto-api/reset", method="POST")
        urllib.request.urlopen(ask, timeout=30).close()


@pytest.fixture(scope="module")
def cloud(
    deploy_python: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Cloud]:
    """An empty AWS on loopback; lifecycle hooks hold machines for a module with `HOOKS_HOLD = True`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("aws") / "server.log"
    words = [deploy_python, str(Path(__file__).with_name("aws_server.py")), str(port)]
    words += ["hold"] if getattr(request.module, "HOOKS_HOLD", False) else []
    with log.open("w") as out:
        server = subprocess.Popen(words, stdout=out, stderr=out)
    try:
        cloud = Cloud(port)
        deadline = time.monotonic() + 90
        while True:
            try:
                cloud.reset()
                break
            except urllib.error.URLError:
                if server.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(log.read_text()[-2000:])
                time.sleep(0.5)
        yield cloud
    finally:
        server.terminate()
        server.wait(30)


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory, terraform: str) -> Path:
    """A copy of the Terraform files, so that no state or lock file gets into the source tree."""
    copy = tmp_path_factory.mktemp("terraform") / "terraform"
    shutil.copytree(
        TERRAFORM,
        copy,
        ignore=shutil.ignore_patterns(".terraform", "*.tfstate*", "*.auto.tfvars*", "terraform.tfvars"),
    )
    return copy


@pytest.fixture(scope="session")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What Packer's manifest looks like after two builds for several regions."""
    builds = [
        {"artifact_id": "us-east-1:ami-0aaaaaaaaaaaaaaaa", "custom_data": {"kind": "cpu"}},
        {
            "artifact_id": "us-east-1:ami-0bbbbbbbbbbbbbbbb,eu-west-1:ami-0cccccccccccccccc",
            "custom_data": {"kind": "gpu"},
        },
        {"artifact_id": "us-east-1:ami-0dddddddddddddddd", "custom_data": {"kind": "cpu"}},
    ]
    file = tmp_path_factory.mktemp("packer") / "manifest.json"
    file.write_text(json.dumps({"builds": builds, "last_run_uuid": "00"}))
    return file


def run(
    *words: str | Path, cwd: Path, env: dict[str, str], ok: tuple[int, ...] = (0,), timeout_s: float = 900
) -> str:
    """Run a command; its output. Fails with the output where the exit status is none of `ok`."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=env,
        timeout=timeout_s,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    output = done.stdout
    if done.returncode not in ok:
        print(output[-6000:], file=sys.stderr)
        pytest.fail(f"{' '.join(map(str, words))}: exit status {done.returncode}\n{output[-6000:]}")
    return output


def init_words() -> list[str]:
    """How to initialise: from a local mirror of the provider where TROUPE_TERRAFORM_PLUGINS names one."""
    mirror = os.environ.get("TROUPE_TERRAFORM_PLUGINS")
    return ["init", "-input=false", "-no-color", *([f"-plugin-dir={mirror}"] if mirror else [])]
