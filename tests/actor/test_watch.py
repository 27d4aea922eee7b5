"""What goes wrong in environments is reported while it happens, by a thread beside the actor's loop."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.harness import until
from troupe.common.config.env_section import EnvConfig
from troupe.common.envs import VectorEnv, make_vector
from troupe.common.envs.calls import RESET, STEP, Calls
from troupe.services.actor.watch import EnvWatch

BROKEN = "tests.envs.broken:Broken-v0"
Reports = list[tuple[dict[str, float], dict[str, str]]]


def make(how: str, at: int) -> VectorEnv:
    return make_vector(EnvConfig(id=BROKEN, kwargs={"how": how, "at": at}), 2, 1)


@pytest.fixture
def watch() -> Iterator[Callable[[VectorEnv, float], tuple[EnvWatch, Reports]]]:
    watches: list[EnvWatch] = []

    def watch(env: VectorEnv, stall_s: float) -> tuple[EnvWatch, Reports]:
        reports: Reports = []
        watches.append(EnvWatch(lambda: [env], lambda *report: reports.append(report), stall_s))
        return watches[-1], reports

    yield watch
    for each in watches:
        each.close()


def test_failures_are_counted_and_the_last_is_told(
    watch: Callable[[VectorEnv, float], tuple[EnvWatch, Reports]],
) -> None:
    env = make("raise", at=3)
    watched, reports = watch(env, 1000.0)
    env.reset()
    for _ in range(6):
        env.step(np.zeros(2, np.int64))
    watched.close()
    metrics, trouble = reports[-1]
    assert metrics == {"actor/env_restarts_total": 4.0, "actor/env_hangs_total": 0.0}
    told = f"{BROKEN} raised RuntimeError: the physics exploded (broken.py:68) at step 3, slot 1, seed "
    assert trouble.startswith(told)
    assert watched.metrics() == reports[-1][0]
    before = len(reports)
    watched.look()
    assert len(reports) == before, "nothing new"


def test_how_long_a_hang_was_is_told_when_it_is_over(
    watch: Callable[[VectorEnv, float], tuple[EnvWatch, Reports]],
) -> None:
    env = make("", at=0)
    watched, reports = watch(env, 1000.0)
    env.reset()
    env.calls.enter(0, 3, 1)
    watched.look()
    watched.look(1000.0)
    watched.look(900.0)
    assert [report[1].split(", ")[-1] for report in reports] == ["for 1000 s"]
    env.calls.leave(0)
    watched.look()
    assert reports[-1][0]["actor/env_hangs_total"] == 1.0
    assert reports[-1][1].startswith(f"{BROKEN} hung at step 1, slot 0, for 19")


def test_a_reset_of_many_slots_in_one_call_is_no_hang_of_one(
    watch: Callable[[VectorEnv, float], tuple[EnvWatch, Reports]],
) -> None:
    env = make("", at=0)
    env.num_slots, env.calls = 48, Calls(48, whole=True)
    watched, reports = watch(env, 1000.0)
    env.calls.enter(0, RESET)
    watched.look()
    watched.look(5900.0)
    assert not reports, "48 slots have six times as long"
    watched.look(200.0)
    assert reports[-1][1].startswith(f"{BROKEN} hangs in reset(), all slots, for 6")
    env.calls.leave(0)
    env.calls.enter(0, STEP, 1)
    watched.look()
    watched.look(1000.0)
    assert reports[-1][0]["actor/env_hangs_total"] == 2.0, "a step has no longer than that of one slot"
    env.calls.leave(0)


def test_a_call_that_goes_on_is_not_the_loops_hang() -> None:
    env, busy = make("", at=0), []
    watched = EnvWatch(lambda: [env], lambda *report: None, 1000.0, busy=lambda: busy.append(1))
    env.reset()
    watched.look()
    assert not busy
    env.calls.enter(0, STEP, 1)
    watched.look()
    assert busy
    env.calls.leave(0)
    watched.close()


def test_a_hang_is_counted_once_while_it_lasts(
    watch: Callable[[VectorEnv, float], tuple[EnvWatch, Reports]],
) -> None:
    env = make("hang", at=2)
    watched, reports = watch(env, 2.0)
    env.reset()
    env.step(np.zeros(2, np.int64))
    threading.Thread(target=env.step, args=(np.zeros(2, np.int64),), daemon=True).start()
    until(lambda: reports)
    assert reports[0][0] == {"actor/env_restarts_total": 0.0, "actor/env_hangs_total": 1.0}
    told = f"{BROKEN} hangs at step 2, slot 0, for "
    assert reports[0][1] in (f"{told}2 s", f"{told}3 s")  # a look may be a second after the one before
    watched.look(4.0)
    assert reports[-1][0] == reports[0][0], "one hang, however long"
    assert int(reports[-1][1].split()[-2]) >= 6


def test_quick_calls_are_no_hang_however_long_they_go_on(
    watch: Callable[[VectorEnv, float], tuple[EnvWatch, Reports]],
) -> None:
    env = make("", at=0)
    watched, reports = watch(env, 1000.0)
    env.reset()
    for _ in range(200):
        env.calls.enter(0, 3, 1)  # the same step of the same slot, but another call
        watched.look(900.0)
        env.calls.leave(0)
    assert not reports


HANGING = """
import sys, time
import numpy as np
from tests.actor.test_watch import make
from troupe.services.actor.watch import EnvWatch
env = make("hang", at=1)
env.reset()
EnvWatch(lambda: [env], lambda *report: print(*report), 0.1)
env.step(np.zeros(2, np.int64))
"""


@pytest.mark.slow
def test_a_process_that_hangs_for_good_ends_with_its_reason() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", HANGING], cwd=root, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 70, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"troupe: error: {BROKEN} hangs at step 1, slot 0, for ")
    assert last.endswith(": the actor exits so that it can be restarted")
    assert "tests/envs/broken.py" in done.stderr  # where it hangs
