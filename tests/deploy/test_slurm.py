"""Runs and sweeps on a real Slurm: preempted, near the end of their time, with more actors, cancelled.

`TROUPE_SLURM_PREEMPTIONS` says how often the run is preempted: 3 without it, 20 before a release.
`TROUPE_SLURM_REPORT` names a file for the figures.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.ledger import audit
from tests.deploy.conftest import ROOT
from tests.deploy.slurm import PATIENCE_S, Cluster, need_slurm
from troupe.common.runtime.files import read_status

# Slurm itself takes a minute or two to start again a job that was queued again.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

PREEMPTIONS = int(os.environ.get("TROUPE_SLURM_PREEMPTIONS") or 3)
ENDLESS = ("--run.total_steps=100000000", "--replay.capacity_items=1000000")
TROUPE = Path(sys.executable).with_name("troupe")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    need_slurm()
    # Not pytest's: the path of a socket has room for a hundred letters.
    with tempfile.TemporaryDirectory(prefix="troupe-slurm-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        cluster = Cluster(Path(folder))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


def troupe(cluster: Cluster, *words: str | Path) -> str:
    """Run a command as a user of the cluster does; its output."""
    done = subprocess.run(
        [TROUPE, *words], env=cluster.env, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class Run:
    """A run of `troupe slurm` that learns on and on."""

    def __init__(self, cluster: Cluster, folder: Path, *words: str) -> None:
        self.cluster, self.folder = cluster, folder
        asked = ("cartpole-apex", "--nodes", "4", "--partition", "main", "--learner-cpus", "2", *words)
        said = troupe(cluster, "slurm", *asked, "--run-dir", folder)
        self.job = said.partition("submitted as job ")[2].partition(":")[0]

    def status(self) -> dict[str, Any]:
        return read_status(self.folder) if (self.folder / "status.json").exists() else {}

    def updates(self) -> int:
        return int(self.status().get("updates", 0))

    def learns(self) -> float:
        """Wait until it has made updates that it had not; the seconds that took."""
        before = self.updates()
        return self.cluster.wait("updates", lambda: self.updates() > before)

    def starts(self) -> list[str]:
        """What the script says when it begins."""
        log = self.folder / "slurm" / f"{self.job}.log"
        return [line for line in log.read_text().splitlines() if ", start " in line] if log.exists() else []

    def log(self) -> str:
        return (self.folder / "logs" / "learner.log").read_text()

    def checkpoints(self) -> set[str]:
        return {path.name for path in (self.folder / "checkpoints").glob("step-*")}


def _ledger(run: Run, folder: Path) -> subprocess.Popen[str]:
    """A producer that notes what replay acknowledges, and knows nothing but docs/protocol.md."""
    keys = run.folder / "slurm" / "keys"
    address = (run.folder / "slurm" / "address").read_text().strip()
    host, _, port = address.rpartition(":")
    words = {
        "endpoint": f"{host}:{int(port) + 3}",
        "server_key": (keys / "replay.public").read_text().strip(),
        "secret_key": (keys / "actor.secret").read_text().strip(),
        "journal": str(folder / "journal"),
        "period_s": 0.1,
    }
    command = [sys.executable, "-P", "-m", "tests.chaos.ledger", json.dumps(words)]
    env = {**run.cluster.env, "PYTHONPATH": str(ROOT)}
    with (folder / "ledger.err").open("w") as errors:
        return subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=errors)


def _preempt(run: Run, number: int) -> None:
    """Have one of three things take the run's nodes away: a job of others, its time, an operator."""
    cluster = run.cluster
    if number % 3 == 0:
        urgent = cluster.say(
            "sbatch",
            "--parsable",
            "-p",
            "urgent",
            "-N",
            "4",
            "--exclusive",
            "--output=/dev/null",
            "--wrap=sleep 1",
        ).strip()
        cluster.wait("the urgent job", lambda: cluster.state(urgent) in ("COMPLETED", ""))
    elif number % 3 == 1:
        cluster.say("scancel", "--signal=USR1", "--batch", run.job)  # what --signal=B:USR1@120 has Slurm do
    else:
        cluster.say("scontrol", "requeue", run.job)


def test_preempted_again_and_again_a_run_loses_nothing(cluster: Cluster, tmp_path: Path) -> None:
    run = Run(cluster, tmp_path / "run", *ENDLESS)
    cluster.wait("its start", run.starts)
    pauses = [run.learns()]
    ledger = _ledger(run, tmp_path)
    try:
        for number in range(PREEMPTIONS):
            _preempt(run, number)
            cluster.wait("the next start", lambda count=number + 2: len(run.starts()) == count)
            pauses.append(run.learns())
            assert run.log().count("resumed from step-") == number + 1
            assert ledger.poll() is None, (tmp_path / "ledger.err").read_text()
            print(f"preemption {number}: learns {pauses[-1]:.1f} s after its start", flush=True)
        ledger.send_signal(signal.SIGTERM)
        told = json.loads(ledger.communicate(timeout=PATIENCE_S)[0])
    finally:
        ledger.kill()
        if ledger.stdout:
            ledger.stdout.close()
        ledger.wait()
    before = run.checkpoints()
    cluster.say("scancel", run.job)
    cluster.wait("its end", lambda: cluster.state(run.job) in ("CANCELLED", ""))
    assert run.checkpoints() - before, "a cancelled run makes a checkpoint"
    found = audit(run.folder / "replay" / "shard-0", tmp_path / "journal", removes=False)
    figures = {
        "preemptions": PREEMPTIONS,
        "first_update_s": [round(pause, 1) for pause in pauses],
        "acknowledged": found.acknowledged,
        "lost": len(found.lost),
        "doubled": len(found.doubled),
        "changed": len(found.changed),
    }
    print(json.dumps(figures))
    if report := os.environ.get("TROUPE_SLURM_REPORT"):
        Path(report).write_text(json.dumps(figures) + "\n")
    assert told["acknowledged"] == found.acknowledged > 0
    assert not told["unsettled"]
    assert not told["refused"]
    assert not found.lost
    assert not found.doubled
    assert not found.changed


def test_preempted_actors_are_simply_gone(cluster: Cluster, tmp_path: Path) -> None:
    run = Run(cluster, tmp_path / "run", *ENDLESS, "--actor.total_slots=1024")
    cluster.wait("its start", run.starts)
    run.learns()
    said = troupe(cluster, "slurm", "--join", run.folder, "--nodes", "2", "--actors-per-node", "1")
    array = said.partition("submitted as jobs ")[2].partition("_")[0]
    cluster.wait("more actors", lambda: run.log().count(" joins (") == 6)
    cluster.say("scancel", f"{array}_1")
    cluster.wait("its end", lambda: cluster.state(f"{array}_1") in ("CANCELLED", ""))
    run.learns()
    assert len(run.starts()) == 1
    assert cluster.state(f"{array}_2") == "RUNNING"
    cluster.say("scancel", array, run.job)


def test_a_run_that_slurm_refused_at_first_ends_and_its_job_with_it(cluster: Cluster, tmp_path: Path) -> None:
    words = ("slurm", "cartpole-apex", "--partition", "nowhere", "--run-dir", tmp_path / "run")
    refused = subprocess.run(
        [TROUPE, *words], env=cluster.env, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert refused.returncode == 2
    assert "invalid partition" in refused.stderr.lower()
    assert "uses its folder again" in refused.stderr
    run = Run(cluster, tmp_path / "run", "--run.total_steps=1500")
    cluster.wait("its end", lambda: cluster.state(run.job) not in ("PENDING", "RUNNING", "COMPLETING"))
    assert cluster.state(run.job) == "COMPLETED"
    assert run.status()["steps"] >= 1500
    arguments = (run.folder / "slurm" / "job.sh").read_text() + (
        run.folder / "slurm" / f"{run.job}.log"
    ).read_text()
    for secret in (run.folder / "slurm" / "keys").glob("*.secret"):
        assert secret.read_text().strip() not in arguments


def test_a_mistake_ends_the_job(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    troupe(cluster, "slurm", "cartpole-apex", "--run-dir", folder, "--dry-run")
    (folder / "slurm" / "keys" / "learner.secret").chmod(0o644)
    job = cluster.say("sbatch", "--parsable", str(folder / "slurm" / "job.sh")).strip()
    cluster.wait("its end", lambda: cluster.state(job) not in ("PENDING", "RUNNING", "COMPLETING"))
    assert cluster.state(job) == "FAILED"


def test_a_sweep_is_one_array_that_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    file, folder = tmp_path / "seeds.toml", tmp_path / "sweep"
    file.write_text('[sweep]\npreset = "cartpole-apex"\nseeds = 2\nparallel = 2\n[run]\ntotal_steps = 1500\n')
    words = ("sweep", file, "--dir", folder, "--slurm", "--cpus", "2")
    array = troupe(cluster, *words).partition("job array ")[2].partition(":")[0]
    first = folder / "runs" / "seed=0"
    cluster.wait("a checkpoint", lambda: list(first.glob("checkpoints/step-*")))
    cluster.say("scancel", "--signal=USR1", "--batch", f"{array}_0")
    cluster.wait("its next start", lambda: "troupe resume" in _logs(folder))
    cluster.wait("the end of all", lambda: not cluster.say("squeue", "-h", "-j", array).strip())
    assert _logs(folder).count("troupe train") == 2
    said = troupe(cluster, *words)
    assert "submitted" not in said, "nothing is left"
    assert "seed=1" in said, "the table of the runs"
    states = json.loads((folder / "sweep.json").read_text())["runs"]
    assert {each["state"] for each in states.values()} == {"done"}


def _logs(folder: Path) -> str:
    return "".join(path.read_text() for path in (folder / "slurm").glob("*.log"))
