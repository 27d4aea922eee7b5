"""Perceptrons on batches against numpy, and against the same layers one by one."""

import numpy as np
import pytest
import torch
from torch import nn

from troupe.common.nets.perceptron import MIN_ROWS, MIN_WIDTH, Perceptron
from troupe.common.nets.torsos import Style

RELU = Style(activation="relu")


def numpys(net):
    layers = [layer for layer in net.modules() if isinstance(layer, nn.Linear)]
    return [tuple(each.detach().double().numpy() for each in (layer.weight, layer.bias)) for layer in layers]


def gradients(net, x, given):
    """Of `sum(given * net(x))`, by hand: what comes out, by x, and by weight and bias of each layer."""
    inputs, layers = [x], numpys(net)
    for weight, bias in layers[:-1]:
        inputs.append(np.maximum(inputs[-1] @ weight.T + bias, 0))
    out = inputs[-1] @ layers[-1][0].T + layers[-1][1]
    found = []
    for before, (weight, _) in reversed(list(zip(inputs, layers, strict=True))):
        found[:0] = [given.T @ before, given.sum(0)]
        given = (given @ weight) * ((before > 0) | (before is x))
    return out, given, found


@pytest.mark.parametrize("units", [(8, 5), (MIN_WIDTH + 6, MIN_WIDTH)], ids=["narrow", "wide"])
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("by_input", [False, True])
def test_gradients_are_those_of_the_layers(units, fixed, by_input):
    torch.manual_seed(0)
    net = Perceptron(MIN_WIDTH + 1, units, 2, "values", RELU).requires_grad_(not fixed)
    x = torch.randn(MIN_ROWS, MIN_WIDTH + 1).requires_grad_(by_input)
    given = torch.randn(MIN_ROWS, 2)
    out, of_x, of_layers = gradients(net, x.detach().double().numpy(), given.double().numpy())
    said = net(x)
    np.testing.assert_allclose(said.detach(), out, rtol=1e-4, atol=1e-5)
    assert said.requires_grad == (by_input or not fixed)
    if said.requires_grad:
        assert len(said.grad_fn.next_functions) == 1 + 2 * 3, "it went layer by layer"
        said.backward(given)
    for wanted, got in zip(of_layers, (each.grad for each in net.parameters()), strict=True):
        assert got is None if fixed else np.allclose(got, wanted, rtol=1e-4, atol=1e-4)
    assert np.allclose(x.grad, of_x, rtol=1e-4, atol=1e-4) if by_input else x.grad is None


@pytest.mark.parametrize("at", ["input", "weight"])
def test_what_is_not_a_number_stays_that(at):
    net, x = Perceptron(80, (80, 80), 1, "values", RELU), torch.randn(MIN_ROWS, 80)
    with torch.no_grad():
        (x if at == "input" else net[0].layers[1].weight)[0] = torch.nan
    assert net(x)[0].isnan()


def test_who_looks_at_layers_sees_them_and_changes_nothing():
    net, x, seen = Perceptron(80, (80, 72), 3, "policy", RELU), torch.randn(MIN_ROWS, 80), []
    alone = net(x)
    for module in net.modules():
        if isinstance(module, nn.ReLU):
            module.register_forward_hook(lambda module, args, output: seen.append(output))
    torch.testing.assert_close(net(x), alone, rtol=0, atol=0)
    assert [tuple(each.shape) for each in seen] == [(MIN_ROWS, 80), (MIN_ROWS, 72)]


def test_others_go_layer_by_layer():
    few, wide = torch.randn(MIN_ROWS - 1, 80), torch.randn(MIN_ROWS, 80)
    for net, x in (
        (Perceptron(80, (8,), 1, "values", RELU), few),
        (Perceptron(80, (8,), 1, "values", Style(activation="relu", layer_norm=True)), wide),
        (Perceptron(80, (), 1, "values", RELU), wide),
    ):
        torch.testing.assert_close(net(x), nn.Sequential.forward(net, x), rtol=0, atol=0)
        assert len(net(x).grad_fn.next_functions) == 3, "the last layer alone"
