"""A population of real trainings finds the learning rate by which a task is learned."""

from __future__ import annotations

import itertools
import os

import pytest

from tests.experiments.sweeps import RUN_S
from troupe.common.data.inserts import SERIAL
from troupe.common.runtime import StopSignal
from troupe.common.runtime.checkpoint import load_newest
from troupe.lockstep import repeatable
from troupe.serial import SerialTraining
from troupe.services.experiments import plan
from troupe.services.experiments import sweep as running
from troupe.services.experiments.jobs import Job
from troupe.services.launcher import training
from troupe.services.launcher.workspace import has_checkpoint
from troupe.services.learner.control.budget import StepBudget

SLOTS, UNROLL_STEPS = 32, 2
INTERVAL_STEPS = (2 * UNROLL_STEPS + 1) * SLOTS
"""Two updates: the end of an unroll is sent with the step after it."""
TOTAL_STEPS = 20 * INTERVAL_STEPS
PLANTED = 1e-2
# The small ones learn the task in many times the steps that there are; the large ones spoil the network.
FAR = [1e-5, 1.0, 1e-4, 3.0, 3e-4, 10.0, 5e-4, 5.0]
FIELDS = {
    "run": {"total_steps": TOTAL_STEPS, "log_every_s": 1e9},
    "env": {"id": "gym:tests.experiments.aiming:Aiming-v0", "check_timeout_s": 0},
    "agent": {
        "mlp_units": [16],
        "unroll_steps": UNROLL_STEPS,
        "gamma": 0.0,
        "epochs": 1,
        "minibatch_steps": SLOTS * UNROLL_STEPS,
        "learning_rate_schedule": "constant",
        "deviation_start": 0.2,
        "deviation_floor": 0.15,  # with smaller ones steps would be smaller, at any rate
    },
    "replay": {"batch_size": SLOTS},
    "actor": {"slots": SLOTS},
    "evaluator": {"episodes": 1, "slots": 1},
}


class Training(SerialTraining):
    """A training that goes on from its newest checkpoint, and asks no clock what to do."""

    def begin(self):
        self.write_config()
        budget = StepBudget(TOTAL_STEPS, clock=itertools.count().__next__)
        self.begin_learning(budget, resume=has_checkpoint(self.run_dir))
        self.begin_acting(self.config.run.seed + budget.steps)
        self.rollout.timing.steps = budget.made(SERIAL)

    def say(self, text):
        pass


class InThisProcess(Job):
    """A run as `troupe train` and `troupe resume` make it, but in this process: some steps at each look."""

    stride = INTERVAL_STEPS

    def start(self, preset, overrides):
        values = self.write_values()
        if has_checkpoint(self.run_dir):
            training.resume(self.run_dir, sweep=values, overrides=overrides, instead=self._begin)
        else:
            training.train(preset, self.run_dir, sweep=values, overrides=overrides, instead=self._begin)
        self.state, self.error = "running", ""

    def _begin(self, config, run_dir):
        self._process = Training(config, run_dir, StopSignal())
        (run_dir / ".lock").touch()  # of a launcher: none holds it

    def poll(self):
        if self._process is None:
            return False
        counters = self._process.counters
        if self._process.ends():
            self._process.checkpoints.save()
            self._process.close()
            self._process = None
            if self.state == "running":
                self.state = "done" if counters.steps >= TOTAL_STEPS else "stopped"
            return True
        steps = counters.steps
        while counters.steps < steps + self.stride:
            self._process.round()
        self._process.evaluate()
        return False

    def stop(self):
        self._process.stop.set()

    def kill(self):
        if self._process is not None:
            self._process.close()


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Trains runs of given rates side by side, and returns their runner."""
    monkeypatch.setattr(running, "_POLL_S", 0.0)
    monkeypatch.setattr(running, "Job", InThisProcess)
    monkeypatch.setattr(os, "fsync", lambda file: None)

    def trained(rates, **course):
        section = {
            "preset": "cartpole-ppo",
            "parallel": len(rates),
            "trials": len(rates),
            # Drawn evenly: a rate that is drawn again is too large; only factors lead to the right one.
            "search": {"agent": {"learning_rate": {"low": 1e-6, "high": 10.0}}},
            **course,
        }
        monkeypatch.setattr(plan, "draw", lambda space, trial: {"agent.learning_rate": rates[trial]})
        sweep = plan.parse("f.toml", {"sweep": section, **FIELDS}, {})
        folder = tmp_path / ("population" if course else "apart")
        folder.mkdir()
        runner = running.Runner(sweep, folder, StopSignal(), {run.name: TOTAL_STEPS for run in sweep.runs()})
        with repeatable():
            runner.run()
        assert {job.state for job in runner.jobs} == {"done"}
        return runner

    return trained


@pytest.mark.slow
@pytest.mark.timeout(4 * RUN_S)
def test_a_population_learns_what_none_of_its_runs_would_alone(trained, monkeypatch):
    runner = trained(FAR, population={"interval_steps": INTERVAL_STEPS})
    members = runner.course.population.members
    best = max(members, key=lambda name: members[name].score)
    rate = members[best].values["agent.learning_rate"]
    assert members[best].score > 2.5
    assert PLANTED / 4 < rate < 4 * PLANTED
    # It is the one in force.
    meta = load_newest(runner.folder / "runs" / best / "checkpoints").meta
    assert meta["config"]["agent"]["learning_rate"] == rate
    # The right one learns the task in as many steps, and none of those at the beginning comes near.
    monkeypatch.setattr(InThisProcess, "stride", TOTAL_STEPS)
    *far, planted = (job.run().score for job in trained([*FAR, PLANTED]).jobs)
    assert planted > 3.5
    assert max(far) < 1.5
