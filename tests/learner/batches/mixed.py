"""A learner with a queue and a table that gives unrolls again."""

import contextlib
from pathlib import Path

import numpy as np

from tests.harness import InThread, until
from troupe.common.config import load_config
from troupe.common.data.schema import Chunk
from troupe.common.runtime import StopSignal
from troupe.common.wire.control.client import ControlClient
from troupe.common.wire.link import new_incarnation
from troupe.common.wire.replay.outbox import Outbox
from troupe.common.wire.replay.sharded import ShardedReplayClient
from troupe.services.learner.service import Learner
from troupe.services.replay.options import parse_serve
from troupe.services.replay.shard import serve

UNROLLS, STEPS = 43, 20


AGAIN = '{name = "again", sampler = "uniform", capacity = 40, min_items = 4, share = 3}'


FRESH = '{name = "fresh", limiter = "queue", capacity = 8, share = 2}'


class Serving:
    """A shard of a run, for `InThread`."""

    def __init__(self, config, folder: Path, index: int, context, stop):
        words = ["--bind", f"{config.net.replay}-{index}", "--data-dir", str(folder / f"shard-{index}")]
        words += ["--learner", config.net.control, "--index", str(index)]
        options, _ = parse_serve(words)
        self.run = lambda: serve(options, context, stop)


def make_config(tmp_path, **more):
    addresses = {f"net.{name}": f"ipc://{tmp_path}/{name}" for name in ("control", "announce", "replay")}
    fields = {
        "replay.tables": f"[{AGAIN}, {FRESH}]",
        "replay.batch_size": "5",
        "run.total_steps": str(UNROLLS * STEPS),
        "run.log_every_s": "0.01",
        "agent.mlp_units": "[4]",
        "evaluator.enabled": "false",
        "net.heartbeat_s": "0.2",
    }
    return load_config("cartpole-impala", None, {**fields, **addresses, **more}, {})


@contextlib.contextmanager
def running(config, tmp_path, context, resume=False):
    """A learner with its shards; gives the learner, and a list of what it learns from."""
    stop = StopSignal()
    learner, seen = Learner(config, tmp_path, resume=resume, stop=stop), []
    update = learner.agent.update

    def noted(batch):
        seen.append((batch.fields["reward"][:, 1].astype(int), batch.replayed))
        return update(batch)

    learner.agent.update = noted
    threads = [InThread(learner, stop)]
    for index in range(config.replay.shards):
        one = StopSignal()
        threads.append(InThread(Serving(config, tmp_path, index, context, one), one))
    try:
        yield threads[0], seen
    finally:
        for thread in threads:
            thread.end()


def sent(outbox):
    """Wait until all that is in it has gone."""
    until(lambda: not outbox.waiting, step=lambda: outbox.pump(50), why=lambda: outbox.reason)


def unroll(agent, number, **values):
    """An unroll whose rewards are its number, with `values` instead of zeros."""
    fields = {spec.name: np.zeros((spec.entries(STEPS), *spec.shape), spec.dtype) for spec in agent.fields}
    for name, value in {"reward": number, **values}.items():
        fields[name][:] = value
    return Chunk(fields, STEPS, np.zeros(1, int), np.full(1, STEPS), np.ones(1), version=number)


@contextlib.contextmanager
def actor(config, context):
    """A client of the learner, and an outbox as actors have."""
    incarnation = new_incarnation()
    control = ControlClient(
        context, config.net.control, role="actor", name="actor-0", incarnation=incarnation, slots_wanted=4
    )
    replay = ShardedReplayClient(ctx=context, name="actor-0", incarnation=incarnation, tolerate_refusals=True)
    try:
        control.join(60.0)
        until(lambda: len(control.shards) == config.replay.shards)
        replay.set_shards(control.shards)
        yield control, Outbox(replay, *config.replay.shares())
    finally:
        control.close()
        replay.close()
