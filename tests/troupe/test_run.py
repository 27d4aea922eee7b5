"""Trainings from Python: in the background, with callbacks, in this process; and what is left of them."""

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import weakref

import gymnasium
import psutil
import pytest

import troupe
from tests.harness import PATIENCE_S, until
from troupe.common.errors import CheckpointError, ConfigError, PeerError
from troupe.following import Follower, Metrics
from troupe.run import Run

QUIET = {"net.tensorboard_port": 0, "evaluator.period_s": 0.5, "run.log_every_s": 0.5}
CORRIDOR = """\
import json
import sys

import gymnasium
import numpy as np

import troupe


class Corridor(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (5,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def _shown(self):
        return np.eye(5, dtype=np.float32)[self.at]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = 0
        return self._shown(), {}

    def step(self, action):
        self.at = max(0, self.at + (1 if action else -1))
        over = self.at == 4
        return self._shown(), 1.0 if over else -0.1, over, False, {}


"""


def program(folder, text, **variables):
    (folder / "walk.py").write_text(CORRIDOR + text)
    return subprocess.Popen(
        [sys.executable, "walk.py"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_class_of_the_program_trains_in_the_background_until_a_callback_has_enough(tmp_path):
    text = f"""
def enough(metrics):
    print("evaluated", metrics.steps > 0)
    # What an untrained network does may be right by luck.
    return metrics.steps == 0 or metrics["eval/episode_return"] < 0.5

if __name__ == "__main__":
    fields = {{**{QUIET}, "env.max_episode_frames": 200}}
    with troupe.start(env=Corridor, steps=10_000_000, seed=3, fields=fields, run_dir="run",
                      on_evaluation=enough, on_checkpoint=lambda path: print("saved", path.name)) as run:
        print("running", run.running, run.path)
        print("ended", run.wait(400), run.running)
        print("same", run.metrics()["eval/episode_return"] == run.series("eval/episode_return").values[-1])
        print("acts", run.policy().act([1, 0, 0, 0, 0]))
        reports = [troupe.evaluate(of, Corridor, episodes=2) for of in (run, run.policy())]
        print(json.dumps([report["returns"] for report in reports]), reports[0]["steps"] == run.steps)
"""
    done = program(tmp_path, text)
    said, _ = done.communicate(timeout=500)
    lines = said.splitlines()
    assert {"running True run", "evaluated True", "ended True False", "same True", "acts 1"} <= {*lines}, said
    assert "saved step-000000000000" in lines
    assert lines[-1] == "[[0.7, 0.7], [0.7, 0.7]] True", said
    config = (tmp_path / "run" / "config.toml").read_text()
    assert 'id = "walk:Corridor"' in config
    assert "seed = 3" in config


@pytest.mark.slow
def test_a_program_without_a_guard_is_told(tmp_path):
    done = program(tmp_path, 'troupe.train(env=Corridor, run_dir="run")')
    said, _ = done.communicate(timeout=PATIENCE_S)
    assert done.returncode == 1
    assert said.splitlines()[-1].endswith('put what starts it under `if __name__ == "__main__":`')
    assert not (tmp_path / "run" / "config.toml").exists()


def test_a_training_in_this_process_tells_a_failure_once(tmp_path, monkeypatch):
    """Python prints warnings where nobody handles them, and a failure is both told and logged."""
    handlers, logger = [], logging.getLogger("troupe")

    def run(self):
        handlers.extend(logger.handlers)
        self.close()

    monkeypatch.setattr("troupe.serial.SerialTraining.run", run)
    troupe.train(env="gym:CartPole-v1", steps=100, run_dir=tmp_path / "run", serial=True)
    assert [type(each) for each in handlers] == [logging.NullHandler]
    assert not logger.handlers


def test_a_training_in_this_process_takes_any_environment_and_calls_back(tmp_path):
    def make():
        return gymnasium.make("CartPole-v1")

    told, saved = [], []
    run = troupe.train(
        run_dir=tmp_path / "run",
        env=make,
        steps=600,
        seed=2,
        serial=True,
        fields={**QUIET, "evaluator.episodes": 2, "evaluator.period_s": 60},
        on_metrics=told.append,
        on_checkpoint=saved.append,
    )
    assert run == tmp_path / "run"
    assert {metrics.source for metrics in told} == {"evaluator", "actor-0"}
    assert all(isinstance(metrics, Metrics) and metrics.values for metrics in told)
    assert saved[-1].name >= "step-000000000600"
    # The environment is gone with the process, and is given anew.
    assert troupe.evaluate(run, make, episodes=2)["episodes"] == 2
    with pytest.raises(ConfigError, match="the network does not fit gym:Acrobot-v1"):
        troupe.evaluate(troupe.load(run), "gym:Acrobot-v1", episodes=2)

    def fails(metrics):
        raise ZeroDivisionError("own")

    with pytest.raises(ZeroDivisionError, match="own"):
        troupe.train(run_dir=tmp_path / "other", env=make, serial=True, fields=QUIET, on_metrics=fails)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give a preset"),
        ({"preset": "cartpole-ppo", "algo": "ppo"}, "replaces a preset"),
        ({"preset": "cartpole-ppo", "fields": {"agent.gamma": {1}}}, "agent.gamma should be a value of"),
        ({"preset": "cartpole-ppp"}, "cartpole-ppo"),
        ({"preset": "cartpole-ppo", "steps": -1}, "run.total_steps"),
    ],
)
def test_what_cannot_begin_is_one_line(tmp_path, arguments, message):
    before = psutil.Process().children()  # of other tests, such as Python's tracker of shared memory
    with pytest.raises(ConfigError, match=message) as error:
        troupe.start(run_dir=tmp_path / "run", **arguments)
    assert "\n" not in str(error.value)
    assert psutil.Process().children() == before


def test_a_run_below_the_home_directory_is_found_there_again(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    fields = {"evaluator.enabled": False, "env.check_timeout_s": 0, "net.tensorboard_port": 0}
    run = troupe.train("cartpole-ppo", "~/run", fields, steps=500, serial=True)
    assert run == tmp_path / "home" / "run"
    assert troupe.load("~/run").checkpoint.meta["steps"] == 500
    assert troupe.resume("~/run", fields) == run
    with pytest.raises(ConfigError, match="/home/run holds a run already"):
        troupe.start("cartpole-ppo", "~/run")
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


@pytest.mark.parametrize("begin", [troupe.start, troupe.train])
def test_a_run_that_is_there_is_refused_before_callbacks_are_told_of_it(tmp_path, begin):
    (tmp_path / "config.toml").touch()
    (tmp_path / "metrics.csv").write_text("1,7,7,1,learner,loss,2\n")
    told = []
    with pytest.raises(ConfigError, match=str(tmp_path)):
        begin("cartpole-ppo", tmp_path, on_metrics=told.append)
    assert not told


# What follows is about the process of a run, whatever it is.


def training(path, code, told=None):
    path.mkdir()
    (path / "config.toml").touch()
    run = Run([sys.executable, "-c", code], path, {}, told or Follower(path))
    run.begin()
    return run


ENDLESS = "import signal; signal.sigwait([signal.SIGTERM])"


def test_errors_of_the_run_are_those_that_it_ends_with(tmp_path):
    for code, kind in ((2, ConfigError), (3, PeerError), (5, CheckpointError)):
        run = training(
            tmp_path / str(code), f"import sys; print('troupe: error: own cause'); sys.exit({code})"
        )
        with pytest.raises(kind, match=r"^own cause$"):
            run.wait()
    run = training(tmp_path / "defect", "import time; time.sleep(0.3); 1 / 0")
    with pytest.raises(troupe.TroupeError, match="exit code 1: ZeroDivisionError"):
        run.wait()
    run = training(tmp_path / "killed", ENDLESS)  # as by the kernel, where memory is out
    run._process.kill()
    with pytest.raises(troupe.TroupeError, match="exit code -9"):
        run.wait()


def test_a_run_is_stopped_by_its_handle_its_block_and_its_callbacks(tmp_path):
    with training(tmp_path / "block", ENDLESS) as run:
        assert run.running
        assert not run.wait(timeout_s=0.0)
        assert "running" in repr(run)
    assert not run.running

    def told(metrics):
        raise ZeroDivisionError(f"own, at {metrics.steps}")

    path = tmp_path / "callback"
    run = training(path, ENDLESS, Follower(path, on_metrics=told))
    run.watch()
    (path / "metrics.csv").write_text(
        "wall_s,steps,frames,updates,source,name,value\n1,7,7,1,learner,loss,2\n"
    )
    with pytest.raises(ZeroDivisionError, match="own, at 7"):
        run.wait(PATIENCE_S)
    assert not run.running


@pytest.mark.timeout(60)
def test_a_wait_has_its_limit_also_while_a_callback_lasts(tmp_path):
    goes_on, path = threading.Event(), tmp_path / "run"
    run = training(path, ENDLESS, Follower(path, on_metrics=lambda metrics: goes_on.wait()))
    (path / "metrics.csv").write_text("1,7,7,1,learner,loss,2\n")
    run.watch()
    run.stop()
    assert not run.wait(timeout_s=0.5)
    goes_on.set()
    assert run.wait(PATIENCE_S)


def test_runs_that_nobody_waits_for_are_let_go_when_they_have_ended(tmp_path):
    ended = [weakref.ref(training(tmp_path / str(number), "")) for number in range(2)]
    until(lambda: all(run() is None or not run().running for run in ended))
    with training(tmp_path / "next", ENDLESS):
        gc.collect()
        assert [run() for run in ended] == [None, None]


@pytest.mark.parametrize("dies", [False, True])
def test_no_run_outlives_its_program(tmp_path, dies):
    text = f"""
from troupe.run import Run
from troupe.following import Follower
from pathlib import Path
run = Run([sys.executable, "-c", "{ENDLESS}"], Path("."), {{}}, Follower(Path(".")))
print(run._process.pid, flush=True)
if {dies}:
    sys.stdin.read()
"""
    done = program(tmp_path, text)
    child = int(done.stdout.readline())
    if dies:
        until(lambda: "sigwait" in " ".join(psutil.Process(child).cmdline()[:3]))  # past the guard
        done.send_signal(signal.SIGKILL)
    done.communicate(timeout=PATIENCE_S)
    until(lambda: not psutil.pid_exists(child))


def test_callbacks_get_what_is_new_once(tmp_path):
    told, evaluated, saved = [], [], []
    follower = Follower(tmp_path, evaluated.append, saved.append, told.append)
    assert follower.look()
    rows = [
        "wall_s,steps,frames,updates,source,name,value",
        "1,10,40,3,learner,loss,2",
        "1,10,40,3,learner,q,4",
    ]
    rows += ["2,8,32,2,evaluator,eval/episode_return,5", "2,9,36,2,evaluator,eval/epi"]
    (tmp_path / "metrics.csv").write_text("\n".join(rows))
    (tmp_path / "checkpoints" / "step-000000000010").mkdir(parents=True)
    for _ in range(2):
        assert follower.look()
    assert told == [
        Metrics(10, 40, 3, 1.0, "learner", {"loss": 2.0, "q": 4.0}),
        Metrics(8, 32, 2, 2.0, "evaluator", {"eval/episode_return": 5.0}),
    ]
    assert evaluated == told[1:]
    assert evaluated[0]["eval/episode_return"] == 5.0
    assert ("loss" in told[0], "loss" in told[1]) == (True, False)
    assert (told[0].get("loss"), told[1].get("loss"), told[1].get("loss", 0.0)) == (2.0, None, 0.0)
    assert [path.name for path in saved] == ["step-000000000010"]
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("sode_return,6\n")
    assert follower.look()
    assert told[-1].values == {"eval/episode_return": 6.0}
    assert not Follower(tmp_path, on_metrics=lambda metrics: False).look()
