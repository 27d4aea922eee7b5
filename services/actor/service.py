"""The actor: steps environments, with actions that it or the learner chooses, until the run is done."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

from troupe.common import system
from troupe.common.config import config_from_dict
from troupe.common.errors import PeerError
from troupe.common.permits import check_modules
from troupe.common.runtime import health, watchdog
from troupe.common.runtime.lifecycle import Deadline, StopSignal
from troupe.common.runtime.usage import OwnUsage
from troupe.common.wire.control.client import ControlClient, Welcome
from troupe.common.wire.control.messages import TelemetryFields
from troupe.common.wire.link import new_incarnation
from troupe.common.wire.sockets import Context, Security, WaitLog
from troupe.services.actor.acting import Acting, Place
from troupe.services.actor.timing import TimingReports
from troupe.services.actor.watch import EnvWatch

_log = logging.getLogger(__name__)

RESTART_S = 300.0
"""Longest time in which processes of environments are started again, see `troupe.common.envs.workers`."""
MAX_GAMES, MAX_NAMED_GAMES = 1350, 450
"""Of one report, without and with the names of their tasks: all have to fit in the header of a message."""


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
        modules: that the run's environment and algorithm may be from, in addition to Troupe's own.
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
        modules: Collection[str] = (),
    ) -> None:
        self._place = Place(ctx, learner, name, security)
        self._name = name
        self._stop = stop
        self._slots_wanted = slots
        self._slots: list[int] = []
        self._join_timeout_s = join_timeout_s
        self._relay_directory = relay_directory
        self._modules = modules
        self._reports = TimingReports()
        self._usage = OwnUsage("actor")
        self._loop = watchdog.Loop(name)

    def run(self) -> None:
        """Act until the end. Raises `PeerError` where the learner or its parameters do not come in time."""
        try:
            welcome = self._join()
        except Stopped:
            return
        # Overwritten where all goes well: BYE says it, whichever exception leads there.
        reason = "failed"
        acting = self._acting
        # Joined already, so that what goes wrong from the first reset on can be reported.
        self._watch = EnvWatch(
            lambda: acting.envs, self._tell, self._config.actor.env_stall_s, busy=self._loop.turn
        )
        try:
            self._begin(welcome)
            while not self._done():
                self._loop.turn()
                acting.round()
                self._keep_in_touch()
            acting.finish()
            self._report()
            _log.info("%s ends after %d steps", self._name, acting.timing.steps)
            reason = "stopped" if self._stop else "the run is done"
        except Stopped:
            reason = "stopped"
        finally:
            self._watch.close()
            self._control.close(reason)
            acting.close()

    # -- joining --

    def _join(self) -> Welcome:
        """Join, make as many environments as the run's config says, and only then ask for as many slots.

        Making emulators may keep the whole process busy, its heartbeats included, for longer than a lease
        lasts.
        """
        # Without slots at first: see above. A lease that nobody uses would keep them from other actors.
        self._control = ControlClient(
            self._place.ctx,
            self._place.learner,
            role="actor",
            name=self._name,
            incarnation=new_incarnation(),
            connect_timeout_s=self._join_timeout_s,
            security=self._place.security,
            relay_directory=self._relay_directory,
        )
        try:
            # Twice: the first WELCOME brings the configuration, by which environments are made, the second
            # the slots.
            seen = self._welcome()
            # The agent's section is checked by who runs the network: others need no torch.
            self._config = config_from_dict(seen.config, typed_agent=False)
            watchdog.arm(self._config.run.hang_s)
            thinks = self._config.inference.mode == "local"
            check_modules(self._config, self._modules, "the run", thinks=thinks)
            wanted = self._slots_wanted or self._config.actor.slots
            if self._config.env.processes > 0:
                self._loop.min_s = RESTART_S
            with self._loop.long("its start"):  # which imports torch, and makes environments
                self._acting = self._make_acting()
                self._acting.prepare(wanted)
            self._control.want_slots(wanted)
            return self._welcome()
        except BaseException:
            # BYE at once: otherwise the name would be taken until the lease ends, and a second try refused.
            self._control.close("gave up waiting")
            raise

    def _welcome(self) -> Welcome:
        welcome = self._control.join_unless(self._gives_up)
        if welcome is None:
            raise Stopped
        return welcome

    def _gives_up(self) -> bool:
        """Whether to wait no longer; to wait, for slots or for a learner, is no hang."""
        self._loop.turn()
        return self._stop.requested

    def _make_acting(self) -> Acting:
        if self._config.inference.mode == "central":
            from troupe.services.actor.central_inference import CentralActing

            return CentralActing(self._config, self._place)
        from troupe.services.actor.local_inference import LocalActing

        return LocalActing(self._config, self._place)

    def _begin(self, welcome: Welcome) -> None:
        """Take the slots, and wait for what else acting needs: the first parameters."""
        self._joins = self._control.joins
        self._slots = welcome.slots
        self._acting.begin(self._control, welcome)
        _log.info(
            "%s acts in %d slots of %d, incarnation %x",
            self._name,
            len(self._slots),
            welcome.total_slots,
            self._control.incarnation,
        )
        deadline, wait_log = Deadline(self._config.net.connect_timeout_s), WaitLog()
        while not self._acting.ready():
            self._loop.turn()
            self._control.check()
            if self._done():
                raise Stopped
            if deadline.expired:
                raise PeerError(
                    f"{self._name} got no {self._acting.waits_for} from the learner at {self._place.learner} "
                    f"within {self._config.net.connect_timeout_s:.0f} s; see its log"
                )
            if wait_log.due():
                waits_for = self._acting.waits_for
                _log.info(
                    "%s waits for the first %s, %.0f s so far", self._name, waits_for, wait_log.waited_s
                )
            system.sleep(0.02)

    # -- in every round --

    def _done(self) -> bool:
        return self._stop.requested or self._control.state.stopping

    def _keep_in_touch(self) -> None:
        """Follow changes of slots, and report now and then."""
        self._control.check()
        if self._control.joins != self._joins:
            self._rejoin()
        if self._reports.due(self._control.report_s):
            self._report()

    def _report(self) -> None:
        staleness = max(0, self._control.state.version - self._acting.version)
        metrics, fields = self._reports.report(self._acting.timing, staleness)
        metrics |= self._watch.metrics() | self._usage.metrics()
        metrics["actor/slots"] = float(len(self._slots))
        if dropped := self._control.telemetry_dropped:
            metrics["actor/dropped_reports_total"] = float(dropped)
        health.report(metrics)
        at_once = MAX_NAMED_GAMES if fields.tasks else MAX_GAMES
        for first in range(0, max(1, len(fields.episodes)), at_once):
            self._control.send_telemetry(metrics, fields=fields.cut(first, first + at_once))
            # With the first part only: rates would otherwise be told several times.
            metrics = {}

    def _tell(self, metrics: dict[str, float], trouble: str) -> None:
        """What has gone wrong in an environment; from the watch's thread."""
        health.report(metrics)
        self._control.send_telemetry(metrics, fields=TelemetryFields(trouble=trouble))

    def _rejoin(self) -> None:
        """After joining again: possibly in other slots."""
        welcome = self._welcome()
        self._joins = self._control.joins
        mode = welcome.config.get("inference", {}).get("mode", "local")
        if mode != self._config.inference.mode:
            raise PeerError(f"the learner came back with inference.mode {mode}: restart {self._name}")
        before, self._slots = self._slots, welcome.slots
        if before != self._slots:
            _log.info("%s now has slots %s instead of %s", self._name, self._slots, before)
        self._acting.rejoin(welcome, before)
