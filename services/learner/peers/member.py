"""A learner that joins another's run: it shares the batches, and publishes and records nothing."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence

import torch
import zmq

from troupe.common import system
from troupe.common.agents import make_agent
from troupe.common.agents.tensors import check_device
from troupe.common.envs import make_spec
from troupe.common.machine import usable_cores
from troupe.common.permits import permitted_config
from troupe.common.runtime import Deadline, StopSignal, health
from troupe.common.wire.control.client import ControlClient
from troupe.common.wire.link import new_incarnation
from troupe.common.wire.sockets import Security
from troupe.services.learner.batches.mixture import Mixture
from troupe.services.learner.batches.prefetch import Prefetcher
from troupe.services.learner.batches.staging import staging_for
from troupe.services.learner.control.budget import StepBudget
from troupe.services.learner.peers.network import check_machine, own_address
from troupe.services.learner.peers.seats import GivenSeats
from troupe.services.learner.peers.shares import Lesson, Shares, Wish
from troupe.services.learner.peers.team import Rules, Team
from troupe.services.learner.saving.counters import RunCounters

_log = logging.getLogger(__name__)

FAREWELL_S, FAREWELL_UPDATES, MAX_FAREWELL_S = 10.0, 5, 40.0
"""How long it waits for the others to go on without it, and for so many updates: all learn meanwhile. No
longer than that: who has asked for the end kills it in the end."""
POLL_S = 0.25
"""How long it waits for rows before it tells the others that it has none."""


class Rounds:
    """Rounds in which there may be an update; the others hear from this learner once in each."""

    def __init__(self, learn: Callable[[], Lesson | None]) -> None:
        """Have made none. `learn` makes one, and returns None where there was no update in it."""
        self._learn = learn
        self._took_s: deque[float] = deque([0.0], maxlen=4)  # those with an update

    def learn(self) -> None:
        """Make one."""
        began_s = system.monotonic()
        if self._learn() is not None:
            self._took_s.append(system.monotonic() - began_s)

    def leave(self, let_go: Callable[[], bool]) -> None:
        """Go on until the others `let_go`, or that takes far longer than the last updates tell."""
        farewell = Deadline(min(FAREWELL_S + FAREWELL_UPDATES * max(self._took_s), MAX_FAREWELL_S))
        while not (let_go() or farewell.expired):
            self.learn()


class JoinedLearner:
    """Shares the batches of the run at an address until that ends, or a stop is asked for."""

    def __init__(
        self,
        address: str,
        name: str,
        stop: StopSignal,
        *,
        device: str = "",
        join_timeout_s: float = 60.0,
        security: Security,
        modules: Sequence[str] = (),
    ) -> None:
        """Prepare to join; nothing is connected before `run`.

        Args:
            address: of the control port of the learner that has the run.
            name: unique in the run.
            stop: asks for the end.
            device: of torch; that of the run if empty.
            join_timeout_s: patience with the other learner.
            security: with the key of a learner.
            modules: of other makes that the run may name.
        """
        self._address, self._name, self._stop = address, name, stop
        self._device, self._join_timeout_s = device, join_timeout_s
        self._security, self._modules = security, modules

    def run(self) -> None:
        """Join, and learn until the end. Raises `TroupeError` where the run refuses it."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        control = ControlClient(
            context,
            self._address,
            role="learner",
            name=self._name,
            incarnation=new_incarnation(),
            connect_timeout_s=self._join_timeout_s,
            security=self._security,
        )
        try:
            welcome = control.join_unless(lambda: self._stop.requested)
            if welcome is not None:
                self._learn(context, control, welcome.config)
        finally:
            control.close("done" if not self._stop.requested else "stopped")
            context.destroy(linger=1000)

    def _learn(self, context: zmq.Context, control: ControlClient, values: dict) -> None:
        config = permitted_config(values, self._modules, "the run")
        check_machine(self._address, config.net.learner_network)
        own_address(config.net.learner_network)  # before anything is made: it may have none there
        device = self._device or config.learner.device
        check_device(device)
        torch.set_num_threads(config.torch_threads("learner", usable_cores()))
        spec = make_spec(config.env)
        agent = make_agent(config.agent, spec, seed=config.run.seed, device=device)
        counters = RunCounters(spec.frames_per_step, StepBudget(config.run.total_steps))
        mixture = Mixture(config)
        prefetch = Prefetcher(
            context,
            lambda: control.shards,
            kept=mixture.kept,
            depth=config.learner.prefetch,
            name=self._name,
            fields=agent.fields,
            staging=staging_for(device),
            security=self._security,
        )
        seats = GivenSeats(control, config.net.learner_network, config.net.liveness_s)
        team = Team(agent, counters, seats, Rules.of(config, owner=False))
        shares = Shares(config, agent, prefetch, mixture, team)
        rounds = Rounds(lambda: shares.learn(POLL_S, Wish))
        prefetch.start()
        try:
            while not (self._stop or control.state.stopping):
                control.check()
                rounds.learn()
                if team.learners or health.ready()[0]:
                    health.report({"learner/updates": counters.updates, "learner/learners": team.learners})
            if not control.state.stopping:
                _log.info("%s asks the others to continue without it", self._name)
                rounds.leave(team.let_go)
            why = "stopped" if self._stop else "the run ends"
            _log.info("%s stops after update %d: %s", self._name, counters.updates, why)
        finally:
            team.close()
            prefetch.stop()
