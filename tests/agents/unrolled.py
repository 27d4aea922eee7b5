"""Batches of unrolls, and what makes them."""

import numpy as np

from tests.agents.in_process import stacked_fields
from troupe.common.data.schema import check_chunk
from troupe.common.envs import EnvSpec, make_vector
from troupe.common.spaces import ActionSpec
from troupe.services.actor.local_inference import Rollout

VECTOR = EnvSpec("test:vector", (3,), "float32", ActionSpec.discrete(4), 0, 1, False)


SMALL = {"mlp_units": (8,), "hidden_units": 8, "unroll_steps": 5}


def unrolls_of(agent, env_config, slots, count, seed=0):
    """The first `count` unrolls of an agent that acts in an environment."""
    rollout, chunks = Rollout(agent, make_vector(env_config, slots, seed), 0, seed), []
    rollout.explore(list(range(slots)), slots)
    while len(chunks) < count:
        chunks += rollout.step(0)
    for chunk in chunks:
        check_chunk(chunk, agent.fields)
    return stacked_fields(chunks[:count])


def random_batch(rng, agent, size):
    spec, steps = agent.spec, agent.config.unroll_steps
    batch = {}
    for field in agent.fields:
        batch[field.name] = rng.normal(size=(size, field.entries(steps), *field.shape)).astype(field.dtype)
    batch["action"] = rng.integers(0, spec.actions.count, batch["action"].shape).astype(np.int32)
    batch["ended"] = rng.choice([0, 1, 2], batch["ended"].shape, p=[0.6, 0.2, 0.2]).astype(np.uint8)
    return batch
