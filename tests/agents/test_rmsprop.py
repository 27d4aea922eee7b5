import numpy as np
import pytest
import torch

from troupe.common.agents.learners.rmsprop import RMSProp
from troupe.common.agents.tensors import load_optimizer, optimizer_arrays

EPSILON = 1.5e-7  # of the Ape-X paper


def by_hand(gradients, *, lr, decay, epsilon, momentum, centered):
    """Where a parameter goes from 0, in float64, one number at a time."""
    square, mean, step, place, places = 1.0, 0.0, 0.0, 0.0, []
    for g in gradients:
        square = decay * square + (1 - decay) * g * g
        mean = decay * mean + (1 - decay) * g
        variance = square - mean * mean if centered else square
        step = momentum * step + g / (variance + epsilon) ** 0.5
        place -= lr * step
        places.append(place)
    return places


def walk(gradients, **options):
    """Where the optimiser takes parameters `[W]` along gradients `[N, W]`: `[N, W]`."""
    parameter = torch.nn.Parameter(torch.zeros(gradients.shape[1], dtype=gradients.dtype))
    optimizer = RMSProp([parameter], **options)
    places = []
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
        places.append(parameter.detach().clone())
    return torch.stack(places)


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("epsilon", [EPSILON, 0.1])
def test_steps_by_hand(centered, momentum, epsilon):
    options = {
        "lr": 0.01, "decay": 0.95, "epsilon": epsilon, "momentum": momentum, "centered": centered
    }  # fmt: skip
    gradients = torch.randn(60, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 1e-3
    wanted = np.transpose([by_hand(column.tolist(), **options) for column in gradients.T])
    np.testing.assert_allclose(walk(gradients, **options), wanted, rtol=1e-9)


def test_the_first_step_by_hand():
    """s = 0.9 + 0.1 * 4 = 1.3, m = 0.2, v = 1.26: 2 / sqrt(1.26 + 0.18) = 2 / 1.2."""
    options = {"lr": 0.6, "decay": 0.9, "epsilon": 0.18, "centered": True}
    assert walk(torch.tensor([[2.0]]), **options).item() == pytest.approx(-1.0)


def test_a_gradient_that_hardly_varies_neither_breaks_nor_runs_away():
    """Its variance is less than float32 can tell from 0, and below 0 as often as not."""
    gradients = 0.1 + 1e-6 * torch.randn(2000, 4000, generator=torch.Generator().manual_seed(0))
    lr = 6.25e-5
    steps = walk(gradients, lr=lr, decay=0.95, epsilon=EPSILON, centered=True).diff(dim=0)
    assert steps.isfinite().all()
    assert steps.abs().max() <= 1.001 * lr * 0.1 / EPSILON**0.5  # the variance is 0, and epsilon bounds it


def test_state_comes_back_and_also_from_torchs_own():
    def pair(make):
        parameters = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(1))]
        return parameters, make(parameters)

    def ours(parameters):
        return RMSProp(parameters, lr=0.1, decay=0.9, epsilon=0.01, momentum=0.5, centered=True)

    def moved(parameters, optimizer, count):
        for step in range(count):
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, 0.3 * step + 0.1)
            optimizer.step()
        return [parameter.detach().clone() for parameter in parameters]

    (first, one), (second, two) = pair(ours), pair(ours)
    moved(first, one, 3)
    load_optimizer(two, optimizer_arrays(one))
    with torch.no_grad():
        for old, new in zip(first, second, strict=True):
            new.copy_(old)
    assert all(map(torch.equal, moved(first, one, 3), moved(second, two, 3)))

    before, torchs = pair(lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True))
    moved(before, torchs, 3)
    load_optimizer(two, optimizer_arrays(torchs))
    state = two.state[second[0]]
    for name in ("square_avg", "grad_avg", "momentum_buffer"):
        assert torch.equal(state[name], torchs.state[before[0]][name])
    assert all(place.isfinite().all() for place in moved(second, two, 3))


@pytest.mark.parametrize("wrong", [{"lr": -1.0}, {"epsilon": 0.0}, {"decay": 1.0}, {"momentum": -0.1}])
def test_values_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match="are needed"):
        RMSProp([torch.nn.Parameter(torch.zeros(1))], **{"lr": 0.1, "decay": 0.9, "epsilon": 1e-7, **wrong})
