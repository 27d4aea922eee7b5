"""Population-based training: its decisions, a planted learning rate, kills at every moment, real runs."""

from __future__ import annotations

import itertools
import json
import os
import random

import numpy as np
import pytest

import troupe.services.__main__ as cli
from tests.experiments.sweeps import RUN_S, finished, states
from tests.experiments.trainer import Trainer
from tests.harness import until
from troupe.common.errors import ConfigError
from troupe.common.runtime import StopSignal
from troupe.common.runtime.checkpoint import load_newest
from troupe.common.runtime.files import lock_file, read_status
from troupe.services.experiments import generations, plan, population
from troupe.services.experiments import sweep as running
from troupe.services.experiments.population import Generation, Population
from troupe.services.experiments.space import Choice, Range, explored

SPACE = {
    "agent.learning_rate": Range(1e-6, 10.0, log=True),
    "agent.epochs": Range(1, 10, log=False),
    "agent.gamma": Choice([0.9, 0.99, 0.999]),
}


def explored_values(seed, values, again):
    return explored(SPACE, values, np.random.default_rng(seed), again=again)


def test_values_are_multiplied_within_their_bounds_or_drawn_again():
    at = {"agent.learning_rate": 0.01, "agent.epochs": 2, "agent.gamma": 0.99}
    near = [explored_values(seed, at, 0.0) for seed in range(50)]
    assert {each["agent.learning_rate"] for each in near} == {0.008, 0.0125}
    assert {each["agent.epochs"] for each in near} == {1, 3}  # 1.6 and 2.5 round to 2, which is no other
    assert {each["agent.gamma"] for each in near} == {0.99}
    ends = {"agent.learning_rate": 10.0, "agent.epochs": 1, "agent.gamma": 0.9}
    near = [explored_values(seed, ends, 0.0) for seed in range(50)]
    assert {each["agent.learning_rate"] for each in near} == {8.0, 10.0}
    assert {each["agent.epochs"] for each in near} == {1, 2}
    anew = [explored_values(seed, at, 1.0) for seed in range(400)]
    rates = np.array([each["agent.learning_rate"] for each in anew])
    assert 1e-6 <= rates.min() < 1e-5
    assert 1.0 < rates.max() <= 10
    assert abs(np.mean(np.log10(rates) < -2.5) - 0.5) < 0.1  # as many on either side of the middle
    assert {each["agent.epochs"] for each in anew} == set(range(1, 11))
    assert {each["agent.gamma"] for each in anew} == {0.9, 0.99, 0.999}
    some = [explored_values(seed, at, 0.25)["agent.learning_rate"] for seed in range(400)]
    assert abs(np.mean([rate not in (0.008, 0.0125) for rate in some]) - 0.25) < 0.08


@pytest.mark.parametrize("seed", range(30))
def test_the_worst_quarter_goes_on_as_the_best(seed):
    rng = random.Random(seed)
    names = [f"trial-{i}" for i in range(rng.choice([2, 3, 4, 7, 8, 21]))]
    start = {"agent.learning_rate": 0.01, "agent.epochs": 5, "agent.gamma": 0.9}
    now = Population(SPACE, dict.fromkeys(names, start), 100)
    for generation in range(4):
        failed = set(rng.sample(names, rng.choice([0, 0, 1, len(names) - 1])))
        scores = {name: rng.random() for name in names}
        for name, member in now.members.items():
            assert not now.is_due()
            member.score, member.error = (None, "out of memory") if name in failed else (scores[name], "")
        assert now.is_due()
        before = {name: dict(member.values) for name, member in now.members.items()}
        ended = now.select()
        quarter = max(1, len(names) // 4)
        ranking = sorted(set(names) - failed, key=scores.get)
        worst = failed | set(ranking[: max(0, quarter - len(failed))])
        best = set(ranking[-quarter:]) - worst
        assert set(ended.copies) == worst
        assert {copy.source for copy in ended.copies.values()} <= best
        assert ended.scores == {name: None if name in failed else scores[name] for name in names}
        assert set(ended.errors) == failed
        for name in names:
            copy = ended.copies.get(name)
            assert now.members[name].values == (before[name] if copy is None else copy.values)
        assert (ended.steps, now.boundary) == (100 * (generation + 1), 100 * (generation + 2))
        assert now.open is ended
        again = Population(SPACE, dict.fromkeys(names, start), 100)
        again.restore(json.loads(json.dumps(now.record())))
        assert again.record() == now.record()
        now = again
        for copy in now.open.copies.values():
            copy.checkpoint = "step-1"
        assert now.open is None
        now.begin(dict.fromkeys(names, 100))
    for name in names:
        assert now.ancestors(name)[-1][2] == now.members[name].values
    with pytest.raises(ConfigError, match=r"started with a population of .* every 100 steps"):
        Population(SPACE, dict.fromkeys(names, start), 99).restore(now.record())


def population_of(initial, interval_steps, parallel=3):
    """A sweep whose runs begin with these learning rates."""
    section = {
        "preset": "cartpole-ppo",
        "parallel": parallel,
        "trials": len(initial),
        "search": {"agent": {"learning_rate": {"low": 1e-6, "high": 10.0, "log": True}}},
        "population": {"interval_steps": interval_steps},
    }
    return plan.parse("f.toml", {"sweep": section}, {})


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Trains a population of given rates by `Trainer`, and returns its runner."""
    monkeypatch.setattr(running, "_POLL_S", 0.0)
    monkeypatch.setattr(running, "Job", Trainer)
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(Trainer, "begun", [])
    monkeypatch.setattr(Trainer, "crash", set())

    def trained(initial, interval_steps, total_steps, folder="s", parallel=3):
        monkeypatch.setattr(Trainer, "total_steps", total_steps)
        monkeypatch.setattr(plan, "draw", lambda space, trial: {"agent.learning_rate": initial[trial]})
        sweep = population_of(initial, interval_steps, parallel)
        totals = {run.name: total_steps for run in sweep.runs()}
        runner = running.Runner(sweep, tmp_path / folder, StopSignal(), totals)
        runner.run()
        return runner

    (tmp_path / "s").mkdir()
    return trained


# 1e-2 learns the task in the steps that there are, 1e-4 nothing; from 2 on it falls apart.
FAR = [1e-6, 2e-6, 3e-6, 1e-4, 5e-6, 8e-6, 9e-6, 1e-5]


def returns(runner):
    return [member.score for member in runner.course.population.members.values()]


def test_a_planted_learning_rate_is_found(trained, capsys):
    runner = trained(FAR, 50, 1000)
    assert {job.state for job in runner.jobs} == {"done"}
    assert max(returns(runner)) > 95
    history = runner.course.population.generations
    assert [each.steps for each in history] == list(range(50, 1000, 50))
    # What a run learns by is what the history says: the file of its start, and the checkpoint below it.
    rates = {job.name: rate for job, rate in zip(runner.jobs, FAR, strict=True)}
    starts = {(name, steps): rate for name, steps, rate in Trainer.begun}
    assert len(starts) == len(Trainer.begun) == 8 * 20
    for generation in history:
        rates |= {name: copy.values["agent.learning_rate"] for name, copy in generation.copies.items()}
        assert {name: starts[name, generation.steps] for name in rates} == rates
    table = [line.split() for line in runner.course.table()]
    copies = [[f"{each.steps}", name, copy.source] for each in history for name, copy in each.copies.items()]
    assert [[line[0], line[1], line[3]] for line in table[1 : len(copies) + 1]] == copies
    assert "goes on as trial-000" in capsys.readouterr().out
    name, copy = next(iter(history[0].copies.items()))
    said = f"{name} goes on as {copy.source} at 50 steps"
    for command in ("runs", "compare"):
        assert cli.main([command, str(runner.folder)]) == 0
        assert said in capsys.readouterr().out


def test_without_copies_it_is_not_found(trained, monkeypatch):
    def select(self, complete):
        scores = {name: member.score for name, member in self.members.items()}
        self.generations.append(Generation(self.boundary, scores, {}, {}))
        return self.generations[-1]

    monkeypatch.setattr(Population, "select", select)
    assert max(returns(trained(FAR, 50, 1000))) < 50


def test_without_other_values_it_is_not_found(trained, monkeypatch):
    monkeypatch.setattr(population, "explored", lambda space, values, rng, again: dict(values))
    assert max(returns(trained(FAR, 50, 1000))) < 50


def test_a_copy_has_the_whole_progress_of_the_other_and_its_own_name(trained, tmp_path):
    runner = trained([1e-2, 1e-6], 50, 100, parallel=1)
    [generation] = runner.course.population.generations
    [(name, copy)] = generation.copies.items()
    assert (name, copy.source, copy.checkpoint) == ("trial-0001", "trial-0000", "step-000000000050")
    checkpoints = [load_newest(job.run_dir / "checkpoints") for job in runner.jobs]
    assert [each.meta["run"] for each in checkpoints] == ["trial-0000", "trial-0001"]
    rates = [1e-2, copy.values["agent.learning_rate"]]
    for rate, checkpoint in zip(rates, checkpoints, strict=True):
        curvature = np.array([1.0, 0.5, 0.25, 0.1])
        expected = (1 - 1e-2 * curvature) ** 50 * (1 - rate * curvature) ** 50
        np.testing.assert_allclose(checkpoint.arrays["w"], expected, rtol=1e-9)


def test_a_run_that_crashes_goes_on_as_another(trained):
    Trainer.crash |= {("trial-0000", 75), ("trial-0002", 25)}
    runner = trained([1e-2, 1e-3, 1e-3, 1e-6], 50, 150)
    first, second = runner.course.population.generations
    # The one that never had a checkpoint, and of the others none: it takes the place of the worst.
    assert first.errors == {"trial-0002": "the weights are not finite"}
    assert (list(first.copies), first.copies["trial-0002"].source) == (["trial-0002"], "trial-0000")
    assert first.scores["trial-0002"] is None
    # The best crashes: who had copied it is the best now.
    assert list(second.errors) == list(second.copies) == ["trial-0000"]
    assert second.copies["trial-0000"].source == "trial-0002"
    assert {job.state for job in runner.jobs} == {"done"}
    assert [run for _, run, _ in runner.course.population.ancestors("trial-0000")] == [
        "trial-0000",
        "trial-0002",
        "trial-0000",
    ]


@pytest.mark.parametrize("rates", [[1e-2, 1e-3, 1e-6], [1e-6, 1e-2, 1e-3]])
def test_a_run_that_is_complete_before_it_could_pause_stays_what_it_is(trained, monkeypatch, rates, capsys):
    def look(self, job):
        if job.name != "trial-0000":
            paused(self, job)

    paused = generations.Generations.look
    monkeypatch.setattr(generations.Generations, "look", look)
    runner = trained(rates, 50, 150)
    history = runner.course.population.generations
    assert [each.steps for each in history] == [50, 100]
    for generation in history:
        [(name, copy)] = generation.copies.items()
        assert "trial-0000" not in (name, copy.source)
    assert [name for name, _, _ in Trainer.begun].count("trial-0000") == 1
    assert {job.state for job in runner.jobs} == {"done"}


@pytest.mark.parametrize("last", [{"trial-0001"}, set()])
def test_where_one_or_none_has_steps_left_nobody_is_copied(trained, monkeypatch, last):
    paused = generations.Generations.look
    monkeypatch.setattr(
        generations.Generations, "look", lambda self, job: job.name in last and paused(self, job)
    )
    runner = trained([1e-6, 1e-2], 50, 150)
    assert not any(each.copies for each in runner.course.population.generations)
    assert {job.state for job in runner.jobs} == {"done"}
    assert len(Trainer.begun) == 2 + 2 * len(last)


def test_where_all_crash_the_sweep_is_over(trained):
    Trainer.crash |= {("trial-0000", 25), ("trial-0001", 50)}
    runner = trained([1e-2, 1e-3], 100, 300)
    assert [job.state for job in runner.jobs] == ["failed", "failed"]
    assert not runner.course.population.generations


class Killed(BaseException):
    """What `kill -9` is to a process, as far as one can raise it."""


def test_a_kill_at_any_moment_changes_nothing(trained, monkeypatch, tmp_path):
    initial, whole = [1e-2, 1e-3, 1e-6], "whole"
    (tmp_path / whole).mkdir()
    expected = trained(initial, 50, 150, folder=whole).course.record()
    assert len(expected["generations"]) == 2

    left = 0

    def tick():
        nonlocal left
        left -= 1
        if left <= 0:
            Trainer.killed = True
            raise Killed

    save, copied = running.Runner.save, generations.copied

    def save_and_die(runner):
        if Trainer.killed:  # in a `finally`: a killed process does nothing more
            raise Killed
        save(runner)
        tick()

    def copy_and_die(job, source):
        found = copied(job, source)
        tick()
        return found

    monkeypatch.setattr(running.Runner, "save", save_and_die)
    monkeypatch.setattr(generations, "copied", copy_and_die)
    for moment in itertools.count(1):
        folder = tmp_path / f"{moment}"
        folder.mkdir()
        left = moment
        try:
            trained(initial, 50, 150, folder=folder.name)
            break
        except Killed:
            pass
        finally:
            Trainer.killed = False
        left = 10_000
        assert trained(initial, 50, 150, folder=folder.name).course.record() == expected, moment
    assert moment > 20


def test_no_copy_is_made_and_none_goes_on_while_an_earlier_call_s_run_stops(trained, monkeypatch, tmp_path):
    def killed(job, source):
        raise Killed

    copied = generations.copied
    monkeypatch.setattr(generations, "copied", killed)
    with pytest.raises(Killed):
        trained([1e-2, 1e-6], 50, 100)
    monkeypatch.setattr(generations, "copied", copied)
    begun = len(Trainer.begun)
    sweep = population_of([1e-2, 1e-6], 50)
    runner = running.Runner(sweep, tmp_path / "s", StopSignal(), {run.name: 100 for run in sweep.runs()})
    population = runner.course.population
    with lock_file(tmp_path / "s" / "runs" / "trial-0000" / ".lock", "held"):
        runner._start_some()
        assert population.open is not None
        assert len(Trainer.begun) == begun
    runner.run()
    assert Trainer.begun[begun:] == [
        ("trial-0000", 50, 1e-2),
        ("trial-0001", 50, population.members["trial-0001"].values["agent.learning_rate"]),
    ]


@pytest.mark.parametrize(
    ("search", "words", "message"),
    [
        ("agent.mlp_units = [[64], [32]]", "", "cannot explore agent.mlp_units (it is structural)"),
        (
            "env.kwargs.sutton_barto_reward = [true, false]",
            "",
            "cannot explore env.kwargs.sutton_barto_reward (it is structural), only tunable fields",
        ),
        ("run.total_steps = [90_000, 80_000]", "", "cannot explore run.total_steps (it is of [run])"),
        ("learner.init_from = ['a', 'b']", "", "cannot explore learner.init_from (it is of [learner])"),
        ("actor.processes = {low = 1, high = 4}", "", "cannot explore actor.processes (it is of [actor])"),
        ("net.metrics_port = [9000, 9001]", "", "cannot explore net.metrics_port (it is operational)"),
        ("agent.gamma = [0.9, 0.99]", "--trials 1", "at least two runs"),
        ("agent.gamma = [0.9, 0.99]", "--population 100_000", "lower interval_steps"),
        ("agent.gamma = [0.9, 0.99]", "--population soon", "should be a number of steps"),
        ("agent.gamma = [0.9, 0.99]", "--population 0", "population of [sweep]"),
        ("agent.gamma = [0.9, 0.99]", "--halving 9000", "leave out grid, list and halving"),
        ("agent.gamma = [0.9, 0.99]", "--grid agent.epochs=1,2", "leave out grid, list and halving"),
        ("agent.gamma = [0.9, 0.99]", "--seeds 2", "a population compares trials"),
        ("agent.gamma = [0.9, 0.99]", "--agent.gamma 0.9", "leaves nothing to search"),
        ("agent.gamma = [0.9, 0.99]", "--slurm", "the trials of a population depend on each other"),
        ("agent.gamma = [0.9, 2.0]", "", "agent.gamma"),
    ],
)
def test_what_cannot_be_is_one_line(search, words, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f.toml").write_text(
        '[sweep]\npreset = "cartpole-ppo"\ntrials = 2\npopulation = {interval_steps = 1000}\n[sweep.search]\n'
        + search
    )
    assert cli.main(["sweep", "f.toml", *words.split()]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.timeout(4 * RUN_S)
def test_a_real_population_goes_on_after_a_kill(tmp_path, command):
    (tmp_path / "f.toml").write_text(
        '[sweep]\npreset = "cartpole-ppo"\nparallel = 2\ntrials = 2\npopulation = {interval_steps = 30_000}\n'
        "[sweep.search]\nagent.learning_rate = {low = 1e-9, high = 3e-3, log = true}\n"
        "[run]\ntotal_steps = 60_000\nlog_every_s = 0.5\n[evaluator]\nenabled = false\n"
    )
    folder = tmp_path / "runs" / "sweep-f"
    process = command(tmp_path, "f.toml")

    def record():
        try:
            return json.loads((folder / "sweep.json").read_text())["population"]
        except FileNotFoundError:
            return {"generations": []}

    def is_going_on():
        assert process.poll() is None, process.communicate()
        now = record()
        # `since` is the steps at which this interval began.
        return any(each["copies"] for each in now["generations"]) and all(
            member["since"] and read_status(folder / "runs" / name).get("steps", 0) > member["since"]
            for name, member in now["members"].items()
        )

    until(is_going_on, RUN_S)
    process.kill()
    process.communicate()
    before = record()["generations"]
    stdout, _ = finished(command(tmp_path, "--resume", folder), 0)
    assert set(states(folder).values()) == {"done"}
    found = record()["generations"]
    assert found == before
    assert [each["steps"] for each in found] == [30_000]
    [(name, copy)] = found[0]["copies"].items()
    scores = found[0]["scores"]
    assert scores[copy["source"]] >= scores[name]
    assert "best: trial-000" in stdout
    # The learning rate that the history says is the one in force.
    checkpoint = load_newest(folder / "runs" / name / "checkpoints")
    assert checkpoint.meta["config"]["agent"]["learning_rate"] == copy["values"]["agent.learning_rate"]
    assert checkpoint.meta["run"] != load_newest(folder / "runs" / copy["source"] / "checkpoints").meta["run"]
    assert "goes on as" in (folder / "summary.txt").read_text()
