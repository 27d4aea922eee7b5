"""Noisy layers, spectral convolutions and BTR's torso against numpy."""

import numpy as np
import pytest
import torch
from torch import nn

from troupe.common.agents.learners.target import TargetLearner
from troupe.common.nets.initializers import initialize, lecun_normal
from troupe.common.nets.noisy import NoisyLinear
from troupe.common.nets.spectral import SpectralConvolution, spectral_layers
from troupe.common.nets.torsos import make_torso


def noisy_by_hand(layer, x, noise):
    """Each row by its own weights, made whole."""
    root = np.sign(noise) * np.sqrt(np.abs(noise))
    arrays = (each.detach().numpy() for each in (layer.weight, layer.bias))
    weight, bias = arrays
    outputs = []
    for row, own in zip(x, root, strict=True):
        into, out = own[: layer.in_features], own[layer.in_features :]
        drawn = weight + layer.weight_deviation.detach().numpy() * out[:, None] * into[None, :]
        outputs.append(drawn @ row + bias + layer.bias_deviation.detach().numpy() * out)
    return np.array(outputs)


def test_noise_is_factorised_and_of_each_row():
    rng, layer = np.random.default_rng(0), NoisyLinear(5, 3, 0.5)
    np.testing.assert_allclose(layer.weight_deviation.detach(), 0.5 / np.sqrt(5), rtol=1e-6)
    np.testing.assert_allclose(layer.bias_deviation.detach(), 0.5 / np.sqrt(5), rtol=1e-6)
    with torch.no_grad():
        for deviation in (layer.weight_deviation, layer.bias_deviation):
            deviation.copy_(torch.from_numpy(rng.normal(size=deviation.shape)))
    x, noise = rng.normal(size=(4, 5)), rng.normal(size=(4, layer.draws))
    rows = [torch.from_numpy(each.astype(np.float32)) for each in (x, noise)]
    np.testing.assert_allclose(layer(*rows).detach(), noisy_by_hand(layer, x, noise), rtol=1e-4, atol=1e-5)
    # One draw for many rows, and none.
    shared = layer(rows[0], rows[1][:1]).detach()
    np.testing.assert_allclose(shared, noisy_by_hand(layer, x, noise[[0] * 4]), rtol=1e-4, atol=1e-5)
    means = x @ layer.weight.detach().numpy().T + layer.bias.detach().numpy()
    np.testing.assert_allclose(layer(rows[0]).detach(), means, rtol=1e-4, atol=1e-5)


def largest(weight):
    return np.linalg.svd(weight.detach().numpy().reshape(len(weight), -1), compute_uv=False)[0]


def test_the_largest_singular_value_is_one():
    torch.manual_seed(0)
    layer = lecun_normal(SpectralConvolution(6, 8, 3, padding=1))
    layer.settle(300)
    np.testing.assert_allclose(
        layer.kernel().detach(), layer.weight.detach() / largest(layer.weight), rtol=1e-4, atol=1e-6
    )
    assert largest(layer.kernel()) == pytest.approx(1.0, rel=1e-5)
    x = torch.randn(2, 6, 5, 5)
    wanted = nn.functional.conv2d(x, layer.weight / largest(layer.weight), layer.bias, padding=1)
    np.testing.assert_allclose(layer(x).detach(), wanted.detach(), rtol=1e-3, atol=1e-5)


def test_its_gradient_is_that_of_weight_and_singular_value():
    torch.manual_seed(0)
    layer = SpectralConvolution(2, 3, 2).double()
    layer.settle(2000)
    cost = torch.randn_like(layer.weight)
    (layer.kernel() * cost).sum().backward()
    weight, by_hand = layer.weight.detach().numpy().copy(), np.zeros(layer.weight.shape)
    for place in np.ndindex(*weight.shape):
        for sign in (1.0, -1.0):
            moved = weight.copy()
            moved[place] += sign * 1e-6
            top = np.linalg.svd(moved.reshape(3, -1), compute_uv=False)[0]
            by_hand[place] += sign * (moved / top * cost.numpy()).sum() / 2e-6
    np.testing.assert_allclose(layer.weight.grad, by_hand, rtol=1e-5, atol=1e-8)


def test_the_estimate_follows_weights_that_move():
    torch.manual_seed(0)
    layer = lecun_normal(SpectralConvolution(4, 6, 3))
    before = largest(layer.weight)
    for _ in range(200):
        with torch.no_grad():
            layer.weight.mul_(1.01).add_(0.002 * torch.randn_like(layer.weight))
        layer.settle()
    assert largest(layer.weight) > 5 * before
    assert largest(layer.kernel()) == pytest.approx(1.0, rel=0.05)


def test_a_target_that_lags_behind_is_divided_by_what_its_own_weights_have():
    torch.manual_seed(1)
    net, found = SpectralConvolution(4, 6, 3), []
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    learner = TargetLearner(net, optimizer, 0.0, period_updates=1, tau=0.005)
    for goal in torch.randn(4, *net.weight.shape):
        for _ in range(100):
            learner.step(-(net.kernel() * goal).sum())
        found.append(largest(learner.target.kernel()))
    assert max(found) < 1.3  # 2.2 with singular vectors of the network's weights


def test_acting_moves_no_singular_vector_and_first_weights_are_settled():
    torch.manual_seed(0)
    torso = make_torso("btr", (4, 44, 44), ())
    initialize(torso, "he_normal", {})
    layers = spectral_layers(torso)
    assert len(layers) == 12
    for layer in layers:
        assert largest(layer.kernel()) == pytest.approx(1.0, rel=0.1)
    before = [(layer.left.clone(), layer.right.clone()) for layer in layers]
    first = torso(torch.rand(2, 4, 44, 44))
    assert first.shape == (2, torso.features)
    for layer, (left, right) in zip(layers, before, strict=True):
        assert torch.equal(layer.left, left)
        assert torch.equal(layer.right, right)


@pytest.mark.parametrize("sides", [(84, 84), (60, 100)])
def test_pooling_leaves_six_by_six_of_any_picture(sides):
    torch.manual_seed(0)
    torso = make_torso("btr", (2, *sides), ())
    images = torch.rand(1, 2, *sides)
    with torch.no_grad():
        seen, features = torso.sections(images).numpy(), torso(images).numpy()
    height, width = seen.shape[2:]
    wanted = np.zeros((1, 6, 6, 64))
    for y in range(6):
        for x in range(6):
            # From the floor of a sixth's beginning to the ceiling of its end.
            rows = slice(y * height // 6, -(-(y + 1) * height // 6))
            columns = slice(x * width // 6, -(-(x + 1) * width // 6))
            wanted[:, y, x] = np.maximum(seen[:, :, rows, columns].max((2, 3)), 0.0)
    np.testing.assert_allclose(features, wanted.reshape(1, -1), rtol=1e-6)
    traced = torch.jit.trace(torso, images)  # as exporters see it
    np.testing.assert_allclose(traced(images).detach(), features, rtol=1e-5, atol=1e-6)
