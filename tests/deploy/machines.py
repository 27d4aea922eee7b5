"""Machines on one host: a network namespace, a root and a systemd each, and a VPC between them.

Everything that outlives a process (namespaces, cgroups) is called troupe-ec2-PID-...: `remove(is_dead)` takes
away what a killed test left.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.deploy.conftest import ROOT
from tests.deploy.vpc_services import Metadata, bound_in

PREFIX = "troupe-ec2-"
BOOT = Path(__file__).with_name("machine.sh")
USER, UID = "troupe", 990
METADATA = "169.254.169.254"
# Of the host's /usr: what needs hardware, or would change settings of the host's kernel.
MASKED = """
console-getty.service dbus.service dbus.socket dev-hugepages.mount dev-mqueue.mount getty.target
kmod-static-nodes.service proc-sys-fs-binfmt_misc.automount sys-fs-fuse-connections.mount
sys-kernel-config.mount sys-kernel-debug.mount sys-kernel-tracing.mount systemd-binfmt.service
systemd-firstboot.service systemd-logind.service systemd-machine-id-commit.service
systemd-modules-load.service systemd-pcrphase-sysinit.service systemd-pcrphase.service
systemd-random-seed.service systemd-repart.service systemd-sysctl.service systemd-sysusers.service
systemd-tmpfiles-clean.timer systemd-tmpfiles-setup-dev.service systemd-tmpfiles-setup.service
systemd-udev-trigger.service systemd-udevd.service systemd-update-utmp-runlevel.service
systemd-update-utmp.service systemd-user-sessions.service
""".split()  # noqa: SIM905


def ip(*words: str) -> str:
    """Run `ip`; its output."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def missing() -> str:
    """Why machines cannot be had here; empty where they can."""
    if os.geteuid() != 0:
        return "it needs root, for network namespaces"
    for tool in ("ip", "unshare", "setpriv", "nsenter", "pivot_root", "journalctl"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    if not Path("/usr/lib/systemd/systemd").exists():
        return "systemd is not installed"
    if cgroups() is None:
        return "cgroups of version 2 are not mounted"
    try:
        ip("netns", "add", f"{PREFIX}{os.getpid()}-probe")
        ip("netns", "del", f"{PREFIX}{os.getpid()}-probe")
    except (RuntimeError, OSError) as error:
        return f"no network namespace can be made: {error}"
    return ""


def cgroups() -> Path | None:
    """Where cgroups of version 2 are mounted."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, folder, kind, options, *_ = line.split()
        if kind == "cgroup2" and "rw" in options.split(","):
            return Path(folder)
    return None


def wait_until(condition: Callable[[], object], timeout_s: float, what: str, poll_s: float = 0.2) -> None:
    """Look until it is so."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout_s:.0f} s")
        time.sleep(poll_s)


def remove(whose: Callable[[int], bool]) -> None:
    """Remove the namespaces and cgroups of the tests `whose` process id says so, with what runs in them."""
    here = [line.split()[0] for line in ip("netns", "list").splitlines()]
    base = cgroups()
    groups = [path.name for path in base.glob(f"{PREFIX}*")] if base else []
    for name in sorted({*here, *groups}):
        found = re.match(rf"{PREFIX}(\d+)-", name)
        if found and whose(int(found[1])):
            remove_cgroup(name)
            if name in here:
                ip("netns", "del", name)


def is_dead(pid: int) -> bool:
    """Whether a process is no more."""
    return not Path("/proc", str(pid)).exists()


def is_own(pid: int) -> bool:
    """Whether it is this process."""
    return pid == os.getpid()


def remove_cgroup(name: str) -> None:
    """End every process of a cgroup, and remove it with all below."""
    base = cgroups()
    group = (base or Path("/nonexistent")) / name
    if not group.exists():
        return
    (group / "cgroup.kill").write_text("1")
    wait_until(lambda: "populated 0" in (group / "cgroup.events").read_text(), 60, f"end of {name}")
    for folder in sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True):
        folder.rmdir()
    group.rmdir()


@dataclass(frozen=True)
class Image:
    """What machines are made of: what the provisioning scripts leave, with this host's Python and packages.

    Attributes:
        root: files of its own.
        shared: folders of this host, as SOURCE=TARGET.
    """

    root: Path
    shared: list[str]

    def run(self, *words: str) -> None:
        """Run a command in the image, without network."""
        command = ["unshare", "--net", "bash", str(BOOT), str(self.root), "-", *self.shared, "--", *words]
        done = subprocess.run(
            command, timeout=300, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stdout}")


def make_image(root: Path, deploy_python: str) -> Image:
    """Make an image: what install.sh leaves by hand (its packages are here), then install-node.sh itself."""
    shared, python = shared_python(sys.executable, "numpy", "/opt/python", "/opt/troupe/source")
    node_shared, node_python = shared_python(deploy_python, "boto3", "/opt/node-python")
    shared += [*node_shared, f"{ROOT}=/opt/troupe/source"]
    files = {
        "etc/passwd": f"root:x:0:0::/root:/bin/sh\n{USER}:x:{UID}:{UID}::/var/lib/troupe:/bin/false\n",
        "etc/group": f"root:x:0:\n{USER}:x:{UID}:\n",
        "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
        "etc/hosts": "127.0.0.1 localhost\n",
        "etc/machine-id": "",
        "etc/systemd/journald.conf": "[Journal]\nStorage=persistent\n",
        "opt/troupe/venv/bin/python": python,
        "opt/troupe/venv/bin/troupe": '#!/bin/sh\nexec /opt/troupe/venv/bin/python -m troupe "$@"\n',
        "opt/troupe/node/bin/python": node_python,
        "opt/troupe/bin/troupe-start": (ROOT / "deploy" / "scripts" / "start.sh").read_text(),
    }
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755 if name.startswith("opt/") else 0o644)
    for folder in ("var/lib/troupe", "var/log/troupe", "var/log/journal", "etc/systemd/system", "root"):
        (root / folder).mkdir(parents=True, exist_ok=True)
        if folder.endswith("troupe"):
            os.chown(root / folder, UID, UID)
    (root / "var/run").symlink_to("/run")
    for unit in MASKED:
        (root / "etc/systemd/system" / unit).symlink_to("/dev/null")
    for file in ("/etc/ld.so.cache", "/etc/localtime"):
        with contextlib.suppress(OSError):
            shutil.copyfile(file, root / file.lstrip("/"))
    image = Image(root, shared)
    deploy = "/opt/troupe/source/deploy"
    image.run("bash", f"{deploy}/scripts/install-node.sh", f"{deploy}/packer/systemd", f"{deploy}/node")
    return image


def shared_python(python: str, package: str, target: str, *more: str) -> tuple[list[str], str]:
    """Where on a machine a Python of this host and the folder of `package` are, and a command that runs it.

    Elsewhere than here: units do not see /root and /home.
    """
    code = f"import os, sys, {package} as one; "
    code += "print(sys.base_prefix, os.path.realpath(sys.executable), one.__file__)"
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    prefix, executable, module = done.stdout.split()
    command = f"{target}/{Path(executable).relative_to(os.path.realpath(prefix))}"
    path = ":".join([*more, f"{target}-packages"])
    shared = [f"{prefix}={target}", f"{Path(module).parents[1]}={target}-packages"]
    text = (
        f"#!/bin/sh\nexport LD_LIBRARY_PATH={target}/lib PYTHONDONTWRITEBYTECODE=1\n"
        f'PYTHONPATH="$PYTHONPATH:{path}" exec {command} "$@"\n'
    )
    return shared, text


class Vpc:
    """A bridge in a network namespace of its own: nothing of it is in the host's network.

    Attributes:
        name: the namespace.
        router: address of the bridge.
        bits: length of the prefix of its addresses.
    """

    def __init__(self, cidr: str) -> None:
        base, bits = cidr.split("/")
        stem = base.rsplit(".", 1)[0]
        self.name = f"{PREFIX}{os.getpid()}-vpc"
        self.bits, self.router, self.dns = int(bits), f"{stem}.1", f"{stem}.2"
        ip("netns", "add", self.name)
        ip("-n", self.name, "link", "set", "lo", "up")
        ip("-n", self.name, "link", "add", "vpc", "type", "bridge")
        for address in (self.router, self.dns):
            ip("-n", self.name, "addr", "add", f"{address}/{bits}", "dev", "vpc")
        ip("-n", self.name, "link", "set", "vpc", "up")

    def close(self) -> None:
        """Remove the namespace and with it the bridge."""
        ip("netns", "del", self.name)


class Machine:
    """One running machine.

    Attributes:
        instance: its id in AWS.
        address: its address in the VPC.
        role: what its tags say.
        root: its files, as this host sees them.
        metadata: what its metadata service answers.
    """

    def __init__(
        self,
        vpc: Vpc,
        image: Image,
        folder: Path,
        instance: str,
        role: str,
        address: str,
        user_data: str,
        metadata: dict[str, str],
        environment: dict[str, str],
    ) -> None:
        self.instance, self.role, self.address = instance, role, address
        self.root = folder / instance
        self._vpc, self._name = vpc, f"{PREFIX}{os.getpid()}-{instance}"
        self._port = f"m{instance[-12:]}"
        self._process: subprocess.Popen[bytes] | None = None
        subprocess.run(["cp", "-a", str(image.root), str(self.root)], check=True, timeout=60)
        self._write_files(user_data, environment)
        self._connect()
        self.metadata = Metadata(bound_in(self._name, METADATA, 80), metadata)
        base = cgroups()
        assert base is not None
        group = base / self._name
        group.mkdir()
        words = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            "nsenter",
            f"--net=/run/netns/{self._name}",
            "bash",
            str(BOOT),
        ]
        words += [str(self.root), str(group), *image.shared, "--"]
        words += ["/usr/lib/systemd/systemd", "--unit=multi-user.target", "--log-target=journal"]
        with (folder / f"{instance}.console").open("wb") as console:
            self._process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=console, stderr=console)

    def _write_files(self, user_data: str, environment: dict[str, str]) -> None:
        """What the machine is given at its first boot; a unit runs the user data as cloud-init does."""
        units = self.root / "etc" / "systemd" / "system"
        script = self.root / "var" / "lib" / "cloud" / "user-data"
        script.parent.mkdir(parents=True)
        script.write_text(user_data)
        script.chmod(0o755)
        unit = "[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/var/lib/cloud/user-data\n"
        (units / "user-data.service").write_text(unit)
        (units / "multi-user.target.wants" / "user-data.service").symlink_to("../user-data.service")
        words = " ".join(f'"{name}={text}"' for name, text in environment.items())
        (self.root / "etc/systemd/system.conf").write_text(f"[Manager]\nDefaultEnvironment={words}\n")
        (self.root / "etc/resolv.conf").write_text(f"nameserver {self._vpc.dns}\noptions timeout:2\n")
        (self.root / "etc/hostname").write_text(f"ip-{self.address.replace('.', '-')}\n")

    def _connect(self) -> None:
        ip("netns", "add", self._name)
        there = ("-n", self._name)
        peer = ("peer", "name", "eth0", "netns", self._name)
        ip("-n", self._vpc.name, "link", "add", self._port, "type", "veth", *peer)
        ip("-n", self._vpc.name, "link", "set", self._port, "master", "vpc", "up")
        ip(*there, "addr", "add", f"{METADATA}/32", "dev", "lo")
        ip(*there, "link", "set", "lo", "up")
        ip(*there, "addr", "add", f"{self.address}/{self._vpc.bits}", "dev", "eth0")
        ip(*there, "link", "set", "eth0", "up")
        ip(*there, "route", "add", "default", "via", self._vpc.router)

    def set_link(self, up: bool) -> None:
        """Plug the network in, or pull it out."""
        ip("-n", self._vpc.name, "link", "set", self._port, "up" if up else "down")

    def execute(self, *words: str) -> str:
        """Run a command on the machine, as root; its output, whatever its exit status."""
        assert self._process is not None
        pid = self._process.pid  # of unshare; its child is the machine's first process
        child = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0]
        command = ["nsenter", "-t", child, "--all", *words]
        done = subprocess.run(
            command, timeout=300, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        return done.stdout

    def check(self) -> None:
        """Raise where it has crashed."""
        if self._process is not None and self._process.poll() is not None:
            console = self.root.with_name(f"{self.instance}.console").read_text()
            raise RuntimeError(f"the machine of {self.role} has crashed: {console}")

    def log(self, name: str) -> str:
        """Text of the logs called so (a pattern)."""
        files = sorted((self.root / "var" / "log" / "troupe").glob(name))
        return "".join(file.read_text(errors="replace") for file in files)

    def journal(self) -> str:
        """The last lines that its units and its boot agent wrote."""
        words = [
            "journalctl",
            "-D",
            str(self.root / "var/log/journal"),
            "--no-pager",
            "-o",
            "cat",
            "-n",
            "60",
        ]
        return subprocess.run(words, timeout=60, text=True, capture_output=True).stdout

    def close(self) -> None:
        """Pull the plug: every process ends at once, nothing is flushed."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)
            self._process = None
            remove_cgroup(self._name)
            self.metadata.close()
            ip("netns", "del", self._name)
