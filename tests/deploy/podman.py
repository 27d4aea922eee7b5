"""Kubernetes manifests on podman: what a kubelet would do with them, as far as `podman kube play` does it.

Podman takes pods, volume claims and configuration maps as they are. The rest is done here: a Deployment
becomes its pods, a Secret a folder with the owner and modes that a kubelet gives it, a Service a name on a
network.
"""

from __future__ import annotations

import base64
import copy
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.conftest import ROOT
from tests.deploy.machines import shared_python

Resource = dict[str, Any]
USER = 10001
NETWORK, SUBNET = "troupe", "10.89.77.0/24"
PROGRAMS = ("podman", "runc", "conmon", "iptables")
# Where a Docker daemon runs, it has the host drop what goes from one port of another bridge to the next.
_LET_THROUGH = ("FORWARD", "-s", SUBNET, "-d", SUBNET, "-j", "ACCEPT")
# Rootful, without systemd and without anything of the host's own podman.
_CONTAINERS = """\
[containers]
log_driver = "k8s-file"
default_ulimits = ["nofile=4096:4096", "nproc=30000:30000"]
[network]
network_backend = "netavark"
network_config_dir = "{folder}/net"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
tmp_dir = "{folder}/tmp"
volume_path = "{folder}/volumes"
helper_binaries_dir = ["/usr/lib/podman", "/usr/libexec/podman", "/usr/bin"]
"""
_STORAGE = '[storage]\ndriver = "overlay"\ngraphroot = "{folder}/root"\nrunroot = "{folder}/run"\n'
# What deploy/docker/Dockerfile says of every image.
_ENVIRONMENT = {
    "PATH": "/opt/troupe/bin:/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
    "OMP_NUM_THREADS": "1",
    "TROUPE_METRICS_HOST": "127.0.0.1",
    "TROUPE_METRICS_PORT": "9100",
}


def need_podman() -> None:
    """Skip where podman, or what it needs, is not installed."""
    missing = [name for name in PROGRAMS if not shutil.which(name)]
    if not Path("/usr/lib/podman/netavark").exists() or not Path("/usr/lib/podman/aardvark-dns").exists():
        missing.append("netavark and aardvark-dns")
    if not Path("/usr/libexec/podman/catatonit").exists():
        missing.append("catatonit")
    if missing or os.geteuid() != 0:
        why = f"{', '.join(missing)} is not installed" if missing else "it needs root here"
        pytest.skip(f"NOT TESTED: the manifests were not run: podman: {why}")


class Podman:
    """A podman of this test alone, with one image under many names, made of this host's files.

    Attributes:
        folder: of everything that it has.
        ports: of each pod's service, by name.
        probes: of each pod: what a kubelet would ask it. Podman does not ask.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports: dict[str, dict[str, int]] = {}
        self.probes: dict[str, list[dict[str, str]]] = {}
        (folder / "net").mkdir()
        (folder / "containers.conf").write_text(_CONTAINERS.format(folder=folder))
        (folder / "storage.conf").write_text(_STORAGE.format(folder=folder))
        self._env = os.environ | {
            "CONTAINERS_CONF": str(folder / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
        }
        self.mounts = self._make_image()
        self.run("network", "create", "--internal", "--subnet", SUBNET, NETWORK)
        subprocess.run(["iptables", "-I", *_LET_THROUGH], check=True, timeout=60)

    def run(self, *words: str | Path, ok: tuple[int, ...] = (0,)) -> str:
        """Run podman; its output."""
        done = subprocess.run(["podman", *words], env=self._env, capture_output=True, text=True, timeout=600)
        if done.returncode not in ok:
            pytest.fail(f"podman {' '.join(map(str, words))}: {done.stdout[-2000:]}{done.stderr[-3000:]}")
        return done.stdout

    def logs(self, pod: str, last: int = 0) -> str:
        """What a pod's service has logged, whatever stream it took."""
        words = ["podman", "logs", *(("--tail", str(last)) if last else ()), f"{pod}-troupe"]
        done = subprocess.run(
            words, env=self._env, text=True, timeout=600, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        return done.stdout

    def _make_image(self) -> dict[str, str]:
        """Import an image; the host's folders that have to be mounted, by where."""
        shared, python = shared_python(sys.executable, "numpy", "/opt/python", "/opt/troupe/source")
        mounts = {target: source for source, target in (each.split("=") for each in shared)}
        mounts |= {"/usr": "/usr", "/opt/troupe/source": str(ROOT)}
        root = self.folder / "image"
        files = {
            "etc/passwd": f"root:x:0:0::/root:/bin/sh\ntroupe:x:{USER}:{USER}::/var/lib/troupe:/bin/false\n",
            "etc/group": f"root:x:0:\ntroupe:x:{USER}:\n",
            "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
            "opt/troupe/venv/bin/python": python,
            "opt/troupe/venv/bin/troupe": '#!/bin/sh\nexec /opt/troupe/venv/bin/python -m troupe "$@"\n',
            "opt/troupe/bin/troupe-start": (ROOT / "deploy/scripts/start.sh").read_text(),
        }
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
            (root / name).chmod(0o755 if name.startswith("opt/") else 0o644)
        for name in (*mounts, "/proc", "/sys", "/dev", "/run", "/secret", "/etc/troupe/run"):
            (root / name.lstrip("/")).mkdir(parents=True, exist_ok=True)
        for name in ("bin", "sbin", "lib", "lib64"):
            (root / name).symlink_to(f"usr/{name}")
        shutil.copyfile("/etc/ld.so.cache", root / "etc/ld.so.cache")
        # An empty volume takes owner and mode from the image's folder; a kubelet's takes `fsGroup`'s.
        for name in ("tmp", "keys", "var/lib/troupe/runs", "var/lib/troupe/replay"):
            (root / name).mkdir(parents=True, exist_ok=True)
            os.chown(root / name, USER, USER)
            (root / name).chmod(0o1777 if name == "tmp" else 0o755)
        tar = self.folder / "image.tar"
        with tarfile.open(tar, "w") as packed:
            packed.add(root, arcname=".")
        changes = [f"ENV {name}={text}" for name, text in _ENVIRONMENT.items()]
        changes += ['ENTRYPOINT ["/opt/troupe/bin/troupe-start"]', f"USER {USER}:{USER}"]
        for role in ("learner", "replay", "actor", "evaluator"):
            words = [word for change in (*changes, f'CMD ["{role}"]') for word in ("-c", change)]
            self.run("import", "-q", *words, tar, f"registry.example.com/troupe-{role}:latest")
        return mounts

    def play(self, resources: list[Resource]) -> None:
        """Start everything that the manifests have; each service's pods under its name."""
        of = {kind: [each for each in resources if each["kind"] == kind] for kind in _KINDS}
        secrets = {each["metadata"]["name"]: self._secret(each) for each in of["Secret"]}
        self._kube("volumes", of["PersistentVolumeClaim"])
        for deployment in of["Deployment"]:
            name = deployment["metadata"]["name"]
            pods = [
                self._pod(deployment, number, secrets) for number in range(deployment["spec"]["replicas"])
            ]
            for pod in pods:
                self._kube(pod["metadata"]["name"], [*of["ConfigMap"], pod], f"{NETWORK}:alias={name}")

    def _kube(self, name: str, documents: list[Resource], network: str = "") -> None:
        file = self.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump_all(documents))
        self.run("kube", "play", *(("--network", network) if network else ()), file)

    def _secret(self, secret: Resource) -> Path:
        folder = self.folder / secret["metadata"]["name"]
        folder.mkdir()
        for name, text in secret["data"].items():
            file = folder / name
            file.write_bytes(base64.b64decode(text))
            os.chown(file, 0, USER)
            file.chmod(0o440)
        return folder

    def _pod(self, deployment: Resource, number: int, secrets: dict[str, Path]) -> Resource:
        template = copy.deepcopy(deployment["spec"]["template"])
        spec = template["spec"]
        # `Always` would start the containers of `initContainers` again, which podman then cannot remove.
        spec["restartPolicy"] = "OnFailure"
        for volume in spec["volumes"]:
            if secret := volume.pop("secret", None):
                volume["hostPath"] = {"path": str(secrets[secret["secretName"]]), "type": "Directory"}
        for place, (target, source) in enumerate(self.mounts.items()):
            spec["volumes"].append(
                {"name": f"host{place}", "hostPath": {"path": source, "type": "Directory"}}
            )
            for container in (*spec["containers"], *spec["initContainers"]):
                container["volumeMounts"].append(
                    {"name": f"host{place}", "mountPath": target, "readOnly": True}
                )
                container["imagePullPolicy"] = "Never"
        name = f"{deployment['metadata']['name']}-{number}"
        [main] = spec["containers"]
        # Podman would publish them on this host.
        self.ports[name] = {port["name"]: port["containerPort"] for port in main.pop("ports")}
        self.probes[name] = [main.pop(probe)["httpGet"] for probe in ("readinessProbe", "livenessProbe")]
        labels = template["metadata"]["labels"]
        return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}

    def close(self) -> None:
        """Remove everything."""
        subprocess.run(["iptables", "-D", *_LET_THROUGH], capture_output=True, timeout=60)
        for words in (
            ("pod", "rm", "-a", "-f", "-t", "5"),
            ("volume", "rm", "-a", "-f"),
            ("network", "rm", NETWORK),
        ):
            subprocess.run(["podman", *words], env=self._env, capture_output=True, timeout=300)
        subprocess.run(["podman", "rmi", "-a", "-f"], env=self._env, capture_output=True, timeout=300)


_KINDS = ("Secret", "ConfigMap", "PersistentVolumeClaim", "Deployment")
