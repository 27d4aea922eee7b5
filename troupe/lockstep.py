"""A training that repeats itself to the last bit: `troupe train PRESET --deterministic`.

`troupe.serial`, in spans. A span begins with what the newest checkpoint holds: the learner's state, a copy of
replay, and how far the run is. All else is made anew, with seeds that follow from the run's and from where it
is: games, what is open of chunks, memory, generators. So a span is the same whether the process that made the
checkpoint goes on, or another one. Nothing here asks a clock what to do.
"""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from troupe.certificate import Certificate, Weights, circumstances, differences
from troupe.common.config import Config, check_resumable, read_config
from troupe.common.data.inserts import SERIAL
from troupe.common.envs import VectorEnv, make_spec, make_vector
from troupe.common.envs.base import split_slots
from troupe.common.errors import CheckpointError, ConfigError
from troupe.common.runtime import StopSignal
from troupe.common.runtime.checkpoint import newest_first, steps_of
from troupe.common.runtime.files import CONFIG_FILE, hold_run_dir
from troupe.common.wire.replay.codec import SampleBatch
from troupe.joined import JoinedVector
from troupe.serial import SerialTraining
from troupe.services.launcher.training import check_repeatable, check_room
from troupe.services.learner.control.budget import StepBudget
from troupe.services.replay.storage.snapshot import Snapshot, restore_snapshot

ROWS_PER_SPAN = 10
"""Rows of the training's returns in `metrics.csv` between two checkpoints."""
SNAPSHOT_S = 3600.0
"""How long a copy of replay may take."""


def train(config: Config, run_dir: Path, stop: StopSignal, *, resume: bool = False) -> None:
    """Train until the run is complete or a stop is asked for; a run that is resumed has checkpoints."""
    config = repeatable_config(config)
    with hold_run_dir(run_dir), repeatable():
        if not resume:
            # One more than are kept: the oldest goes when the newest is whole.
            check_room(config, make_spec(config.env), run_dir, config.learner.keep_checkpoints + 1)
        training = LockstepTraining(config, run_dir, stop, resume=resume)
        try:
            training.run()
        except BaseException:
            training.abandon()  # a program that resumes from Python goes on, and keeps no file open
            raise


@contextmanager
def repeatable() -> Iterator[None]:
    """Have torch compute in one thread, by algorithms that repeat themselves, until the block ends."""
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(strict)
        torch.set_num_threads(threads)


def repeatable_config(config: Config) -> Config:
    """Return the configuration with one thread for everything, and nothing that is chosen by trial.

    Raises:
        ConfigError: it asks for what does not repeat itself.
    """
    check_repeatable(config)
    agent = config.agent
    if getattr(agent, "compute_dtype", "") == "auto":  # which a race of both formats would decide
        agent = agent.model_copy(update={"compute_dtype": "float32"})
    sections = {
        "env": config.env.model_copy(update={"processes": 0}),
        "agent": agent,
        "actor": config.actor.model_copy(update={"env_threads": 1, "torch_threads": 1}),
        "learner": config.learner.model_copy(update={"torch_threads": 1}),
    }
    return config.model_copy(update=sections)


class LockstepTraining(SerialTraining):
    """One run. `run` returns when it is complete or a stop was asked for; what is stopped saves nothing.

    Args:
        config: the run's configuration, as `repeatable_config` gives it.
        run_dir: the run directory.
        stop: asks for the end.
        resume: go on from the newest checkpoint.
    """

    def __init__(self, config: Config, run_dir: Path, stop: StopSignal, *, resume: bool = False) -> None:
        self.resume = resume
        self.copies = (run_dir / "replay").resolve()  # snapshots go to absolute paths only
        self.certificate = Certificate(circumstances())
        self.learned_at = 0  # the steps that the run had made at its newest update
        super().__init__(config, run_dir, stop)

    # ------------------------------------------------------------------ spans

    def begin(self) -> None:
        """Begin the run's first span, or that of the newest checkpoint."""
        if self.resume:
            self.begin_learning(_budget(self.config), resume=True)
            here = self.certificate
            try:
                self.certificate = Certificate.read(self.run_dir)
            except ConfigError:
                self.say(f"{self.run_dir} has lost its certificate: another one begins with the next update")
            self.certificate.cut(self.counters.updates)
            for line in differences(self.certificate.made_with, here.made_with):
                self.say(f"different from when the run began: {line}")
        else:
            self.write_config()
            self.begin_learning(_budget(self.config), resume=False)
            self.save_learning(copy="", inserted_items=0)
            self.begin_learning(_budget(self.config), resume=True)
        self.begin_span()
        if self.resume and not self.is_complete:  # with nothing left that may refuse the new configuration
            self.change_config()

    def change_config(self) -> None:
        """Write the configuration that a resumed run goes on with, and into the certificate what changed."""
        former = read_config(self.run_dir / CONFIG_FILE)
        changed = [each.path for each in check_resumable(former, self.config)]
        if changed:
            self.certificate.changed = list(dict.fromkeys([*self.certificate.changed, *changed]))
            self.certificate.write(self.run_dir)
        self.write_config()

    @property
    def is_complete(self) -> bool:
        """Whether the run has made all of its steps."""
        return self.counters.steps >= self.config.run.total_steps

    def begin_span(self) -> None:
        """Go on from the checkpoint that has just been loaded."""
        state, counters = self.checkpoints.lockstep, self.counters
        try:
            self.inserts, self.sampled = int(state["inserts"]), int(state["sampled"])
            inserted_items, copy = int(state["inserted_items"]), str(state["replay"])
            self.learned_at = int(state.get("learned_at", counters.steps))  # of earlier versions not known
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(
                f"the newest checkpoint of {self.run_dir} is not of a deterministic run: it has no replay"
            ) from None
        seeds = np.random.SeedSequence([self.config.run.seed, counters.steps, counters.updates])
        acting, whole = seeds.generate_state(2).tolist()
        # Nothing of ours draws from these, but an environment may.
        random.seed(whole)
        np.random.seed(whole)
        torch.manual_seed(whole)
        shutil.rmtree(self.folder, ignore_errors=True)
        if copy:
            restore_snapshot(str(self.copies / Path(copy).name), self.folder)
            self.inserts += 1  # a number is missing, as the chunks are that were open when the span ended
        self.begin_acting(acting)
        self.replay.counters.inserted_items = inserted_items
        # What this process says to have made goes on from what the former one has said.
        self.rollout.timing.steps = counters.budget.made(SERIAL)

    def next_span(self) -> None:
        """End a span: save, evaluate, and begin another one with what was saved."""
        reached = self.counters.updates, self.counters.steps
        if not self.inserts:  # and so it would be in every span
            raise ConfigError(
                f"nothing to learn from in {self.config.learner.checkpoint_period_steps} steps: a checkpoint "
                "drops what slots have begun to collect; begin again with a longer "
                "--learner.checkpoint_period_steps"
            )
        self.save()
        self.evaluate()
        self.leave()
        self.begin_learning(_budget(self.config), resume=True)
        if (self.counters.updates, self.counters.steps) != reached:
            raise CheckpointError(
                f"the checkpoint of update {reached[0]} could not be written into {self.run_dir}: make room, "
                "then `troupe resume` it"
            )
        self.begin_span()

    def leave(self) -> None:
        """Close what the next span makes anew."""
        self.env.close()
        self.replay.close()

    def abandon(self) -> None:
        """Close everything, and save nothing."""
        self.leave()
        self.metrics.close()

    def save(self) -> None:
        """Write what the next span begins with, and drop what only older checkpoints had."""
        copy = self.copies / f"step-{self.counters.steps:012d}"
        filled = self.replay.store is not None
        if filled:
            shutil.rmtree(copy, ignore_errors=True)
            snapshot = Snapshot(self.replay, str(copy))
            snapshot.start()
            snapshot.join(SNAPSHOT_S)
            if snapshot.progress.state != "done":
                raise CheckpointError(
                    f"cannot copy replay into {copy}: {snapshot.progress.detail or 'it took too long'}"
                )
        self.save_learning(copy.name if filled else "", self.replay.counters.inserted_items)
        kept = {steps_of(path) for path in newest_first(self.run_dir / "checkpoints")}
        for each in self.copies.glob("step-*"):
            if not each.name[5:].isdecimal() or int(each.name[5:]) not in kept:
                shutil.rmtree(each, ignore_errors=True)

    def save_learning(self, copy: str, inserted_items: int) -> None:
        """Write the learner's state and the certificate, beside a `copy` of replay that is there already."""
        self.checkpoints.lockstep = {
            "replay": copy,
            "inserts": self.inserts,
            "sampled": self.sampled,
            "inserted_items": inserted_items,
            "learned_at": self.learned_at,
        }
        self.checkpoints.save()
        self.certificate.write(self.run_dir)

    # ------------------------------------------------------------------ what differs from a serial run

    def make_env(self, seed: int) -> VectorEnv:
        """The slots of all actors, as many vectors as there are actors."""
        config, slots = self.config, self.config.total_slots
        parts = split_slots(slots, max(1, config.actor.processes), self.spec.agents)
        return JoinedVector([make_vector(config.env, len(part), seed) for part in parts])

    def learn(self, batch: SampleBatch) -> None:
        """One update, and what the certificate says of it."""
        super().learn(batch)
        self.learned_at = self.counters.steps
        if self.is_certified(self.counters.updates):
            self.add_certified()

    def add_certified(self) -> None:
        """Put the weights as they are now into the certificate."""
        updates = self.counters.updates
        self.certify(self.certificate.add(updates, self.learned_at, self.agent.params()))

    def certify(self, weights: Weights) -> None:
        """Look at a new line of the certificate."""

    def is_certified(self, update: int) -> bool:
        """Whether the weights after this update are in the certificate."""
        return update % self.config.learner.certificate_period_updates == 0

    def record(self) -> None:
        """What is due after so many rounds: a row of metrics, a checkpoint."""
        period = self.config.learner.checkpoint_period_steps
        done = self.rollout.timing.calls % period  # in the span
        if done % max(1, period // ROWS_PER_SPAN) == 0:
            self.add_row()
        if done == 0 and not self.ends():
            self.next_span()

    def run(self) -> None:
        """The main loop."""
        if self.is_complete:
            self.say(
                f"the run was already complete at {self.counters.steps:,} steps; to continue, raise "
                "run.total_steps"
            )
            self.release()  # with the status that the run left: one of now would say less
            return
        while not self.ends():
            self.round()
            self.record()
        if self.stop:
            self.certificate.write(self.run_dir)
            at = f"{self.counters.updates:,}"
            self.say(f"stopped at update {at}; `troupe resume` continues from the last checkpoint")
        else:
            if self.counters.updates not in (0, *self.certificate.weights):
                self.add_certified()  # the last ones always: they are what the run is for
            self.add_row()
            self.save()
            self.checkpoints.check_current()
            self.evaluate()
        self.close()


def _budget(config: Config) -> StepBudget:
    """A count of steps that believes its only actor, whatever the time."""
    return StepBudget(config.run.total_steps, clock=itertools.count().__next__)
