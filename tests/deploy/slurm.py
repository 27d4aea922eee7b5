"""A Slurm of this host alone: munge, a controller, and daemons that say each that they are a machine."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
NODES = 4
PATIENCE_S = 1800.0
_SBIN = "/usr/sbin:/sbin"

# Neither cgroups nor accounting. A job of `main` is queued again for one of `urgent`, as is the fashion where
# groups share a cluster; of a job that is queued again the credentials have to expire first, so they do soon.
_CONF = """\
ClusterName=troupe
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
StateSaveLocation={folder}/state
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={folder}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
ReturnToService=2
InactiveLimit=0
KillWait=120
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 MaxTime=INFINITE State=UP
PartitionName=urgent Nodes=ALL PriorityTier=10 MaxTime=INFINITE State=UP
"""


def need_slurm() -> None:
    """Skip where Slurm is not installed, or could not be started."""
    os.environ["PATH"] += f":{_SBIN}"
    missing = [name for name in PROGRAMS if not shutil.which(name)]
    if missing or os.geteuid() != 0:
        why = f"{', '.join(missing)} is not installed" if missing else "its daemons need root"
        pytest.skip(f"NOT TESTED: Slurm: {why}")


class Cluster:
    """Four nodes of eight cores, whatever the host has."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ports = _free_ports(NODES + 1)
        self.env = {
            name: text for name, text in os.environ.items() if not name.startswith(("TROUPE_", "SLURM"))
        }
        self.env["SLURM_CONF"] = str(folder / "slurm.conf")

    def start(self) -> None:
        """Start every daemon, and wait until all nodes are idle."""
        host = socket.gethostname().partition(".")[0]
        nodes = [
            f"NodeName=node{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 RealMemory=4000"
            for i, port in enumerate(self._ports[1:], 1)
        ]
        conf = _CONF.format(host=host, folder=self.folder, port=self._ports[0])
        (self.folder / "slurm.conf").write_text("\n".join([*nodes, conf]))
        (self.folder / "state").mkdir()
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o400)
        munge = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid"}
        munge |= {"log-file": "munged.log", "seed-file": "munged.seed"}
        self._daemon("munged", "--force", *(f"--{name}={self.folder / file}" for name, file in munge.items()))
        self._daemon("slurmctld", "-c", "-i")
        for i in range(1, NODES + 1):
            self._daemon("slurmd", "-N", f"node{i}", "-c")
        self.wait(
            "idle nodes", lambda: len(self.say("sinfo", "-hN", "-tidle", "-pmain", "-o%N").split()) == NODES
        )

    def _daemon(self, *words: str) -> None:
        with (self.folder / f"{words[0]}.out").open("a") as out:
            subprocess.run(
                words, env=self.env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, check=True, timeout=60
            )

    def say(self, *words: str) -> str:
        """Run a command of Slurm; its output."""
        done = subprocess.run(words, env=self.env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def state(self, job: str) -> str:
        """The state of a job, of its first part; empty where Slurm has forgotten it."""
        done = subprocess.run(
            ["scontrol", "show", "job", job], env=self.env, capture_output=True, text=True, timeout=60
        )
        words = [word for word in done.stdout.split() if word.startswith("JobState=")]
        return words[0].partition("=")[2] if words else ""

    def restarts(self, job: str) -> int:
        """How often a job was queued again."""
        words = [word for word in self.say("scontrol", "show", "job", job).split() if "Restarts=" in word]
        return int(words[0].partition("=")[2])

    def wait(self, what: str, condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> float:
        """Poll until `condition()` is true; the seconds that took. Fails with what the queue has."""
        began_s = time.monotonic()
        while not condition():
            if time.monotonic() - began_s > timeout_s:
                pytest.fail(
                    f"not within {timeout_s:.0f} s: {what}\n{self.say('squeue')}\n{self.say('sinfo', '-Nl')}"
                )
            time.sleep(0.2)
        return time.monotonic() - began_s

    def stop(self) -> None:
        """End all jobs, which outlive their daemons, then the daemons."""
        subprocess.run(["scancel", "--me"], env=self.env, timeout=60, capture_output=True)
        deadline_s = time.monotonic() + 90
        while time.monotonic() < deadline_s and self.say("squeue", "-h").strip():
            time.sleep(0.5)
        for file in [
            *self.folder.glob("slurmd-*.pid"),
            self.folder / "slurmctld.pid",
            self.folder / "munged.pid",
        ]:
            if file.exists():
                os.kill(int(file.read_text()), signal.SIGTERM)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
