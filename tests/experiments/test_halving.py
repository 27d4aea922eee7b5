"""Successive halving: its decisions against a model that was written from the paper, and one real sweep."""

from __future__ import annotations

import json
import random

import pytest

import troupe.services.__main__ as cli
from tests.experiments.sweeps import RUN_S, finished, states
from troupe.common.errors import ConfigError
from troupe.services.experiments import plan
from troupe.services.experiments.halving import Halving, check_enough, rungs_of


class Model:
    """Algorithm 2 of Li et al. 2020 with sets: what ran at each rung, and what was promoted from it."""

    def __init__(self, names, height, eta):
        self.new, self.eta = list(names), eta
        self.results = [{} for _ in range(height)]
        self.gone = [set() for _ in range(height)]

    def get_job(self):
        for k in range(len(self.results) - 1, -1, -1):
            losses = self.results[k]
            size = len(losses) // self.eta
            top = {name for name in losses if sum(other < losses[name] for other in losses.values()) < size}
            candidates = top - self.gone[k]
            if candidates:
                best = min(candidates, key=losses.get)
                self.gone[k].add(best)
                return best, k + 1
        return (self.new.pop(0), 0) if self.new else None

    def report(self, name, k, loss):
        if k < len(self.results):
            self.results[k][name] = loss


@pytest.mark.parametrize("seed", range(40))
def test_decisions_are_those_of_the_paper(seed):
    rng = random.Random(seed)
    eta, height, workers = rng.choice([2, 3, 4]), rng.choice([1, 2, 3]), rng.choice([1, 2, 5])
    names = [f"trial-{i}" for i in range(rng.choice([eta**height, 2 * eta**height + 3]))]
    # All different: of what is alike the paper says nothing.
    worth = {name: iter(rng.sample(range(1000), height + 1)) for name in names}
    taken: set[int] = set()
    halving, model, waiting = Halving(range(1, height + 1), eta), Model(names, height, eta), list(names)
    running: list[tuple[str, int]] = []
    order = []
    while True:
        while len(running) < workers:
            expected = model.get_job()
            name = halving.promotable([each for each in names if halving.is_paused(each)])
            if name:
                rung = halving.rungs.index(halving.before(name)) + 1
                halving.promote(name)
            elif waiting:
                name, rung = waiting.pop(0), 0
            assert expected == ((name, rung) if name else None)
            if not name:
                break
            running.append((name, rung))
            order.append((name, rung))
        if not running:
            break
        name, rung = running.pop(rng.randrange(len(running)))
        value = next(worth[name])
        while value in taken:
            value += 1000
        taken.add(value)
        model.report(name, rung, -value)
        if halving.rung(name) is not None:
            assert halving.rung(name) == rung + 1
            halving.reached(name, value)
        # A record is all that is needed to go on.
        again = Halving(halving.rungs, eta)
        again.restore(json.loads(json.dumps(halving.record())), names)
        halving = again
    assert {name for name, rung in order if rung == 0} == set(names)
    assert any(rung == height for _, rung in order)


def test_the_best_of_a_rung_goes_on_and_later_ones_may_join_it():
    halving = Halving([10, 30], 3)
    for name, score in (("a", 1.0), ("b", 5.0)):
        halving.reached(name, score)
        assert halving.promotable("abc") is None
    halving.reached("c", 3.0)
    assert halving.promotable("abc") == "b"
    assert halving.promotable("ac") is None  # it still writes its checkpoint: no other takes its place
    halving.promote("b")
    assert (halving.rung("b"), halving.before("b"), halving.rung("d"), halving.before("d")) == (30, 10, 10, 0)
    assert not halving.is_paused("b")
    for name, score in (("d", 4.0), ("e", 0.0)):
        halving.reached(name, score)
        assert halving.promotable("acde") is None
    halving.reached("f", 0.0)  # of six two go on
    assert halving.promotable("acdef") == "d"
    with pytest.raises(
        ConfigError, match=r"started with rungs at \[10, 30\] steps and eta = 3, not \[20, 60\]"
    ):
        Halving([20, 60], 3).restore(halving.record(), "abcdef")


def test_rungs_lie_below_all_steps_and_need_enough_trials():
    assert rungs_of(1000, 3, 27_000) == [1000, 3000, 9000]
    assert rungs_of(1000, 3, 27_001) == [1000, 3000, 9000, 27_000]
    check_enough(27, 1000, 3, 27_000)
    with pytest.raises(ConfigError, match=r"leaves none of 26 trials after 3 rungs .* it takes 27 trials"):
        check_enough(26, 1000, 3, 27_000)
    with pytest.raises(ConfigError, match="lower first_steps"):
        check_enough(26, 1000, 3, 1000)


def test_a_grid_of_the_command_line_multiplies_with_that_of_the_file(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f.toml").write_text(
        '[sweep]\npreset = "cartpole-ppo"\n[sweep.grid]\nagent.gamma = [0.9, 0.99]\nagent.epochs = [1, 2]\n'
        "[agent]\nlearning_rate = 1e-5\n"
    )
    words = ["--grid", "agent.learning-rate=1e-3,3e-4", "--grid=agent.epochs=4", "--dry-run"]
    assert cli.main(["sweep", "f.toml", *words]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == [
        f"gamma={gamma},epochs=4,learning_rate={rate}" for gamma in (0.9, 0.99) for rate in (0.001, 0.0003)
    ]
    words = ["--grid", "agent.mlp_units=[64, 64],[256]", "--grid", "env.id=gym:CartPole-v1,gym:Acrobot-v1"]
    assert cli.main(["sweep", "cartpole-ppo", *words, "--dry-run"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names[:2] == ["mlp_units=64-64,CartPole-v1", "mlp_units=64-64,Acrobot-v1"]
    assert len(names) == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--grid agent.gamma", "should be a field and its values"),
        ("--grid gamma=1,2", "should be a field and its values"),
        ("--grid agent.gama=0.9", "agent.gamma"),
        ("--grid agent.gamma=high,low", "agent.gamma"),
        (
            "--grid agent.gamma=0.9,0.99 --halving 1000,2 --seeds 2",
            "leave out study, suite and further seeds",
        ),
        ("--grid agent.gamma=0.9,0.99 --halving 1000", "it takes"),
        ("--grid agent.gamma=0.9,0.99 --halving soon", "should be steps"),
        ("--grid run.total_steps=9000,99000 --halving 5000,2", "the same run.total_steps"),
        ("--grid agent.gamma=0.9,0.99 --halving 50_000,2 --slurm", "cannot be a job array"),
    ],
)
def test_what_cannot_be_is_one_line(words, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["sweep", "cartpole-ppo", *words.split()]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_halving_survives_its_record():
    options = {"grid": {"agent.gamma": [0.9, 0.99]}, "halving": {"first_steps": 50_000, "eta": 2}}
    wanted = plan.read("cartpole-ppo", options, {})
    assert plan.parse("x", json.loads(json.dumps(wanted.tables())), {}).section == wanted.section


@pytest.mark.slow
@pytest.mark.timeout(3 * RUN_S)
def test_a_real_sweep_ends_the_worse_trial_early_and_more_trials_may_bring_it_back(tmp_path, command):
    words = ["cartpole-ppo", "--grid", "agent.learning_rate=3e-3,1e-9", "--halving", "32_000,2"]
    # Another 28,000 steps take a fast machine seconds, in which the trial is looked at.
    words += ["--total-steps", 60_000, "--run.log_every_s", 0.5, "--evaluator.enabled", "false"]
    stdout, _ = finished(command(tmp_path, *words), 0)
    folder = tmp_path / "runs" / "sweep-cartpole-ppo"
    good, bad = "learning_rate=0.003", "learning_rate=1e-09"
    assert states(folder) == {good: "done", bad: "pruned"}
    assert f"{bad} is worth " in stdout
    assert f"{bad}: pruned" not in stdout  # when it paused nobody knew
    # What has ended early is kept, and could go on.
    status = json.loads((folder / "runs" / bad / "status.json").read_text())
    assert 32_000 <= status["steps"] < 60_000
    assert list((folder / "runs" / bad / "checkpoints").glob("step-*"))
    again, _ = finished(command(tmp_path, *words), 0)
    assert "trains" not in again
    assert "goes on" not in again
    assert states(folder) == {good: "done", bad: "pruned"}
