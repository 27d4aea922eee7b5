"""Convolutions in bfloat16: the gradient in parts is the gradient."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from troupe.common.nets import convolution
from troupe.common.nets.convolution import Convolution


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def gradients(layer, x, short):
    with torch.autocast("cpu", torch.bfloat16, enabled=short):
        y = layer(x)
    y.float().square().sum().backward()
    found = [y.float().detach(), layer.weight.grad, layer.bias.grad, x.grad]
    layer.zero_grad()
    x.grad = None
    return found


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_gradients_in_bfloat16_are_those_of_float32(two_threads, batch):
    torch.manual_seed(batch)
    layer = Convolution(3, 8, 4, 2, padding=1)
    x = torch.randn(batch, 3, 12, 10, requires_grad=True)
    short, exact = gradients(layer, x, True), gradients(layer, x, False)
    for one, other in zip(short, exact, strict=True):
        assert one.dtype == torch.float32
        assert (one - other).norm() < 0.01 * other.norm()
        assert (one - other).any(), "computed in float32"


def test_outside_of_bfloat16_it_is_the_layer_of_torch():
    layer, plain = Convolution(3, 8, 3), nn.Conv2d(3, 8, 3)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(2, 3, 9, 9, requires_grad=True)
    for one, other in zip(gradients(layer, x, False), gradients(plain, x, False), strict=True):
        assert torch.equal(one, other)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), plain(x))


def test_a_layer_that_does_not_pass_on_gradients_has_its_own(two_threads):
    """The first one sees images."""
    layer = Convolution(3, 8, 3)
    with torch.autocast("cpu", torch.bfloat16):
        layer(torch.randn(2, 3, 9, 9)).float().sum().backward()
    assert layer.bias.grad.tolist() == [2 * 7 * 7] * 8


def test_what_the_gradient_in_parts_does_not_know_is_refused():
    for unknown in ({"dilation": 2}, {"padding_mode": "circular"}, {"groups": 3}, {"bias": False}):
        with pytest.raises(TypeError):
            Convolution(3, 9, 3, **unknown)


def test_threads_that_share_a_gradient_compute_alone(two_threads, monkeypatch):
    """Torch's own would keep cores that other programs want, waiting for each other."""
    own, asked, both = convolution._own_threads, [], threading.Barrier(2, timeout=60)
    own.cache_clear()  # they are made here, not in an earlier test
    monkeypatch.setattr(convolution, "_own_threads", lambda count: asked.append(count) or own(count))
    with torch.autocast("cpu", torch.bfloat16):
        Convolution(3, 8, 3)(torch.randn(4, 3, 9, 9)).float().sum().backward()
    assert asked == [2]

    def in_each(_):
        both.wait()
        return torch.get_num_threads()

    assert list(own(2).map(in_each, range(2))) == [1, 1]
    with ThreadPoolExecutor(1) as later:
        assert later.submit(torch.get_num_threads).result() == torch.get_num_threads() == 2
