"""Local inference: the actor runs the network, cuts chunks, and inserts them itself."""

from __future__ import annotations

import logging

import numpy as np
import torch

from troupe.common import system
from troupe.common.agents import Act, Agent, make_agent
from troupe.common.agents.base import check_returned
from troupe.common.agents.formats import faster_dtype
from troupe.common.agents.hindsight import Hindsight, hindsight_of
from troupe.common.agents.network import NetworkAgent
from troupe.common.agents.opponents import Opponents
from troupe.common.agents.pace import HELD_LIMIT_S, Pace
from troupe.common.agents.slots import Slots
from troupe.common.config import Config, config_from_dict
from troupe.common.data.schema import Chunk, stored_as
from troupe.common.envs import Episode, VectorEnv, make_vector
from troupe.common.machine import usable_cores
from troupe.common.nets.torsos import compute_in
from troupe.common.wire.control.client import ControlClient, Params, Welcome
from troupe.common.wire.replay.outbox import Outbox
from troupe.common.wire.replay.sharded import ShardedReplayClient
from troupe.common.wire.sockets import WaitLog, reachable_endpoint
from troupe.services.actor.acting import Place
from troupe.services.actor.timing import Blocked, Timing

_log = logging.getLogger(__name__)

FLUSH_TIMEOUT_S = 3.0
PUMP_MS = 50
HELD_MS = 2


class Rollout:
    """Acts in all slots at once and cuts what happened into chunks; `timing.steps` counts every slot."""

    def __init__(
        self,
        agent: Agent,
        env: VectorEnv,
        chunk_steps: int,
        seed: int,
        timing: Timing | None = None,
        hindsight: Hindsight | None = None,
        pace: Pace | None = None,
        opponents: Opponents | None = None,
    ) -> None:
        self.env = env
        self.timing = timing or Timing()
        self._agent = agent
        self._opponents = opponents
        if opponents is not None:
            opponents.begin(env.num_slots)
            self.timing.opponents = opponents.metrics
        # Two streams, one for exploration and one for games: from one number they would be correlated.
        seeds = np.random.SeedSequence(seed).generate_state(2)
        self._rng = system.generator(int(seeds[0]))
        self._slots = Slots(agent, env.reset(int(seeds[1])), chunk_steps, hindsight, pace)
        self._numbers = list(range(env.num_slots))

    @property
    def episodes(self) -> list[Episode]:
        """Games that finished since the caller last cleared the list."""
        return self.timing.episodes

    @property
    def epsilons(self) -> np.ndarray:
        """Exploration of each slot, `[S]` float32."""
        return self._slots.epsilons

    def explore(self, slots: list[int], total_slots: int) -> None:
        """Take over the exploration of these `slots` of the run, one for each environment."""
        self._numbers = list(slots)
        self._slots.explore(slots, total_slots)

    def step(self, version: int) -> list[Chunk]:
        """One step of every slot with the current parameters, number `version`; the chunks it completed."""
        start = system.perf_counter()
        inputs, epsilons, opponents = self._slots.inputs, self._slots.epsilons, self._opponents
        act = self._agent.act(inputs, epsilons, self._rng)
        check_returned(self._agent, "act", act, Act)
        others: list[int] = []
        if opponents is not None:
            act = opponents.act(act, inputs, epsilons, self._agent, version)
            others = opponents.slots
        acted = system.perf_counter()
        step = self.env.step(act.action)
        stepped = system.perf_counter()
        chunks = self._slots.take(act, step, version, others)
        if opponents is not None:
            opponents.take(step)
        timing = self.timing
        timing.take([episode for episode in step.episodes if episode.slot not in others], self._numbers)
        timing.steps += self.env.num_slots - len({*step.idle, *others})
        timing.calls += 1
        timing.inference_s += acted - start
        timing.env_s += stepped - acted
        timing.accumulate_s += system.perf_counter() - stepped
        return chunks

    def choose_dtype(self, wanted: str) -> None:
        """Compute as `wanted`, a value of `actor.compute_dtype`, where the network has convolutions."""
        agent = self._agent
        if not isinstance(agent, NetworkAgent) or not compute_in(agent.net, torch.float32):
            return
        rng = system.generator(0)  # its own: what is played does not depend on how often is tried

        def step(dtype: torch.dtype) -> None:
            compute_in(agent.net, dtype)
            agent.act(self._slots.inputs, self._slots.epsilons, rng)

        # By the processor's time: nothing else runs in this process yet, and others do on this machine.
        of, clock = "acting", system.process_time
        chosen = faster_dtype(wanted, agent.device, step, of=of, what="a step of all slots", clock=clock)
        compute_in(agent.net, chosen)

    def flush(self) -> list[Chunk]:
        """What can be inserted of the running episodes."""
        return self._slots.flush()


class LocalActing:
    """See `troupe.services.actor.acting.Acting`."""

    waits_for = "parameters"

    def __init__(self, config: Config, place: Place) -> None:
        self.timing = Timing()
        self.version = -1
        # With the agent's section checked, which imports the algorithm.
        self._config = config_from_dict(config.to_dict())
        self._place = place
        self._steps_with_params = 0
        self._blocked = Blocked(self.timing)
        self._wait_log: WaitLog | None = None
        self._held_since_s: float | None = None
        torch.set_num_threads(self._config.torch_threads("actor", usable_cores()))

    @property
    def envs(self) -> list[VectorEnv]:
        """The one of all slots."""
        return [self._env]

    def prepare(self, slots: int) -> None:
        """Make environments and network."""
        self._env = self._make_env(slots)
        self._agent = make_agent(self._config.agent, self._env.spec, seed=self._config.run.seed)

    def _make_env(self, slots: int) -> VectorEnv:
        # The seed is given when the slots are known, at reset.
        return make_vector(self._config.env, slots, self._config.run.seed, self._config.actor.env_threads)

    def begin(self, control: ControlClient, welcome: Welcome) -> None:
        """Act in the granted slots, as soon as there are parameters."""
        replay, actor = self._config.replay, self._config.actor
        self._control = control
        self._replay = ShardedReplayClient(
            ctx=self._place.ctx,
            name=self._place.name,
            incarnation=control.incarnation,
            specs=stored_as(replay.compression, self._agent.fields),
            max_outstanding=max(1, actor.max_outstanding_inserts // replay.shards),
            security=self._place.security,
            tolerate_refusals=True,
        )
        self._outbox = Outbox(self._replay, *replay.shares())
        seed = welcome.seed(control.incarnation, welcome.slots[0], 1)  # apart from that of the rollout
        self._opponents = Opponents.of(self._config, self._env.spec, seed)
        self._take_slots(welcome)
        threads = torch.get_num_threads()
        _log.info("%s runs the network locally, with %d torch threads", self._place.name, threads)

    def _take_slots(self, welcome: Welcome) -> None:
        if self._env.num_slots != len(welcome.slots):
            self._env.close()
            self._env = self._make_env(len(welcome.slots))
        self._env.assign(welcome.slots, welcome.total_slots)
        seed = welcome.seed(self._control.incarnation, welcome.slots[0])
        chunk_steps = self._config.actor.chunk_steps
        hindsight = hindsight_of(self._config, self._env.spec)
        self._pace = Pace.of(self._config, len(welcome.slots))
        self.rollout = Rollout(
            self._agent,
            self._env,
            chunk_steps,
            seed,
            self.timing,
            hindsight,
            self._pace,
            self._opponents,
        )
        self.rollout.explore(welcome.slots, welcome.total_slots)
        self.rollout.choose_dtype(self._config.actor.compute_dtype)

    def ready(self) -> bool:
        """Whether there are parameters; a fetch goes on in the background."""
        if self.version < 0:
            params = self._control.params_if_newer(-1)
            if params is not None:
                self._load(params)
        return self.version >= 0

    def round(self) -> None:
        """One step of all slots, unless replay does not take what there is already, or the run has no more.

        Then everything stands still: nothing is dropped, nothing piles up here.
        """
        learner = self._place.learner
        # Every round: shards come and go, and an unchanged list costs a comparison.
        self._replay.set_shards([reachable_endpoint(shard, learner) for shard in self._control.shards])
        blocked = self._outbox.waiting > 0
        self._blocked.set(blocked)
        if blocked:
            self._outbox.pump(timeout_ms=PUMP_MS)
            self._say_who_waits()
            return
        if self._held():
            return
        self._wait_log = None
        if not self._control.may_step(self._env.num_slots, PUMP_MS / 1000):
            self._outbox.pump()  # what is complete goes on its way while the learner counts
            return
        chunks = self.rollout.step(self.version)
        self._control.report_steps(self.timing.steps)
        self.timing.chunks += len(chunks)
        # Before the chunks leave: what the learner makes of them must not be what the next round acts with,
        # now and then, where `max_staleness` has acting one version behind.
        self._refresh_params()
        self._outbox.put(chunks)
        if chunks:
            self.timing.packed(self._replay.counters)

    def _held(self) -> bool:
        """Whether acting has to wait for newer parameters."""
        if self._pace is None or not self._pace.holds(self.version):
            self._held_since_s = None
            return False
        now_s = system.monotonic()
        self._held_since_s = self._held_since_s or now_s
        # Another actor may have died with its part of the batch: without its unrolls no version would ever
        # come.
        if now_s - self._held_since_s > HELD_LIMIT_S:
            _log.info("%s keeps acting with version %d: no newer one arrived", self._place.name, self.version)
            self._pace.release()
        params = self._control.params_if_newer(self.version)
        if params is not None:
            self._load(params)
        else:
            self._outbox.pump(HELD_MS)
            system.sleep(HELD_MS / 1000)
        # Asked again, so that a version that has just come is acted on in this round.
        return self._pace.holds(self.version)

    def _say_who_waits(self) -> None:
        self._wait_log = self._wait_log or WaitLog()
        if self._wait_log.due():
            reason = self._outbox.reason
            _log.info(
                "%s waits for replay, %.0f s so far (%s)", self._place.name, self._wait_log.waited_s, reason
            )

    def _refresh_params(self) -> None:
        """Take newer parameters, at most once in `params_period_steps`; the fetch runs in the background."""
        self._steps_with_params += 1
        if self._pace is not None and not self._pace.between_batches:
            # They change between batches only, so that every row is of one version; here by then, at best.
            self._control.want_params()
            return
        if self._steps_with_params >= self._config.actor.params_period_steps:
            params = self._control.params_if_newer(self.version)
            if params is not None:
                self._load(params)

    def _load(self, params: Params) -> None:
        self._agent.load_params(params.params)
        self.version = params.version
        self._steps_with_params = 0

    def rejoin(self, welcome: Welcome, before: list[int]) -> None:
        """Other slots mean other exploration, and possibly other levels or fewer environments."""
        if welcome.slots == before:
            return
        # Where slots differ in their levels, games begin anew in those of the new ones.
        if len(welcome.slots) == len(before) and not self._env.spec.tasks:
            self.rollout.explore(welcome.slots, welcome.total_slots)
            return
        self._outbox.put(self.rollout.flush())
        self._take_slots(welcome)

    def finish(self) -> None:
        """Send what is complete. Bounded: a peer that is gone must not hold us up."""
        self._outbox.put(self.rollout.flush())
        lost = self._outbox.finish(FLUSH_TIMEOUT_S)
        if lost:
            reason = self._outbox.reason
            _log.info(
                "%s stops with %d chunks that replay did not accept (%s)", self._place.name, lost, reason
            )

    def close(self) -> None:
        """Close environments and connections."""
        self._env.close()
        self._replay.close()
