"""One learner of several, in a process of its own: what it makes of its shares of the same batches."""

from pathlib import Path

import numpy as np
import torch

from tests.agents.contract import PIXELS, VECTORS
from tests.agents.replayed import batch_of, windows
from tests.agents.soft import CONTINUOUS, replayed
from troupe.common.agents import make_agent
from troupe.common.agents.base import Batch
from troupe.common.agents.learners.reduction import Reduction
from troupe.common.config.algorithms import agent_model
from troupe.common.envs import make_vector
from troupe.services.actor.local_inference import Rollout

ROWS = 9  # which neither two nor four learners divide evenly
UPDATES = 2

UNROLLS = {"unroll_steps": 5, "mlp_units": [16]}
PASSES = {**UNROLLS, "epochs": 2, "minibatch_steps": 12}
CASES = {
    "apex": ({"algorithm": "apex"}, "vectors"),
    "apex, quantiles of pixels": (
        {"algorithm": "apex", "quantiles": 8, "optimizer": "adam", "normalize_rewards": True},
        "pixels",
    ),
    "apex, noise": ({"algorithm": "apex", "noise": 0.5, "munchausen_alpha": 0.9}, "vectors"),
    "r2d2": (
        {
            "algorithm": "r2d2",
            "lstm_units": 8,
            "sequence_steps": 6,
            "sequence_period_steps": 3,
            "normalize_rewards": True,
        },
        "vectors",
    ),
    "sac": ({"algorithm": "sac", "normalize_vectors": True, "normalize_rewards": True}, "reals"),
    "sac, atoms": ({"algorithm": "sac", "atoms": 11, "layer_norm": True, "critics_count": "mean"}, "reals"),
    "sac, with memory": (
        {
            "algorithm": "sac",
            "lstm_units": 8,
            "sequence_steps": 6,
            "sequence_period_steps": 3,
            "normalize_rewards": True,
        },
        "vectors",
    ),
    "iql": ({"algorithm": "iql", "normalize_rewards": True}, "reals"),
    "td3": ({"algorithm": "td3"}, "reals"),
    "td3_bc": ({"algorithm": "td3_bc", "policy_period_updates": 1}, "reals"),
    "impala": (
        {"algorithm": "impala", **UNROLLS, "target_entropy": 0.5, "normalize_returns": True},
        "vectors",
    ),
    "impala, sums of pixels": ({"algorithm": "impala", "unroll_steps": 5, "loss_reduction": "sum"}, "pixels"),
    "pqn": ({"algorithm": "pqn", **PASSES}, "vectors"),
    "ppo": (
        {
            "algorithm": "policy_gradient",
            **PASSES,
            "normalize_vectors": True,
            "normalize_returns": True,
            "learning_rate_schedule": "kl",
            "entropy_target": 0.5,
        },
        "vectors",
    ),
    "ppo, with memory": (
        {"algorithm": "policy_gradient", **PASSES, "lstm_units": 8, "recompute_advantages": True},
        "vectors",
    ),
    "ppo, one step": (
        {"algorithm": "policy_gradient", **UNROLLS, "epochs": 1, "minibatch_steps": 0},
        "vectors",
    ),
}
"""Fields of the agent, and what it sees."""

ONE_STEP = {name for name in CASES if not name.startswith(("pqn", "ppo")) or name == "ppo, one step"}
"""Where an update is one step of the optimiser."""

ROUNDED = "impala, sums of pixels"
"""What is also learned with gradients in bfloat16."""


def agent_for(name):
    """The agent of a case, as every learner begins with it."""
    fields, sees = CASES[name]
    config = agent_model(fields["algorithm"])(**fields)
    if sees == "reals":
        return make_agent(config, CONTINUOUS, seed=3)
    env = make_vector(PIXELS if sees == "pixels" else VECTORS, 1, 0)
    env.close()
    return make_agent(config, env.spec, seed=3)


def made_batches(name):
    """What the learners share: fields, lengths and importance weights of each update."""
    agent, sees = agent_for(name), CASES[name][1]
    rng, items = np.random.default_rng(0), []
    if sees != "reals":
        env = make_vector(PIXELS if sees == "pixels" else VECTORS, 3, 0)
        rollout = Rollout(agent, env, 6, seed=0)
        rollout.explore([0, 1, 2], 3)
        while len(items) < ROWS * UPDATES:
            items += windows(rollout.step(version=0), agent.fields)
        env.close()
    for update in range(UPDATES):
        if sees == "reals":
            fields, lengths = replayed(CONTINUOUS, rng, ROWS), np.ones(ROWS, np.int32)
        else:
            fields, lengths = batch_of(items[update * ROWS : (update + 1) * ROWS])
        yield fields, lengths, rng.uniform(0.5, 1.0, ROWS).astype(np.float32)


def write_batches(directory):
    """Make the batches of all cases, once for all processes."""
    for number, name in enumerate(CASES):
        for update, (fields, lengths, weights) in enumerate(made_batches(name)):
            np.savez(directory / f"batch-{number}-{update}.npz", lengths_=lengths, weights_=weights, **fields)


def batches(name, directory):
    """Fields, lengths and weights of each update of a case."""
    number = list(CASES).index(name)
    for update in range(UPDATES):
        arrays = dict(np.load(directory / f"batch-{number}-{update}.npz"))
        lengths, weights = arrays.pop("lengths_"), arrays.pop("weights_")
        yield arrays, lengths, weights


def learned(name, reduction, rows, directory):
    """The first update's gradient, and the state after all, of a learner with these rows of each batch."""
    torch.set_num_threads(1)
    agent = agent_for(name)
    agent.learn_with(reduction)
    gradient = None
    for fields, lengths, weights in batches(name, directory):
        own = lengths[rows]
        # As replay hands them out: a window is as long as the longest item of the share needs.
        entries = {spec.name: spec.entries(int(own.max())) for spec in agent.fields}
        share = {key: array[rows, : entries[key]] for key, array in fields.items()}
        reduction.exchange(len(own))
        agent.update(Batch(share, weights[rows], own, progress=0.25))
        if gradient is None:
            grads = [each.grad for each in agent.net.parameters() if each.grad is not None]
            gradient = torch.cat([each.flatten() for each in grads]).numpy().copy()
    return {"gradient": gradient, **agent.state()[0]}


def share(rank, size):
    """The rows of a learner."""
    return slice(rank * ROWS // size, (rank + 1) * ROWS // size)


def learn_shares(rank, sizes, port, directory):
    """The body of a process: learns every case in groups of these sizes, and leaves what it has learned."""
    from torch.distributed import TCPStore

    from troupe.services.learner.peers.group import ProcessGroup

    directory = Path(directory)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    for size in sizes:
        if rank >= size:
            continue
        group = ProcessGroup(store, size, rank, size, "127.0.0.1", 300.0)
        for number, name in enumerate(CASES):
            arrays = learned(name, Reduction(group), share(rank, size), directory)
            np.savez(directory / f"{number}-{rank}-of-{size}.npz", **arrays)
        arrays = learned(ROUNDED, Reduction(group, bfloat16=True), share(rank, size), directory)
        np.savez(directory / f"rounded-{rank}-of-{size}.npz", **arrays)
        group.close()
