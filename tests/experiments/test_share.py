"""A sweep that several processes share: who has which run, and who finishes those of one that is killed."""

from __future__ import annotations

import errno
import itertools
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading

import pytest

import troupe.services.__main__ as cli
from tests.experiments.sweeps import ROOT, RUN_S, states
from tests.experiments.trainer import Trainer
from tests.harness import PATIENCE_S, end_tree, until
from troupe.common.errors import ConfigError, PeerError
from troupe.common.runtime import StopSignal
from troupe.common.runtime.files import read_status
from troupe.common.runtime.lifecycle import INTERRUPTED
from troupe.services.experiments import claims, others, plan
from troupe.services.experiments import sweep as running
from troupe.services.experiments.claims import BEAT_S, LEASE_S, Claims


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def pair(tmp_path):
    """Two processes' claims, as far as one can tell, and the clock of both."""
    clock = Clock()
    return Claims(tmp_path, clock), Claims(tmp_path, clock), clock


def pass_by(clock, seconds, *alive):
    """Time passes, in which these processes are heard and look."""
    end_s = clock.now_s + seconds
    while clock.now_s < end_s:
        clock.now_s = min(end_s, clock.now_s + 1.0)
        for each in alive:
            assert each.beat() == []
            each.newest()


def test_a_run_is_one_process_s_as_long_as_that_is_heard(pair):
    ours, theirs, clock = pair
    assert ours.take("a")
    assert not theirs.take("a")
    assert not ours.take("a")
    assert theirs.take("b")
    pass_by(clock, 10 * LEASE_S, ours, theirs)
    assert not theirs.take("a")
    assert {name: claim.state for name, claim in theirs.newest().items()} == {"a": "held", "b": "held"}


def test_a_run_of_a_process_that_is_heard_no_more_is_taken_once(pair, tmp_path):
    ours, theirs, clock = pair
    third = Claims(tmp_path, clock)
    assert ours.take("a")
    pass_by(clock, 1, theirs, third)
    pass_by(clock, LEASE_S, theirs, third)
    assert not theirs.take("a")  # not before its lease is over
    pass_by(clock, BEAT_S, theirs, third)
    assert theirs.take("a")
    assert not third.take("a")
    # It was only suspended: it finds out at once, and has nothing more to say.
    assert ours.beat() == ["a"]
    ours.give_back("a", "failed", "killed")
    pass_by(clock, 2 * LEASE_S, ours, theirs, third)
    assert third.newest()["a"].state == "held"
    theirs.give_back("a", "done")
    assert not ours.take("a")
    assert ours.newest()["a"].state == "done"


def test_who_has_just_come_waits_for_a_lease_too(pair, tmp_path):
    ours, _, clock = pair
    assert ours.take("a")
    clock.now_s = 1e6
    late = Claims(tmp_path, clock)
    assert not late.take("a")  # perhaps its owner was heard a moment ago
    clock.now_s += LEASE_S + 1
    assert late.take("a")


def test_what_is_given_back_is_free_and_what_is_over_is_not(pair):
    ours, theirs, _ = pair
    assert ours.take("a")
    ours.give_back("a")
    assert theirs.take("a")
    theirs.give_back("a", "failed", "out of memory")
    claim = ours.newest()["a"]
    assert (claim.number, claim.state, claim.error) == (1, "failed", "out of memory")
    assert not ours.take("a", again=0)
    assert ours.take("a", again=1)
    assert not theirs.take("a", again=1)  # `--retry` on two machines tries it once more, not twice


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff", '{"state": {}}', "1" * 5000])
def test_a_claim_that_says_nothing_counts_until_its_lease_is_over(pair, tmp_path, text):
    ours, _, clock = pair
    (tmp_path / "claims" / "a.3").write_text(text)
    (tmp_path / "claims" / ".a.9.0.tmp").touch()
    (tmp_path / "claims" / "note").touch()
    assert not ours.take("a")
    clock.now_s += LEASE_S + 1
    assert ours.take("a")
    assert set(ours.newest()) == {"a"}


def _take_all(folder, start, results):
    mine = Claims(folder)
    start.wait()
    results.put([name for name in (f"run-{i}" for i in range(150)) if mine.take(name)])


def test_of_many_that_want_the_same_one_gets_it(tmp_path):
    context = multiprocessing.get_context("fork")
    start, results = context.Event(), context.Queue()
    processes = [context.Process(target=_take_all, args=(tmp_path, start, results)) for _ in range(4)]
    for process in processes:
        process.start()
    start.set()
    taken = [name for _ in processes for name in results.get(timeout=60)]
    for process in processes:
        process.join(60)
    assert sorted(taken) == sorted(f"run-{i}" for i in range(150))


def shared_sweep(tmp_path, rates=(0.01, 0.02, 0.03, 0.04, 0.05, 0.06), **section):
    tables = {"preset": "cartpole-ppo", "grid": {"agent": {"learning_rate": list(rates)}}, **section}
    sweep = plan.parse("f.toml", {"sweep": tables}, {})
    (tmp_path / "s").mkdir(exist_ok=True)
    return sweep, {run.name: 1000 for run in sweep.runs()}


def test_two_runners_share_the_runs_and_both_know_how_all_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "_POLL_S", 0.001)
    monkeypatch.setattr(running, "Job", Trainer)
    monkeypatch.setattr(Trainer, "begun", [])
    monkeypatch.setattr(Trainer, "crash", {("learning_rate=0.03", 500)})
    monkeypatch.setattr(Trainer, "total_steps", 1000)
    sweep, totals = shared_sweep(tmp_path)
    runners = [running.Runner(sweep, tmp_path / "s", StopSignal(), totals, shared=True) for _ in range(2)]
    threads = [threading.Thread(target=runner.run) for runner in runners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(name for name, _, _ in Trainer.begun) == sorted(totals)  # each once
    expected = {name: "failed" if name == "learning_rate=0.03" else "done" for name in totals}
    for runner in runners:
        assert {job.name: job.state for job in runner.jobs} == expected
    assert states(tmp_path / "s") == expected
    # Later: what has failed is tried again where that is asked for, and nothing else.
    assert not running.Runner(sweep, tmp_path / "s", StopSignal(), totals, shared=True).unfinished
    again = running.Runner(sweep, tmp_path / "s", StopSignal(), totals, shared=True, retry=True)
    again.run()
    assert [name for name, _, _ in Trainer.begun[6:]] == ["learning_rate=0.03"]
    assert set(states(tmp_path / "s").values()) == {"done"}
    # More steps than they were done with.
    monkeypatch.setattr(Trainer, "total_steps", 1100)
    more = running.Runner(sweep, tmp_path / "s", StopSignal(), dict.fromkeys(totals, 1100), shared=True)
    more.run()
    assert len(Trainer.begun) == 13


class Breaking(StopSignal):
    """Claims are out of reach from one moment of a runner on, for some moments: its waits, ends of polls."""

    def __init__(self, folder, first, moments):
        super().__init__()
        self.claims, self.away = folder / "claims", folder / "away"
        self.first, self.last, self.moment = first, first + moments, 0

    def wait(self, timeout_s=0.0):
        self.moment += 1
        if self.moment == self.first:
            self.claims.rename(self.away)
            self.claims.touch()  # a file: whatever is done in it is an OSError
        if self.moment == self.last:
            self.claims.unlink()
            self.away.rename(self.claims)


@pytest.fixture
def quick(monkeypatch):
    """Runs without processes, and runners that look at the claims each time."""
    monkeypatch.setattr(running, "_POLL_S", 0.0)
    monkeypatch.setattr(running, "Job", Trainer)
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(claims, "BEAT_S", 0.0)
    monkeypatch.setattr(others, "_LOOK_S", 0.0)
    monkeypatch.setattr(Trainer, "begun", [])
    monkeypatch.setattr(Trainer, "total_steps", 50)


def test_a_file_system_that_fails_for_a_while_ends_no_runner(tmp_path, quick, monkeypatch, capsys):
    def polled(job):
        ended = poll(job)
        stop.wait()
        return ended

    poll = Trainer.poll
    monkeypatch.setattr(Trainer, "poll", polled)
    for first in itertools.count(1):
        folder = tmp_path / f"{first}"
        folder.mkdir()
        sweep, totals = shared_sweep(folder, rates=(0.01, 0.02))
        stop = Breaking(folder / "s", first, moments=7)
        Trainer.begun.clear()
        running.Runner(sweep, folder / "s", stop, dict.fromkeys(totals, 50), shared=True).run()
        assert [name for name, _, _ in Trainer.begun] == list(totals)
        assert set(states(folder / "s").values()) == {"done"}
        said = capsys.readouterr().out
        assert sorted(re.findall(r"(\S+): done, return", said)) == sorted(totals)
        if "fails, trying again: [Errno 20]" not in said:
            break  # it was over
        assert {claim.state for claim in Claims(folder / "s").newest().values()} == {"done"}
    assert first > 15


def test_a_run_that_is_claimed_and_could_not_start_does_at_the_next_look(tmp_path, quick, monkeypatch):
    def started(job, *words):
        if job.name not in failed:
            failed.append(job.name)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        start(job, *words)

    start, failed = Trainer.start, []
    monkeypatch.setattr(Trainer, "start", started)
    sweep, totals = shared_sweep(tmp_path, rates=(0.01, 0.02))
    running.Runner(sweep, tmp_path / "s", StopSignal(), dict.fromkeys(totals, 50), shared=True).run()
    assert [name for name, _, _ in Trainer.begun] == list(totals) == failed
    assert set(states(tmp_path / "s").values()) == {"done"}


def test_a_file_system_that_fails_for_too_long_ends_the_runner_and_its_runs(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(others, "PATIENCE_S", 0.0)
    sweep, totals = shared_sweep(tmp_path)
    stop = Breaking(tmp_path / "s", 2, moments=1000)
    runner = running.Runner(sweep, tmp_path / "s", stop, dict.fromkeys(totals, 50), shared=True)
    with pytest.raises(
        PeerError, match=r"the file system of .* has failed for .*repeat the command"
    ) as caught:
        runner.run()
    assert "\n" not in str(caught.value)
    assert not any(job.alive for job in runner.jobs)


_ENDLESS = """
import sys
from tests.experiments.trainer import Trainer
from troupe.services.experiments import sweep
from troupe.services.__main__ import main

sweep.Job, sweep._POLL_S, Trainer.total_steps = Trainer, 0.1, 10**9
Trainer.crash = {("learning_rate=0.01", 25)}
sys.exit(main(["sweep", *sys.argv[1:]]))
"""


def test_a_runner_is_not_suspended_and_its_code_says_that_it_was_told_to_stop(tmp_path):
    words = ["cartpole-ppo", "--share", "--grid", "agent.learning_rate=0.01,0.02,0.03", "--dir", "s"]
    process = subprocess.Popen(
        [sys.executable, "-c", _ENDLESS, *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until((tmp_path / "s" / "claims" / "learning_rate=0.02.0").exists)
        process.send_signal(signal.SIGTSTP)
        assert "a shared sweep is not suspended" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
    finally:
        end_tree(process)
    # Neither 0 nor 6, though a run has failed: the sweep is not over.
    assert process.returncode == INTERRUPTED, stderr
    assert list(states(tmp_path / "s").values()) == ["failed", "stopped", "waiting"]
    assert "go on: " in stdout


def test_another_sweep_in_the_same_directory_is_refused(tmp_path):
    sweep, totals = shared_sweep(tmp_path)
    running.Runner(sweep, tmp_path / "s", StopSignal(), totals, shared=True)
    other, totals = shared_sweep(tmp_path, rates=[0.01, 0.07])
    other = plan.parse("f.toml", {**other.tables(), "agent": {"gamma": 0.5}}, {})
    with pytest.raises(ConfigError, match=r"takes agent\.gamma from its preset, not 0\.5"):
        running.Runner(other, tmp_path / "s", StopSignal(), totals, shared=True)
    # Also where both begin at the same moment, and neither has seen the other's record.
    with pytest.MonkeyPatch.context() as patch:
        known = running.read_record
        patch.setattr(running, "read_record", lambda folder: patch.undo() or {})
        with pytest.raises(ConfigError, match=r"takes agent\.gamma from its preset, not 0\.5"):
            running.Runner(other, tmp_path / "s", StopSignal(), totals, shared=True)
        assert running.read_record is known


def test_who_shares_a_sweep_has_the_same_runs(tmp_path):
    two, totals = shared_sweep(tmp_path, rates=[0.01], seeds=2)
    three, more = shared_sweep(tmp_path, rates=[0.01], seeds=3)
    running.Runner(two, tmp_path / "s", StopSignal(), totals, shared=True)
    refusal = r"has a sweep of 2 runs, not of these 3: start the same command on each machine"
    with pytest.raises(ConfigError, match=refusal):
        running.Runner(three, tmp_path / "s", StopSignal(), more, shared=True)
    running.Runner(three, tmp_path / "s", StopSignal(), more).save()
    running.Runner(three, tmp_path / "s", StopSignal(), more, shared=True)


def test_who_shares_keeps_out_who_does_not(tmp_path):
    with (
        running.claimed(tmp_path / "s", shared=True),
        running.claimed(tmp_path / "s", shared=True),
        pytest.raises(ConfigError, match="start all with --share"),
        running.claimed(tmp_path / "s"),
    ):
        pass


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--grid agent.gamma=0.9,0.99 --halving 50_000,2", "the trials of halving depend on each other"),
        ("--slurm", "Slurm itself divides a sweep"),
    ],
)
def test_what_cannot_be_shared_is_one_line(words, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["sweep", "cartpole-ppo", "--share", *words.split()]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


_SOON = """
import sys
from troupe.services.experiments import claims
from troupe.services.__main__ import main

claims.BEAT_S, claims.LEASE_S = 0.5, 15.0
sys.exit(main(["sweep", *sys.argv[1:]]))
"""


@pytest.mark.slow
@pytest.mark.timeout(3 * RUN_S)
def test_real_runs_of_a_process_that_is_killed_are_finished_by_another(tmp_path):
    folder = tmp_path / "runs" / "sweep-cartpole-ppo"
    words = ["cartpole-ppo", "--share", "--seeds", "2", "--evaluator.enabled", "false"]
    words += ["--total-steps", "24_000", "--run.log_every_s", "0.5", "--learner.checkpoint_period_s", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = []

    def start():
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", _SOON, *words],
                cwd=tmp_path,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return started[-1]

    def claim(name):
        return json.loads((folder / "claims" / name).read_text())

    def both_train():
        assert all(process.poll() is None for process in started)
        return all(read_status(folder / "runs" / f"seed={seed}").get("steps", 0) for seed in (0, 1))

    try:
        start(), start()
        until(both_train, RUN_S)
        [doomed] = [each for each in started if each.pid == claim("seed=0.0")["pid"]]
        [heir] = [each for each in started if each.pid == claim("seed=1.0")["pid"]]
        doomed.send_signal(signal.SIGKILL)
        first = doomed.communicate(timeout=60)[0]
        second = heir.communicate(timeout=RUN_S)[0]
    finally:
        for process in started:
            end_tree(process)
    assert heir.returncode == 0, second
    assert states(folder) == {"seed=0": "done", "seed=1": "done"}
    said = first + second
    # Each is begun once, resumed where it was, and done once.
    assert sorted(re.findall(r"(seed=\d) trains", said)) == ["seed=0", "seed=1"]
    assert re.findall(r"(seed=\d) goes on", said) == ["seed=0"]
    assert sorted(re.findall(r"(seed=\d): done", said)) == ["seed=0", "seed=1"]
    last = claim("seed=0.1")
    assert (last["state"], last["pid"]) == ("done", heir.pid)
