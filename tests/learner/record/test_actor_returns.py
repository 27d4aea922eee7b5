"""Whose returns in training are whose: of each actor process, and of the slot that explores least."""

import csv

import numpy as np

from tests.harness import games, make_reporter
from troupe.services.learner.control.budget import StepBudget
from troupe.services.learner.control.reports import Report
from troupe.services.learner.record.actor_returns import MAX_ACTORS, ActorReturns
from troupe.services.learner.saving.counters import RunCounters

LEASES = {1: {0, 4}, 2: {5, 9}}


def ladder(slots):
    return np.float32(0.4) ** (1 + np.asarray(slots, np.float32))


def report(source, incarnation, *ended, role="actor"):
    return Report(source, role, incarnation, {}, games(*ended))


def test_the_least_exploring_slot_has_a_curve():
    returns = ActorReturns(ladder)
    returns.take(report("actor-0", 1, (1.0, 5, 0), (3.0, 5, 4)))
    returns.take(report("actor-1", 2, (10.0, 5, 9), (20.0, 5, 9), (7.0, 5, 5)))
    returns.take(report("evaluator", 3, (99.0, 5, 9), role="evaluator"))
    assert returns.rows(LEASES) == {
        "actor-0": {"actor/episode_return": 2.0},
        "actor-1": {"actor/episode_return": np.mean([10.0, 20.0, 7.0])},
        "actors": {"train/least_exploring_return": 15.0},
    }
    assert returns.rows(LEASES) == {}


def test_a_slot_counts_only_where_it_is_leased():
    returns = ActorReturns(ladder)
    returns.take(report("actor-0", 1, (1.0, 5, 9)))
    returns.take(report("actor-7", 7, (2.0, 5, 9)))
    assert "actors" not in returns.rows(LEASES)
    # Whose lease is over leaves the place to the next.
    returns.take(report("actor-0", 1, (1.0, 5, 4)))
    assert returns.rows({1: {0, 4}})["actors"] == {"train/least_exploring_return": 1.0}
    assert returns.rows({}) == {}


def test_where_all_explore_alike_nobody_explores_least():
    for explores in (None, lambda slots: np.ones(len(slots), np.float32)):
        returns = ActorReturns(explores)
        returns.take(report("actor-1", 2, (10.0, 5, 9)))
        assert set(returns.rows(LEASES)) == {"actor-1"}


def test_the_number_of_curves_is_bounded():
    returns = ActorReturns(ladder)
    for turn in range(2):
        for index in range(MAX_ACTORS + 5):
            returns.take(report(f"actor-{index}", index, (1.0 + turn, 1)))
        assert list(returns.rows({})) == [f"actor-{index}" for index in range(MAX_ACTORS)]


class Control:
    def peers(self):
        return []

    def tell(self, status):
        pass

    def leases(self):
        return LEASES


def test_both_are_written(tmp_path):
    reporter = make_reporter(tmp_path, env_id="gym:X", counters=RunCounters(4, StepBudget()), explores=ladder)
    reporter.collect(report("actor-1", 2, (10.0, 5, 9)))
    reporter.tick(Control(), 0.0, force=True)
    reporter.close()
    with (tmp_path / "metrics.csv").open() as file:
        rows = {(row["source"], row["name"]): float(row["value"]) for row in csv.DictReader(file)}
    assert rows["actors", "train/least_exploring_return"] == 10.0
    assert rows["actor-1", "actor/episode_return"] == 10.0
    assert rows["actors", "train/episode_return"] == 10.0
