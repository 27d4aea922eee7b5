"""deploy/kubernetes: rendered, checked against every version's schemas, and read as an administrator would.

`kubectl kustomize` renders without a cluster. Whether a kubelet takes it is not shown here.
"""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.conftest import ROOT, run
from troupe.common.config import load_config
from troupe.common.errors import ConfigError
from troupe.common.runtime.lifecycle import INTERRUPTED
from troupe.common.wire.security.keys import make_keys
from troupe.services.experiments import checks, plan
from troupe.services.experiments.ending import SweepError
from troupe.services.experiments.sweep_command import sweep_parser

yaml = pytest.importorskip("yaml")

KUBERNETES = ROOT / "deploy" / "kubernetes"
ROLES = ("learner", "learner-peer", "replay", "actor", "evaluator")
OVERLAYS = {"base": ROLES, "gpu": ROLES, "sweep": ("sweep",)}
"""And their pods."""
# Schemas before 1.29 want `onPodConditions` also in a rule of `onExitCodes`, as the sweep's Job has.
FIRST_MINOR = {"base": 25, "gpu": 25, "sweep": 29}
Resources = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy with keys in it."""
    if shutil.which("kubectl") is None:
        pytest.skip("NOT TESTED: kubectl is not installed")
    copy = tmp_path_factory.mktemp("kubernetes") / "kubernetes"
    shutil.copytree(KUBERNETES, copy, ignore=shutil.ignore_patterns("keys"))
    make_keys(copy / "base" / "keys")
    return copy


def rendered(folder: Path, overlay: str) -> str:
    return run("kubectl", "kustomize", folder / overlay, cwd=folder, env=dict(os.environ))


def resources(folder: Path, overlay: str) -> Resources:
    return [each for each in yaml.safe_load_all(rendered(folder, overlay)) if each]


def of_kind(found: Resources, kind: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in found if each["kind"] == kind}


def pods(found: Resources) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, deployment in {**of_kind(found, "Deployment"), **of_kind(found, "Job")}.items():
        yield name, deployment["spec"]["template"]["spec"]


def _validate(python: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    command = Path(python).with_name("kubernetes-validate")
    if not command.exists():
        pytest.skip(f"NOT TESTED: {command} is missing; `make test-deploy` installs it")
    return subprocess.run([command, "--strict", *words], capture_output=True, text=True, timeout=600)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_version_of_kubernetes_takes_it(
    folder: Path, overlay: str, deploy_python: str, tmp_path: Path
) -> None:
    file = tmp_path / "all.yaml"
    file.write_text(rendered(folder, overlay))
    for minor in range(FIRST_MINOR[overlay], 38):
        done = _validate(deploy_python, "-k", f"1.{minor}", file)
        assert done.returncode == 0, f"1.{minor}: {done.stdout}{done.stderr}"
    file.write_text(file.read_text().replace("readOnlyRootFilesystem", "readOnlyRootFileSystem"))
    assert _validate(deploy_python, "-k", "1.37", file).returncode, "a misspelt field"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_are_as_the_restricted_standard_wants_them(folder: Path, overlay: str) -> None:
    """The rules of kubernetes.io/docs/concepts/security/pod-security-standards, and a read-only root."""
    found = resources(folder, overlay)
    (namespace,) = of_kind(found, "Namespace").values()
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    assert sorted(name for name, _ in pods(found)) == sorted(OVERLAYS[overlay])
    for _, pod in pods(found):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 10001
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert not pod.keys() & {"hostNetwork", "hostPID", "hostIPC"}
        for volume in pod["volumes"]:
            assert volume.keys() & {"emptyDir", "secret", "configMap", "persistentVolumeClaim"}
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"]
            assert not any("hostPort" in port for port in container.get("ports", ()))


def test_each_service_gets_the_keys_that_containers_get(folder: Path, tmp_path: Path) -> None:
    """Those that deploy/docker/keys.sh hands out; and no manifest holds one but the secrets."""
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    keys = folder / "base" / "keys"
    run("bash", ROOT / "deploy" / "docker" / "keys.sh", keys, tmp_path, cwd=ROOT, env=env)
    found = resources(folder, "base")
    secrets = of_kind(found, "Secret")
    for role, pod in pods(found):
        (name,) = (each["secret"]["secretName"] for each in pod["volumes"] if "secret" in each)
        data = {file: base64.b64decode(text) for file, text in secrets[name]["data"].items()}
        given = tmp_path / role.removesuffix("-peer")
        assert data == {file.name: file.read_bytes() for file in given.iterdir()}
    for text in (file.read_text() for file in folder.rglob("*.yaml")):
        assert not any(secret.read_text().strip() in text for secret in keys.glob("*.secret"))


def test_what_may_be_reached_is_what_the_services_bind(folder: Path) -> None:
    found = resources(folder, "base")
    text = (ROOT / "deploy" / "scripts" / "start.sh").read_text()
    for name, service in of_kind(found, "Service").items():
        assert service["spec"]["publishNotReadyAddresses"] is True
        for port in service["spec"]["ports"]:
            assert f"0.0.0.0:{port['port']}" in text or port["port"] == 5560
        (policy,) = (
            each
            for each in of_kind(found, "NetworkPolicy").values()
            if each["spec"]["podSelector"].get("matchLabels", {}).get("app") == name
        )
        allowed = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
        assert allowed == {port["port"] for port in service["spec"]["ports"]}
    closed = of_kind(found, "NetworkPolicy")["nothing-else"]["spec"]
    assert closed["podSelector"].keys() <= {"matchLabels"}
    assert "ingress" not in closed


def test_who_owns_files_is_there_once(folder: Path) -> None:
    found = resources(folder, "base")
    deployments = of_kind(found, "Deployment")
    for name in ("learner", "replay"):
        spec = deployments[name]["spec"]
        assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
        claims = [
            each["persistentVolumeClaim"]["claimName"]
            for each in spec["template"]["spec"]["volumes"]
            if "persistentVolumeClaim" in each
        ]
        assert set(claims) <= of_kind(found, "PersistentVolumeClaim").keys()
        assert of_kind(found, "PodDisruptionBudget")[name]["spec"]["maxUnavailable"] == 0


def test_learners_that_join_come_when_they_are_asked_for_and_meet_only_learners(folder: Path) -> None:
    found = resources(folder, "base")
    deployments = of_kind(found, "Deployment")
    assert deployments["learner-peer"]["spec"]["replicas"] == 0
    images = {}
    for role in ("learner", "learner-peer"):
        [container] = deployments[role]["spec"]["template"]["spec"]["containers"]
        images[role] = container["image"]
    assert container["args"] == ["learner-peer"]
    assert images["learner"] == images["learner-peer"]
    policies = {name: each["spec"] for name, each in of_kind(found, "NetworkPolicy").items()}
    # Which ports a learner meets the others on, its system decides.
    high = {
        name
        for name, policy in policies.items()
        for rule in policy.get("ingress", ())
        if any(port["port"] > 5600 or "endPort" in port for port in rule["ports"])
    }
    assert high == {"learners"}
    meet = policies["learners"]
    [expression] = meet["podSelector"]["matchExpressions"]
    assert sorted(expression["values"]) == ["learner", "learner-peer"]
    ports = [{"port": 32768, "endPort": 60999}]
    assert meet["ingress"] == [{"from": [{"podSelector": meet["podSelector"]}], "ports": ports}]
    assert meet["egress"] == [{"to": [{"podSelector": meet["podSelector"]}], "ports": ports}]
    for name in ("learner", "replay"):
        [rule] = policies[name]["ingress"]
        assert "learner-peer" in rule["from"][0]["podSelector"]["matchExpressions"][0]["values"]
    assert "learner-peer" in policies["members"]["podSelector"]["matchExpressions"][0]["values"]


def test_gpus_are_the_learners(folder: Path) -> None:
    for role, pod in pods(resources(folder, "gpu")):
        (container,) = pod["containers"]
        learns = role in ("learner", "learner-peer")
        assert ("nvidia.com/gpu" in container["resources"]["limits"]) == learns
        assert ("troupe-learner-cuda:" in container["image"]) == learns
        variables = {each["name"]: each["value"] for each in container["env"]}
        assert variables.get("TROUPE_LEARNER__DEVICE") == ("cuda" if role == "learner" else None)


def test_the_run_file_is_one_that_can_begin() -> None:
    assert load_config(str(KUBERNETES / "base" / "my.toml")).actor.total_slots == 4096


def test_pods_of_a_sweep_share_it(folder: Path) -> None:
    found = resources(folder, "sweep")
    [job] = of_kind(found, "Job").values()
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"]) == ("Indexed", spec["parallelism"])
    [(_, pod)] = pods(found)
    [container] = pod["containers"]
    program, command, *words = container["command"]
    assert (program, command) == ("/opt/troupe/bin/troupe", "sweep")
    options = sweep_parser().parse_args(words)
    assert options.share
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    volumes = {each["name"]: each for each in pod["volumes"]}
    file = Path(options.source)
    name = volumes[mounts[str(file.parent)]]["configMap"]["name"]
    assert of_kind(found, "ConfigMap")[name]["data"].keys() == {file.name}
    claim = volumes[mounts[str(options.dir.parent)]]["persistentVolumeClaim"]["claimName"]
    assert of_kind(found, "PersistentVolumeClaim")[claim]["spec"]["accessModes"] == ["ReadWriteMany"]
    # What no other start would mend ends the job; an eviction and a stop do not, nor do they count.
    evicted, stopped, final = spec["podFailurePolicy"]["rules"]
    assert evicted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert stopped["onExitCodes"]["values"] == [INTERRUPTED]
    assert {evicted["action"], stopped["action"]} == {"Ignore"}
    assert final["onExitCodes"]["values"] == [ConfigError.exit_code, SweepError.exit_code]
    assert (final["action"], final["onExitCodes"]["containerName"]) == ("FailJob", container["name"])
    wanted = plan.read(str(KUBERNETES / "sweep" / file.name), {}, {})
    assert not wanted.depends
    assert len(checks.check(wanted)) == 6
