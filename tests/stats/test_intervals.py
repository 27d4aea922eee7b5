"""Aggregates and their intervals, against numpy and against what rliable does by another way."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from troupe.common.stats.intervals import bootstrap, iqm, mean, mean_curve, median, optimality_gap


def scores(tasks=7, runs=5, seed=0):
    return np.random.default_rng(seed).normal(0.8, 0.6, (runs, tasks))


def by_task(matrix):
    return [column.tolist() for column in matrix.T]


def trimmed(values):
    """The mean of what lies between the quartiles' ranks, counted out one by one."""
    ordered = sorted(values)
    cut = int(0.25 * len(ordered))
    return sum(ordered[cut : len(ordered) - cut]) / (len(ordered) - 2 * cut)


ORACLES = {
    mean: lambda matrix: matrix.mean(),
    median: lambda matrix: np.median(matrix.mean(axis=0)),
    iqm: lambda matrix: trimmed(matrix.ravel().tolist()),
    optimality_gap: lambda matrix: 1 - np.minimum(matrix, 1).mean(),
}


@pytest.mark.parametrize("statistic", ORACLES, ids=lambda statistic: statistic.__name__)
def test_a_statistic_of_a_matrix_of_scores(statistic):
    matrix = scores()
    assert bootstrap(by_task(matrix), statistic).value == pytest.approx(ORACLES[statistic](matrix))


@pytest.mark.parametrize("statistic", ORACLES, ids=lambda statistic: statistic.__name__)
def test_its_interval_is_that_of_resamples_drawn_task_by_task(statistic):
    matrix = scores(tasks=4, runs=6, seed=3)
    found = bootstrap(by_task(matrix), statistic, resamples=20_000)
    rng = np.random.default_rng(99)
    values = []
    for _ in range(4_000):
        columns = [column[rng.integers(0, 6, 6)] for column in matrix.T]
        values.append(ORACLES[statistic](np.stack(columns, axis=1)))
    low, high = np.quantile(values, [0.025, 0.975])
    width = high - low
    assert found.low == pytest.approx(low, abs=0.06 * width)
    assert found.high == pytest.approx(high, abs=0.06 * width)


def test_an_interval_of_few_runs_is_exact_where_all_resamples_can_be_listed():
    values = [1.0, 2.0, 4.0]
    means = sorted(np.mean(draw) for draw in itertools.product(values, repeat=3))
    found = bootstrap([values], mean, level=0.8, resamples=50_000)
    assert found.low == pytest.approx(np.quantile(means, 0.1, method="inverted_cdf"))
    assert found.high == pytest.approx(np.quantile(means, 0.9, method="inverted_cdf"))


def test_tasks_are_not_mixed():
    # Within each task all runs agree, so there is nothing to be unsure of; mixed, there would be.
    found = bootstrap([[0.0] * 4, [1.0] * 4], mean)
    assert (found.low, found.value, found.high) == (0.5, 0.5, 0.5)


def test_tasks_may_have_different_numbers_of_runs():
    assert bootstrap([[0.0], [1.0, 2.0, 3.0]], mean).value == pytest.approx((0 + 2) / 2)
    assert bootstrap([[0.0], [1.0, 2.0, 3.0]], iqm).value == pytest.approx(1.5)


def test_a_statistic_needs_scores_of_every_task():
    for bad in ([], [[]], [[1.0], []], [[np.inf]]):
        with pytest.raises(ValueError, match="at least one value"):
            bootstrap(bad, mean)


def test_the_mean_of_curves_is_where_all_of_them_are():
    places, means, low, high = mean_curve([([0, 10], [0, 10]), ([2, 12], [4, 4]), ([1, 8], [1, 8])], points=7)
    np.testing.assert_allclose(places, [2, 3, 4, 5, 6, 7, 8])
    np.testing.assert_allclose(means, [(x + 4 + x) / 3 for x in range(2, 9)])
    # Of three curves, all drawn alike is more likely than 2.5 %: the bounds are the extremes.
    np.testing.assert_allclose(low, np.minimum(places, 4))
    np.testing.assert_allclose(high, np.maximum(places, 4))


def test_one_curve_is_its_own_mean_and_curves_apart_have_none():
    places, means, low, high = mean_curve([([1, 5], [2, 3])])
    assert (places.tolist(), means.tolist(), low.tolist(), high.tolist()) == ([1, 5], [2, 3], [2, 3], [2, 3])
    assert mean_curve([([0, 1], [0, 1]), ([2, 3], [0, 1])])[0].size == 0
    assert mean_curve([([0, 1], [0, 1]), ([], [])])[0].size == 0
