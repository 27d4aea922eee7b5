"""Environments in processes of their own, which crash, hang and return nonsense there."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.harness import PATIENCE_S, until
from troupe.common.config.env_section import EnvConfig
from troupe.common.envs import EnvError, VectorEnv, make_vector
from troupe.common.envs.spectator import NoPictureError
from troupe.common.envs.workers import WorkerVector
from troupe.common.errors import ConfigError
from troupe.services.launcher.workspace import remove_abandoned

BROKEN = "tests.envs.broken:Broken-v0"
COUNTING = "tests.envs.counting:Counting-v0"
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def make(env_id: str, slots: int, processes: int = 2, timeout_s: float = 60.0, **kwargs: object) -> VectorEnv:
    config = EnvConfig(
        id=env_id, reward_clip="none", kwargs=kwargs, processes=processes, step_timeout_s=timeout_s
    )
    return make_vector(config, slots, 1)


def zeros(slots: int) -> np.ndarray:
    return np.zeros(slots, np.int64)


def test_steps_are_those_of_one_process() -> None:
    """Observations, rewards, endings, last observations and games, slot by slot."""
    alone = make(COUNTING, 3, processes=0, length=4, ends_by="truncation")
    apart = make(COUNTING, 3, length=4, ends_by="truncation")
    assert apart.spec == alone.spec
    np.testing.assert_array_equal(apart.reset(), alone.reset())
    kept = apart.step(zeros(3))
    before = kept.obs.copy()
    alone.step(zeros(3))
    for _ in range(7):
        want, got = alone.step(zeros(3)), apart.step(zeros(3))
        for name in ("obs", "reward", "terminated", "truncated"):
            np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
        assert got.episodes == want.episodes
        assert got.final_obs.keys() == want.final_obs.keys()
        for slot, obs in want.final_obs.items():
            np.testing.assert_array_equal(got.final_obs[slot], obs)
    np.testing.assert_array_equal(kept.obs, before)  # what was handed out is not written to again
    apart.close()


def test_each_slot_gets_its_own_action_and_seed() -> None:
    env = make("gym:CartPole-v1", 4)
    first = env.reset(7)
    assert len(np.unique(first[:, 0])) == 4
    step = env.step(np.array([0, 1, 1, 0]))
    assert (np.sign(step.obs[:, 1] - first[:, 1]) == [-1, 1, 1, -1]).all()  # the cart's speed
    np.testing.assert_array_equal(env.reset(7), first)
    assert not np.array_equal(env.reset(8), first)
    env.close()


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("_exit", "ended its process (os._exit(3))"),
        ("segfault", "ended its process (SIGSEGV)"),
        ("hang", "did not return within 2 s"),
    ],
)
def test_what_ends_or_holds_up_a_process_costs_its_episodes_only(how: str, cause: str) -> None:
    # Copy 0 of a process tells the shapes. The second process has one slot, so no copy 2.
    env = make(BROKEN, 3, how=how, at=3, copy=2)
    patient = env._config  # type: ignore[attr-defined]
    env.reset()
    before = env.pids  # type: ignore[attr-defined]
    for _ in range(2):
        assert not env.step(zeros(3)).discarded
    # For this step alone: a process that gets no core must not be taken for one that hangs.
    env._config = patient.model_copy(update={"step_timeout_s": 2.0})  # type: ignore[attr-defined]
    step = env.step(zeros(3))
    env._config = patient  # type: ignore[attr-defined]
    assert step.discarded == [0, 1]
    assert step.reward.tolist() == [0, 0, 1]
    np.testing.assert_allclose(step.obs[:, 0], [0, 0, 0.03])
    assert not (step.terminated | step.truncated).any()
    (failure,) = env.failures
    assert str(failure).startswith(f"{BROKEN} {cause} at step 3, slot 1, seed ")
    assert env.restarts_total == 1
    after = env.pids  # type: ignore[attr-defined]
    assert (before[0] != after[0], before[1] == after[1]) == (True, True)
    assert not psutil.pid_exists(before[0])
    step = env.step(zeros(3))
    assert not step.discarded
    np.testing.assert_allclose(step.obs[:, 0], [0.01, 0.01, 0.04])
    env.close()
    assert not any(psutil.pid_exists(pid) for pid in after)


def test_each_process_is_told_which_slots_are_its_own() -> None:
    env = make("tests.envs.counting:Counting-v0", 3)
    env.assign([7, 8, 9], 20)
    workers = env._workers  # type: ignore[attr-defined]
    assert [worker.assignment["slots"] for worker in workers] == [[7, 8], [9]]
    env.reset()  # they understand it: it is not answered
    assert not env.step(zeros(3)).discarded
    env.close()


def test_nonsense_is_mended_in_the_process_and_told() -> None:
    env = make(BROKEN, 3, how="nan", at=2, copy=1)
    env.reset()
    before = env.pids  # type: ignore[attr-defined]
    env.step(zeros(3))
    step = env.step(zeros(3))
    assert step.discarded == [0, 2]  # the first slot of each process
    assert [(failure.slot, failure.step) for failure in env.failures] == [(0, 2), (2, 2)]
    assert "returned an observation with nan" in str(env.failures[0])
    assert None not in [failure.seed for failure in env.failures]
    assert env.restarts_total == 2
    assert env.pids == before  # type: ignore[attr-defined]
    env.close()


def test_pictures_come_from_the_process() -> None:
    env = make_vector(EnvConfig(id="tests.envs.counting:Colour-v0", processes=1), 2, 1, evaluation=True)
    env.reset()
    env.step(zeros(2))
    frame = env.render_frame(1)
    assert (frame.shape, frame[0, 0, 0]) == ((96, 64, 3), 11)
    env.close()
    plain = make(COUNTING, 1, processes=1)
    with pytest.raises(NoPictureError):
        plain.render_frame(0)
    plain.close()


def test_a_process_that_ends_when_it_should_draw_is_started_again() -> None:
    env = make_vector(EnvConfig(id="tests.envs.counting:Colour-v0", processes=1), 2, 1, evaluation=True)
    env.reset()
    os.kill(env.pids[0], signal.SIGKILL)  # type: ignore[attr-defined]
    with pytest.raises(NoPictureError, match=r"it ended its process \(SIGKILL\)"):
        env.render_frame(1)
    step = env.step(zeros(2))
    assert step.discarded == [0, 1]
    assert (step.obs[:, -1] == 10).all()
    assert not env.step(zeros(2)).discarded
    env.close()


def test_what_cannot_be_made_is_said_as_without_processes() -> None:
    with pytest.raises(ConfigError, match="cannot be made with kwargs"):
        make(COUNTING, 2, nonsense=1)
    with pytest.raises(ConfigError, match="did you mean gym:CartPole-v1"):
        make("gym:CartPol-v1", 2)


def test_an_environment_that_always_ends_its_process_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("troupe.common.envs.base.MAX_FAILURES_IN_A_ROW", 1)
    env = make(BROKEN, 1, processes=1, how="_exit", at=0)
    with pytest.raises(EnvError, match=r"failed 2 times in a row.*os._exit\(3\)\) in reset\(\), slot 0"):
        env.reset()
    env.close()


def test_an_end_in_the_midst_of_a_step_leaves_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    env = make(COUNTING, 2)
    env.reset()
    assert isinstance(env, WorkerVector)
    for worker in env._workers:
        worker.tell({"do": "step"})
    for worker in env._workers:
        select.select([worker._link], [], [], PATIENCE_S)  # the answer is there, and nobody reads it
    env.close()
    assert not capfd.readouterr().err


def test_processes_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    """Killed without a word while an environment hangs."""
    code = (
        "import numpy as np\nfrom troupe.common.envs import make_vector\n"
        "from troupe.common.config.env_section import EnvConfig\n"
        f"env = make_vector(EnvConfig(id={BROKEN!r}, processes=1, kwargs=dict(how='hang', at=1)), 1, 1)\n"
        "env.reset(); print(env.pids[0], flush=True); env.step(np.zeros(1, np.int64))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as parent:
        try:
            assert parent.stdout is not None
            worker = int(parent.stdout.readline())
            assert psutil.pid_exists(worker)
        finally:
            parent.kill()
    until(lambda: not psutil.pid_exists(worker) or psutil.Process(worker).status() == psutil.STATUS_ZOMBIE)
    assert list(tmp_path.glob("troupe-*"))
    remove_abandoned(tmp_path)
    assert not list(tmp_path.glob("troupe-*"))
