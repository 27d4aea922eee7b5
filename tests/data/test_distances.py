import math

import numpy as np
import pytest

from troupe.common.data.distances import DISTANCES, distances, nearness

RNG = np.random.default_rng(0)
LEFT, RIGHT = RNG.normal(size=(2, 5, 3, 4))


@pytest.mark.parametrize("power", [1.0, 2.0, 3.5])
def test_norm_of_all_numbers(power):
    for got, a, b in zip(distances("norm", LEFT, RIGHT, power), LEFT, RIGHT, strict=True):
        assert got == pytest.approx(sum(abs(x) ** power for x in (a - b).ravel()) ** (1 / power))


def test_cosine_is_a_distance():
    """0 for the same direction: the most on policy are the nearest."""
    for got, a, b in zip(distances("cosine", LEFT, RIGHT), LEFT, RIGHT, strict=True):
        dot = sum(x * y for x, y in zip(a.ravel(), b.ravel(), strict=True))
        assert got == pytest.approx(1 - dot / (math.hypot(*a.ravel()) * math.hypot(*b.ravel())))
    assert distances("cosine", LEFT, 7 * LEFT) == pytest.approx(0, abs=1e-12)
    assert distances("cosine", LEFT, -LEFT) == pytest.approx(2)
    nothing = np.zeros_like(LEFT)
    assert (distances("cosine", LEFT, nothing) == 1).all()
    assert (distances("cosine", nothing, nothing) == 0).all()


def test_kl_over_the_steps():
    for got, a, b in zip(distances("kl", LEFT, RIGHT), LEFT, RIGHT, strict=True):
        want = 0.0
        for row, other in zip(a, b, strict=True):
            p, q = (np.exp(x) / np.exp(x).sum() for x in (row, other))
            want += sum(u * math.log(u / v) for u, v in zip(p, q, strict=True))
        assert got == pytest.approx(want)


@pytest.mark.parametrize("kind", DISTANCES)
def test_whatever_is_stored_has_a_distance(kind):
    """The largest float16, opposite to each other, and the same."""
    most = np.full((2, 3, 4), np.finfo(np.float16).max, np.float16)
    most[:, :, 0] *= -1
    for power in (1.0, 2.0, 64.0):
        far = distances(kind, most, -most, power)
        assert np.isfinite(far).all()
        assert (far > 0).all()
        assert (distances(kind, most, most, power) == 0).all()
        near = nearness(far)
        assert (near > 0).all()
        assert (near < 1).all()
    assert nearness(np.zeros(1)) == 1


@pytest.mark.parametrize("kind", DISTANCES)
def test_one_side_may_be_a_single_state(kind):
    state = RIGHT[:1, :1]
    spread = np.broadcast_to(state, LEFT.shape)
    np.testing.assert_array_equal(distances(kind, LEFT, state, 3.0), distances(kind, LEFT, spread, 3.0))
