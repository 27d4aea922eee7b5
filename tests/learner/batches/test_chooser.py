"""Candidates that the learner scores: its network as it is then chooses, whatever has carried them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.harness import LOOPBACK, Shard, insert, make_steps, until
from tests.learner.batches.mixed import FRESH, actor, make_config, running, sent
from troupe.common.agents import make_agent
from troupe.common.config import load_config
from troupe.common.data.candidates import STRATEGIES
from troupe.common.data.schema import Chunk
from troupe.common.envs import make_spec
from troupe.common.runtime import StopSignal
from troupe.common.wire.replay.client import ReplayClient
from troupe.common.wire.replay.sharded import ShardedReplayClient
from troupe.serial import SerialTraining
from troupe.services.learner.batches.chooser import Chooser
from troupe.services.learner.batches.usable import UsableItems

STEPS, ROWS, UNROLLS, LAMBDA = 20, 3, 40, 8
SCORED = {"scored_by": "learner", "candidates_max": LAMBDA, "capacity": UNROLLS}
FIELDS = {"agent.behaviour_features": "torso", "agent.see_last_step": "false", "agent.learning_rate": "0.05"}


def tables(name="default", sampler="elite", strategy="nearest", fresh=FRESH):
    """A queue, and a table that the learner scores."""
    fields = SCORED | {"name": name, "sampler": sampler, "strategy": strategy, "share": ROWS, "min_items": 4}
    text = ", ".join(f"{key} = {value!r}" for key, value in fields.items())
    return {"replay.tables": f"[{{{text}}}, {fresh}]", "replay.batch_size": str(ROWS + 2), **FIELDS}


def seen(params, obs):
    """What a network makes of observations `[..., 4]`, in numpy."""
    found = obs.astype(np.float64)
    for layer in (1, 3):
        if f"torso.layers.{layer}.weight" in params:
            weight, bias = (params[f"torso.layers.{layer}.{name}"] for name in ("weight", "bias"))
            found = np.tanh(found @ weight.T.astype(float) + bias)
    return found


def unroll(agent, rng):
    """An unroll by a network that is not the agent's, of random observations."""
    fields = {spec.name: np.zeros((spec.entries(STEPS), *spec.shape), spec.dtype) for spec in agent.fields}
    fields["obs"][:] = rng.normal(size=fields["obs"].shape)
    then = {name: value + rng.normal(size=value.shape) for name, value in agent.params().items()}
    fields["features"][:] = seen(then, fields["obs"][:STEPS])
    return Chunk(fields, STEPS, np.zeros(1, int), np.full(1, STEPS), np.ones(1))


def oracle(params, batch, rows, *, attentive, strategy, count):
    """Ids of the candidates in `rows` that these weights choose, worked out from the batch alone."""
    now = seen(params, batch.fields["obs"][rows, :STEPS])
    then = batch.fields["features"][rows].astype(float)
    ids, sampled = batch.ids[rows], batch.sampled[rows]
    if attentive:
        then, now, ids, sampled = now[-1, -1], now[:-1], ids[:-1], sampled[:-1]
    far = np.sqrt(((now - then) ** 2).sum(axis=(1, 2)))
    drawn = sorted(zip(far.tolist(), sampled.tolist(), ids.tolist(), strict=True))
    if strategy == "nearest":
        return sorted(each for _, _, each in drawn[:count])
    once = sorted({each: (distance, times, each) for distance, times, each in drawn}.values())
    size = len(once) // count
    groups = [once[i * size : (i + 1) * size] for i in range(count)]
    return sorted(
        each[2]
        for each in {
            "spread": [group[0] for group in groups],
            "least_sampled": sorted(once, key=lambda row: (row[1], row[0]))[:count],
            "spread_least_sampled": [min(group, key=lambda row: (row[1], row[0])) for group in groups],
        }[strategy]
    )


class Choosing:
    """A network that changes, and what it chooses; every choice is held against the oracle."""

    def __init__(self, sampler="elite", strategy="nearest"):
        config = load_config("cartpole-impala", None, tables("default", sampler, strategy), {})
        self.agent = make_agent(config.agent, make_spec(config.env), seed=1)
        self.rng = np.random.default_rng(2)
        self.how = {"attentive": sampler == "attentive", "strategy": strategy, "count": ROWS}
        self._chooser, self._usable = Chooser(config, self.agent), UsableItems(self.agent, lambda *told: None)
        self._before, self.changed = None, 0
        self.counts = {}

    def fill(self, client, count=UNROLLS):
        for _ in range(count):
            insert(client, unroll(self.agent, self.rng))
        assert client.flush(60)

    def pick(self, batch):
        """What is chosen of the usable items of a batch."""
        return self._chooser.choose(batch, self._usable.of(batch))

    def choose(self, client, batch, told=True):
        """One choice of a batch, and what it does to later draws."""
        assert batch.candidates == {"default"}
        assert len(batch.ids) == LAMBDA * ROWS + self.how["attentive"]
        times = [self.counts.get((batch.shard, each), 0) for each in batch.ids.tolist()]
        assert batch.sampled.tolist() == times, "how often each was chosen before, at its shard"
        params = {name: value.copy() for name, value in self.agent.params().items()}
        want = oracle(params, batch, slice(None), **self.how)
        if self._before is not None:
            self.changed += want != oracle(self._before, batch, slice(None), **self.how)
        every = self._usable.of(batch)
        chosen, usable, near = self._chooser.choose(batch, every)
        assert sorted(chosen.ids.tolist()) == want
        placed = {name: torch.from_numpy(array.copy()) for name, array in every.fields.items()}
        elsewhere = self._chooser.choose(batch, replace(every, placed=placed))[1]  # as on a GPU
        assert elsewhere.placed.keys() == usable.fields.keys()
        for name, tensor in elsewhere.placed.items():
            np.testing.assert_array_equal(tensor.numpy(), usable.fields[name])
        for name, array in usable.fields.items():
            where = [batch.ids.tolist().index(each) for each in chosen.ids.tolist()]
            np.testing.assert_array_equal(array, batch.fields[name][where], err_msg=name)
        now = seen(params, chosen.fields["obs"][:, :STEPS])
        off = np.sqrt(((now - chosen.fields["features"].astype(float)) ** 2).sum(axis=(1, 2)))
        np.testing.assert_allclose(near, 1 / (1 + off), rtol=1e-4)
        client.update(chosen, near, batch.candidates, chosen=True)
        client.recycle(batch)
        if told:
            for each in chosen.ids.tolist():
                self.counts[batch.shard, each] = self.counts.get((batch.shard, each), 0) + 1
        self._before = params
        moved = {name: value + 0.7 * self.rng.normal(size=value.shape) for name, value in params.items()}
        self.agent.load_params({name: value.astype(np.float32) for name, value in moved.items()})
        return want


@pytest.mark.parametrize(
    ("path", "sampler", "strategy"),
    [
        *zip(["mapped", "tcp"] * 2, ["elite"] * 4, STRATEGIES, strict=True),
        ("mapped", "attentive", "nearest"),
        ("tcp", "attentive", "least_sampled"),
    ],
)
def test_the_network_of_now_chooses(context, tmp_path, path, sampler, strategy):
    address = LOOPBACK if path == "tcp" else f"ipc://{tmp_path}/replay"
    shard = Shard(context, tmp_path / "data", address, sampler=sampler, strategy=strategy, **SCORED)
    client = ReplayClient(shard.endpoint, ctx=context, map_files=path == "mapped")
    choosing = Choosing(sampler, strategy)
    try:
        choosing.fill(client)
        for _ in range(12):
            choosing.choose(client, client.sample(ROWS))
        assert choosing.changed > 3, "the network before would have chosen others"
        assert len(choosing.counts) > ROWS
        assert bool(client.counters["mapped_batches"]) == (path == "mapped")
        status = client.status()["tables"]["default"]
        assert status["sampled_total"] == 12 * ROWS, "candidates do not count"
    finally:
        client.close(0)
        shard.end()


@pytest.mark.parametrize("sampler", ["elite", "attentive"])
def test_what_nobody_can_learn_from_is_not_chosen(context, tmp_path, sampler):
    shard = Shard(context, tmp_path / "data", f"ipc://{tmp_path}/replay", sampler=sampler, **SCORED)
    client, choosing = ReplayClient(shard.endpoint, ctx=context), Choosing(sampler)
    try:
        choosing.fill(client)
        batch = client.sample(ROWS)
        bad = choosing.choose(client, batch)[0]
        batch = client.sample(ROWS)
        batch.fields["features"][batch.ids == bad] = np.nan
        chosen, usable, _ = choosing.pick(batch)
        assert len(chosen.ids) == len(usable.lengths) == ROWS
        assert bad not in chosen.ids
        batch.fields["features"][:-1] = np.nan
        chosen, usable, near = choosing.pick(batch)
        assert len(chosen.ids) == len(usable.lengths) == len(near) == (sampler == "elite")
        assert chosen.weights(1.0).shape == chosen.ids.shape
        client.update(chosen, near, batch.candidates, chosen=True)
        assert client.status()["tables"]["default"]["sampled_total"] == 2 * ROWS
    finally:
        client.close(0)
        shard.end()


def test_the_network_of_now_chooses_from_several_shards_and_after_the_loss_of_one(context, tmp_path):
    make = {
        name: lambda name=name: Shard(
            context, tmp_path / name, f"ipc://{tmp_path}/{name}.socket", sampler="elite", **SCORED
        )
        for name in ("a", "b")
    }
    shards = {shard.endpoint: shard for shard in (start() for start in make.values())}
    client = ShardedReplayClient(list(shards), ctx=context, seed=1)
    choosing = Choosing("elite", "nearest")
    try:
        choosing.fill(client, 2 * UNROLLS)
        asked = []
        for _ in range(12):
            batch = client.sample(ROWS)
            asked.append(batch.shard)
            choosing.choose(client, batch)
        assert set(asked) == set(shards)
        batch = client.sample(ROWS)
        lost = batch.shard
        shards[lost].end()
        choosing.choose(client, batch, told=False)  # learned from, though nobody is left to count it
        for _ in range(6):
            batch = client.sample(ROWS)
            assert batch.shard != lost
            choosing.choose(client, batch)
        assert choosing.changed > 5
    finally:
        client.close(0)
        for shard in shards.values():
            if shard.alive:
                shard.end()


@pytest.mark.parametrize(("shards", "strategy"), [(1, "least_sampled"), (2, "nearest")])
def test_a_run_chooses_by_the_network_that_each_update_begins_with(tmp_path, context, shards, strategy):
    more = {"replay.shards": str(shards), "replay.durable": "none", "learner.prefetch": "1"}
    config = make_config(tmp_path, **{**tables("again", "elite", strategy), **more})
    with running(config, tmp_path, context) as (learning, updates):
        agent, chooser = learning.service.agent, learning.service.shares.chooser
        choose, checked, rng = chooser.choose, [], np.random.default_rng(1)

        def noted(batch, usable):
            params = {name: value.copy() for name, value in agent.params().items()}
            rows = batch.rows()["again"]
            want = oracle(params, batch, rows, attentive=False, strategy=strategy, count=ROWS)
            found = choose(batch, usable)
            checked.append((sorted(found[0].ids[found[0].rows()["again"]].tolist()), want, params))
            checked[-1] += (sorted(found[1].fields["obs"][:, 0, 0].tolist()), batch.sampled[rows])
            return found

        update = agent.update

        def compared(batch):
            params, obs = checked[-1][2], checked[-1][3]
            assert all(np.array_equal(params[name], value) for name, value in agent.params().items())
            assert sorted(batch.fields["obs"][:, 0, 0].tolist()) == obs
            assert batch.replayed.sum() == ROWS
            return update(batch)

        chooser.choose, agent.update = noted, compared
        with actor(config, context) as (control, outbox):
            for _ in range(43):
                outbox.put([unroll(agent, rng)])
                sent(outbox)
            make_steps(control, 43 * STEPS)
            assert outbox.finish(120) == 0
            until(lambda: control.state.steps >= 43 * STEPS)
        learning.join()
    assert len(checked) == len(updates) >= 19
    assert all(got == want for got, want, *_ in checked)
    assert not np.allclose(checked[0][2]["torso.layers.1.weight"], checked[-1][2]["torso.layers.1.weight"])
    assert max(sampled.max() for *_, sampled in checked) > 0, "the shard hears of the choice"


def test_a_training_in_one_process_scores_as_well(tmp_path):
    more = {"run.total_steps": "1600", "evaluator.enabled": "false", "actor.slots": "4"}
    config = load_config("cartpole-impala", None, {**tables("again", "attentive", "spread"), **more}, {})
    training = SerialTraining(config, tmp_path, StopSignal())
    sampled, close = [], training.replay.close
    table = training.replay.tables["again"]
    training.replay.close = lambda: (sampled.append(int(table.limiter.sampled)), close())
    training.run()
    assert training.counters.updates > 20
    assert sampled == [ROWS * training.counters.updates]
