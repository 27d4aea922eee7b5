"""The launcher as a process of its own, with stand-ins for the services."""

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.harness import PATIENCE_S, leave, until
from troupe.common.config import config_from_dict, load_config
from troupe.common.runtime import StopSignal
from troupe.common.runtime.checkpoint import save_checkpoint
from troupe.common.runtime.lifecycle import INTERRUPTED
from troupe.services.launcher import launcher
from troupe.services.launcher.launcher import _how_to_evaluate, _how_to_extend
from troupe.services.launcher.supervisor import ChildSpec

LAUNCH = Path(__file__).with_name("fake_launch.py")
ALL = ["learner", "replay", "actor-0", "actor-1", "evaluator"]


class Launched:
    """A launcher under test."""

    def __init__(self, run_dir, behaviour, *words, output=None, **options):
        self.run_dir = run_dir
        self.output = output or run_dir.with_suffix(".out")
        with self.output.open("w") as out:
            options = {"stdout": out, "stderr": subprocess.STDOUT} | options
            self.process = subprocess.Popen(
                [sys.executable, str(LAUNCH), str(run_dir), behaviour, *words],
                env={**os.environ, "PYTHONPATH": str(LAUNCH.parents[2])},
                **options,
            )

    def text(self, name):
        try:
            return (self.run_dir / name).read_text()
        except FileNotFoundError:
            return ""

    def children(self):
        return [
            (int(pid), name) for pid, name in (line.split() for line in self.text("pids.txt").splitlines())
        ]

    def wait_until(self, condition, timeout_s=PATIENCE_S):
        until(condition, timeout_s, why=self.output.read_text)

    def wait_all_up(self):
        self.wait_until(lambda: {name for _, name in self.children()} == set(ALL))

    def wait(self, timeout_s=PATIENCE_S):
        code = self.process.wait(timeout_s)
        return code, self.output.read_text()

    def assert_nothing_is_left(self, timeout_s=60.0):
        pids = [pid for pid, _ in self.children()]
        assert pids
        self.wait_until(lambda: not any(_alive(pid) for pid in pids), timeout_s)
        assert not Path(self.text("sockets.txt")).exists()


def _alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def launch(tmp_path):
    launched = []

    def launch(behaviour, *words, run_dir=tmp_path / "run", **options):
        launched.append(Launched(run_dir, behaviour, *words, **options))
        return launched[-1]

    yield launch
    for one in launched:
        one.process.kill()
        one.process.wait()
        for pid, _ in one.children():
            if _alive(pid):
                os.kill(pid, signal.SIGKILL)


def test_the_end_says_where_to_read_what_kept_a_run_from_learning(launch):
    run = launch("high-rate")
    code, output = run.wait()
    assert code == 0, output
    assert f"troupe why {run.run_dir}" in output


def test_a_complete_run_ends_by_itself(launch):
    run = launch("finish")
    code, output = run.wait()
    assert code == 0, output
    assert f"run directory: {run.run_dir}" in output
    assert "last evaluation: return 12.50 (version 4)" in output
    assert "complete at 2,000 steps" in output
    assert f"troupe resume {run.run_dir} --total-steps 4000" in output
    assert "steps/s 1,000" in output
    assert "nothing was learned" not in output
    assert "no episode" not in output
    assert "troupe why" not in output
    run.assert_nothing_is_left()
    assert 'id = "gym:CartPole-v1"' in run.text("config.toml")


def test_the_end_says_that_no_episode_has_ended(launch):
    code, output = launch("endless").wait()
    assert code == 0, output
    slots = load_config().total_slots
    assert f"no episode has ended in {2000 / slots:,.0f} steps of each slot, so there is no" in output


def test_lines_come_less_often_as_the_run_goes_on(tmp_path, monkeypatch, capsys):
    now_s = 0.0
    monkeypatch.setattr(launcher.time, "monotonic", lambda: now_s)
    config = config_from_dict({"run": {"log_every_s": 2.0}}, typed_agent=False)
    spec = ChildSpec("learner", lambda restarts: [], tmp_path / "learner.log")
    shown = launcher._Launcher(
        config, tmp_path, tmp_path, StopSignal(), [spec], [], resume=False, damaged="", progress=False
    )
    (tmp_path / "status.json").write_text('{"steps": 1, "metrics": {"speed/steps_per_s": 1.0}, "note": ""}')
    said_s = []
    for now_s in range(2 * 3600):
        shown._show()
        said_s += [now_s] * bool(capsys.readouterr().out)
    gaps = np.diff(said_s)
    assert list(gaps[:8]) == [2] * 8, "a run of seconds is followed closely"
    assert np.all(np.diff(gaps) >= 0)
    assert set(gaps[np.array(said_s[:-1]) > 700]) == {60}
    assert len(said_s) < 160, "not 3,600 lines"


def test_that_a_run_starts_is_said_once(launch):
    code, output = launch("slow-start").wait()
    assert code == 0, output
    assert output.count("| starting: services are loading") == 1, output


def test_what_the_end_waits_for_is_said_once(launch):
    code, output = launch("slow-end").wait()
    assert code == 0, output
    assert output.count("| writing") == 1, output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_cleanly_learner_first(launch, number):
    run = launch("run")
    run.wait_all_up()
    run.wait_until(lambda: "steps 1,900/2,000" in run.output.read_text())
    run.process.send_signal(number)
    code, output = run.wait()
    assert code == 0, output
    assert "stopped at 1,900 of 2,000 steps, saved at 123; to continue:" in output
    stopped = run.text("stopped.txt").split()
    assert stopped[0] == "learner"
    assert stopped[-1] == "replay"
    assert sorted(stopped) == sorted(ALL)
    assert f"troupe resume {run.run_dir}\n" in output
    run.assert_nothing_is_left()


def test_without_a_checkpoint_there_is_nothing_to_go_on_with(launch):
    run = launch("early")
    run.wait_all_up()
    run.process.send_signal(signal.SIGINT)
    code, output = run.wait()
    assert code == 130, output
    assert "stopped before the first checkpoint: nothing to resume" in output
    assert "writes a checkpoint" not in output
    assert "troupe resume" not in output


def test_resume_passes_the_word_on(launch):
    run = launch("run")
    run.wait_all_up()
    run.process.send_signal(signal.SIGINT)
    run.wait()
    again = launch("finish")
    code, output = again.wait()
    assert code == 0, output
    assert "up 0 ['--resume']" in again.text("logs/learner.log")


def test_a_run_too_short_to_learn_anything_says_so(launch):
    code, output = launch("idle").wait()
    assert code == 0, output
    assert (
        "nothing was learned: the run was too short for an update, because replay needs 50,000 items"
    ) in output
    # It said so when it started, too, and not only after the wait.
    started = "this run is too short to learn anything: 2,000 steps, and learning starts at 50,000 items"
    assert output.index(started) < output.index("steps/s")


def test_a_run_whose_learner_died_of_its_updates_is_not_complete(launch):
    run = launch("dies-of-updates")
    code, output = run.wait()
    assert code == 70, output
    (line,) = [line for line in output.splitlines() if line.startswith("troupe: error:")]
    assert line.startswith(
        "troupe: error: the run made all of its steps but has not learned from all of them: learner died"
    )
    assert "ValueError: clamp takes a number" in line
    assert "complete at" not in output
    run.assert_nothing_is_left()


def test_a_learner_that_died_and_learned_again_completes_the_run(launch):
    code, output = launch("dies-once").wait()
    assert code == 0, output
    assert "complete at 2,000 steps" in output


def test_resuming_a_complete_run_starts_nothing(launch):
    run = launch("finish")
    run.wait()
    save_checkpoint(run.run_dir / "checkpoints", {"w": np.zeros(2, np.float32)}, {"steps": 2000})
    (run.run_dir / "logs" / "learner.log").unlink()
    status = (run.run_dir / "status.json").read_bytes()
    code, output = launch("run").wait()
    assert code == 0, output
    assert "complete at 2,000 steps; to continue, raise the total:" in output
    assert (run.run_dir / "status.json").read_bytes() == status  # what `troupe runs` tells of it
    assert not (run.run_dir / "logs" / "learner.log").exists()


def test_the_status_of_an_earlier_call_does_not_look_like_progress(launch):
    run = launch("finish")
    run.wait()
    save_checkpoint(run.run_dir / "checkpoints", {"w": np.zeros(2, np.float32)}, {"steps": 1000})
    assert '"steps": 2000' in run.text("status.json")  # killed: it had come further than its checkpoint
    (run.run_dir / "pids.txt").unlink()
    again = launch("silent")
    again.wait_all_up()
    assert not again.text("status.json")
    again.process.send_signal(signal.SIGINT)
    again.wait()


def test_ctrl_c_twice_does_not_wait_for_the_deaf(launch):
    run = launch("deaf")
    run.wait_all_up()
    run.process.send_signal(signal.SIGINT)
    run.wait_until(lambda: "stopping on request" in run.output.read_text())
    time.sleep(0.2)  # else both are taken for one
    run.process.send_signal(signal.SIGINT)
    code, output = run.wait()
    assert code == 130, "killed before its first checkpoint"
    assert "killed learner, on the second signal" in output
    run.assert_nothing_is_left()


def test_kill_9_of_the_launcher_leaves_no_orphans(launch):
    run = launch("deaf")
    run.wait_all_up()
    run.process.kill()
    run.process.wait()
    pids = [pid for pid, _ in run.children()]
    run.wait_until(lambda: not any(_alive(pid) for pid in pids))


def test_what_dies_is_started_again(launch):
    run = launch("crash")
    run.wait_until(lambda: "up 2" in run.text("logs/actor-1.log"))
    output = run.output.read_text()
    assert "actor-1 died (exit code 1): RuntimeError: emulator exploded; restarting in 1 s" in output
    assert "up 0" in run.text("logs/actor-0.log")
    assert run.text("logs/actor-0.log").count("up") == 1
    victim = next(pid for pid, name in run.children() if name == "evaluator")
    os.kill(victim, signal.SIGKILL)
    run.wait_until(lambda: "up 1" in run.text("logs/evaluator.log"))
    run.process.send_signal(signal.SIGINT)
    code, output = run.wait()
    assert code == 0
    assert "actor-1 died 2 times, the last: exit code 1: RuntimeError: emulator exploded (log: " in output
    assert "evaluator died once: SIGKILL: killed from outside" in output
    assert "actor-1 died" in run.text("logs/launcher.log")
    run.assert_nothing_is_left()


def test_a_config_error_of_a_service_is_the_launchers(launch):
    run = launch("bad-config")
    code, output = run.wait()
    assert code == 2
    (line,) = [line for line in output.splitlines() if line.startswith("troupe: error:")]
    assert line == (
        "troupe: error: learner died (exit code 2): no such game: pongg; nearest: pong "
        f"(log: {run.run_dir / 'logs' / 'learner.log'})"
    )
    assert "Traceback" not in output
    run.assert_nothing_is_left()


def test_a_learner_that_hangs_is_named_and_its_rates_go_blank(launch):
    run = launch("run")
    run.wait_until(lambda: "steps/s 1,000" in run.output.read_text())
    learner = next(pid for pid, name in run.children() if name == "learner")
    os.kill(learner, signal.SIGSTOP)
    run.wait_until(lambda: "learner has been silent for" in run.output.read_text())
    named = [line for line in run.output.read_text().splitlines() if "has been silent" in line]
    assert "steps/s" not in named[0]
    os.kill(learner, signal.SIGCONT)
    lines = len(run.output.read_text())
    run.wait_until(lambda: "steps/s 1,000" in run.output.read_text()[lines:])


def test_a_disk_that_fills_up_is_said_and_a_stop_leaves_no_traceback(launch, disk):
    run = launch("run", run_dir=disk / "run", output=disk.parent / "out")
    run.wait_all_up()
    leave(disk, 0)
    run.wait_until(lambda: "No space left on device" in run.output.read_text())
    run.process.send_signal(signal.SIGINT)
    code, output = run.wait()
    assert code == INTERRUPTED, output  # there was no room for a checkpoint
    assert "Traceback" not in output
    assert "Logging error" not in output
    assert "internal error" not in output
    said = [line for line in output.splitlines() if "steps " in line and "No space left" in line]
    assert f"cannot write into {disk / 'run'}" in said[0]


def test_a_disk_that_is_full_at_the_start_is_named(launch, disk):
    leave(disk, 0)
    code, output = launch("run", run_dir=disk / "run", output=disk.parent / "out").wait()
    assert code == 2, output
    assert output.count("\n") == 1
    assert "No space left on device" in output


def test_two_launchers_do_not_share_a_run(launch):
    run = launch("run")
    run.wait_all_up()
    second = launch("run")
    code, _ = second.wait()
    assert code == 2
    assert "in use by another process" in second.output.read_text()
    assert run.process.poll() is None


def test_the_panel_on_a_terminal_that_goes_away(launch):
    main, side = pty.openpty()
    run = launch("run", "panel", stdout=side, stderr=side)
    os.close(side)
    shown = bytearray()
    until(
        lambda: b"bottleneck" in shown and b"actor-1" in shown,
        step=lambda: shown.extend(os.read(main, 65536)),
        why=lambda: shown[-3000:],
    )
    run.wait_all_up()
    os.close(main)  # nobody reads on: every write fails from now on
    run.process.send_signal(signal.SIGHUP)
    assert run.process.wait(120) == 0
    assert sorted(run.text("stopped.txt").split()) == sorted(ALL)
    run.assert_nothing_is_left()


def test_the_commands_that_are_named_can_be_typed(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    own = load_config("cartpole-ppo", None, {}, {})
    assert _how_to_evaluate(tmp_path, own).endswith(f"eval {tmp_path} --episodes 20")
    env = {
        "env.id": "my_games.maze:Maze-v0",
        "env.wrappers": ["my_games.maze:Wrap", "gymnasium.wrappers:ClipReward"],
    }
    others = load_config("cartpole-ppo", None, env, {})
    assert _how_to_evaluate(tmp_path, others).endswith("--episodes 20 --modules my_games.maze")
    # A run may have more steps than were asked for, since chunks come whole.
    assert _how_to_extend(tmp_path, own, 32, 1)[1].endswith("--total-steps 64")
    # A module in a folder that only PYTHONPATH names is found by who types the command as well.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "my games"), ""]))
    named = f"PYTHONPATH='{tmp_path}/my games' "
    assert _how_to_evaluate(tmp_path, others).startswith(named)
    assert _how_to_extend(tmp_path, others, 32, 1)[1].strip().startswith(named)
    assert "PYTHONPATH" not in _how_to_evaluate(tmp_path, own)
