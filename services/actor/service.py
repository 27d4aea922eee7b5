"""The actor: steps environments with the newest parameters and sends what happens to replay."""

from __future__ import annotations

import dataclasses
import logging
import time
from pathlib import Path

import torch

from common.agents import make_agent
from common.config import config_from_dict
from common.envs import VectorEnv, make_vector
from common.errors import PeerError
from common.runtime import health
from common.runtime.lifecycle import Deadline, StallWatchdog, StopSignal
from common.wire.control_client import ControlClient, Params, Welcome, new_incarnation
from common.wire.replay_client import ReplayClient
from common.wire.sockets import Context, Security, WaitLog, reachable_endpoint
from services.actor.inserter import Inserter
from services.actor.meter import Meter
from services.actor.rollout import Rollout

log = logging.getLogger(__name__)

STALL_LIMIT_S = 60.0
FLUSH_TIMEOUT_S = 5.0
WAIT_SLICE_S = 0.2


class Stopped(Exception):
    """The service was asked to stop before it had begun."""


class ActorService:
    """One actor process: joins the run at `learner`, acts until the run is done or `stop` is set.

    Args:
        ctx: ZeroMQ context; the caller terminates it.
        learner: the learner's control address.
        name: unique in the run.
        stop: set by signals.
        slots: environment copies; 0 takes `actor.slots` of the run's config.
        join_timeout_s: how long to wait for the learner at the start.
        security: keys.
        relay_directory: shared by the actors of this host, of which one fetches parameters for all.
    """

    def __init__(
        self,
        ctx: Context,
        learner: str,
        name: str,
        stop: StopSignal,
        *,
        slots: int = 0,
        join_timeout_s: float = 60.0,
        security: Security | None = None,
        relay_directory: Path | None = None,
    ) -> None:
        self._ctx = ctx
        self._learner = learner
        self._name = name
        self._stop = stop
        self._slots_wanted = slots
        self._join_timeout_s = join_timeout_s
        self._security = security
        self._relay_directory = relay_directory
        self._incarnation = 0
        self._meter = Meter()
        self._inserter = Inserter(self._connect_shard)
        self._version = -1
        self._steps_with_params = 0

    def run(self) -> None:
        """Act until the end. Raises `PeerError` where the learner or its parameters do not come in time."""
        try:
            welcome = self._join()
        except Stopped:
            return
        reason = "failed"
        self._watchdog = StallWatchdog(STALL_LIMIT_S)
        try:
            self._take_slots(welcome)
            self._wait_for_params(self._config.net.connect_timeout_s)
            while not self._done():
                self._watchdog.beat()
                self._inserter.put(self._rollout.step(self._version))
                self._wait_for_credit()
                self._refresh_params()
                self._keep_in_touch()
            self._finish()
            reason = "stopped" if self._stop else "the run is done"
        except Stopped:
            reason = "stopped"
        finally:
            self._watchdog.close()
            self._control.close(reason)
            self._inserter.close()

    # -- joining --

    def _join(self) -> Welcome:
        """Join with as many slots as there are environments.

        These are made first, for which the run's config has to be looked up: making emulators may keep the
        whole process busy, its heartbeats included, for longer than a lease lasts.
        """
        self._config = config_from_dict(self._hello("viewer", f"{self._name[:56]}-config", 0).config)
        self._control.close("has seen the config")
        torch.set_num_threads(self._config.actor.torch_threads)
        wanted = self._slots_wanted or self._config.actor.slots
        self._env = self._make_env(wanted)
        self._agent = make_agent(self._config.agent, self._env.spec, seed=self._config.run.seed)
        return self._hello("actor", self._name, wanted)

    def _hello(self, role: str, name: str, slots: int) -> Welcome:
        self._incarnation = new_incarnation()
        self._control = ControlClient(
            self._ctx,
            self._learner,
            role=role,
            name=name,
            incarnation=self._incarnation,
            slots_wanted=slots,
            connect_timeout_s=self._join_timeout_s,
            security=self._security,
            relay_directory=self._relay_directory if role == "actor" else None,
        )
        deadline = Deadline(self._join_timeout_s)
        while not self._stop:
            try:
                return self._control.join(deadline.slice_s(WAIT_SLICE_S))
            except PeerError as error:
                if deadline.expired:
                    self._control.close("gives up")
                    detail = str(error).partition("(")[2].rstrip(")")
                    waited = f"within {self._join_timeout_s:.0f} s ({detail})"
                    raise PeerError(
                        f"{self._name} could not join the learner at {self._learner} {waited}"
                    ) from error
        self._control.close("stopped")
        raise Stopped

    def _make_env(self, slots: int) -> VectorEnv:
        # The seed is given when the slots are known, at reset.
        return make_vector(self._config.env, slots, self._config.run.seed, self._config.actor.env_threads)

    def _take_slots(self, welcome: Welcome) -> None:
        """Act in the slots that were granted, which may be fewer than there are environments."""
        self._joins = self._control.joins
        self._slots = welcome.slots
        if self._env.num_slots != len(welcome.slots):
            self._env.close()
            self._env = self._make_env(len(welcome.slots))
        self._rollout = self._make_rollout(welcome)
        log.info(
            "%s acts in %d slots of %d with %d torch threads, incarnation %x",
            *(self._name, len(self._slots), welcome.total_slots, torch.get_num_threads(), self._incarnation),
        )

    def _make_rollout(self, welcome: Welcome) -> Rollout:
        seed = welcome.seed(self._incarnation, welcome.slots[0])
        rollout = Rollout(self._agent, self._env, self._config.actor.chunk_steps, seed)
        rollout.explore(welcome.slots, welcome.total_slots)
        return rollout

    def _connect_shard(self, endpoint: str) -> ReplayClient:
        replay, actor = self._config.replay, self._config.actor
        compress = replay.compression == "lz4"
        return ReplayClient(
            reachable_endpoint(endpoint, self._learner),
            ctx=self._ctx,
            name=self._name,
            incarnation=self._incarnation,
            specs=[dataclasses.replace(s, compress=s.compress and compress) for s in self._agent.fields],
            max_outstanding=max(1, actor.max_outstanding_inserts // replay.shards),
            security=self._security,
        )

    def _wait_for_params(self, timeout_s: float) -> None:
        deadline, wait_log = Deadline(timeout_s), WaitLog()
        while (params := self._control.params_if_newer(-1)) is None:
            if self._done():
                raise Stopped
            self._watchdog.beat()
            self._control.check()
            if deadline.expired:
                raise PeerError(
                    f"{self._name} got no parameters from the learner at {self._learner} "
                    f"within {timeout_s:.0f} s; see its log"
                )
            if wait_log.due():
                log.info("%s waits for the first parameters since %.0f s", self._name, wait_log.waited_s)
            time.sleep(0.02)
        self._load(params)

    # -- in every step --

    def _done(self) -> bool:
        return self._stop.requested or self._control.state.stopping

    def _wait_for_credit(self) -> None:
        """Stand still while replay does not take what there is: nothing is dropped, nothing piles up here."""
        if not self._inserter.waiting:
            return
        wait_log = WaitLog()
        blocked_before_s = self._meter.blocked_s
        while self._inserter.waiting and not self._done():
            self._watchdog.beat()
            self._inserter.pump(timeout_ms=50)
            self._meter.blocked_s = blocked_before_s + wait_log.waited_s
            self._keep_in_touch()
            if wait_log.due():
                reason = self._inserter.reason()
                log.info("%s waits for replay since %.0f s (%s)", self._name, wait_log.waited_s, reason)

    def _refresh_params(self) -> None:
        """Take newer parameters, at most once in `params_period_steps`; the fetch runs in the background."""
        self._steps_with_params += 1
        if self._steps_with_params >= self._config.actor.params_period_steps:
            params = self._control.params_if_newer(self._version)
            if params is not None:
                self._load(params)

    def _load(self, params: Params) -> None:
        self._agent.load_params(params.params)
        self._version = params.version
        self._steps_with_params = 0

    def _keep_in_touch(self) -> None:
        """Follow changes of shards and slots, and report now and then."""
        self._control.check()
        self._inserter.set_shards(self._control.shards)
        if self._control.joins != self._joins:
            self._follow_slots()
        if self._meter.due():
            self._report()

    def _report(self) -> None:
        staleness = max(0, self._control.state.version - self._version)
        metrics, fields = self._meter.report(self._rollout, staleness, self._inserter.chunks_total)
        self._control.send_telemetry(metrics, fields=fields)
        health.report(metrics)

    def _follow_slots(self) -> None:
        """After joining again: other slots mean other exploration, and possibly fewer environments."""
        welcome = self._control.join()
        self._joins = self._control.joins
        if welcome.slots == self._slots:
            return
        log.info("%s now has slots %s instead of %s", self._name, welcome.slots, self._slots)
        if len(welcome.slots) == len(self._slots):
            self._slots = welcome.slots
            self._rollout.explore(welcome.slots, welcome.total_slots)
            return
        old = self._rollout
        self._inserter.put(old.flush())
        self._take_slots(welcome)
        self._rollout.timing, self._rollout.episodes = old.timing, old.episodes

    # -- the end --

    def _finish(self) -> None:
        """Send what is complete, and the last report. Bounded: a peer that is gone must not hold us up."""
        self._inserter.put(self._rollout.flush())
        lost = self._inserter.finish(FLUSH_TIMEOUT_S)
        if lost:
            reason = self._inserter.reason()
            log.info("%s ends with %d chunks that replay did not take (%s)", self._name, lost, reason)
        self._report()
        self._env.close()
        log.info("%s ends after %d steps", self._name, self._rollout.timing.steps)
