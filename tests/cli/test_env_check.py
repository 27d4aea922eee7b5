"""Environments that fail, hang and crash, each in a process of its own that says where."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import psutil
import pytest

from tests.harness import PATIENCE_S, until
from troupe.common.config.env_section import EnvConfig
from troupe.common.envs import calls
from troupe.common.envs.returned import other_dtypes
from troupe.common.errors import ConfigError, MissingEngineError
from troupe.services.environment import check as module
from troupe.services.environment.check import Findings, check
from troupe.services.launcher.workspace import remove_abandoned

BROKEN = "tests.envs.broken:Broken-v0"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


def found(env_id: str = BROKEN, **kwargs: object) -> Findings:
    return check(EnvConfig(id=env_id, kwargs=kwargs))


@pytest.mark.parametrize(
    ("kwargs", "line"),
    [
        ({"how": "_exit"}, "ended the process at step 3, slot 0 (os._exit(3))"),
        ({"how": "_exit", "at": 0}, "ended the process in reset(), slot 0 (os._exit(3))"),
        (
            {"how": "nan", "at": 20},
            "returned an observation with nan (2 of its 3 numbers) at step 20, slot 0",
        ),
        ({"how": "inf", "at": 0}, "returned an observation with inf (1 of its 3 numbers) in reset(), slot 0"),
        ({"how": "exit"}, "raised SystemExit: 3 (broken.py:70) at step 3, slot 0"),
        ({"how": "interrupt"}, "raised KeyboardInterrupt (broken.py:80) at step 3, slot 0"),
    ],
    ids=str,
)
def test_a_broken_environment_is_one_line(kwargs: dict[str, object], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        found(**kwargs)
    told = str(error.value)
    assert told.startswith(f"{BROKEN} {line}")
    assert told.endswith("; --env.check_timeout_s 0 trains without this check")


def test_who_asks_for_the_check_alone_is_told_the_cause_and_not_how_to_leave_it_out() -> None:
    with pytest.raises(ConfigError) as error:
        check(EnvConfig(id=BROKEN, kwargs={"how": "nan"}), thorough=True)
    assert str(error.value).endswith("failures in 100 steps)")


def test_what_fails_now_and_then_is_told_and_trained_on() -> None:
    findings = found(how="raise", chance=0.03, length=40)
    assert findings.steps == 100
    assert 0 < findings.failures < 10
    assert findings.first_failure.startswith(
        f"{BROKEN} raised RuntimeError: the physics exploded (broken.py:68) at step "
    )


def test_what_fails_often_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"exploded \(broken.py:68\) at step \d+, slot ., seed \d+ \(\d+ failures in 100 steps\); --env",
    ):
        found(how="raise", chance=0.3)


def test_what_cannot_be_closed_is_played_and_said_to_fail_there() -> None:
    findings = check(EnvConfig(id=BROKEN, kwargs={"how": "close"}), thorough=True)
    assert findings.steps == 100
    (said,) = [each for each in findings.objections or [] if each.startswith("close()")]
    assert said.startswith("close() raised RuntimeError: the viewer has gone (broken.py:")


def test_another_dtype_than_the_announced_one_is_told_with_the_cast_to_write() -> None:
    findings = check(EnvConfig(id=BROKEN), thorough=True)
    said = "the observation is float64, its space says float32: return obs.astype(np.float32)"
    assert (findings.objections or []).count(said) == 1
    spaces = gymnasium.spaces
    space = spaces.Dict({"eye": spaces.Tuple([spaces.Box(0, 1, (2,), np.float32)]), "n": spaces.Discrete(3)})
    assert other_dtypes(space, {"eye": (np.zeros(2, np.float32),), "n": 1}) == []
    assert other_dtypes(space, {"eye": (np.zeros(2),), "n": 1}) == [
        "the observation part 'eye.0' is float64, its space says float32: return obs.astype(np.float32)"
    ]


def test_a_crash_is_told_with_its_signal() -> None:
    with pytest.raises(ConfigError, match=r"ended the process at step 3, slot 0 \(SIGABRT\)"):
        found(how="abort")


def test_a_module_that_ends_the_process_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_games.py").write_text("import os, sys; print('no licence', flush=True); os._exit(3)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    line = r"ended the process while it is made \(os._exit\(3\)\); its last words: no licence"
    with pytest.raises(ConfigError, match=line):
        found("their_games:Maze-v0")


def test_a_hang_is_told_and_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    # The clock leaps once the environment hangs: a limit short enough to wait for would end slow imports.
    seen: list[str] = []
    look = calls.calls_of

    def calls_of(directory: Path, pid: int) -> list[calls.Call]:
        running = look(directory, pid)
        seen.extend(map(str, running))
        return running

    def clock() -> float:
        return time.monotonic() + ("at step 3, slot 0" in seen) * PATIENCE_S

    monkeypatch.setattr(calls, "calls_of", calls_of)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    with pytest.raises(ConfigError, match=r"hangs at step 3, slot 0: no answer for"):
        check(EnvConfig(id=BROKEN, kwargs={"how": "hang"}), timeout_s=PATIENCE_S)
    for process in psutil.Process().children(recursive=True):
        # Other tests of this process may have left one that has ended, and has no command line.
        with contextlib.suppress(psutil.ZombieProcess):
            assert not probes(process)


def test_a_check_that_is_killed_leaves_neither_a_process_nor_a_folder(tmp_path: Path) -> None:
    code = (
        "from troupe.common.config.env_section import EnvConfig\n"
        "from troupe.services.environment.check import check\n"
        f"check(EnvConfig(id={BROKEN!r}, kwargs=dict(how='hang')))"
    )
    variables = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], env=variables) as parent:
        try:
            until(lambda: any(map(probes, psutil.Process(parent.pid).children())))
            [child] = psutil.Process(parent.pid).children()
        finally:
            parent.kill()
    until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    assert list(tmp_path.iterdir())
    remove_abandoned(tmp_path)
    assert not list(tmp_path.iterdir())


def probes(process: psutil.Process) -> bool:
    return "troupe.services.environment.probe" in process.cmdline()


def test_what_cannot_be_made_here_is_the_error_that_it_is_there() -> None:
    with pytest.raises(MissingEngineError, match="deepmind_lab"):
        found("dmlab:rooms_watermaze")


def test_what_is_found() -> None:
    findings = found("tests.envs.counting:Counting-v0", length=5, ends_by="truncation")
    assert (findings.steps, findings.terminated, findings.truncated) == (100, 0, 20)
    assert findings.episodes == [(12.5, 5)] * 20
    assert findings.reward_range == (2.5, 2.5)
    assert findings.observation_ranges == [(0.0, 10.0)]
    assert findings.spec.obs_shape == (2,)
    assert findings.frames_per_s > 0


def test_the_range_of_each_part_is_found() -> None:
    findings = found("tests.envs.matching:Read-v0")
    parts = [".".join(map(str, leaf.path)) for leaf in findings.spec.obs_leaves]
    ranges = dict(zip(parts, findings.observation_ranges, strict=True))
    assert ranges["pair.0"] == (2.0, 4.0)
    assert ranges["pair.1"] == (0.0, 1.0)
    assert 150 < ranges["column"][1] < 210
    assert ranges["height"][0] < -50 < 50 < ranges["height"][1]
