"""Distributions against torch's own, sums worked out by quadrature, and what is drawn."""

import math

import numpy as np
import pytest
import torch
from torch import distributions as theirs

from troupe.common.rl.distributions import (
    Categorical,
    Joint,
    MultiCategorical,
    Normal,
    Tanh,
    TanhNormal,
    distribution_of,
)
from troupe.common.spaces import MAX_REAL, ActionSpec, Leaf

RNG = np.random.default_rng(0)
CHOICES = (2, 2, 5, 3)


def params_of(distribution, *shape, scale=1.0):
    return torch.from_numpy(RNG.normal(scale=scale, size=(*shape, distribution.size)).astype(np.float32))


def reals(**fields):
    return ActionSpec((Leaf(shape=(2,), dtype="float32", low=(-1.0, 0.0), high=(1.0, 5.0), **fields),))


def test_choices_are_torch_s_categoricals():
    ours = MultiCategorical(CHOICES)
    params, others = params_of(ours, 3, 4), params_of(ours, 3, 4)
    actions = torch.stack([torch.from_numpy(RNG.integers(n, size=(3, 4))) for n in CHOICES], dim=-1)
    first = [theirs.Categorical(logits=part) for part in params.split(CHOICES, dim=-1)]
    second = [theirs.Categorical(logits=part) for part in others.split(CHOICES, dim=-1)]
    log_prob = sum(each.log_prob(actions[..., i]) for i, each in enumerate(first))
    torch.testing.assert_close(ours.log_prob(params, actions), log_prob)
    torch.testing.assert_close(ours.entropy(params), sum(each.entropy() for each in first))
    kl = sum(theirs.kl_divergence(p, q) for p, q in zip(first, second, strict=True))
    torch.testing.assert_close(ours.kl(params, others), kl)
    # Zeros and ones: the difference of two logits is a Bernoulli's.
    both = MultiCategorical((2, 2, 2))
    params, bits = params_of(both, 7), torch.from_numpy(RNG.integers(2, size=(7, 3)))
    bernoulli = theirs.Bernoulli(logits=params[:, 1::2] - params[:, ::2])
    torch.testing.assert_close(both.log_prob(params, bits), bernoulli.log_prob(bits.float()).sum(-1))
    torch.testing.assert_close(both.entropy(params), bernoulli.entropy().sum(-1))


@pytest.mark.parametrize("kind", ["softplus", "exp"])
def test_normals_are_torch_s(kind):
    ours = Normal(3, kind, floor=0.1, start=0.7)
    mean, deviation = ours.moments(torch.zeros(ours.size))
    torch.testing.assert_close((mean, deviation), (torch.zeros(3), torch.full((3,), 0.7)))
    params, others = params_of(ours, 5), params_of(ours, 5)
    raw = params[:, 3:].double()
    shift = math.log(math.expm1(0.6)) if kind == "softplus" else math.log(0.6)
    want = 0.1 + (torch.log1p((raw + shift).exp()) if kind == "softplus" else (raw + shift).exp())
    torch.testing.assert_close(ours.moments(params)[1], want.float())
    first, second = (theirs.Normal(*ours.moments(each)) for each in (params, others))
    actions = torch.from_numpy(RNG.normal(size=(5, 3)).astype(np.float32))
    torch.testing.assert_close(ours.log_prob(params, actions), first.log_prob(actions).sum(-1))
    torch.testing.assert_close(ours.entropy(params), first.entropy().sum(-1))
    torch.testing.assert_close(ours.kl(params, others), theirs.kl_divergence(first, second).sum(-1))
    assert ours.moments(torch.full((6,), -100.0))[1].tolist() == pytest.approx([0.1] * 3)


@pytest.mark.parametrize(
    ("mean", "deviation"), [(0.0, 1.0), (1.5, 0.3), (-3.0, 2.0), (6.0, 0.5), (0.2, 0.05)]
)
def test_squashed_normals_by_quadrature(mean, deviation):
    ours = TanhNormal(1, "exp", floor=1e-3, start=1.0)
    params = torch.tensor([mean, math.log((deviation - 1e-3) / 0.999)], dtype=torch.float64)
    assert ours.moments(params)[1].item() == pytest.approx(deviation)
    normal = theirs.Normal(torch.tensor(mean).double(), torch.tensor(deviation).double())
    # Inside the density of a change of variables; where it ends, the tail's mass over its width.
    inside = torch.linspace(-0.9989, 0.9989, 31, dtype=torch.float64)
    squashed = theirs.TransformedDistribution(normal, theirs.TanhTransform(cache_size=1))
    torch.testing.assert_close(ours.log_prob(params, inside[:, None]), squashed.log_prob(inside))
    edge = math.atanh(0.999)
    for place in (1.0, -1.0):
        mass = 0.5 * math.erfc((edge - place * mean) / deviation / math.sqrt(2.0))
        got = ours.log_prob(params, torch.tensor([place]).double()).exp() * 0.001
        assert got.item() == pytest.approx(mass, rel=1e-6)
    # All of it together is 1.
    grid = (1 - 1e-9) * torch.linspace(-edge, edge, 200_001, dtype=torch.float64)
    middle = torch.trapezoid(ours.log_prob(params, grid.tanh()[:, None]).exp() * (1 - grid.tanh() ** 2), grid)
    ends = sum(ours.log_prob(params, torch.tensor([end]).double()).exp() * 0.001 for end in (-1.0, 1.0))
    assert (middle + ends).item() == pytest.approx(1.0, abs=1e-5)
    # Entropy: the normal's, plus the mean of the log of the slope.
    grid = torch.linspace(mean - 9 * deviation, mean + 9 * deviation, 400_001, dtype=torch.float64)
    log_slope = 2.0 * (math.log(2.0) - grid.abs() - torch.log1p((-2.0 * grid.abs()).exp()))
    want = normal.entropy() + torch.trapezoid(normal.log_prob(grid).exp() * log_slope, grid)
    assert ours.entropy(params).item() == pytest.approx(want.item(), abs=0.02)
    other = torch.tensor([mean + 0.3, params[1].item() + 0.5], dtype=torch.float64)
    kl = theirs.kl_divergence(normal, theirs.Normal(*ours.moments(other))).item()
    assert ours.kl(params, other).item() == pytest.approx(kl)


def test_without_chance():
    ours = Tanh(2)
    params, actions = params_of(ours, 4), params_of(ours, 4)
    torch.testing.assert_close(
        ours.log_prob(params, actions), theirs.Normal(params.tanh(), 1.0).log_prob(actions).sum(-1)
    )
    rows = params.numpy()
    np.testing.assert_allclose(ours.sample(rows, RNG), np.tanh(rows))
    assert ours.entropy(params).tolist() == [0.0] * 4


def test_a_joint_distribution_adds_up():
    spec = ActionSpec((*reals().leaves, Leaf(shape=(2,), choices=(2, 3), start=(0, 0))))
    for kind in ("normal", "tanh_normal", "tanh"):
        ours = distribution_of(spec, kind)
        assert isinstance(ours, Joint)
        left, right = MultiCategorical((2, 3)), distribution_of(reals(), kind)
        params, others = params_of(ours, 6), params_of(ours, 6)
        actions = torch.from_numpy(ours.sample(params.numpy(), RNG))
        assert spec.fault(actions.numpy(), 6) == ""
        assert spec.fault(ours.mode(params.numpy()), 6) == ""
        parts = left.log_prob(params[:, :5], actions[:, :2]), right.log_prob(params[:, 5:], actions[:, 2:])
        torch.testing.assert_close(ours.log_prob(params, actions), sum(parts))
        torch.testing.assert_close(
            ours.entropy(params), left.entropy(params[:, :5]) + right.entropy(params[:, 5:])
        )
        torch.testing.assert_close(
            ours.kl(params, others),
            left.kl(params[:, :5], others[:, :5]) + right.kl(params[:, 5:], others[:, 5:]),
        )


def everything():
    yield Categorical(4), ()
    yield MultiCategorical(CHOICES), (4,)
    for deviation in ("softplus", "exp"):
        for family in (Normal, TanhNormal):
            yield family(2, deviation), (2,)
    yield Tanh(2), (2,)
    yield Joint(CHOICES, TanhNormal(2)), (6,)


@pytest.mark.parametrize("seed", range(8))
def test_what_is_drawn_has_the_probabilities_that_are_told(seed):
    """KL(p || q) is the mean of log p - log q over what p draws; p's entropy that of -log p."""
    ours, shape = list(everything())[seed]
    rng = np.random.default_rng(seed)
    params, others = (
        torch.from_numpy(rng.normal(scale=0.5, size=ours.size).astype(np.float32)) for _ in range(2)
    )
    count = 200_000
    drawn = ours.sample(np.tile(params.numpy(), (count, 1)), rng)
    assert drawn.shape == (count, *shape)
    if isinstance(ours, Tanh):
        return
    drawn = torch.from_numpy(drawn)
    log_p, log_q = (ours.log_prob(each.expand(count, -1), drawn) for each in (params, others))
    gain = log_p - log_q
    assert gain.mean().item() == pytest.approx(
        ours.kl(params, others).item(), abs=6 * gain.std().item() / count**0.5
    )
    # The tails' density is spread: 0.001 wide, it changes the entropy by little.
    error = 6 * log_p.std().item() / count**0.5 + 0.01
    assert -log_p.mean().item() == pytest.approx(ours.entropy(params).item(), abs=error)


@pytest.mark.parametrize("index", range(8))
def test_nothing_that_a_stranger_can_store_is_infinite(index):
    ours, shape = list(everything())[index]
    for value in (1e9, -1e9, 0.0):
        for number in (0.0, 1.0, -1.0, 0.9989, MAX_REAL, -MAX_REAL):
            params = torch.zeros(ours.size, requires_grad=True)
            behaviour = torch.full((ours.size,), value, requires_grad=True)
            actions = torch.full(shape, number)
            actions = actions.clamp(0, 3).long() if not shape else actions
            for result in (
                ours.log_prob(behaviour, actions) + ours.log_prob(params, actions),
                ours.kl(params, behaviour) + ours.kl(behaviour, params),
                ours.entropy(behaviour),
            ):
                assert torch.isfinite(result)
                if result.requires_grad:
                    result.backward()
            for each in (params, behaviour):
                assert each.grad is None or torch.isfinite(each.grad).all()


def test_squashing_needs_bounds():
    unbounded = ActionSpec((Leaf(dtype="float32", low=(None,), high=(1.0,)),))
    assert isinstance(distribution_of(unbounded, "normal"), Normal)
    with pytest.raises(ValueError, match="have none"):
        distribution_of(unbounded, "tanh_normal")
    assert isinstance(distribution_of(ActionSpec.discrete(3), "tanh_normal"), Categorical)
