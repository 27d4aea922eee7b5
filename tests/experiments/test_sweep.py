"""Sweeps of real runs: interrupted, resumed, and with one that cannot work."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from types import SimpleNamespace

import numpy as np
import pytest

import troupe.services.__main__ as cli
from tests.experiments.folders import make_run
from tests.experiments.sweeps import RUN_S, finished, states
from tests.experiments.trainer import Trainer
from tests.harness import until
from troupe.common.runtime.checkpoint import save_checkpoint
from troupe.common.runtime.files import read_status
from troupe.services.experiments import checks, ending, jobs
from troupe.services.experiments import sweep as running
from troupe.services.experiments.plan import Planned
from troupe.services.experiments.runs import read_run
from troupe.services.launcher.workspace import saved_steps

FILE = """
[sweep]
preset = "cartpole-ppo"
parallel = 2

[[sweep.list]]
env.id = "gym:CartPole-v1"

[[sweep.list]]
env.id = "tests.envs.broken:Broken-v0"
env.kwargs = {how = "raise"}

[run]
log_every_s = 0.5

[evaluator]
enabled = false
"""


@pytest.mark.slow
@pytest.mark.timeout(3 * RUN_S)
def test_a_sweep_is_stopped_and_goes_on_and_lists_what_failed(tmp_path, command):
    (tmp_path / "f.toml").write_text(FILE)
    folder = tmp_path / "runs" / "sweep-f"
    run = folder / "runs" / "CartPole-v1"
    process = command(tmp_path, "f.toml", "--total-steps", 10_000_000)

    def look():
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)

    until(
        lambda: read_status(run).get("updates", 0) >= 2 and "failed" in states(folder).values(),
        RUN_S,
        step=look,
        why=lambda: read_status(run),
    )
    process.send_signal(signal.SIGINT)
    stdout, stderr = finished(process, 6)
    [broken] = set(states(folder)) - {"CartPole-v1"}
    assert states(folder) == {"CartPole-v1": "stopped", broken: "failed"}
    assert f"1 of 2 runs failed, {broken}: " in stderr
    assert "the physics exploded" in stderr
    assert stderr.count("\n") == 1
    assert "sweep --resume runs/sweep-f" in stdout
    stopped_at = read_run(run).steps

    total = stopped_at + 20_000  # enough for games to end, however well they go
    stdout, stderr = finished(command("/", "--resume", folder, "--total-steps", total), 6)
    assert f"{broken} trains" not in stdout
    assert states(folder)["CartPole-v1"] == "done"
    done = read_run(run)
    assert (done.state, done.fields["run.seed"]) == ("done", 1)
    assert done.steps >= total
    assert "CartPole-v1" in (folder / "summary.txt").read_text()
    [group] = [g for g in json.loads((folder / "summary.json").read_text())["groups"] if g["finals"]]
    assert group["steps"] == [done.steps]
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")

    stdout, _ = finished(command(tmp_path, "--resume", folder, "--retry"), 6)
    assert "CartPole-v1 goes on" not in stdout
    assert f"{broken} trains" in stdout


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """A sweep of one done run, as far as its directory tells."""
    monkeypatch.chdir(tmp_path)
    wanted = running.parse("cartpole-ppo", {"sweep": {"preset": "cartpole-ppo", "seeds": 1}}, {})
    folder = tmp_path / "s"
    with running.claimed(folder):
        make_run(folder / "runs" / "seed=0", run__seed="0")
        runner_of(wanted, folder).run()
    return folder


def runner_of(wanted, folder, **options):
    from troupe.common.runtime import StopSignal

    return running.Runner(wanted, folder, StopSignal(), checks.check(wanted), **options)


@pytest.mark.parametrize("written", ["sweep.json", "summary.txt"])
def test_a_disk_that_is_full_is_one_line_that_says_how_to_go_on(begun, monkeypatch, capsys, written):
    def write(path, data, **options):
        if path.name == written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(running, "atomic_write", write)
    monkeypatch.setattr(ending, "atomic_write", write)
    assert cli.main(["sweep", "--resume", "s"]) == 2
    told = capsys.readouterr().err
    assert told.startswith(
        "troupe: error: the sweep ends, because s cannot be written: No space left on device;"
    )
    assert told.endswith("sweep --resume s\n")
    assert told.count("\n") == 1


def test_a_run_that_is_killed_is_not_told_to_have_died_of_an_earlier_error(tmp_path, monkeypatch):
    job = jobs.Job(Planned("seed=0", {}), tmp_path)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "seed=0.log").write_text("troupe: error: port 6006 is in use\n")
    monkeypatch.setattr(jobs.subprocess, "Popen", lambda *words, **named: SimpleNamespace(poll=lambda: -9))
    job.start("cartpole-ppo", {})
    assert job.poll()
    assert (job.state, job.error) == ("failed", "killed from outside, possibly for lack of memory")


def test_where_the_record_cannot_be_written_every_run_writes_its_checkpoint(tmp_path, monkeypatch):
    def write(path, data, **options):
        if b'"failed"' in data:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(running, "Job", Trainer)
    monkeypatch.setattr(Trainer, "crash", {("seed=0", 50)})
    monkeypatch.setattr(running, "atomic_write", write)
    tables = {"sweep": {"preset": "cartpole-ppo", "seeds": 3, "parallel": 3}}
    runner = runner_of(running.parse("f.toml", tables | {"agent": {"learning_rate": 1e-3}}, {}), tmp_path)
    with pytest.raises(OSError, match="No space left on device"):
        runner.run()
    assert [(job.state, job.alive) for job in runner.jobs] == [("failed", False), *2 * [("stopped", False)]]
    assert [saved_steps(job.run_dir) > 0 for job in runner.jobs] == [False, True, True]


def test_what_is_done_is_left_alone(begun):
    assert states(begun) == {"seed=0": "done"}
    before = (begun / "runs" / "seed=0" / "config.toml").stat().st_mtime_ns
    again = running.recorded_sweep(begun, {}, {})
    runner = runner_of(again, begun)
    runner.run()
    assert [job.state for job in runner.jobs] == ["done"]
    assert (begun / "runs" / "seed=0" / "config.toml").stat().st_mtime_ns == before
    assert "seed=0  done    2.00" in "\n".join(ending.summary(runner.jobs, again, begun))


def test_more_steps_are_asked_for_by_resume_only(begun):
    again = running.recorded_sweep(begun, {}, {"run.total_steps": "200_000"})
    runner = runner_of(again, begun, changed={"run.total_steps"})
    assert [job.state for job in runner.jobs] == ["waiting"]
    with pytest.raises(
        running.ConfigError, match=r"in which seed=0 takes run\.total_steps from its preset, not 200_000; "
    ):
        runner_of(again, begun)


def test_a_sweep_of_other_values_is_refused_and_one_of_more_seeds_is_not(begun):
    tables = {"sweep": {"preset": "cartpole-ppo", "seeds": 2}}
    wider = running.parse("cartpole-ppo", tables, {})
    assert [job.state for job in runner_of(wider, begun).jobs] == ["done", "waiting"]
    other = running.parse("cartpole-ppo", {**tables, "agent": {"gamma": 0.9}}, {})
    with pytest.raises(
        running.ConfigError,
        match=r"seed=0 takes agent\.gamma from its preset, not 0\.9; .*sweep --resume .*another --dir",
    ):
        runner_of(other, begun)


def test_deterministic_runs_stay_so(begun, tmp_path, monkeypatch):
    tables = {"sweep": {"preset": "cartpole-ppo", "seeds": 1, "deterministic": True}}
    sweep = running.parse("f.toml", tables, {})
    with pytest.raises(running.ConfigError, match="seed=0 has deterministic = False, not True"):
        runner_of(sweep, begun)
    started = []
    monkeypatch.setattr(jobs.subprocess, "Popen", lambda words, **named: started.extend(words))
    runner = runner_of(sweep, tmp_path / "new")
    runner.begin(runner.jobs[0])
    assert started[started.index("train") :][:3] == ["train", "cartpole-ppo", "--deterministic"]
    assert running.recorded_sweep(tmp_path / "new", {}, {}).options == ["--deterministic"]
    tables["sweep"] |= {"grid": {"agent": {"gamma": [0.9, 0.99]}}, "halving": {"first_steps": 10}, "seeds": 0}
    with pytest.raises(running.ConfigError, match="halving stops runs anywhere; leave out"):
        running.parse("f.toml", tables, {})


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("learner.device", "cuda", "set learner.device to cpu, not cuda"),
        ("evaluator.elo_games", "10", "elo_games needs an evaluator process"),
        ("run.trackers", '["mlflow"]', "send nothing to mlflow"),
    ],
)
def test_what_no_deterministic_run_can_is_refused_before_the_first(field, value, told):
    tables = {"sweep": {"preset": "cartpole-ppo", "seeds": 1, "deterministic": True}}
    with pytest.raises(running.ConfigError, match=told):
        checks.check(running.parse("f.toml", tables, {field: value}))


@pytest.mark.slow
def test_two_deterministic_runs_at_a_time(tmp_path, command):
    fields = ["--total-steps", "600", "--evaluator.enabled", "false", "--env.check_timeout_s", "0"]
    finished(
        command(tmp_path, "cartpole-ppo", "--seeds", "2", "--parallel", "2", "--deterministic", *fields), 0
    )
    runs = tmp_path / "runs" / "sweep-cartpole-ppo" / "runs"
    assert [path.parent.name for path in sorted(runs.glob("*/certificate.json"))] == ["seed=0", "seed=1"]


def test_values_that_a_sweep_has_no_more_are_told_too(begun):
    runner_of(running.recorded_sweep(begun, {}, {"agent.gamma": "0.9"}), begun, changed={"agent.gamma"}).run()
    with pytest.raises(running.ConfigError, match=r"seed=0 has agent\.gamma = 0\.9, not its preset's; "):
        runner_of(running.parse("p", {"sweep": {"preset": "cartpole-ppo", "seeds": 1}}, {}), begun)


def test_runs_that_a_sweep_has_no_more_are_named(begun, capsys):
    fewer = running.parse("cartpole-ppo", {"sweep": {"preset": "cartpole-ppo", "seeds": [5]}}, {})
    make_run(begun / "runs" / "seed=5", run__seed="5")
    runner_of(fewer, begun).run()
    assert "runs of an earlier call that are no longer in the sweep: seed=0" in capsys.readouterr().out


def test_fewer_steps_than_were_made_are_enough(begun):
    run = make_run(begun / "runs" / "seed=1", run__seed="1", steps=5000)
    save_checkpoint(run / "checkpoints", {"w": np.zeros(2, np.float32)}, {"steps": 4500})
    (run / ".lock").touch()  # of a launcher that has ended
    again = running.recorded_sweep(begun, {"seeds": 2}, {"run.total_steps": "4000"})
    runner = runner_of(again, begun, changed={"run.total_steps"})
    assert [job.state for job in runner.jobs] == ["done", "done"]
    again = running.recorded_sweep(begun, {"seeds": 2}, {"run.total_steps": "4800"})
    runner = runner_of(again, begun, changed={"run.total_steps"})
    assert [job.state for job in runner.jobs] == ["done", "waiting"]


def test_a_link_is_not_emptied(begun, tmp_path):
    other = make_run(tmp_path / "precious", steps=5)
    again = running.recorded_sweep(begun, {"seeds": 2}, {})
    (begun / "runs" / "seed=1").symlink_to(other)
    with pytest.raises(running.ConfigError, match="is a link to a run without a checkpoint"):
        runner_of(again, begun)


def test_a_summary_says_that_nothing_was_evaluated(begun):
    (begun / "runs" / "seed=0" / "metrics.csv").write_text(
        "time,steps,frames,updates,source,name,value\n1.0,10,10,1,learner,train/episode_return,3.0\n"
    )
    again = running.recorded_sweep(begun, {}, {})
    lines = ending.summary(runner_of(again, begun).jobs, again, begun)
    assert "no run was evaluated: these are values of train/episode_return" in lines


def test_failed_runs_end_a_sweep_with_a_code_of_their_own(begun):
    runner = runner_of(running.recorded_sweep(begun, {}, {}), begun)
    runner.jobs[0].state, runner.jobs[0].error = "failed", "the physics exploded"
    with pytest.raises(ending.SweepError, match="1 of 1 runs failed, seed=0: the physics") as failed:
        ending.check_failures(runner.jobs, begun)
    assert failed.value.exit_code == 6
    assert str(failed.value).endswith("--retry`")
    with pytest.raises(ending.SweepError, match=r"try others with `.* --trials N`"):
        ending.check_failures(runner.jobs, begun, is_study=True)


def test_a_suite_s_own_scores_are_in_its_summary(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tasks = {"gym:CartPole-v1": 300.0, "gym:Acrobot-v1": -80.0}
    (tmp_path / "s.toml").write_text(
        '[tasks."gym:CartPole-v1"]\nlow = 100\nhigh = 500\n[tasks."gym:Acrobot-v1"]\nlow = -100\nhigh = -60\n'
    )
    wanted = running.parse("f", {"sweep": {"preset": "cartpole-ppo", "suite": "s.toml", "seeds": 2}}, {})
    for run in wanted.runs():
        value = tasks[run.fields["env.id"]]
        fields = {name.replace(".", "__"): str(each) for name, each in run.fields.items()}
        make_run(tmp_path / "s" / "runs" / run.name, returns=[(10, value)], **fields)
    runner = runner_of(wanted, tmp_path / "s")
    lines = ending.summary(runner.jobs, wanted, tmp_path / "s")
    assert [line.split()[:3] for line in lines[1:5]] == [
        [f"{task.partition(':')[2]},seed={seed}", "done", f"{value:.2f}"]
        for task, value in tasks.items()
        for seed in (0, 1)
    ]
    [scores] = json.loads((tmp_path / "s" / "summary.json").read_text())["normalized"]
    assert (scores["tasks"], scores["iqm"]["value"], scores["median"]["value"]) == (2, 0.5, 0.5)
    assert lines[-3].split()[:5] == ["all", "runs", "2", "4", "0.50"]


def test_one_runner_at_a_time(begun):
    with (
        running.claimed(begun),
        pytest.raises(running.ConfigError, match="in use by another"),
        running.claimed(begun),
    ):
        pass


def test_a_record_that_is_none_is_refused(begun):
    (begun / "sweep.json").write_text('{"version": 99}')
    with pytest.raises(running.ConfigError, match="not a record of this version"):
        running.recorded_sweep(begun, {}, {})
    (begun / "sweep.json").write_text("{")
    with pytest.raises(running.ConfigError, match="cannot read"):
        running.recorded_sweep(begun, {}, {})


def test_runs_at_a_time_do_not_want_one_port():
    words = {"net.metrics_port": "9100"}
    two = running.parse("cartpole-ppo", {"sweep": {"preset": "cartpole-ppo", "seeds": 2}}, words)
    checks.check(two)
    with pytest.raises(
        running.ConfigError, match=r"2 runs at a time would use the same ports: set net\.metrics_port to 0 "
    ):
        checks.check(two, at_once=2)
    own = {"preset": "cartpole-ppo", "grid": {"net": {"metrics_port": [9100, 9200]}}}
    checks.check(running.parse("cartpole-ppo", {"sweep": own}, {}), at_once=2)


@pytest.mark.parametrize(
    ("words", "told", "code"),
    [
        (("cartpole-ppo", "--suite", "atari5"), "battle_zone: ", 2),
        (("cartpole-ppo", "--keys", "nowhere"), "cannot read the keys in nowhere", 4),
    ],
)
def test_runs_that_could_not_begin_are_refused_before_any_does(
    tmp_path, monkeypatch, capsys, words, told, code
):
    monkeypatch.chdir(tmp_path)
    for option in ((), ("--dry-run",)):
        assert cli.main(["sweep", *words, *option]) == code
        stderr = capsys.readouterr().err
        assert stderr.startswith("troupe: error: ")
        assert told in stderr
        assert len(stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())
