"""What a network sees of pixels."""

import numpy as np
import pytest
import torch

from troupe.common.nets.pixels import NormalizedPixels, ScaledPixels, interleaved, unpacked
from troupe.common.nets.q_network import QNetwork

GREY, COLOUR, PLAIN = (20, 18), (3, 20, 18), (3, 20, 18)


def observations(rng, frame_shape, stack, size=40):
    shape = (size, stack, *frame_shape) if stack else (size, *frame_shape)
    return rng.integers(60, 110, shape, dtype=np.uint8)


def by_hand(seen, obs, stack):
    """`seen` and `obs` as bytes; float64 images `[B, C, H, W]`."""
    newest = (seen[:, -1] if stack else seen).astype(np.float64)
    images = np.clip((obs - newest.mean(0)) / np.sqrt(newest.var(0) + 1.0), -5.0, 5.0)
    for image, raw in zip(images, obs, strict=True):
        for place in range(stack - 1):
            if raw[: place + 1].any():
                break
            image[place] = 0.0
    return images.reshape(len(obs), -1, *obs.shape[-2:])


@pytest.mark.parametrize(("frame_shape", "stack"), [(GREY, 4), (GREY, 2), (GREY, 1), (COLOUR, 4), (PLAIN, 0)])
def test_normalised_by_position_with_one_picture_for_all_places(frame_shape, stack):
    rng = np.random.default_rng(0)
    seen, obs = observations(rng, frame_shape, stack), observations(rng, frame_shape, stack)
    seen[..., 3, :] = 87  # constant: the floor is what divides
    obs[::7, ..., 3, 4] = 255
    for place in range(stack - 1):
        obs[place::5, : place + 1] = 0  # the first steps of an episode
    if stack == 4:
        obs[-1, 2] = 0  # black, but no padding: it is not the oldest
    pixels = NormalizedPixels(frame_shape, stack)
    pixels.observe(torch.from_numpy(seen))
    before = obs.copy()
    images = pixels(torch.from_numpy(obs))
    assert images.dtype == torch.float32
    assert images.is_contiguous(memory_format=torch.channels_last)
    want = by_hand(seen, obs, stack)
    assert (np.abs(want) == 5.0).any()
    np.testing.assert_allclose(images, want, atol=1e-4)
    np.testing.assert_array_equal(obs, before)
    if obs.shape[1:-2] == (4,):  # as a learner stacks them: channels-last
        assert torch.equal(pixels(interleaved(torch.from_numpy(obs).unbind(1))), images)


def test_a_black_first_picture_is_found_wherever_it_has_a_dot():
    """A frame whose looked-at pixels are black is looked at wholly."""
    pixels = NormalizedPixels(GREY, 2)
    pixels.observe(torch.from_numpy(observations(np.random.default_rng(0), GREY, 2)))
    obs = np.full((2, 2, *GREY), 80, np.uint8)
    obs[:, 0] = 0
    obs[1, 0, 3, 3] = 1
    images = pixels(torch.from_numpy(obs))
    assert (images[0, 0] == 0.0).all()
    assert (images[1, 0] != 0.0).all()


def test_until_it_has_seen_anything_it_divides_by_255():
    obs = torch.from_numpy(observations(np.random.default_rng(0), GREY, 4))
    np.testing.assert_allclose(NormalizedPixels(GREY, 4)(obs), ScaledPixels()(obs), rtol=1e-4)
    np.testing.assert_allclose(ScaledPixels()(obs), obs.numpy() / 255.0, rtol=1e-6)
    assert ScaledPixels()(obs).is_contiguous(memory_format=torch.channels_last)


def test_only_what_counts_is_observed_and_nothing_after_the_limit():
    rng = np.random.default_rng(0)
    obs = observations(rng, GREY, 4, 12).reshape(4, 3, 4, *GREY)
    counts = rng.random((4, 3)) < 0.5
    pixels = NormalizedPixels(GREY, 4, limit=1)
    pixels.observe(torch.from_numpy(obs), torch.from_numpy(counts))
    np.testing.assert_allclose(pixels.mean, obs[counts][:, -1].mean(0).ravel())
    assert pixels.count.item() == counts.sum()
    before = pixels.mean.clone()
    pixels.observe(torch.from_numpy(obs))
    assert torch.equal(pixels.mean, before)


def pong_like(rng, size):
    """Stacks of Pong's constant grey ground with a ball of two pixels and two paddles somewhere."""
    frames = np.full((size, 4, 84, 84), 87, np.uint8)
    for stack in frames:
        for column in (8, 74):
            row = rng.integers(14, 70)
            stack[:, row : row + 8, column : column + 2] = 147
        row, column = rng.integers(14, 74), rng.integers(12, 72)
        for place, frame in enumerate(stack):
            frame[row : row + 2, column + place] = 200
    return torch.from_numpy(frames)


def switching_units(pixels, obs):
    torch.manual_seed(0)
    network = QNetwork((4, 84, 84), 6, "small", 128, (), True, pixels)
    network.observe(obs)
    with torch.no_grad():
        on = network.hidden(network.torso(network.inputs(obs))) > 0
    return (on.any(0) & ~on.all(0)).sum().item()


def test_on_a_grey_ground_units_switch_that_would_be_on_or_off_for_every_picture():
    obs = pong_like(np.random.default_rng(0), 200)
    assert switching_units(None, obs) < 60
    assert switching_units(NormalizedPixels((84, 84), 4), obs) > 250


@pytest.mark.parametrize("shape", [(5, 4, 4, 6, 3), (1, 3, 1), (7, 12)])
def test_bits_are_pixels_again(shape):
    packed = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    pixels = unpacked(torch.from_numpy(packed))
    assert pixels.dtype == torch.uint8
    np.testing.assert_array_equal(pixels, np.unpackbits(packed, axis=-1) * 255)
    strided = torch.from_numpy(packed).transpose(0, -1).contiguous().transpose(0, -1)
    assert torch.equal(unpacked(strided), pixels)
    traced = torch.jit.trace(unpacked, (torch.from_numpy(packed),), check_trace=False)
    assert torch.equal(traced(torch.from_numpy(packed)), pixels)
