"""A hundred mixed faults to a run with keys on several machines, beside an independent ledger; and a soak.

`make chaos` runs it: `TROUPE_CHAOS_FAULTS` says how many, `TROUPE_CHAOS_SEED` which; `make chaos SOAK=3600`
has few faults in that many seconds instead. `TROUPE_CHAOS_REPORT` names a file for the figures.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.chaos import machines
from tests.chaos.faults import choose, full_disk
from tests.chaos.ledger import Audit, audit
from tests.chaos.system import ROOT, SLOTS, TAG, System, Use
from tests.harness import only_in_chaos

SEED = int(os.environ.get("TROUPE_CHAOS_SEED") or secrets.randbits(20))
SOAK_S = float(os.environ.get("TROUPE_CHAOS_SOAK_S") or 0)
FAULTS = int(os.environ.get("TROUPE_CHAOS_FAULTS") or (max(1, round(SOAK_S / 300)) if SOAK_S else 100))
LIMIT_S = float(os.environ.get("TROUPE_CHAOS_LIMIT_S") or 3600 + SOAK_S)
"""No fault begins later than this."""
RECOVERY_S = float(os.environ.get("TROUPE_CHAOS_RECOVERY_S") or 600)
"""Longer than this nothing may stand still on a machine that does other things as well."""
PROMISED_S = 30.0
LAST_STEPS = 2000
ENDLESS_ITEMS = 1_000_000
"""So that nothing leaves but for want of room."""
FULL_ITEMS = 10_000
"""Of a soak: what grows while a table fills is no leak."""
PERIOD_S = 10.0
WARM_S = 300.0
"""Of a process's life, which says nothing of how it grows."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200 + 2 * int(SOAK_S)), only_in_chaos]


class Ledger:
    """The ledger's process."""

    def __init__(self, system: System) -> None:
        self.journal = system.folder / "journal"
        self._output, self._errors = system.folder / "ledger.out", system.folder / "ledger.err"
        words = {
            "endpoint": f"tcp://{system.network.address('replay')}:5560",
            "server_key": system.key("replay.public"),
            "secret_key": system.key("actor.secret"),
            "journal": str(self.journal),
            "period_s": 0.1,
        }
        command = [sys.executable, "-P", "-m", "tests.chaos.ledger", json.dumps(words)]
        with self._output.open("w") as out, self._errors.open("w") as errors:
            self.process = subprocess.Popen(
                system.network.inside("stranger", *command),
                env={**os.environ, "PYTHONPATH": str(ROOT), TAG: system.tag},
                stdout=out,
                stderr=errors,
            )

    def end(self, system: System) -> dict[str, Any]:
        """Have it settle what it has, and return what it did."""
        self.process.send_signal(signal.SIGTERM)
        system.wait(lambda: self.process.poll() is not None, RECOVERY_S, "end of the ledger")
        assert self.process.returncode == 0, self._errors.read_text()[-3000:]
        return dict(json.loads(self._output.read_text()))

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


class Figures:
    """What was measured, written as it comes."""

    def __init__(self, folder: Path, system: System) -> None:
        self._system = system
        self._path = Path(os.environ.get("TROUPE_CHAOS_REPORT") or folder / "chaos.jsonl")
        self._path.unlink(missing_ok=True)
        self.uses: list[tuple[float, Use]] = []
        self._next_s = 0.0

    def tell(self, **values: Any) -> None:
        """One line."""
        with self._path.open("a") as file:
            file.write(json.dumps({"at": time.strftime("%H:%M:%S"), **values}) + "\n")

    def look(self) -> None:
        """Note what every service has, now and then."""
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + PERIOD_S
            self.uses += [(time.monotonic(), use) for use in self._system.uses()]

    def slopes(self) -> dict[str, dict[str, float]]:
        """Growth per hour of each process that lived long, by name and pid, without its first minutes."""
        found = {}
        for name, pid in sorted({(use.name, use.pid) for _, use in self.uses}):
            lived = [(at, use) for at, use in self.uses if use.pid == pid and use.age_s > WARM_S]
            if len(lived) < 30:
                continue
            hours = np.array([at for at, _ in lived]) / 3600
            numbers = {"hours": float(hours[-1] - hours[0])}
            for kind in ("memory_mb", "files", "threads"):
                values = np.array([getattr(use, kind) for _, use in lived], float)
                numbers |= {
                    kind: float(np.median(values)),
                    f"{kind}_per_hour": float(np.polyfit(hours, values, 1)[0]),
                }
            found[f"{name} {pid}"] = numbers
        return found


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    if why := machines.missing():
        pytest.skip(f"NOT TESTED: {why}")
    rng = random.Random(SEED)
    system = System(tmp_path, rng.choice(["local", "central"]), FULL_ITEMS if SOAK_S else ENDLESS_ITEMS)
    yield system
    system.close()


def test_faults_under_load(system: System, tmp_path: Path) -> None:
    print(f"TROUPE_CHAOS_SEED={SEED} TROUPE_CHAOS_FAULTS={FAULTS} TROUPE_CHAOS_SOAK_S={SOAK_S:.0f}")
    figures = Figures(tmp_path, system)
    slow_links = system.network.slow or "none: NOT TESTED"
    figures.tell(seed=SEED, faults=FAULTS, soak_s=SOAK_S, slow_links=slow_links, inference=system.inference)
    system.start()
    ledger = Ledger(system)
    try:
        system.wait(lambda: system.status().get("updates", 0) > 20, RECOVERY_S, "the first updates")
        pauses = _faults(system, figures, ledger)
        slopes = figures.slopes()
        figures.tell(slopes=slopes)
        told = ledger.end(system)
        evicted = max(system.evicted_early, _evicted_early(system))
        # A shard counts since its start: what one did before it was killed stands in its log alone.
        full = "the disk is full" in (tmp_path / "replay.log").read_text()
        removes = full or evicted > 0 or system.capacity_items == FULL_ITEMS
        end = _finish(system)
        found = audit(system.data, ledger.journal, removes=removes)
    finally:
        ledger.stop()
    restarts = {name: child.restarts for name, child in system.children.items()}
    summary = _summary(pauses, found) | {"evicted_early_items": evicted, "restarts": restarts}
    summary |= {f"ledger_{name}": value for name, value in told.items()} | end
    figures.tell(**summary)
    print(json.dumps(summary, indent=1))
    assert told["acknowledged"] == found.acknowledged > 0
    assert not told["unsettled"]
    assert not told["refused"]
    assert not found.lost
    assert found.left <= found.gone  # the oldest of all leave, whoever wrote them
    assert not found.doubled
    assert not found.changed
    assert end["total_steps"] <= end["steps"] <= end["total_steps"] + 2 * SLOTS
    assert not system.strays()
    _check_flat(slopes)


def _faults(system: System, figures: Figures, ledger: Ledger) -> list[float]:
    """Do all of them; how long the run took after each until it learned again."""
    rng, began_s = random.Random(SEED), time.monotonic()
    pauses: list[float] = []
    for number, fault in enumerate(choose(rng, FAULTS, bool(system.network.slow))):
        if time.monotonic() - began_s > LIMIT_S:
            break
        until_s = time.monotonic() + (SOAK_S / FAULTS if SOAK_S else rng.uniform(0.5, 3.0))
        while time.monotonic() < until_s:
            system.sleep(0.5)
            figures.look()
        whom = fault(system, rng)
        advanced = system.updates_advance()
        pauses.append(system.wait(advanced, RECOVERY_S, f"updates after {fault.__name__} of {whom}"))
        figures.look()
        if fault is full_disk:  # the shard counts since its start
            system.evicted_early = max(system.evicted_early, _evicted_early(system))
        figures.tell(number=number, fault=fault.__name__, whom=whom, recovered_s=round(pauses[-1], 1))
        assert ledger.process.poll() is None, "the ledger has ended"
    return pauses


def _summary(pauses: list[float], found: Audit) -> dict[str, Any]:
    return {
        "faults": len(pauses),
        "recovered_s_median": round(float(np.median(pauses)), 1),
        "recovered_s_most": round(max(pauses), 1),
        "over_30_s": len([pause for pause in pauses if pause > PROMISED_S]),
        "acknowledged": found.acknowledged,
        "lost": len(found.lost),
        "left_early": found.left,
        "doubled": len(found.doubled),
        "changed": len(found.changed),
        "rows": found.rows,
        "gone": found.gone,
        "gaps": found.gaps,
    }


def _evicted_early(system: System) -> int:
    """How many items have left before their time, as the shard says."""
    words = ["-m", "troupe", "replay", "status", f"tcp://{system.network.address('replay')}:5560"]
    command = system.network.inside(
        "stranger", sys.executable, "-P", *words, "--keys", str(system.keys), "--json"
    )
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return int(json.loads(done.stdout)["evicted_early_items"])


def _finish(system: System) -> dict[str, int]:
    """Have the run come to a total that is near, and everybody end."""
    learner = system.children["learner"]
    pid = learner.pid
    total = int(system.status()["steps"]) + LAST_STEPS
    learner.spec.environment["TROUPE_RUN__TOTAL_STEPS"] = str(total)
    learner.signal(signal.SIGTERM)  # it saves the run; the next one reads the total
    system.wait(lambda: learner.pid not in (None, pid), RECOVERY_S, "the last learner")
    done = lambda: all(child.state == "done" for child in system.children.values())  # noqa: E731
    system.wait(done, RECOVERY_S, "the end of the run", may_be_done=True)
    return {"total_steps": total, "steps": int(system.status()["steps"])}


def _check_flat(slopes: dict[str, dict[str, float]]) -> None:
    """Nothing that lived long grows. A process of some minutes says too little; fewer files are no leak."""
    for name, numbers in slopes.items():
        if numbers["hours"] > 0.4:
            assert numbers["memory_mb_per_hour"] < 30, (name, numbers)
            assert numbers["files_per_hour"] < 10, (name, numbers)
            assert numbers["threads_per_hour"] < 4, (name, numbers)
