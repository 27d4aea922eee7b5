"""Central inference: the actor only steps environments; the learner runs the network and keeps the chunks."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from troupe.common import system
from troupe.common.config import Config
from troupe.common.envs import VectorEnv, copy_slots, make_vector
from troupe.common.envs.base import split_slots
from troupe.common.envs.transfer import pack_start, pack_step
from troupe.common.errors import PeerError
from troupe.common.wire.control.client import ControlClient, Welcome
from troupe.common.wire.sockets import WaitLog, reachable_endpoint
from troupe.services.actor.acting import ROUND_S, Place
from troupe.services.actor.inference_client import Answer, InferenceClient
from troupe.services.actor.timing import Timing

_log = logging.getLogger(__name__)

HOLD_S = 0.05
"""Longest wait for the learner to permit more steps before the actor looks at everything else."""


@dataclass
class EnvGroup:
    """Environments that step together; while the learner chooses for one group, another is stepped."""

    slots: list[int]
    env: VectorEnv
    obs: np.ndarray
    """`[S, *obs_shape]`, the newest."""


class CentralActing:
    """See `troupe.services.actor.acting.Acting`."""

    def __init__(self, config: Config, place: Place) -> None:
        self.waits_for = "actions"
        self.timing = Timing()
        self.version = -1
        self._config = config
        self._per_copy = copy_slots(config.env)
        self._place = place
        self._envs: list[VectorEnv] = []
        self._groups: list[EnvGroup] = []
        self._held: list[Answer] = []  # actions that the run has no steps for yet
        self._client: InferenceClient | None = None
        self._wait_log: WaitLog | None = None

    @property
    def envs(self) -> list[VectorEnv]:
        """One for each group."""
        return self._envs

    def prepare(self, slots: int) -> None:
        """Make an environment for each group."""
        self._close_envs()
        sizes = [len(part) for part in self._split(list(range(slots)))]
        config = self._config
        for size in sizes:
            env = make_vector(config.env, size, config.run.seed, config.actor.env_threads)
            # Slots are numbered over the whole process, so that the watch names the one that hangs.
            env.calls.number_from(sum(each.num_slots for each in self._envs))
            self._envs.append(env)

    def _split(self, slots: list[int]) -> list[list[int]]:
        parts = split_slots(len(slots), self._config.actor.groups, self._per_copy)
        return [[slots[place] for place in part] for part in parts]

    def begin(self, control: ControlClient, welcome: Welcome) -> None:
        """Reset the environments and tell the learner where its slots begin."""
        self._control = control
        parts = self._split(welcome.slots)
        if [env.num_slots for env in self._envs] != [len(part) for part in parts]:
            self.prepare(len(welcome.slots))
        # Kept over a rejoin: its request numbers have to grow over the whole life of the process.
        self._client = self._client or InferenceClient(
            self._place.ctx,
            self._endpoint(welcome),
            name=self._place.name,
            incarnation=control.incarnation,
            liveness_s=welcome.liveness_s,
            security=self._place.security,
        )
        self._client.forget()  # with fewer slots there may be fewer groups, of which some had asked
        self._held = []
        self.waits_for = f"actions (of {self._endpoint(welcome)})"
        self._groups = []
        for slots, env in zip(parts, self._envs, strict=True):
            env.assign(slots, welcome.total_slots)
            self._groups.append(EnvGroup(slots, env, env.reset(welcome.seed(control.incarnation, slots[0]))))
        self._begin_all()
        _log.info(
            "%s asks the learner at %s for actions, in groups of %s slots",
            self._place.name,
            self._endpoint(welcome),
            "+".join(str(len(part)) for part in parts),
        )

    def _endpoint(self, welcome: Welcome) -> str:
        if not welcome.inference:
            raise PeerError(f"the learner offers no central inference: restart {self._place.name}")
        return reachable_endpoint(welcome.inference, self._place.learner)

    def _begin_all(self) -> None:
        for index in range(len(self._groups)):
            self._begin(index)

    def _begin(self, index: int) -> None:
        group = self._groups[index]
        self._asking.begin(index, group.slots, pack_start(group.obs))

    @property
    def _asking(self) -> InferenceClient:
        assert self._client is not None
        return self._client

    def ready(self) -> bool:
        """Whether the learner has chosen actions, or lets us wait for replay."""
        self.round()
        return self._asking.answered

    def round(self) -> None:
        """Step the groups whose actions have come, waiting for at most `ROUND_S`; or hold those back."""
        began_s = system.perf_counter()
        # Not waiting while actions are held: they may be permitted at any moment.
        answers = self._held + self._asking.poll(0 if self._held else round(ROUND_S * 1000))
        self._held = []
        self.timing.inference_s += system.perf_counter() - began_s
        if not answers:
            self._say_who_waits()
            return
        self._wait_log = None
        for answer in answers:
            if answer.actions is None:
                self._begin(answer.group)
            elif self._control.may_step(len(answer.actions), HOLD_S):
                self._step(answer, answer.actions)
            else:
                self._held.append(answer)

    def _step(self, answer: Answer, actions: np.ndarray) -> None:
        group, timing = self._groups[answer.group], self.timing
        # Before the environment gets them: an emulator takes any number for an action, or ends the process.
        fault = group.env.spec.actions.fault(actions, len(group.slots))
        if fault:
            raise PeerError(f"the learner sent {fault}: expected actions for {len(group.slots)} slots")
        self.version = answer.version
        began_s = system.perf_counter()
        step = group.env.step(actions)
        stepped_s = system.perf_counter()
        group.obs = step.obs
        # Before the books are kept below: the learner can choose meanwhile.
        self._asking.go_on(answer.group, pack_step(step, group.env.spec.stack))
        timing.take(step.episodes, group.slots)
        timing.steps += len(actions) - len(step.idle)
        self._control.report_steps(timing.steps)
        timing.calls += 1
        timing.env_s += stepped_s - began_s
        timing.accumulate_s += system.perf_counter() - stepped_s

    def _say_who_waits(self) -> None:
        self._wait_log = self._wait_log or WaitLog()
        if self._wait_log.due():
            _log.info(
                "%s waits for the learner's actions, %.0f s so far (%s)",
                self._place.name,
                self._wait_log.waited_s,
                self._asking.wait_reason or "no answer",
            )

    def rejoin(self, welcome: Welcome, before: list[int]) -> None:
        """Go on in these slots. Games go on; what the network remembers of them begins anew."""
        self._asking.move(self._endpoint(welcome))
        if welcome.slots == before:
            return
        # Where slots differ in their levels, games begin anew in those of the new ones.
        if len(welcome.slots) != len(before) or self._envs[0].spec.tasks:
            self.begin(self._control, welcome)
        # As many as before: the environments stay, and only their exploration is another.
        else:
            for group, slots in zip(self._groups, self._split(welcome.slots), strict=True):
                group.slots = slots
            self._held = []
            self._begin_all()

    def finish(self) -> None:
        """The learner has what there is, and hands it to replay when we have left."""

    def close(self) -> None:
        """Close environments and connections."""
        self._close_envs()
        if self._client is not None:
            self._client.close()

    def _close_envs(self) -> None:
        for env in self._envs:
            env.close()
        self._envs = []
