"""A real learner and real shards: batches from a queue and from a table that gives unrolls again."""

import csv

import numpy as np
import pytest

from tests.harness import make_steps, until
from tests.learner.batches.mixed import (
    AGAIN,
    FRESH,
    STEPS,
    UNROLLS,
    actor,
    make_config,
    running,
    sent,
    unroll,
)
from troupe.common.config import load_config
from troupe.services.learner.batches.mixture import Mixture
from troupe.services.replay.storage.records import PRIORITY


@pytest.mark.parametrize("shards", [1, 2])
def test_every_unroll_is_fresh_once_and_then_replayed(tmp_path, context, shards):
    config = make_config(tmp_path, **{"replay.shards": str(shards), "replay.durable": "none"})
    with running(config, tmp_path, context) as (learning, seen):
        with actor(config, context) as (control, outbox):
            for number in range(1, UNROLLS + 1):
                outbox.put([unroll(learning.service.agent, number)])
                sent(outbox)
            make_steps(control, UNROLLS * STEPS)
            assert outbox.finish(120) == 0
            until(lambda: control.state.steps >= UNROLLS * STEPS)
        learning.join()
    fresh = np.concatenate([numbers[~replayed] for numbers, replayed in seen])
    assert len(fresh) == len(set(fresh)), "an unroll came from the queue twice"
    # All but what fills no batch of a shard.
    assert UNROLLS - 2 * shards < len(fresh) <= UNROLLS
    assert all(replayed.tolist() == [True] * 3 + [False] * 2 for _, replayed in seen)
    again = np.concatenate([numbers[replayed] for numbers, replayed in seen])
    assert len(set(again)) > 5
    with (tmp_path / "metrics.csv").open() as file:
        names = {row["name"] for row in csv.DictReader(file)}
    assert {"replay/sampled_staleness_again", "replay/sampled_staleness_fresh"} <= names


def test_what_cannot_be_learned_from_is_drawn_no_more_though_no_priorities_are_given(tmp_path, context):
    again = AGAIN.replace('"uniform"', '"prioritized", priority_exponent = 0.0').replace("= 40", "= 400")
    tables = {"replay.tables": f"[{again}, {FRESH}]", "replay.durable": "none"}
    config = make_config(tmp_path, **tables, **{"run.total_steps": "1_000_000"})
    assert not Mixture(config).rated, "new priorities are not sent"
    bad = [1, 4, 6]
    with running(config, tmp_path, context) as (learning, seen), actor(config, context) as (_, outbox):
        agent = learning.service.agent
        for number in range(9):
            outbox.put([unroll(agent, number, action=77 if number in bad else 0)])
            sent(outbox)
        file, number = tmp_path / "shard-0" / "again.priorities", 9

        def priorities():
            return np.array(np.memmap(file, PRIORITY, "r")["value"][:9])

        def play():
            nonlocal number
            outbox.put([unroll(agent, number)])
            sent(outbox)
            number += 1

        until(lambda: learning.error or not priorities()[bad].any(), step=play)
        assert learning.error is None
        assert priorities().tolist() == [0.0 if number in bad else 1.0 for number in range(9)]
    assert not {reward for numbers, _ in seen for reward in numbers} & set(bad)


def test_a_resumed_run_finds_both_tables_as_they_were(tmp_path, context):
    config = make_config(tmp_path, **{"replay.durable": "process"})
    with running(config, tmp_path, context) as (learning, seen), actor(config, context) as (_, outbox):
        agent = learning.service.agent
        assert outbox.put([unroll(agent, number) for number in range(1, 8)], 30)
        assert outbox.finish(120) == 0
        until(lambda: len(seen) == 3)
    with (
        running(config, tmp_path, context, resume=True) as (learning, later),
        actor(config, context) as (_, outbox),
    ):
        assert not later, "one fresh unroll is left, and fills no batch"
        assert outbox.put([unroll(learning.service.agent, 8)], 30)
        until(lambda: later)
    numbers, replayed = later[0]
    assert sorted(numbers[~replayed]) == [7, 8]
    assert set(numbers[replayed]) <= set(range(1, 9))


def put_and_learn(learning, outbox, numbers):
    """The progress that the agent is told with each batch of two fresh unrolls."""
    agent, told = learning.service.agent, []
    update = agent.update

    def noted(batch):
        result = update(batch)
        told.append(batch.progress)
        return result

    agent.update = noted
    assert outbox.put([unroll(agent, number) for number in numbers], 30)
    assert outbox.finish(120) == 0
    until(lambda: len(told) == len(numbers) // 2)
    agent.update = update
    return told


@pytest.mark.parametrize("steps", [0, UNROLLS * STEPS // 2])
def test_progress_is_what_was_learned_whatever_was_reported_by_then(tmp_path, context, steps):
    config = make_config(tmp_path, **{"replay.durable": "process"})
    batch = 2 * STEPS / (UNROLLS * STEPS)
    with running(config, tmp_path, context) as (learning, _), actor(config, context) as (control, outbox):
        make_steps(control, steps)
        until(lambda: learning.service.counters.steps == steps)
        told = put_and_learn(learning, outbox, range(1, 9))
        assert told == pytest.approx([0, batch, 2 * batch, 3 * batch])
    with (
        running(config, tmp_path, context, resume=True) as (learning, _),
        actor(config, context) as (_, outbox),
    ):
        told = put_and_learn(learning, outbox, range(9, 13))
    assert told == pytest.approx([4 * batch, 5 * batch])


@pytest.mark.parametrize(
    ("preset", "tables", "name", "times"),
    [
        ("cartpole-impala", f"[{AGAIN}, {FRESH}]", "fresh", 1),
        ("cartpole-impala", f"[{AGAIN}, {FRESH[:-1]}, when_full = 'keep_latest'}}]", None, 0),
        ("cartpole-ppo", None, "default", 1),
        ("cartpole-pqn", None, "default", 1),
        ("cartpole-apex", None, None, 0),
    ],
)
def test_what_passes_through_a_queue_once_tells_the_progress(preset, tables, name, times):
    config = load_config(
        preset, None, {"replay.tables": tables, "replay.batch_size": "5"} if tables else {}, {}
    )
    once = Mixture(config).once
    assert (once and once.name) == name
    assert not once or once.max_times_sampled == times
