"""Chances of evenly spaced returns against loops in numpy."""

import numpy as np
import torch

from troupe.common.rl.categorical import projected


def projected_by_hand(values, chances, low, high):
    rows, count = chances.shape
    step, out = (high - low) / (count - 1), np.zeros((rows, count))
    for b in range(rows):
        for value, chance in zip(values[b], chances[b], strict=True):
            place = (min(max(value, low), high) - low) / step
            for k in range(count):
                out[b, k] += chance * max(0.0, 1.0 - abs(place - k))
    return out


def test_chances_go_to_the_nearest_places():
    rng = np.random.default_rng(0)
    values = rng.normal(1.0, 4.0, (50, 7))  # many beyond the ends
    values[0] = np.linspace(-2, 5, 7)  # places themselves
    values[1] = 5.0
    values[2] = [-1e30, 1e30, -2, 5, 4.9999999, -1.9999999, 0]
    chances = rng.dirichlet(np.ones(7), 50)
    moved = projected(*map(torch.from_numpy, (values, chances)), -2.0, 5.0).numpy()
    np.testing.assert_allclose(moved, projected_by_hand(values, chances, -2.0, 5.0), atol=1e-12)
    np.testing.assert_allclose(moved.sum(1), 1.0)
    np.testing.assert_allclose(moved[0], chances[0], atol=1e-12)
    np.testing.assert_allclose(moved[1], [0, 0, 0, 0, 0, 0, 1], atol=1e-12)


def test_the_mean_is_kept_within_the_ends_also_in_float32():
    rng = np.random.default_rng(1)
    values = rng.uniform(-10, 10, (200, 101)).astype(np.float32)
    chances = rng.dirichlet(np.ones(101), 200).astype(np.float32)
    moved = projected(*map(torch.from_numpy, (values, chances)), -10.0, 10.0)
    np.testing.assert_allclose(
        (moved * torch.linspace(-10, 10, 101)).sum(1), (values * chances).sum(1), atol=1e-4
    )
