"""First weights by option: their distribution, and which layers they reach."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from tests.agents.contract import PIXELS, VECTORS, config_of, env_of, every_algorithm
from troupe.common.agents import make_agent
from troupe.common.agents.policy_gradient import PolicyGradientConfig
from troupe.common.agents.sac import SacConfig
from troupe.common.envs import make_spec
from troupe.common.nets.convolution import Convolution
from troupe.common.nets.initializers import initialize, lecun_normal, orthogonal, output_layer

VARIANCES = {
    "lecun": lambda fan_in, fan_out: 1 / fan_in,
    "glorot": lambda fan_in, fan_out: 2 / (fan_in + fan_out),
    "he": lambda fan_in, fan_out: 2 / fan_in,
}


@pytest.mark.parametrize("family", VARIANCES)
@pytest.mark.parametrize("kind", ["normal", "uniform"])
@pytest.mark.parametrize(
    ("layer", "fan_in", "fan_out"),
    [(nn.Linear(300, 200), 300, 200), (Convolution(20, 60, 5), 20 * 25, 60 * 25)],
    ids=["linear", "convolution"],
)
def test_weights_have_the_published_variance_and_form(family, kind, layer, fan_in, fan_out):
    torch.manual_seed(0)
    initialize(orthogonal(layer), f"{family}_{kind}", {})
    weight = layer.weight.detach().double().numpy().ravel()
    variance = VARIANCES[family](fan_in, fan_out)
    assert weight.var() == pytest.approx(variance, rel=0.03)
    assert abs(weight.mean()) < 4 * math.sqrt(variance / weight.size)
    farthest = math.sqrt(3) if kind == "uniform" else 2 / 0.8796256610342398
    assert np.abs(weight).max() == pytest.approx(farthest * math.sqrt(variance), rel=0.01)
    # The fourth moment over the square of the second, of normals truncated at two deviations and of uniforms.
    kurtosis = 1.8 if kind == "uniform" else 2.37
    assert (weight**4).mean() / weight.var() ** 2 == pytest.approx(kurtosis, abs=0.05)
    assert not layer.bias.any()


def test_last_layers_have_the_gain_of_what_they_give():
    net = nn.Sequential(
        orthogonal(nn.Linear(30, 20)),
        lecun_normal(nn.Linear(20, 20)),
        output_layer(nn.Linear(20, 4), "policy"),
        output_layer(nn.Linear(20, 4), "values"),
    )
    before = [layer.weight.detach().numpy().copy() for layer in net]

    def norms():
        return [np.linalg.norm(layer.weight.detach().numpy(), 2) for layer in net]

    initialize(net, "auto", {"policy": 0.01, "values": 1.0})
    for layer, weight in zip(net, before, strict=True):
        np.testing.assert_array_equal(layer.weight.detach().numpy(), weight)
    initialize(net, "auto", {"policy": 0.5})
    np.testing.assert_allclose(net[2].weight.detach().numpy(), 50 * before[2], rtol=1e-5)
    np.testing.assert_array_equal(net[3].weight.detach().numpy(), before[3])
    initialize(net, "orthogonal", {"policy": 0.2, "values": 3.0})
    np.testing.assert_allclose(norms(), [math.sqrt(2), math.sqrt(2), 0.2, 3.0], rtol=1e-5)
    initialize(net, "he_uniform", {"policy": 0.0, "values": 2.0})
    assert not net[2].weight.any()
    assert net[3].weight.abs().max().item() == pytest.approx(2 * math.sqrt(6 / 20), rel=0.1)


@every_algorithm
@pytest.mark.parametrize("env", [VECTORS, PIXELS], ids=["vectors", "pixels"])
def test_every_algorithm_begins_as_it_is_told(name, env):
    """Every layer's weights change with the initialiser, and are the same again with the same seed."""
    spec, kinds = make_spec(env_of(name, env)), ("auto", "he_uniform", "he_uniform")
    usual, other, again = (make_agent(config_of(name, initializer=each), spec, seed=0) for each in kinds)
    layers = [
        f"{path}.weight"
        for path, module in usual.net.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    ]
    assert layers
    for path in layers:
        assert (usual.params()[path] != other.params()[path]).any(), path
        np.testing.assert_array_equal(other.params()[path], again.params()[path])


@pytest.mark.parametrize("config", [PolicyGradientConfig, SacConfig])
def test_a_policy_begins_with_its_gain(config):
    spec = make_spec(VECTORS)
    small, large = (make_agent(config(policy_gain=gain), spec, seed=0).params() for gain in (0.01, 1.0))
    changed = {name for name in small if (small[name] != large[name]).any()}
    assert len(changed) == 1
    (name,) = changed
    assert "policy" in name
    np.testing.assert_allclose(large[name], 100 * small[name], rtol=1e-4)
