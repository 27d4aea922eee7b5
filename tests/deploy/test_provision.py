"""The provisioning scripts in a bare Debian, and after them every service from its unit's command line."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.conftest import ROOT, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

MIRROR = os.environ.get("DEBIAN_MIRROR", "http://deb.debian.org/debian")

# In the root, in a network of its own: as the boot script leaves a machine, but with all roles on one.
START = r"""
set -eu
ip link set lo up
cd /
units=/etc/systemd/system
run=/var/lib/troupe/runs/test
mkdir -p $run /etc/troupe
troupe=/opt/troupe/bin/troupe
$troupe keys new /etc/troupe/keys >/dev/null
$troupe config show cartpole-apex --run.total_steps 6000 --evaluator.episodes 1 > $run/config.toml
chown -R troupe:troupe /var/lib/troupe /etc/troupe/keys
export HOME=/var/lib/troupe TROUPE_RUN_DIR=$run TROUPE_LEARNER=tcp://127.0.0.1:5550
export TROUPE_KEYS=/etc/troupe/keys
export TROUPE_HOST=i-1 TROUPE_INDEX=0 TROUPE_ADVERTISE=tcp://127.0.0.1:5560 TROUPE_LOGS=/var/log/troupe
export OMP_NUM_THREADS=1
start() {  # a unit, as systemd would: its user, its environment, its command line
  environment=$(sed -n 's/^Environment=//p' "$units/$1")
  command=$(sed -n 's/^ExecStart=//p' "$units/$1" | sed "s/%i/0/")
  user=$(sed -n 's/^User=//p' "$units/$1")
  env $environment \
    setpriv --reuid "$user" --regid "$user" --clear-groups $command >/var/log/troupe/"$1".out 2>&1 &
}
start troupe-replay.service; start troupe-actor@.service; start troupe-evaluator.service
start troupe-learner.service; learner=$!
start troupe-tensorboard.service; start troupe-board.service
waited=0
while kill -0 $learner 2>/dev/null; do
  waited=$((waited + 2)); sleep 2
  if [ $waited -gt 900 ]; then echo "the learner did not come to an end"; break; fi
done
status=0; wait $learner || status=$?
echo "learner: exit status $status"
python3 - <<'PY' || true
import urllib.request
for name, port in (("tensorboard", 6006), ("board", 6007)):
    print(f"{name}:", urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60).status)
PY
grep -h "relays parameters" /var/log/troupe/actor-i-1-0.log || true
tail -n 4 /var/log/troupe/*
cat $run/status.json
"""


@pytest.fixture(scope="module")
def debian(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A bare Debian, made with debootstrap; TROUPE_DEBIAN_ROOT names one made before."""
    if os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("debootstrap"):
        pytest.skip("NOT TESTED: a bare Debian needs root, unshare and debootstrap")
    root = tmp_path_factory.mktemp("debian") / "root"
    env = dict(os.environ)
    if made := os.environ.get("TROUPE_DEBIAN_ROOT"):
        run("cp", "-a", made, root, cwd=ROOT, env=env)
    else:
        words = ["--variant=minbase", "--include=ca-certificates,iproute2", "bookworm", str(root), MIRROR]
        run("debootstrap", *words, cwd=ROOT, env=env, timeout_s=1800)
    for file in ("/etc/resolv.conf", "/etc/ssl/certs/ca-certificates.crt"):
        with contextlib.suppress(OSError):
            shutil.copyfile(file, root / file.lstrip("/"))
    (root / "etc" / "hosts").write_text("127.0.0.1 localhost\n")  # as every machine has it
    yield root
    shutil.rmtree(root, ignore_errors=True)


def in_root(root: Path, script: str, *, network: bool, timeout_s: float) -> str:
    """Run a script in the root; without `network` only a loopback of its own is there.

    What it started ends with it: the processes are in a process namespace that dies with its first.
    """
    mounts = f"mount --rbind /dev {root}/dev && mount -t proc proc {root}/proc"
    for folder in filter(None, os.environ.get("PIP_FIND_LINKS", "").split()):
        if Path(folder).is_dir():
            mounts += f" && mkdir -p {root}{folder} && mount --rbind {folder} {root}{folder}"
    with tempfile.NamedTemporaryFile("w", dir=root / "tmp", suffix=".sh") as file:
        file.write(script)
        file.flush()
        inside = f"{mounts} && exec chroot {root} bash /tmp/{Path(file.name).name}"
        words = ["unshare", "--mount", "--pid", "--fork", "--kill-child", *([] if network else ["--net"])]
        env = {name: text for name, text in os.environ.items() if name.startswith("PIP_")}
        env["PATH"] = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        env["TORCH_INDEX"] = os.environ.get("TORCH_INDEX", "")
        return run(*words, "bash", "-c", inside, cwd=root, env=env, timeout_s=timeout_s)


def test_services_start_in_a_bare_debian(debian: Path) -> None:
    source = debian / "tmp" / "troupe"
    source.mkdir(exist_ok=True)
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", source], input=archive, check=True)
    scripts = "/tmp/troupe/deploy/scripts"
    install = f"""
set -eu
apt-get update -qq && apt-get install -y -qq --no-install-recommends iproute2 >/dev/null
bash {scripts}/install.sh all /tmp/troupe
bash {scripts}/install-node.sh /tmp/troupe/deploy/packer/systemd /tmp/troupe/deploy/node
bash {scripts}/verify.sh cpu learner actor replay evaluator
"""
    output = in_root(debian, install, network=True, timeout_s=2400)
    assert "cpu image with learner actor replay evaluator is whole" in output
    output = in_root(debian, START, network=False, timeout_s=1100)
    assert "learner: exit status 0" in output, output
    assert "tensorboard: 200" in output, output
    assert "board: 200" in output, output
    assert "actor-i-1-0 relays parameters to the other processes" in output, output
