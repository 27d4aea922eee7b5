"""deploy/kubernetes, run: the rendered manifests by `podman kube play`, from keys to the end of a run."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.conftest import run
from tests.deploy.podman import SUBNET, USER, Podman, need_podman
from tests.deploy.test_kubernetes import KUBERNETES
from troupe.common.runtime.files import read_status
from troupe.common.wire.security.keys import make_keys

yaml = pytest.importorskip("yaml")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

PATIENCE_S = 1200.0
STEPS = 8000
RUN_FILE = f"""\
preset = "cartpole-apex"

[run]
total_steps = {STEPS}

[actor]
total_slots = 4096

[net]
learner_network = "{SUBNET}"
"""
PODS = ["actor-0", "actor-1", "evaluator-0", "learner-0", "learner-peer-0", "replay-0"]
PEER = ("Deployment", "learner-peer")
TOGETHER = re.compile(r"epoch \d+: 2 learners share each batch")


def until(condition: Callable[[], object], what: str, podman: Podman) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline_s:
            logs = [podman.logs(name, last=30) for name in PODS]
            pytest.fail(f"{what}: not within {PATIENCE_S:.0f} s\n{podman.run('ps', '-a')}" + "\n".join(logs))
        time.sleep(1.0)


@pytest.fixture(scope="module")
def podman() -> Iterator[Podman]:
    """The run, played."""
    need_podman()
    if shutil.which("kubectl") is None:
        pytest.skip("NOT TESTED: the manifests were not run: kubectl is not installed")
    # Not pytest's: what mounts other file systems shall not lie in a folder that pytest deletes.
    with tempfile.TemporaryDirectory(prefix="troupe-podman-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o755)
        manifests = folder / "kubernetes"
        shutil.copytree(KUBERNETES, manifests, ignore=shutil.ignore_patterns("keys"))
        make_keys(manifests / "base" / "keys")
        (manifests / "base" / "my.toml").write_text(RUN_FILE)
        rendered = run("kubectl", "kustomize", manifests / "base", cwd=folder, env=dict(os.environ))
        resources = [each for each in yaml.safe_load_all(rendered) if each]
        [peer] = (each for each in resources if (each["kind"], each["metadata"]["name"]) == PEER)
        peer["spec"]["replicas"] = 1  # as `kubectl scale` would
        podman = Podman(folder)
        try:
            podman.play(resources)
            yield podman
        finally:
            podman.close()


def inspect(podman: Podman, pod: str) -> dict[str, Any]:
    [found] = json.loads(podman.run("inspect", f"{pod}-troupe"))
    return dict(found)


def together(podman: Podman) -> int:
    """How often two learners have found each other, as the one that has the run says."""
    return len(TOGETHER.findall(podman.logs("learner-0")))


def run_dir(podman: Podman) -> Path:
    [volume] = json.loads(podman.run("volume", "inspect", "runs"))
    return Path(volume["Mountpoint"]) / "run"


def test_every_probe_answers_and_the_run_learns(podman: Podman) -> None:
    until(lambda: read_status(run_dir(podman)).get("updates", 0) > 0, "updates", podman)
    code = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=30).status)"
    for pod in PODS:
        for probe in podman.probes[pod]:
            url = f"http://127.0.0.1:{podman.ports[pod][probe['port']]}{probe['path']}"
            ask = ("exec", f"{pod}-troupe", "/opt/troupe/venv/bin/python", "-c", code, url)
            until(lambda ask=ask: podman.run(*ask, ok=(0, 1)).strip() == "200", f"{pod}: {url}", podman)


def test_containers_are_as_closed_as_the_manifests_say(podman: Podman) -> None:
    for pod in PODS:
        found = inspect(podman, pod)
        assert found["Config"]["User"] in (f"{USER}:{USER}", str(USER))
        assert found["HostConfig"]["ReadonlyRootfs"] is True
        assert not found["EffectiveCaps"]
        status = Path(f"/proc/{found['State']['Pid']}/status").read_text()
        assert "NoNewPrivs:\t1" in status
        assert "CapEff:\t0000000000000000" in status
        # A kubelet's secrets can be read by a group; the service has copies that nobody else reads.
        own = pod[:-2].removesuffix("-peer")
        keys = podman.run(
            "exec", f"{pod}-troupe", "stat", "-c", "%a %n", "/keys/own", f"/keys/own/{own}.secret"
        )
        assert keys.split()[::2] == ["700", "600"]


def test_a_learner_that_is_asked_for_shares_each_batch_and_comes_back_when_it_is_killed(
    podman: Podman,
) -> None:
    until(lambda: together(podman) > 0, "two learners", podman)
    before, pid = together(podman), inspect(podman, "learner-peer-0")["State"]["Pid"]
    os.kill(pid, 9)
    until(lambda: together(podman) > before, "two learners again", podman)
    assert inspect(podman, "learner-peer-0")["State"]["Pid"] not in (0, pid)


def test_a_shard_that_is_killed_comes_back_and_the_run_ends(podman: Podman) -> None:
    pid = inspect(podman, "replay-0")["State"]["Pid"]
    os.kill(pid, 9)
    until(lambda: inspect(podman, "replay-0")["State"]["Pid"] not in (0, pid), "replay again", podman)
    until(lambda: read_status(run_dir(podman)).get("steps", 0) >= STEPS, "the end of the run", podman)
    until(lambda: inspect(podman, "learner-0")["State"]["Status"] == "exited", "the learner's end", podman)
    assert inspect(podman, "learner-0")["State"]["ExitCode"] == 0
    assert list((run_dir(podman) / "checkpoints").glob("step-*"))
