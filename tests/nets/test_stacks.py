import numpy as np
import pytest
import torch

from troupe.common.nets.pixels import as_images, interleaved, stacked


@pytest.mark.parametrize("stack", [1, 2, 4])
@pytest.mark.parametrize("shape", [(5, 6), (3, 5, 6)])
def test_stacks_hold_the_newest_frames_and_zeros_before_an_episode(stack, shape):
    steps, batch = 7, 3
    rng = np.random.default_rng(0)
    frames = rng.integers(1, 256, (steps + stack - 1, batch, *shape), dtype=np.uint8)
    real = rng.integers(1, stack + 1, (steps, batch), dtype=np.uint8)
    obs = stacked(torch.from_numpy(frames), torch.from_numpy(real), stack)
    assert obs.shape == (steps, batch, stack, *shape)
    assert obs.dtype == torch.uint8
    for t in range(steps):
        for b in range(batch):
            expected = frames[t : t + stack, b].copy()
            expected[: stack - real[t, b]] = 0
            np.testing.assert_array_equal(obs[t, b], expected)


@pytest.mark.parametrize("shape", [(2, 3), (3, 60), (0, 2), (2, 0), (100,)])
def test_interleaved_frames_are_channels_in_order(shape):
    """Also of more images than are made at a time."""
    frames = torch.randint(0, 256, (4, *shape, 5, 6), dtype=torch.uint8)
    images = interleaved(frames.unbind(0))
    np.testing.assert_array_equal(images, frames.movedim(0, -3))
    assert not images.numel() or images.flatten(0, -4).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("shape", [(4, 5, 6), (4, 3, 5, 6), (1, 5, 6)])
def test_stack_and_colour_become_channels(shape):
    obs = torch.randint(0, 256, (2, *shape), dtype=torch.uint8)
    before = obs.clone()
    images = as_images(obs)
    np.testing.assert_array_equal(images, obs.reshape(2, -1, 5, 6))
    np.testing.assert_array_equal(obs, before)
