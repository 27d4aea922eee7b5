"""The arithmetic of soft actor-critics in numpy."""

import math

import numpy as np

from troupe.common.agents import make_agent
from troupe.common.agents.base import Batch
from troupe.common.envs import EnvSpec
from troupe.common.spaces import ActionSpec, Leaf

REALS = ActionSpec((Leaf(shape=(2,), dtype="float32", low=(-2.0, 0.0), high=(2.0, 5.0)),))


CONTINUOUS = EnvSpec("test:reals", (3,), "float32", REALS, 0, 1, False)


def several_of(*choices):
    return ActionSpec((Leaf(shape=(len(choices),), choices=choices, start=(0,) * len(choices)),))


SEVERAL = EnvSpec("test:several", (3,), "float32", several_of(2, 3), 0, 1, False)


DISCRETE = EnvSpec("test:choice", (3,), "float32", ActionSpec.discrete(4), 0, 1, False)


SIZE = 6


def replayed(spec, rng, size=SIZE):
    actions = rng.integers(0, 4, (size, 1)).astype(np.int32)
    if spec.actions.reals:
        actions = rng.uniform(-1, 1, (size, 1, 2)).astype(np.float32)
    elif not spec.actions.count:
        actions = rng.integers(0, spec.actions.choices, (size, 1, 2)).astype(np.int32)
    return {
        "obs": rng.normal(size=(size, 2, 3)).astype(np.float32),
        "action": actions,
        "reward": rng.normal(size=(size, 1)).astype(np.float32),
        "discount": np.array([[0.0], *[[0.9]] * (size - 1)], np.float32),
        "bootstrap_steps": np.ones((size, 1), np.uint8),
    }


def perceptron(arrays, name, x):
    """Layers of ReLU and a linear one, in numpy."""
    layers = sorted({key.rpartition(".")[0] for key in arrays if key.startswith(f"{name}.")})
    for layer in layers:
        x = x @ arrays[f"{layer}.weight"].T.astype(np.float64) + arrays[f"{layer}.bias"]
        x = x if layer == layers[-1] else np.maximum(x, 0)
    return x


def drawn(config, params, noise):
    """Squashed actions and the logs of their densities, in numpy."""
    mean, raw = np.split(params, 2, axis=1)
    shift = math.log(math.expm1(config.deviation_start - config.deviation_floor))
    deviation = config.deviation_floor + np.log1p(np.exp(raw + shift))
    action = np.tanh(mean + deviation * noise)
    normal = np.exp(-0.5 * noise**2) / (deviation * math.sqrt(2 * math.pi))
    return action, np.log(normal / (1 - action**2)).sum(1)


def moved(config, spec, updates=3):
    """An agent whose target network lies behind, a batch, and the arrays of its state by network."""
    rng = np.random.default_rng(0)
    agent = make_agent(config, spec, seed=7)
    for _ in range(updates):
        agent.update(Batch(replayed(spec, rng), np.ones(SIZE, np.float32)))
    arrays = {key: array.copy() for key, array in agent.state()[0].items()}
    parts = [
        {k.removeprefix(part): v for k, v in arrays.items() if k.startswith(part)}
        for part in ("net/", "target/")
    ]
    return agent, replayed(spec, rng), *parts


def close(got, wanted):
    np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=1e-5)
