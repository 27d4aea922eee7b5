"""An agent and environments whose games are known beforehand."""

import numpy as np

from troupe.common.agents import Act
from troupe.common.config import EnvConfig
from troupe.common.envs import EnvSpec, Episode, Step
from troupe.common.spaces import ActionSpec
from troupe.services.evaluator.games import play

SPEC = EnvSpec("test:fake", (1,), "float32", ActionSpec.discrete(2), 0, 1, False)


class FakeAgent:
    """Remembers what it was asked."""

    eval_epsilon = 0.0
    memory_size = 1

    def __init__(self):
        self.batches = []
        self.inputs = []

    def act(self, inputs, epsilon, rng):
        slots = len(inputs.obs)
        self.batches.append(slots)
        self.inputs.append(inputs)
        assert epsilon.shape == (slots,)
        return Act(np.ones(slots, np.int64), memory=np.where(inputs.first[:, None], 1, inputs.memory + 1))


class FakeVector:
    """Slot s plays games of (s + 1) * 3 steps that return their length."""

    def __init__(self, config, num_slots, seed, threads=1, *, evaluation=False):
        assert evaluation
        self.num_slots = num_slots
        self.spec = SPEC
        self.time = np.zeros(num_slots, int)
        self.closed = False
        FakeVector.last = self

    steps_per_s = 15.0
    restarts_total = 0

    def assign(self, slots, total_slots):
        assert list(slots) == list(range(self.num_slots))

    def reset(self):
        return np.zeros((self.num_slots, 1), np.float32)

    def step(self, actions):
        self.time += 1
        ended = [s for s in range(self.num_slots) if self.time[s] % ((s + 1) * 3) == 0]
        episodes = [Episode(s, float((s + 1) * 3), (s + 1) * 3, 0) for s in ended]
        terminated = np.isin(np.arange(self.num_slots), ended)
        none = np.zeros(self.num_slots, bool)
        return Step(self.reset(), self.time.astype(np.float32), terminated, none, {}, episodes)

    def render_frame(self, slot):
        return np.full((10, 10, 3), self.time[slot], np.uint8)

    def close(self):
        self.closed = True


def run(agent, **options):
    defaults = {"episodes": 4, "slots": 2, "seed": 0, "epsilon": 0.0, "max_episode_frames": 100}
    return play(agent, EnvConfig(), **(defaults | options))
