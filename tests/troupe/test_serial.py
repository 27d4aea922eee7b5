"""`troupe train PRESET --serial`: one process acts, stores, learns, records and saves."""

import csv
import os
import re
import signal
import subprocess
import sys
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest

import troupe.services.__main__ as cli
from tests.harness import leave, until
from tests.learner.batches.mixed import AGAIN, FRESH, make_config, unroll
from troupe.common.config import load_config
from troupe.common.envs.base import Failure
from troupe.common.errors import ConfigError
from troupe.common.runtime import StopSignal
from troupe.common.runtime.checkpoint import load_checkpoint, load_newest
from troupe.common.runtime.files import read_status
from troupe.serial import SerialTraining
from troupe.services.launcher import training
from troupe.services.launcher.workspace import claimed_run_dir

QUICK = ["--env.check_timeout_s", "0", "--run.log_every_s", "0.5"]


def rows(run_dir):
    with (run_dir / "metrics.csv").open() as file:
        return {row["name"]: row for row in csv.DictReader(file)}


@pytest.mark.parametrize(
    ("preset", "more"),
    [
        ("cartpole-apex", ["--replay.min_items", "300"]),
        ("cartpole-ppo", []),
        ("cartpole-impala", []),
        ("memory-r2d2", ["--replay.min_items", "100"]),
        ("cartpole-clear", []),
        ("cartpole-pqn", []),
    ],
)
def test_it_learns_and_what_it_leaves_is_a_run(tmp_path, capsys, preset, more):
    words = ["train", preset, "--serial", "--run-dir", str(tmp_path / "run"), "--total-steps", "6000"]
    assert cli.main([*words, *QUICK, *more]) == 0
    assert "evaluation after" in capsys.readouterr().out
    saved = load_newest(tmp_path / "run" / "checkpoints")
    assert saved.meta["steps"] >= 6000
    assert saved.meta["updates"] > 0
    assert {"train/episode_return", "eval/episode_return", "learner/loss"} <= rows(tmp_path / "run").keys()
    assert not (tmp_path / "run" / "serial-replay").exists()
    assert cli.main(["eval", str(tmp_path / "run"), "--episodes", "1"]) == 0
    assert cli.main(["runs", str(tmp_path)]) == 0
    assert "done" in capsys.readouterr().out


@pytest.mark.parametrize("mode", ["--serial", "--deterministic"])
def test_the_status_has_the_last_steps_also_where_no_episode_ended_in_them(tmp_path, mode):
    words = ["train", "pendulum-ppo", mode, "--run-dir", str(tmp_path), "--evaluator.enabled", "false"]
    assert cli.main([*words, "--actor.processes", "1", "--actor.slots", "2", "--total-steps", "100"]) == 0
    assert read_status(tmp_path)["steps"] == load_newest(tmp_path / "checkpoints").meta["steps"] == 100


def test_a_run_of_one_seed_repeats_itself(tmp_path):
    fields = {"run.total_steps": "3000", "replay.min_items": "200", "evaluator.enabled": "false"}
    config = load_config("cartpole-apex", None, fields)
    found = []
    for name in ("one", "other"):
        SerialTraining(config, tmp_path / name, StopSignal()).run()
        found.append(load_newest(tmp_path / name / "checkpoints"))
    one, other = found
    assert one.meta["updates"] == other.meta["updates"] > 50
    assert all((one.arrays[key] == other.arrays[key]).all() for key in one.arrays)


def test_without_a_limit_an_item_is_sampled_once_on_average(tmp_path):
    class Watched(SerialTraining):
        def learn(self, batch):
            super().learn(batch)
            if 32 * self.counters.updates > self.replay.counters.inserted_items:
                self.stop.set()  # or it would learn for ever, and act no more

    replay = {"replay.samples_per_insert": "0", "replay.min_items": "100", "replay.batch_size": "32"}
    fields = {"run.total_steps": "600", "evaluator.enabled": "false", **replay}
    training = Watched(load_config("cartpole-apex", None, fields), tmp_path, StopSignal())
    training.run()
    assert not training.stop.requested
    assert training.counters.updates == training.replay.counters.inserted_items // 32 > 10


def test_failures_of_an_environment_are_told_and_counted(tmp_path, capsys):
    kwargs = "{how = 'nan reward', chance = 0.02}"
    words = ["train", "--algo", "ppo", "--env", "tests.envs.broken:Broken-v0", "--env.kwargs", kwargs]
    more = [
        "--serial",
        "--run-dir",
        str(tmp_path / "run"),
        "--total-steps",
        "2000",
        "--evaluator.enabled",
        "false",
    ]
    assert cli.main([*words, *more, *QUICK]) == 0
    out = capsys.readouterr().out
    assert "evaluation" not in out
    assert out.count("Broken-v0 returned the reward nan at step ") == 1
    *_, last = re.findall(r" steps, .*, ([0-9]+) episodes failed\n", out)
    counted = float(rows(tmp_path / "run")["actor/env_restarts_total"]["value"])
    assert 5 <= counted <= int(last)


def test_an_error_that_says_something_else_each_time_is_told_once():
    causes = [f"raised ValueError: {number} is too fast (maze.py:7)" for number in range(3)]
    causes += ["raised ValueError: 0 is too fast (maze.py:8)", "returned the reward nan"]
    failures = deque(Failure("maze:Maze", cause, slot=0, step=1) for cause in causes)
    said: list[str] = []
    training = SimpleNamespace(
        env=SimpleNamespace(failures=failures), failures=0, told_causes=set(), say=said.append
    )
    SerialTraining.tell_failures(training)
    assert (len(said), training.failures) == (3, 5)
    assert training.last_failure.startswith("maze:Maze returned the reward nan at step 1")


def test_a_full_disk_is_told_and_the_end_of_the_run_is_not_lost_without_a_word(disk, capsys, monkeypatch):
    def record(self):
        recorded(self)
        if self.counters.updates >= 2:
            leave(disk, 0)

    recorded = SerialTraining.record
    monkeypatch.setattr(SerialTraining, "record", record)
    words = ["train", "cartpole-ppo", "--serial", "--evaluator.enabled", "false", "--total-steps", "6000"]
    assert cli.main([*words, "--run-dir", str(disk / "run"), *QUICK]) == 5
    out, err = capsys.readouterr()
    assert re.search(r"^(5,9|6,0)\d\d steps", out, re.MULTILINE)  # no episode may end in the last steps
    assert "troupe: cannot write the status into" in err
    assert err.splitlines()[-1].startswith("troupe: error: the last checkpoint could not be written into")
    assert "Traceback" not in err


def test_an_environment_whose_episodes_all_fail_keeps_no_evaluation_waiting(tmp_path, capsys):
    run = tmp_path / "run"
    kwargs = "{how = 'raise', at = 30, length = 100}"
    words = ["train", "--algo", "dqn", "--env", "tests.envs.broken:Broken-v0", "--env.kwargs", kwargs]
    more = ["--serial", "--run-dir", str(run), "--total-steps", "500", "--replay.min_items", "100"]
    assert cli.main([*words, *more, *QUICK]) == 0
    assert "no evaluation after 5" in capsys.readouterr().out
    heard = read_status(run)["environments"]
    assert heard["failures"] > 10
    assert heard["episodes"] == 0
    assert heard["unevaluated"].startswith("no episode of tests.envs.broken:Broken-v0 can be finished: ")
    assert cli.main(["why", str(run)]) == 0
    assert capsys.readouterr().out.startswith(
        f"failing-episodes: 100% of the episodes ({heard['failures']} of "
    )


def test_an_error_of_an_algorithm_shows_its_traceback(tmp_path, capsys, monkeypatch):
    def update(self, batch):
        raise KeyError("rewards")

    monkeypatch.setattr("troupe.common.agents.network.NetworkAgent.update", update)
    words = [
        "train",
        "cartpole-apex",
        "--serial",
        "--replay.min_items",
        "100",
        "--evaluator.enabled",
        "false",
    ]
    assert cli.main([*words, "--run-dir", str(tmp_path / "run"), *QUICK]) == 70
    first, *trace, last = capsys.readouterr().err.splitlines()
    assert first == "Traceback (most recent call last):"
    assert re.search(r'test_serial.py", line \d+, in update', "\n".join(trace))
    assert re.fullmatch(r"troupe: error: KeyError: 'rewards' \(test_serial.py:\d+\)", last)


@pytest.mark.parametrize("mode", ["--serial", "--deterministic"])
@pytest.mark.parametrize("preset", ["cartpole-apex", "pendulum-sac"])
def test_training_that_diverges_ends_with_that_before_anything_of_it_acts(tmp_path, capsys, preset, mode):
    fields = ["--replay.min_items=100", "--agent.learning_rate=1e30", "--evaluator.enabled=false"]
    words = ["train", preset, mode, "--run-dir", str(tmp_path / "run"), "--total-steps=2000"]
    assert cli.main([*words, *fields, *QUICK]) == 70
    assert re.search(r"error: \S+.* not finite at update \d+: resume from", capsys.readouterr().err)
    for checkpoint in (tmp_path / "run" / "checkpoints").glob("step-*"):
        assert all(np.isfinite(array).all() for array in load_checkpoint(checkpoint).arrays.values())


def test_what_cannot_be_learned_from_is_drawn_no_more_though_no_priorities_are_given(tmp_path):
    again = AGAIN.replace('"uniform"', '"prioritized", priority_exponent = 0.0').replace("= 40", "= 400")
    config = make_config(tmp_path, **{"replay.tables": f"[{again}, {FRESH}]"})
    training, bad, number = SerialTraining(config, tmp_path / "run", StopSignal()), [1, 4, 6], 0

    def priorities():
        return training.replay.tables["again"].priorities(np.arange(9))

    while number < 9 or (number < 200 and priorities()[bad].any()):
        training.insert(unroll(training.agent, number, action=77 if number in bad else 0))
        number += 1
        while (batch := training.sample()) is not None:
            training.learn(batch)
    assert priorities().tolist() == [0.0 if number in bad else 1.0 for number in range(9)]
    assert all(np.isfinite(array).all() for array in training.agent.params().values())
    updates = training.counters.updates
    for each in range(2):  # as many as a batch has of the queue
        training.insert(unroll(training.agent, each))
    batch = training.sample()
    batch.fields["action"][:] = 77
    training.learn(batch)
    assert training.counters.updates == updates > 0, "nothing was left to learn from"
    training.close()


@pytest.mark.slow
def test_it_learns_cartpole(tmp_path, capsys):
    words = [
        "train",
        "cartpole-ppo",
        "--serial",
        "--run-dir",
        str(tmp_path / "run"),
        "--total-steps",
        "40000",
    ]
    assert cli.main([*words, *QUICK]) == 0
    assert float(rows(tmp_path / "run")["eval/episode_return"]["value"]) > 300


@pytest.mark.slow
def test_ctrl_c_saves_what_there_is(tmp_path):
    words = ["train", "cartpole-apex", "--serial", "--run-dir", str(tmp_path / "run")]
    process = subprocess.Popen(
        [sys.executable, "-m", "troupe", *words, *QUICK], env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        until(lambda: read_status(tmp_path / "run").get("steps"))
        with pytest.raises(ConfigError, match="is in use by another process"):
            claimed_run_dir(tmp_path / "run", resume=True).__enter__()
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.wait()
    assert load_newest(tmp_path / "run" / "checkpoints").meta["steps"] > 0


def test_earlier_versions_play_here_too_and_repeat_themselves(tmp_path):
    fields = {
        "env.id": "pettingzoo:tests.envs.coins:Coins",
        "actor.opponents": "recent",
        "actor.opponents_period_versions": "1",
        "run.total_steps": "3000",
        "evaluator.enabled": "false",
        "run.log_every_s": "0.01",
    }
    found = []
    for name in ("one", "other"):
        SerialTraining(load_config("cartpole-ppo", None, fields), tmp_path / name, StopSignal()).run()
        found.append(load_newest(tmp_path / name / "checkpoints").arrays)
    told = rows(tmp_path / "one")
    assert {"actor/opponent_win_rate", "actor/opponent_version/2", "train/episode_return"} <= told.keys()
    for name, array in found[0].items():
        np.testing.assert_array_equal(array, found[1][name])
    rated = fields | {"evaluator.elo_games": "10"}
    with pytest.raises(ConfigError, match=r"evaluator.elo_games needs an evaluator process"):
        training.train(
            "cartpole-ppo", tmp_path / "no", overrides=rated, instead=lambda *_: pytest.fail("began")
        )
    assert not (tmp_path / "no").exists()
