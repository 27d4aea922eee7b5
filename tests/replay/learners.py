"""A learner that draws from shards."""

import numpy as np

from tests.harness import InThread
from troupe.common.config import load_config
from troupe.common.data.schema import Chunk
from troupe.common.runtime import StopSignal
from troupe.services.learner.service import Learner


def learnable(specs, items, *, length=1, priority=1.0, **values):
    """A chunk of items of `length` steps as Ape-X stores them, with `values` instead of the usual ones."""
    steps = items + length - 1
    fields = {spec.name: np.zeros((spec.entries(steps), *spec.shape), spec.dtype) for spec in specs}
    fields["bootstrap_steps"][:] = 1
    for name, value in values.items():
        fields[name][:] = value
    lengths = np.full(items, length, np.int32)
    return Chunk(fields, steps, np.arange(items, dtype=np.int32), lengths, np.full(items, priority))


def run_learner(tmp_path, run_dir, *, resume=False):
    """A real learner in a thread, in `run_dir`."""
    addresses = {f"net.{name}": f"ipc://{tmp_path}/{name}" for name in ("control", "announce")}
    small = {"agent.mlp_units": "[8]", "agent.hidden_units": "8", "net.heartbeat_s": "0.2"}
    run_dir.mkdir(exist_ok=True)
    stop = StopSignal()
    config = load_config("cartpole-apex", None, {**small, **addresses}, {})
    return InThread(Learner(config, run_dir, resume=resume, stop=stop), stop)
