import numpy as np
import pytest
import torch

from troupe.common.rl.normalizers import Normalizer, RunningMoments, normalized_advantages


def batches(rng, shape, sizes=(1, 40, 3, 17)):
    """Batches whose mean and deviation move."""
    return [rng.normal(3.0 * i, 1.0 + i, (size, *shape)) for i, size in enumerate(sizes)]


@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6])
def test_running_moments_are_those_of_everything_seen(shape, scale):
    moments = RunningMoments(shape, mean=7.0, deviation=11.0)
    assert (moments.mean == 7.0).all()
    assert (moments.variance == 121.0).all()
    seen = [scale * batch for batch in batches(np.random.default_rng(0), shape)]
    for batch in seen:
        moments.update(torch.from_numpy(batch))
    everything = np.concatenate(seen).reshape(61, -1)
    np.testing.assert_allclose(moments.mean, everything.mean(0), rtol=1e-12)
    np.testing.assert_allclose(moments.variance, everything.var(0), rtol=1e-12)
    assert moments.count.tolist() == [61]


def test_small_changes_of_large_numbers_are_not_lost():
    values = 1e8 + np.random.default_rng(0).normal(size=1000)
    moments = RunningMoments(())
    for part in np.split(values, 10):
        moments.update(torch.from_numpy(part))
    np.testing.assert_allclose(moments.variance, values.var(), rtol=1e-6)


def test_leading_axes_are_all_samples_and_bytes_are_exact():
    frames = np.random.default_rng(0).integers(0, 256, (7, 5, 3, 4), dtype=np.uint8)
    moments = RunningMoments((3, 4))
    moments.update(torch.from_numpy(frames))
    np.testing.assert_allclose(moments.mean, frames.reshape(35, 12).mean(0), rtol=1e-14)
    np.testing.assert_allclose(moments.variance, frames.reshape(35, 12).var(0), rtol=1e-13)


def test_with_a_window_it_averages_until_that_is_full_and_then_exponentially():
    rng, window = np.random.default_rng(0), 50
    moments, mean, square, count = RunningMoments((4,), window=window), 0.0, 0.0, 0
    for batch in [rng.normal(i, 1 + i % 3, (10, 4)) for i in range(12)]:
        share = max(10 / (count + 10), 10 / window)
        mean = (1 - share) * mean + share * batch.mean(0)
        square = (1 - share) * square + share * (batch**2).mean(0)
        count += 10
        moments.update(torch.from_numpy(batch))
    np.testing.assert_allclose(moments.mean, mean, rtol=1e-12)
    np.testing.assert_allclose(moments.variance, square - mean**2, rtol=1e-10)
    larger = rng.normal(size=(80, 4))  # than the window: nothing older is left
    moments.update(torch.from_numpy(larger))
    np.testing.assert_allclose(moments.variance, larger.var(0), rtol=1e-12)


def test_at_its_limit_it_stays_as_it_is():
    moments = RunningMoments((), limit=10)
    for value in range(6):
        assert not moments.frozen
        moments.update(torch.full((2,), float(value)))
        if moments.frozen:
            break
    assert moments.count.tolist() == [10]
    moments.update(torch.full((100,), 1e6))
    assert moments.mean.tolist() == [2.0]
    assert RunningMoments((), limit=0).frozen


def test_no_samples_change_nothing():
    moments = RunningMoments((3,))
    moments.update(torch.zeros(0, 3))
    assert moments.count.tolist() == [0]
    assert moments.variance.tolist() == [1.0] * 3


def test_normalizer_by_hand():
    rng = np.random.default_rng(0)
    seen = rng.normal(100.0, 20.0, (200, 3))
    seen[:, 2] = 5.0  # never changes
    normalizer = Normalizer((3,), floor=0.5, clip=2.0)
    normalizer.update(torch.from_numpy(seen))
    samples = rng.normal(100.0, 40.0, (6, 9, 3))
    deviation = np.sqrt(seen.var(0) + 0.25)
    want = (samples - seen.mean(0)) / deviation
    got = normalizer(torch.from_numpy(samples))
    assert got.dtype == torch.float32
    assert (np.abs(want) > 2.0).any()
    np.testing.assert_allclose(got, np.clip(want, -2.0, 2.0), atol=1e-5)
    inside = np.abs(want) < 2.0
    np.testing.assert_allclose(normalizer.inverse(got)[inside], samples[inside], rtol=1e-5)


def test_returns_are_numbers():
    returns = np.random.default_rng(0).normal(-50.0, 30.0, (20, 8))
    normalizer = Normalizer(())
    normalizer.update(torch.from_numpy(returns))
    got = normalizer(torch.from_numpy(returns))
    assert got.shape == (20, 8)
    np.testing.assert_allclose(got.mean(), 0.0, atol=1e-6)
    np.testing.assert_allclose(got.std(correction=0), 1.0, atol=1e-6)
    np.testing.assert_allclose(normalizer.inverse(got), returns, rtol=1e-4, atol=1e-4)


def test_advantages_have_mean_zero_and_deviation_one():
    advantages = np.random.default_rng(0).normal(4.0, 0.01, (16, 8))
    got = normalized_advantages(torch.from_numpy(advantages))
    np.testing.assert_allclose(got, (advantages - advantages.mean()) / advantages.std(), rtol=1e-5)
    assert normalized_advantages(torch.full((4, 2), 3.0)).abs().max() == 0.0
