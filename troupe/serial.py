"""A whole training in one process, without a socket: `troupe train PRESET --serial`.

The way into the code: the agents, environments, accumulators, tables and checkpoints of the services, one
after the other. An actor's step, a shard's insert, a batch, the learner's update. A debugger stops in each of
them, and a profiler sees them all.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from troupe.common.agents import Batch, make_agent
from troupe.common.agents.hindsight import hindsight_of
from troupe.common.agents.inspection import Inspection
from troupe.common.agents.opponents import Opponents
from troupe.common.config import Config, to_toml
from troupe.common.data.inserts import SERIAL, HeldError
from troupe.common.data.plan import make_plan
from troupe.common.data.schema import Chunk, stored_as
from troupe.common.envs import VectorEnv, make_spec, make_vector, means_told
from troupe.common.envs.base import EnvError
from troupe.common.errors import ConfigError, sameness
from troupe.common.machine import usable_cores
from troupe.common.rl.importance import annealed
from troupe.common.runtime import StopSignal
from troupe.common.runtime.files import CONFIG_FILE, SERIAL_FOLDER, atomic_write, write_status
from troupe.common.runtime.metrics import MetricsWriter
from troupe.common.stats.played import levels_missed
from troupe.common.wire.replay.codec import (
    SampleBatch,
    decode_batch,
    decode_insert,
    encode_batch,
    encode_insert,
)
from troupe.services.actor.local_inference import Rollout
from troupe.services.actor.timing import fields_of
from troupe.services.evaluator.games import play
from troupe.services.learner.batches.chooser import Chooser
from troupe.services.learner.batches.mixture import Mixture
from troupe.services.learner.batches.usable import UsableItems
from troupe.services.learner.control.budget import StepBudget
from troupe.services.learner.record.training_returns import TrainingReturns
from troupe.services.learner.saving.checkpoints import RunCheckpoints
from troupe.services.learner.saving.counters import RunCounters
from troupe.services.learner.saving.finite import check_metrics, check_weights
from troupe.services.replay.storage.replay import Replay

METRICS_PERIOD_UPDATES = 20


class SerialTraining:
    """One run. `run` returns when it is complete or a stop was asked for.

    Args:
        config: the run's configuration; what it says of processes and addresses means nothing here.
        run_dir: a new run directory, which the caller holds by `hold_run_dir` where others may use it.
        stop: asks for the end.
    """

    def __init__(self, config: Config, run_dir: Path, stop: StopSignal) -> None:
        self.config, self.run_dir, self.stop = config, run_dir, stop
        self.spec, self.mixture = make_spec(config.env), Mixture(config)
        self.folder = run_dir / SERIAL_FOLDER
        self.inserts = self.sampled = 0
        self.failures = self.episodes = 0
        self.last_failure = self.unevaluated = ""
        self.told_causes: set[object] = set()
        torch.set_num_threads(config.torch_threads("learner", usable_cores()))
        run_dir.mkdir(parents=True, exist_ok=True)
        self.begin()
        self.metrics = MetricsWriter(run_dir, resumed_steps=self.counters.steps or None)
        self.training = TrainingReturns(config.env.id, self.spec.tasks)
        self.next_row_s = self.next_evaluation_s = time.monotonic()

    def begin(self) -> None:
        """Make what learns, and then what acts."""
        self.write_config()
        self.begin_learning(StepBudget(self.config.run.total_steps), resume=False)
        self.begin_acting(self.config.run.seed)

    def write_config(self) -> None:
        """Write the configuration into the run."""
        atomic_write(self.run_dir / CONFIG_FILE, to_toml(self.config).encode())

    def begin_learning(self, budget: StepBudget, *, resume: bool) -> None:
        """Make the network and the counters: new ones, or as the newest checkpoint has them."""
        config, spec = self.config, self.spec
        self.agent = make_agent(config.agent, spec, seed=config.run.seed, device=config.learner.device)
        self.inspection = Inspection(self.agent)
        self.usable = UsableItems(self.agent, self.tell_priorities)
        self.chooser = Chooser(config, self.agent)
        self.counters = RunCounters(spec.frames_per_step, budget)
        folder = self.run_dir / "checkpoints"
        self.checkpoints = RunCheckpoints(config, folder, self.agent, spec, self.counters)
        self.checkpoints.begin_run(resume=resume)

    def begin_acting(self, seed: int) -> None:
        """Make environments, each with a new game, and tables, which go on with what is in their folder."""
        config, slots = self.config, self.config.total_slots
        self.env = self.make_env(seed)
        hindsight = hindsight_of(config, self.spec)
        opponents = Opponents.of(config, self.spec, seed + 1)
        self.rollout = Rollout(
            self.agent, self.env, config.actor.chunk_steps, seed, hindsight=hindsight, opponents=opponents
        )
        self.rollout.explore(list(range(slots)), slots)
        self.fields = stored_as(config.replay.compression, self.agent.fields)
        tables = config.replay.shard_tables(1)
        budget_bytes = make_plan(self.folder, tables, config.replay.max_bytes).store_bytes
        self.replay = Replay(self.folder, tables, budget_bytes=budget_bytes, seed=seed)

    def make_env(self, seed: int) -> VectorEnv:
        """All slots of the run."""
        config = self.config
        return make_vector(config.env, config.total_slots, seed, config.actor.env_threads)

    def run(self) -> None:
        """The main loop."""
        while not self.ends():
            self.round()
            self.record()
        self.add_row()
        self.evaluate()
        self.checkpoints.save()
        self.checkpoints.check_current()
        self.close()

    def ends(self) -> bool:
        """Whether the run is complete, or has to stop."""
        return self.counters.steps >= self.config.run.total_steps or self.stop.requested

    def round(self) -> None:
        """One step of every slot, and the updates that it allows."""
        for chunk in self.rollout.step(self.counters.version):
            self.insert(chunk)
        self.tell_failures()
        self.counters.budget.report(SERIAL, self.rollout.timing.steps, self.env.num_slots)
        while not self.stop and (batch := self.sample()) is not None:
            self.learn(batch)

    def tell_failures(self) -> None:
        """Count what has failed in an environment, which was made anew and goes on; say each cause once."""
        while self.env.failures:
            failure = self.env.failures.popleft()
            self.failures += 1
            self.last_failure = str(failure)
            # An error by its line: what it says may be another number each time.
            cause = sameness(failure.cause.removeprefix("raised "))
            if cause not in self.told_causes:
                self.told_causes.add(cause)
                self.say(f"{failure}; such episodes are discarded")

    def insert(self, chunk: Chunk) -> None:
        """Store a chunk in every table that batches come from; a full queue is learned from first."""
        first, *others = self.mixture.shares
        chunk.more = dict.fromkeys(others, chunk.items)
        self.inserts += 1
        message = encode_insert(chunk, self.fields, first, incarnation=SERIAL)
        message.oldest = self.inserts  # those before it are stored, but for one at the end of each span
        while True:
            try:
                self.replay.insert(decode_insert(message, self.inserts))
                return
            except HeldError as error:
                batch = self.sample()
                if batch is None:
                    raise ConfigError(f"acting and learning wait for each other: {error}") from None
                self.learn(batch)

    def sample(self) -> SampleBatch | None:
        """A batch, if the tables give one; without a limiter an item is sampled once on average."""
        rows = sum(self.mixture.shares.values())
        if self.sampled + rows > self.replay.counters.inserted_items and not self.is_limited:
            return None
        sample = self.replay.sample(self.mixture.shares)
        if isinstance(sample, str):
            return None
        self.sampled += rows
        assert self.replay.specs is not None
        message = encode_batch(sample, self.replay.specs).message()
        return decode_batch(message, shares=self.mixture.shares)

    @property
    def is_limited(self) -> bool:
        """Whether a table says itself how often its items are sampled."""
        tables = self.config.replay.sampled_tables()
        return any(table.is_queue or table.samples_per_insert for table in tables)

    def learn(self, batch: SampleBatch) -> None:
        """One update, and the priorities that it gives."""
        replay, counters = self.config.replay, self.counters
        usable = self.usable.of(batch)
        if not len(usable.lengths):
            return
        if candidates := batch.candidates:
            batch, usable, near = self.chooser.choose(batch, usable)
            for table, rows in batch.rows().items():
                if table in candidates:
                    self.replay.update(table, batch.ids[rows], near[rows], chosen=True)
        replayed = self.mixture.replayed(batch)
        beta = annealed(
            replay.importance_exponent,
            replay.importance_exponent_final,
            counters.updates,
            replay.importance_anneal_updates,
        )
        counters.updates += 1
        counters.version += 1
        update = self.inspection.update(
            Batch(
                usable.fields,
                usable.chosen(batch.weights(beta)),
                usable.lengths,
                None if replayed is None else usable.chosen(replayed),
                progress=counters.progress(learned=self.mixture.once is not None),
                measure=counters.updates % METRICS_PERIOD_UPDATES == 1,
            )
        ).settled()
        # At once: where they had acted or been stored first, environment or replay would be blamed.
        check_weights(self.agent.params(), counters.updates)
        priorities = {} if update.priorities is None else {"priorities": float(np.sum(update.priorities))}
        check_metrics(update.metrics | priorities, counters.updates)
        counters.learned_steps += self.mixture.learned_steps(batch, usable)
        if update.priorities is not None:
            self.tell_priorities(usable.part(batch), update.priorities)
        if update.metrics:
            self.write("learner", update.metrics)

    def tell_priorities(self, batch: SampleBatch, priorities: NDArray[np.float64]) -> None:
        """Give the tables that keep their items new priorities `[B]` of a batch."""
        for table, rows in batch.rows().items():
            if table in self.mixture.kept:
                self.replay.update(table, batch.ids[rows], priorities[rows])

    def record(self) -> None:
        """What is due: a row of metrics, an evaluation, a checkpoint."""
        now_s = time.monotonic()
        if now_s >= self.next_row_s and self.rollout.episodes:
            self.next_row_s = now_s + self.config.run.log_every_s
            self.add_row()
        if now_s >= self.next_evaluation_s:
            self.evaluate()
        self.checkpoints.save_if_due()

    def add_row(self) -> None:
        """Record the returns of the games that have ended since the last row, if any has."""
        if not self.rollout.episodes:
            return
        episodes = self.rollout.episodes
        self.episodes += len(episodes)
        told = {f"env/{name}": value for name, value in means_told(episodes).items()}
        self.training.take(fields_of(episodes))
        episodes.clear()
        row = self.training.row()
        told |= self.rollout.timing.opponents()
        self.write("actor-0", row | told | {"actor/env_restarts_total": float(self.env.restarts_total)})
        updates, failures = self.counters.updates, self.failures
        done = f"{self.counters.steps:,} steps, {updates:,} update{'s'[: updates != 1]}"
        failed = f", {failures:,} episode{'s'[: failures != 1]} failed" if failures else ""
        self.say(f"{done}, return {row['train/episode_return']:.2f}{failed}")

    def evaluate(self) -> None:
        """Play whole games, as the evaluator does, unless the run wants none or the environment fails."""
        if not self.config.evaluator.enabled:
            return
        self.unevaluated = ""
        try:
            self.play_games()
        except EnvError as error:
            self.unevaluated = str(error)
            self.write("evaluator", {})
            self.say(f"no evaluation after {self.counters.steps:,} steps: {error}")
        self.next_evaluation_s = time.monotonic() + self.config.evaluator.period_s

    def play_games(self) -> None:
        """Play the games of an evaluation; EnvError where none would end."""
        section, env, version = self.config.evaluator, self.config.env, self.counters.version
        result = play(
            self.agent,
            env,
            episodes=section.episodes,
            slots=section.slots,
            seed=self.config.run.seed + version,
            epsilon=self.agent.eval_epsilon,
            max_episode_frames=section.max_episode_frames,
            should_stop=lambda: self.stop.requested,
        )
        if result is not None:
            metrics = result.metrics(env.id, version, 0.0)
            self.write("evaluator", metrics)
            said = f"evaluation after {self.counters.steps:,} steps: return {result.mean_return:.2f}"
            self.say(said + (f", {missed}" if (missed := levels_missed(metrics)) else ""))

    def say(self, text: str) -> None:
        """Tell the terminal."""
        print(text, flush=True)

    def write(self, source: str, metrics: dict[str, float]) -> None:
        """Add to the run's record."""
        counters = self.counters
        self.metrics.add(
            source, metrics, steps=counters.steps, frames=counters.frames, updates=counters.updates
        )
        self.record_status()

    def record_status(self) -> None:
        """Say in status.json how far the run is."""
        counters = self.counters
        status = {"steps": counters.steps, "frames": counters.frames, "updates": counters.updates}
        more = {"total_steps": self.config.run.total_steps, "wall_s": self.metrics.wall_s}
        heard = {
            "failures": self.failures,
            "episodes": self.episodes,
            "last": self.last_failure,
            "unevaluated": self.unevaluated,
        }
        with self.metrics.tolerant("write the status into"):
            write_status(
                self.run_dir, {**status, **more, "environments": heard, "metrics": self.metrics.last}
            )

    def close(self) -> None:
        """Say how far the run has come, as the last row may be older than the last steps, and `release`."""
        self.record_status()
        self.release()

    def release(self) -> None:
        """Close what is open."""
        self.checkpoints.wait()
        self.metrics.close()
        self.replay.close()
        shutil.rmtree(self.folder, ignore_errors=True)  # a run that is resumed fills its tables anew
        self.env.close()
