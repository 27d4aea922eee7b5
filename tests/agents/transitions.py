"""Batches of transitions."""

import numpy as np

from troupe.common.envs import EnvSpec
from troupe.common.spaces import ActionSpec

VECTOR = EnvSpec("test:vector", (3,), "float32", ActionSpec.discrete(4), 0, 1, False)


PIXELS = EnvSpec("test:pixels", (4, 84, 84), "uint8", ActionSpec.discrete(6), 4, 4, True)


def batch_of(rng, spec, size, n=3):
    window = (spec.stack + n if spec.stack else 1 + n, *spec.obs_shape[1 if spec.stack else 0 :])
    obs = rng.integers(0, 255, (size, *window)).astype(spec.obs_dtype)
    steps = rng.integers(1, n + 1, (size, 1)).astype(np.uint8)
    return {
        "obs": obs,
        "action": rng.integers(0, spec.actions.count, (size, 1)).astype(np.int32),
        "reward": rng.normal(size=(size, 1)).astype(np.float32),
        "discount": np.where(rng.random((size, 1)) < 0.2, 0.0, 0.99**steps).astype(np.float32),
        "bootstrap_steps": steps,
    }
