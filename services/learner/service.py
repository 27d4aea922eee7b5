"""The learner: turns sampled batches into better parameters, and keeps the run's record."""

from __future__ import annotations

import contextlib
import logging
import math
import queue
from contextlib import ExitStack
from pathlib import Path

import torch
import zmq

from troupe.common import system
from troupe.common.agents import make_agent
from troupe.common.agents.learners.graphed import GraphedUpdates
from troupe.common.agents.tensors import check_device
from troupe.common.config import Config, to_toml
from troupe.common.envs import make_spec
from troupe.common.envs.sides import check_opponents
from troupe.common.errors import PeerError
from troupe.common.machine import usable_cores
from troupe.common.rl.importance import annealed
from troupe.common.runtime import Deadline, StopSignal, open_files, watchdog
from troupe.common.runtime.files import CONFIG_FILE, atomic_write, make_directory
from troupe.common.runtime.logging import Throttle
from troupe.common.wire.security.key_options import make_security
from troupe.services.learner import assembly
from troupe.services.learner.batches.mixture import Mixture
from troupe.services.learner.batches.prefetch import Prefetcher
from troupe.services.learner.batches.staging import staging_for
from troupe.services.learner.batches.usable import Usable
from troupe.services.learner.control.budget import StepBudget
from troupe.services.learner.gpu import GpuMeter
from troupe.services.learner.inference.service import CentralInference
from troupe.services.learner.peers.seats import OwnSeats
from troupe.services.learner.peers.shares import Shares, Wish
from troupe.services.learner.peers.team import Rules, Team
from troupe.services.learner.record.gathered import Gathered
from troupe.services.learner.record.histograms import Histograms
from troupe.services.learner.record.ratings import Ratings
from troupe.services.learner.record.reporter import Reporter
from troupe.services.learner.record.spent import Spent
from troupe.services.learner.record.totals import tell_unlearned
from troupe.services.learner.record.trackers import Run
from troupe.services.learner.record.tracking import Trackers
from troupe.services.learner.saving.checkpoints import CHECKPOINT_S, RunCheckpoints
from troupe.services.learner.saving.counters import RunCounters
from troupe.services.learner.saving.finite import check_metrics, check_weights
from troupe.services.learner.saving.kept import Best

_log = logging.getLogger(__name__)

METRICS_PERIOD_UPDATES = 20
"""Scalars of an update are read this often: reading one from a GPU waits for everything before it."""
METRICS_PERIOD_S = 2.0
"""Or after so long, where updates are few and large."""
TOLD_WAIT_S = 10.0
"""How long there may be no batch before the log says why; learning and acting in turn takes seconds."""
LAST_BATCHES_S = 60.0
"""How long the end of a run learns from what is on its way to a queue."""
DATASET_WAIT_S = 600.0
"""How long a run that learns from a data set waits for its first batch, which nobody makes meanwhile."""
QUIET_S = 1.0
"""A queue that gives no batch for so long has no more."""
FAREWELL_S = 8.0
"""How long the end of a run waits for services to send their last reports and leave."""
COLLECT_S = 0.02
"""How long the learner takes in reports between two updates; the rest waits for the next time."""
LAST_COLLECT_S = 2.0
"""The same for those that have come when the run stops."""
FINAL_EVALUATION_S = 600.0
"""How long a run waits at its end for the last evaluation: games of a good Atari policy take minutes."""
EVALUATOR_START_S = 120.0
"""How long of that it waits for an evaluator that has not joined: in a short run it may be starting still.

On busy cores that takes over a minute, since others have priority; an unevaluated trial has no score."""


class Learner:
    """One run's learner. `run` returns when the run is complete or a stop was asked for.

    Args:
        config: the run's configuration.
        run_dir: the run directory.
        resume: go on from the newest whole checkpoint.
        stop: asks for the end.
        write_config: `run_dir` is made where there is none, and gets this configuration.
        linger_s: how long a run that is complete already answers those who come, so that they learn of it.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        *,
        resume: bool,
        stop: StopSignal,
        write_config: bool = False,
        linger_s: float = 0.0,
    ) -> None:
        self.config = config
        self.stop = stop
        self._run_dir = run_dir
        check_device(config.learner.device)
        torch.set_num_threads(config.torch_threads("learner", usable_cores()))
        self.spec = make_spec(config.env)
        check_opponents(config, self.spec)
        self.agent = make_agent(config.agent, self.spec, seed=config.run.seed, device=config.learner.device)
        self._mixture = Mixture(config)
        self._gpu = GpuMeter(config.learner.device)
        self._histograms = Histograms(self.agent, config.learner.histogram_period_updates)
        # An update shows no frames, however many a step has.
        frames_per_step = 1 if config.run.offline else self.spec.frames_per_step
        self.counters = RunCounters(frames_per_step, StepBudget(config.run.total_steps))
        directory = run_dir / "checkpoints"
        self.checkpoints = RunCheckpoints(config, directory, self.agent, self.spec, self.counters)
        # Before any socket: a run that cannot go on says so without a service having joined it.
        self.checkpoints.begin_run(resume=resume)
        self._linger_s = linger_s if self._complete() else 0.0
        self._best = Best(directory, self.checkpoints.meta) if config.learner.keep_best else None
        self._context = zmq.Context()
        try:
            self._make_parts()
            self._bind()  # first: a learner that cannot leaves no run behind
            if write_config:
                make_directory(run_dir, "run directory")
                atomic_write(run_dir / CONFIG_FILE, to_toml(config).encode())
            self.reporter = self._make_reporter(directory, resumed=resume)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.reporter.writer.add_text("config", f"```toml\n{to_toml(config)}\n```")
        self._throttle = Throttle(10.0)
        self._complete_before = self._complete()  # nobody waits for what an earlier session has ended with
        self._measured_s = -math.inf  # the first update is measured: a short run has few
        self._spent = Spent()
        self._learned = False

    def _make_parts(self) -> None:
        """Whom the learner serves, what it asks, and with whom it learns; nothing is bound or started."""
        config, net, context = self.config, self.config.net, self._context
        security = make_security(net.keys_dir, "learner", insecure=net.insecure)
        run, budget = self.checkpoints.run_id, self.counters.budget
        self.control = assembly.control_server(context, config, self.agent, run, budget, security)
        self.inference: CentralInference | None = None
        if config.inference.mode == "central":
            steps = self.counters.steps
            self.inference = assembly.central_inference(
                context, config, self.spec, self.control, steps, security
            )
        self.prefetch = Prefetcher(
            context,
            self.control.shards,
            kept=self._mixture.kept,
            depth=config.learner.prefetch,
            fields=self.agent.fields,
            staging=staging_for(config.learner.device),
            security=security,
        )
        seats = OwnSeats(self.control, net.learner_network, self.stop)
        graphed = config.learner.cuda_graph and config.learner.device != "cpu"
        update = GraphedUpdates(self.agent).update if graphed else None
        self.team = Team(self.agent, self.counters, seats, Rules.of(config, owner=True), update)
        self.shares = Shares(config, self.agent, self.prefetch, self._mixture, self.team)

    def _make_reporter(self, checkpoints: Path, *, resumed: bool) -> Reporter:
        config, counters, place = self.config, self.counters, self._run_dir.resolve()
        known_as = Run(self.checkpoints.run_id, config.run.name or place.name, str(place), config.to_dict())
        ratings: Ratings | None = None
        if config.evaluator.elo_games:
            known = counters.version if resumed else -1
            ratings = Ratings(checkpoints, known, self.control.play_against)
        return Reporter(
            self._run_dir,
            config.env.id,
            config.run.total_steps,
            config.run.log_every_s,
            counters,
            counters.steps if resumed else None,
            Trackers(config.run.trackers, known_as),
            lambda slots: self.agent.slot_epsilons(slots, config.total_slots),
            gathered=Gathered(config, self.spec.tasks),
            tasks=self.spec.tasks,
            ratings=ratings,
            best=self._best,
        )

    def _bind(self) -> None:
        config = self.config
        members = config.total_slots // config.actor.slots + config.replay.shards
        members += config.evaluator.processes + config.learner.processes
        if line := open_files.too_few_for(members):
            _log.warning("%s", line)
        self.control.bind()
        if self.inference is not None:
            self.inference.bind()

    def run(self) -> None:
        """The main loop."""
        self._loop = watchdog.Loop("the learner's main loop")
        if not self.counters.updates:
            # Before anybody hears the run's name: it has to outlive this process, as what is stored under it.
            with self._loop.long("its first checkpoint"):  # which makes the optimiser: torch imports a lot
                self.checkpoints.save()
        if self.inference is not None:
            self.inference.start()
            # Before control starts: WELCOME has to name the address to the first that joins.
            self.control.inference_endpoint = self.inference.endpoint
        self.control.start()
        self.prefetch.start()
        try:
            self._publish()
            quiet, patience = Deadline(TOLD_WAIT_S), Deadline(DATASET_WAIT_S)
            self._tell_importer()
            while not self.stop and not self._complete():
                if self._learn_patiently():
                    quiet = Deadline(TOLD_WAIT_S)
                elif self.config.run.offline and not self._learned and patience.expired:
                    reason, waited = self.prefetch.wait_reason, f"{patience.elapsed_s:.0f} s"
                    raise PeerError(f"no batch of the data set after {waited} ({reason}); {self._importer}")
                elif quiet.expired and self._throttle("wait"):
                    _log.info("learner waits for batches: %s", self.prefetch.wait_reason)
                self._housekeeping()
            if self._complete():
                if not self._complete_before:
                    self._learn_the_rest()
                    if self._mixture.once is not None:
                        tell_unlearned(self.counters.steps, self.counters.learned_steps)
                self._finish()
            # Last of all, so that what is resumed later has every step that the status shows.
            self._collect(LAST_COLLECT_S)
            # A report after this would be in the status and not in the checkpoint: the resumed run would seem
            # to lose steps.
            self.counters.budget.close()
            if not self._complete_before:  # else everything is in the run directory already
                self.checkpoints.save()
                if self._complete() and not self.stop:
                    self.checkpoints.check_current()
        finally:
            self._loop.close()  # what follows has limits of its own
            self._close()

    def _tell_importer(self) -> None:
        """Say at once what has to be done, if it was not the launcher that began this run."""
        if self.config.run.offline and not (self._run_dir / "replay").is_dir():
            _log.info("the learner waits for shards that hold the data set; %s", self._importer)

    @property
    def _importer(self) -> str:
        """The commands that bring the data set to this run."""
        file, at = self._run_dir / CONFIG_FILE, self.control.control_endpoint
        return (
            f"fill shards by `troupe replay import {file} --data-dir DIR`, and run each by `troupe replay "
            f"serve --learner {at} --data-dir DIR/shard-0 --adopt`"
        )

    def _complete(self) -> bool:
        return self.counters.steps >= self.config.run.total_steps

    def _learn_the_rest(self) -> None:
        """Take what a queue still holds: each of its items was meant to be learned from once.

        Other tables go on giving their share. What fills no batch, and unrolls that are not complete, are
        left: they count as steps all the same.
        """
        if not self._mixture.has_queue:
            return
        deadline, quiet = Deadline(LAST_BATCHES_S), Deadline(QUIET_S)
        while not (self.stop or deadline.expired or quiet.expired):
            if self._learn():
                quiet = Deadline(QUIET_S)
            self._housekeeping()

    def _learn_patiently(self) -> bool:
        """`_learn`; the first update of a process may compile, and make room for what all others use."""
        if self._learned:
            return self._learn()
        with self._loop.long("its first update"):
            self._learned = self._learn()
        return self._learned

    def _learn(self) -> bool:
        """One update, alone or with others, and now and then a new version; whether there was one."""
        counters = self.counters
        with self._spent.update(self.prefetch):
            lesson = self.shares.learn(0.25, self._wish, self._look)
        if left_out := self.shares.usable.left_out:
            self.reporter.note("learner", {"learner/unusable_items_total": float(left_out)})
        if self.team.moved:
            # What acts has the older weights of the checkpoint.
            self.team.moved = False
            self._publish()
        if lesson is None:
            return False
        if lesson.wish.measure and lesson.update is not None and lesson.sample is not None:
            self._measured_s = system.monotonic()
            metrics = lesson.update.metrics
            check_metrics(metrics, counters.updates)  # up to METRICS_PERIOD_UPDATES late
            lag = self._mixture.staleness(lesson.sample, counters.version)
            self.reporter.note("learner", {**metrics, "learner/beta": lesson.wish.beta, **lag})
        if self.config.run.offline:
            counters.budget.count(counters.updates)
        if counters.updates % self.config.learner.publish_period_updates == 0:
            self._publish()
        return True

    def _wish(self) -> Wish:
        """What the next update goes by."""
        replay, counters = self.config.replay, self.counters
        beta = annealed(
            replay.importance_exponent,
            replay.importance_exponent_final,
            counters.updates,
            replay.importance_anneal_updates,
        )
        late = system.monotonic() - self._measured_s > METRICS_PERIOD_S
        measure = (counters.updates + 1) % METRICS_PERIOD_UPDATES == 0 or late
        return Wish(counters.progress(learned=self._mixture.once is not None), beta, measure)

    def _look(self, usable: Usable) -> None:
        if self._histograms.due(self.counters.updates):
            self.reporter.look(*self._histograms.take(usable.fields))

    def _publish(self) -> None:
        with self._spent.publish():
            params = self.agent.params()
            check_weights(params, self.counters.updates)
            self.counters.version += 1
            self.control.set_state(updates=self.counters.updates)
            self.control.publish(self.counters.version, params)
            if self.inference is not None:
                self.inference.offer(self.counters.version, params)

    def _housekeeping(self) -> None:
        """What has to be done now and then, between two updates."""
        self._collect()
        self.control.set_state(updates=self.counters.updates)
        if self.inference is not None:
            self.inference.check()
            self.reporter.note("learner", self.inference.metrics())
        if gpu := self._gpu.metrics():
            self.reporter.note("learner", gpu)
        self.reporter.note_links(self.control, self.prefetch)
        if spent := self._spent.metrics():
            self.reporter.note("learner", spent)
        self.reporter.tick(self.control, self.prefetch.waited_s)
        self.checkpoints.save_if_due()
        if self._best is not None:
            self._best.go_on()

    def _collect(self, limit_s: float = COLLECT_S) -> None:
        """Take in what the services have sent, for at most `limit_s`: they cannot keep the learner."""
        self._loop.turn()
        deadline = Deadline(limit_s)
        with contextlib.suppress(queue.Empty):
            while not deadline.expired:
                self.reporter.collect(self.control.telemetry.get_nowait())

    def _finish(self) -> None:
        """Publish the last parameters and wait, within a limit, until they have been evaluated."""
        if self._complete_before:
            _log.info(
                "the run was already complete at %d steps; to continue, raise run.total_steps",
                self.counters.steps,
            )
        self._publish()
        # The status first: who sees a service leave looks there for whether that is in order.
        self.reporter.tick(self.control, self.prefetch.waited_s, note="complete", force=True)
        # After the last version is out: who hears of the end fetches that one.
        self.control.set_state(updates=self.counters.updates, stopping=True)
        # Only now: the others end where they lose this learner and know that the run is done.
        self.team.close()
        if self._linger_s:
            self._stay_for_latecomers()
        if self.config.evaluator.enabled and not self._complete_before:
            self._wait_for_evaluation()
            self._collect()  # an evaluator leaves as soon as it has sent its last games
            self.reporter.end_evaluation()
        deadline = Deadline(FAREWELL_S)
        # A shard that has heard stays for a while, for what actors still send. A shard or another learner
        # that has not heard would look for this one for ever.
        while not (self.stop or deadline.expired) and (
            self.control.has("actor", "evaluator") or self.control.untold("replay", "learner")
        ):
            self.stop.wait(0.05)

    def _stay_for_latecomers(self) -> None:
        """Answer for a while: services that start together with this one would wait for a learner."""
        _log.info(
            "the run is complete at %d steps; waiting %.0f s to tell services that join",
            self.counters.steps,
            self._linger_s,
        )
        deadline = Deadline(self._linger_s)
        while not deadline.expired and not self.stop.wait(deadline.slice_s(0.1)):
            self._collect()
            self.reporter.tick(self.control, self.prefetch.waited_s, note="complete")

    def _wait_for_evaluation(self) -> None:
        deadline, start, joined = Deadline(FINAL_EVALUATION_S), Deadline(EVALUATOR_START_S), False
        while not (self.stop or self.reporter.is_evaluated(self.counters.version)):
            here = self.control.has("evaluator")
            if joined and not here:  # it has left
                return
            joined = here
            limit = deadline if joined else start
            if limit.expired:
                _log.warning("the last evaluation did not arrive within %.0f s", limit.elapsed_s)
                return
            note = "last evaluation" if joined else "waiting for the evaluator to start"
            if self._throttle(note):
                _log.info("%s, for at most %.0f s", note, limit.remaining_s)
            self._collect()
            self.reporter.tick(self.control, self.prefetch.waited_s, note=note)
            self.stop.wait(0.1)

    def _close(self) -> None:
        with ExitStack() as ends:  # each step, whatever happens to the others; the last one named comes first
            ends.callback(self.checkpoints.wait)
            if self._best is not None:
                ends.callback(self._best.wait, CHECKPOINT_S)
            ends.callback(self._context.destroy, linger=1000)
            # After the reporter, whose last status names the peers.
            ends.callback(self.control.stop)
            ends.callback(self.reporter.close)
            ends.callback(
                self.reporter.tick,
                self.control,
                self.prefetch.waited_s,
                note="the learner is finishing: writing what is left to disk",
                force=True,
                ended=bool(self.stop) or self._complete(),
            )
            ends.callback(self.prefetch.stop)
            ends.callback(self.team.close)
            if self.inference is not None:
                ends.callback(self.inference.stop)
