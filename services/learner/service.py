"""The learner: turns sampled batches into better parameters, and keeps the run's record."""

from __future__ import annotations

import logging
import queue
import secrets
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zmq

from common.agents import make_agent
from common.config import Config, structural_hash, to_toml
from common.data.fields import check_windows
from common.envs import make_spec
from common.errors import CheckpointError, ConfigError, TroupeError
from common.rl.replay import annealed, importance_weights
from common.runtime import Deadline, StopSignal
from common.runtime.checkpoint import load_newest, save_checkpoint
from common.runtime.logging import Throttle
from common.wire.codec import WireError
from common.wire.control import ControlServer
from common.wire.control_client import new_incarnation
from common.wire.inserter import connect_shard
from common.wire.key_options import make_security
from common.wire.replay_codec import SampleBatch
from common.wire.sockets import Security
from services.learner.counters import RunCounters
from services.learner.inference import CentralInference
from services.learner.prefetch import Prefetcher
from services.learner.reporter import Reporter

log = logging.getLogger(__name__)

METRICS_PERIOD_UPDATES = 20
"""Scalars of an update are read this often: reading one from a GPU waits for everything before it."""
FAREWELL_S = 8.0
"""How long the end of a run waits for services to send their last reports and leave."""
FINAL_EVALUATION_S = 120.0
"""How long the end of a run waits for the last evaluation."""


class DivergedError(TroupeError):
    """Learning produced numbers that are not finite."""


class Learner:
    """One run's learner. `run` returns when the run is complete or a stop was asked for."""

    def __init__(self, config: Config, run_dir: Path, *, resume: bool, stop: StopSignal) -> None:
        self.config = config
        self.stop = stop
        self._checkpoints = run_dir / "checkpoints"
        if config.learner.device != "cpu" and not torch.cuda.is_available():
            raise ConfigError(f"learner.device is {config.learner.device!r} but torch finds no CUDA; use cpu")
        torch.set_num_threads(config.learner.torch_threads)
        self.spec = make_spec(config.env)
        self.agent = make_agent(config.agent, self.spec, seed=config.run.seed, device=config.learner.device)
        self.counters = RunCounters(self.spec.frames_per_step)
        self._saved: tuple[int, int] | None = None
        self.run_id = secrets.token_hex(8)
        if resume:
            self._restore()
        net = config.net
        security = make_security(net.keys_dir, "learner", insecure=net.insecure)
        self._context = zmq.Context()
        self.control = ControlServer(
            self._context,
            net.control,
            net.announce,
            config_dict=config.to_dict(),
            structural_hash=structural_hash(config),
            total_slots=config.total_slots,
            # With a total of its own, actors come and go; without, as many are expected as fill it.
            spread_slots=config.actor.total_slots > 0,
            heartbeat_s=net.heartbeat_s,
            liveness_s=net.liveness_s,
            bfloat16=config.learner.publish_dtype == "bfloat16",
            security=security,
            run=self.run_id,
        )
        self.inference = self._make_inference(security) if config.inference.mode == "central" else None
        self.prefetch = Prefetcher(
            self._context,
            self.control.shards,
            batch_size=config.replay.batch_size,
            depth=config.learner.prefetch,
            incarnation=secrets.randbits(63),
            pinned=config.learner.device != "cpu",
            security=security,
        )
        self.reporter = Reporter(
            run_dir,
            config.env.id,
            config.run.total_steps,
            config.run.log_every_s,
            self.counters,
            self.counters.steps if resume else None,
        )
        self.reporter.writer.add_text("config", f"```toml\n{to_toml(config)}\n```")
        self._throttle = Throttle(10.0)
        self._next_checkpoint = time.monotonic() + config.learner.checkpoint_period_s

    def _make_inference(self, security: Security) -> CentralInference:
        """The service that acts for the actors, with a network of its own: updates change the other one."""
        config = self.config
        seed = np.random.SeedSequence([config.run.seed, self.counters.steps]).generate_state(1)[0]
        with torch.random.fork_rng(devices=[]):  # the learner's own generator may come from a checkpoint
            agent = make_agent(config.agent, self.spec, seed=config.run.seed, device=config.learner.device)
        return CentralInference(
            self._context,
            config,
            agent,
            self.spec,
            leases=self.control.leases,
            shards=self.control.shards,
            connect=partial(
                connect_shard,
                ctx=self._context,
                name="inference",
                incarnation=new_incarnation(),
                fields=self.agent.fields,
                compress=config.replay.compression == "lz4",
                max_outstanding=max(1, config.actor.max_outstanding_inserts // config.replay.shards),
                security=security,
            ),
            seed=int(seed),
            security=security,
        )

    def run(self) -> None:
        """The main loop."""
        if not self.counters.updates:
            # Before anybody hears the run's name: it has to outlive this process, as what is stored under it.
            self._checkpoint()
        if self.inference is not None:
            self.inference.start()
            self.control.inference_endpoint = self.inference.endpoint
        self.control.start()
        self.prefetch.start()
        try:
            self._publish()
            while not self.stop and not self._complete():
                batch = self.prefetch.get(timeout_s=0.25)
                if batch is None:
                    self._say_who_waits()
                else:
                    self._learn(batch)
                self._keep_house()
            if self._complete():
                self._finish()
            # Last of all, so that what is resumed later has every step that the status shows.
            self._collect()
            self._checkpoint()
        finally:
            self._close()

    def _complete(self) -> bool:
        return self.counters.steps >= self.config.run.total_steps

    def _learn(self, sample: SampleBatch) -> None:
        """One update, its priorities, and every so often a new parameter version."""
        replay, counters = self.config.replay, self.counters
        self._check_fields(sample)
        beta = annealed(
            replay.importance_exponent,
            replay.importance_exponent_final,
            counters.updates,
            replay.importance_anneal_updates,
        )
        weights = importance_weights(sample.probabilities, sample.table_items, beta)
        counters.updates += 1
        measure = counters.updates % METRICS_PERIOD_UPDATES == 0
        progress = min(1.0, counters.steps / self.config.run.total_steps)
        update = self.agent.update(
            sample.fields, weights, want_metrics=measure, progress=progress, lengths=sample.lengths
        )
        self.prefetch.put_priorities(sample, update.priorities)
        if measure:
            self._check_finite(update.metrics)
            lag = np.maximum(0, counters.version - sample.versions).mean()
            self.reporter.note(
                "learner", {**update.metrics, "learner/beta": beta, "replay/sampled_staleness": float(lag)}
            )
        if counters.updates % self.config.learner.publish_period_updates == 0:
            self._publish()

    def _check_fields(self, sample: SampleBatch) -> None:
        """Stops before items that some other program has stored are taken for the agent's."""
        try:
            check_windows(sample.fields, int(sample.lengths.max()), self.agent.fields)
        except ValueError as error:
            raise ConfigError(
                f"replay at {sample.shard} sends {error}, which {self.config.agent.algorithm} cannot learn "
                "from: start that shard with another --data-dir, or with --volatile"
            ) from None

    def _check_finite(self, metrics: dict[str, float]) -> None:
        """Notices a loss or a gradient that is not finite, up to METRICS_PERIOD_UPDATES late."""
        self._refuse_nonsense([name for name, value in metrics.items() if not np.isfinite(value)])

    def _check_weights(self, arrays: dict[str, np.ndarray]) -> None:
        """Before they reach actors or the disk: what a bad update leaves in the weights is NaN."""
        self._refuse_nonsense([name for name, array in arrays.items() if np.isnan(array).any()])

    def _refuse_nonsense(self, bad: list[str]) -> None:
        """Stops where any of these is not finite."""
        if bad:
            raise DivergedError(
                f"{', '.join(bad[:3])} not finite at update {self.counters.updates}: resume from the last "
                "checkpoint with a lower agent.learning_rate"
            )

    def _publish(self) -> None:
        params = self.agent.params()
        self._check_weights(params)
        self.counters.version += 1
        self.control.publish(self.counters.version, params)
        if self.inference is not None:
            self.inference.offer(self.counters.version, params)

    def _keep_house(self) -> None:
        """What has to be done now and then, between two updates."""
        self._collect()
        self.control.set_state(steps=self.counters.steps, updates=self.counters.updates)
        if self.inference is not None:
            self.inference.check()
            self.reporter.note("learner", self.inference.metrics())
        self.reporter.tick(self.control, self.prefetch.waited_s)
        if time.monotonic() >= self._next_checkpoint:
            self._checkpoint()

    def _collect(self) -> None:
        """Takes in what the services have sent; what a service sends cannot stop the learner."""
        while True:
            try:
                telemetry = self.control.telemetry.get_nowait()
            except queue.Empty:
                return
            try:
                self.reporter.collect(telemetry)
            except WireError as error:
                if self._throttle(telemetry.source):
                    log.warning("ignored a report of %s: %s", telemetry.source, error)

    def _has_peer(self, *roles: str) -> bool:
        return any(peer["role"] in roles for peer in self.control.peers())

    def _say_who_waits(self) -> None:
        if self._throttle("wait"):
            log.info("learner waits for batches: %s", self.prefetch.wait_reason)

    def _finish(self) -> None:
        """Publishes the last parameters and waits, within a limit, until they have been evaluated."""
        self._publish()
        # The status first: who sees a service leave looks there for whether that is in order.
        self.reporter.tick(self.control, self.prefetch.waited_s, note="complete", force=True)
        self.control.set_state(steps=self.counters.steps, updates=self.counters.updates, stopping=True)
        if self.config.evaluator.enabled:
            self._wait_for_evaluation()
        deadline = Deadline(FAREWELL_S)
        while self._has_peer("actor", "evaluator") and not (self.stop or deadline.expired):
            self.stop.wait(0.05)

    def _wait_for_evaluation(self) -> None:
        deadline = Deadline(FINAL_EVALUATION_S)
        while not self.stop and self._has_peer("evaluator"):
            if self.reporter.evaluated_version >= self.counters.version:
                return
            if deadline.expired:
                log.warning("the last evaluation did not come within %.0f s", FINAL_EVALUATION_S)
                return
            if self._throttle("final"):
                log.info(
                    "learner waits for the evaluator's last evaluation, at most %.0f s", deadline.remaining_s
                )
            self._collect()
            self.reporter.tick(self.control, self.prefetch.waited_s, note="last evaluation")
            self.stop.wait(0.1)

    # ------------------------------------------------------------ checkpoints

    def _checkpoint(self) -> None:
        """Saves the run unless nothing has happened since: copies of one state would push out others."""
        self._next_checkpoint = time.monotonic() + self.config.learner.checkpoint_period_s
        reached = (self.counters.steps, self.counters.updates)
        if reached == self._saved:
            return
        arrays, agent_meta = self.agent.state()
        self._check_weights(arrays)
        arrays["rng/torch"] = torch.get_rng_state().numpy()
        meta: dict[str, Any] = {
            **self.counters.to_meta(),
            "agent": agent_meta,
            "config": self.config.to_dict(),
            "structural_hash": structural_hash(self.config),
            "run": self.run_id,
        }
        try:
            path = save_checkpoint(self._checkpoints, arrays, meta, keep=self.config.learner.keep_checkpoints)
            self._saved = reached
            log.info("checkpoint %s (%d updates)", path.name, self.counters.updates)
        except CheckpointError as error:
            # A full disk must not end the training: the previous checkpoint stays valid.
            log.error("%s", error)

    def _restore(self) -> None:
        arrays, meta, path = load_newest(self._checkpoints)
        if meta.get("structural_hash") != structural_hash(self.config):
            raise CheckpointError(
                f"{path} was written with other structural fields; resume with the run's own config.toml"
            )
        self.agent.load_state({k: v for k, v in arrays.items() if not k.startswith("rng/")}, meta["agent"])
        torch.set_rng_state(torch.from_numpy(arrays["rng/torch"].copy()))
        self.counters.load_meta(meta)
        self._saved = (self.counters.steps, self.counters.updates)
        self.run_id = str(meta.get("run", ""))
        log.info(
            "resumed from %s: %d steps, %d updates", path.name, self.counters.steps, self.counters.updates
        )

    def _close(self) -> None:
        with ExitStack() as ends:  # each step, whatever happens to the others; the last one named comes first
            ends.callback(self._context.destroy, linger=1000)
            ends.callback(self.control.stop)
            ends.callback(self.reporter.close)
            ends.callback(
                self.reporter.tick, self.control, self.prefetch.waited_s, note="stopped", force=True
            )
            ends.callback(self.prefetch.stop)
            if self.inference is not None:
                ends.callback(self.inference.stop)
