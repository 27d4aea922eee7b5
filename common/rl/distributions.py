"""Policies' distributions over actions, as functions of the flat parameters that a network gives.

A distribution's parameters are `[..., size]`, an action is a row of `troupe.common.spaces.ActionSpec`:
`[...]` int64
for one choice, else `[..., numbers]`. Probabilities of an action with several numbers are joint ones. What
learning needs takes and gives tensors; drawing is for actors, in numpy, from a generator of theirs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from troupe.common.rl import policy
from troupe.common.rl.fixed import constant
from troupe.common.spaces import MAX_REAL, ActionSpec, runs

RealKind = Literal["normal", "tanh_normal", "tanh"]
DeviationKind = Literal["softplus", "exp"]

_HALF_LOG_TAU = 0.5 * math.log(2.0 * math.pi)
# Beyond this a squashed number counts as having reached its bound.
_END = 0.999
# Deviations beyond which a tail is no smaller: its gradient would leave float32.
_FARTHEST = -1000.0
# The integrand has no closed form. It is nearly linear away from 0, which 32 nodes integrate to well below
# the noise of a batch.
_NODES, _WEIGHTS = np.polynomial.hermite.hermgauss(32)


class Distribution(ABC):
    """One family of distributions.

    Attributes:
        size: how many parameters it has.
    """

    size: int

    @abstractmethod
    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor:
        """Log of the probability, or density, of actions; `[...]`. Finite for whatever a row can hold."""

    @abstractmethod
    def entropy(self, params: Tensor) -> Tensor:
        """In nats, `[...]`; of real numbers that of a density, which may be below 0."""

    @abstractmethod
    def kl(self, params: Tensor, others: Tensor) -> Tensor:
        """`KL(p || q)` in nats, `[...]`, of p with `params` and q with `others`."""

    @abstractmethod
    def best(self, params: Tensor) -> Tensor:
        """The actions that stand for the policy where nothing is drawn."""

    def mode(self, params: np.ndarray) -> np.ndarray:
        """The same in numpy."""
        return self.best(torch.from_numpy(params)).numpy()

    @abstractmethod
    def sample(self, params: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Actions that are drawn."""


class Categorical(Distribution):
    """One choice among `count`; parameters are logits."""

    def __init__(self, count: int) -> None:
        self.size = count

    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor:
        """See the base class, as for all methods."""
        return policy.log_prob(params, actions)

    def entropy(self, params: Tensor) -> Tensor:
        """Exact."""
        return policy.entropy(params)

    def kl(self, params: Tensor, others: Tensor) -> Tensor:
        """Exact."""
        return policy.kl(params, others)

    def best(self, params: Tensor) -> Tensor:
        """The most likely ones."""
        return params.argmax(-1)

    def sample(self, params: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """The largest of logits plus Gumbel noise is distributed as the softmax of the logits."""
        # Needs neither a softmax nor a cumulative sum, and so nothing that over- or underflows.
        return (params + rng.gumbel(size=params.shape)).argmax(axis=-1)


class MultiCategorical(Distribution):
    """Several independent choices; parameters are the logits of one after the other.

    A number that is 0 or 1 is a choice between two: the difference of its logits is that of a Bernoulli.
    """

    def __init__(self, choices: tuple[int, ...]) -> None:
        self.size = sum(choices)
        self._numbers = len(choices)
        self._runs = runs(choices)

    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor:
        """Values that are not there count as the nearest that are."""
        chosen = actions.long().split([numbers for numbers, _ in self._runs], dim=-1)
        return self._summed(
            # Stored rows are a peer's: an index beyond the logits would end the learner in `gather`.
            policy.log_prob(logits, each.clamp(0, logits.shape[-1] - 1))
            for logits, each in zip(self._logits(params), chosen, strict=True)
        )

    def entropy(self, params: Tensor) -> Tensor:
        """Exact."""
        return self._summed(policy.entropy(logits) for logits in self._logits(params))

    def kl(self, params: Tensor, others: Tensor) -> Tensor:
        """Exact."""
        pairs = zip(self._logits(params), self._logits(others), strict=True)
        return self._summed(policy.kl(ours, theirs) for ours, theirs in pairs)

    def best(self, params: Tensor) -> Tensor:
        """The most likely value of each."""
        return torch.cat([logits.argmax(-1) for logits in self._logits(params)], dim=-1)

    def sample(self, params: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """As one choice."""
        return self.mode(params + rng.gumbel(size=params.shape))

    def chances(self, params: Tensor) -> list[Tensor]:
        """Probabilities `[..., n]` of the values of each number, one after the other."""
        return [each for logits in self._logits(params) for each in logits.softmax(-1).unbind(-2)]

    def drawn(self, params: Tensor, noise: Tensor) -> Tensor:
        """Actions drawn with draws of a standard normal, `[..., size]` like the parameters."""
        # Normal noise becomes Gumbel's by its quantiles, -log(-log Phi(z)), so that a caller draws one kind
        # of noise for choices and reals. `log_ndtr` is exact in the lower tail, where log(Phi) would be -inf.
        return self.best(params - (-torch.special.log_ndtr(noise)).log())

    def _logits(self, params: Tensor) -> list[Tensor]:
        """Logits `[..., numbers, n]` of the numbers with n values, run by run."""
        parts = params.split([numbers * n for numbers, n in self._runs], dim=-1)
        return [part.unflatten(-1, run) for part, run in zip(parts, self._runs, strict=True)]

    @staticmethod
    def _summed(parts: object) -> Tensor:
        return torch.stack([part.sum(-1) for part in parts]).sum(0)  # type: ignore[attr-defined]


class Reals(Distribution):
    """Independent real numbers; parameters are all means, then what all deviations are made of.

    The deviation of a parameter x is `floor + softplus(x + c)`, or `floor + exp(x + c)`, with c such that it
    is `start` at x = 0.

    Args:
        numbers: how many.
        deviation: see above.
        floor: least deviation.
        start: see above; more than `floor`.
    """

    def __init__(
        self, numbers: int, deviation: DeviationKind = "softplus", floor: float = 1e-3, start: float = 1.0
    ) -> None:
        self.size = 2 * numbers
        self._kind = deviation
        self._floor = floor
        above = start - floor
        # The inverse of softplus, written so that it neither overflows for large `above` nor cancels for
        # small ones.
        self._shift = above + math.log(-math.expm1(-above)) if deviation == "softplus" else math.log(above)

    def moments(self, params: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and deviation `[..., numbers]` of the normals, bounded so that float32 bears their squares."""
        mean, raw = params.chunk(2, dim=-1)
        # Bounded before the exponential: a clamp after it would meet inf, whose gradient is nan even where it
        # is not chosen.
        raw = (raw + self._shift).clamp(max=MAX_REAL if self._kind == "softplus" else math.log(MAX_REAL))
        spread = softplus(raw) if self._kind == "softplus" else raw.exp()
        return mean.clamp(-MAX_REAL, MAX_REAL), self._floor + spread

    def kl(self, params: Tensor, others: Tensor) -> Tensor:
        """Exact; that of the normals, for squashing both alike changes nothing."""
        (mean, deviation), (other_mean, other) = self.moments(params), self.moments(others)
        ratio = deviation / other
        off = (mean - other_mean) / other
        return (0.5 * (ratio.square() + off.square() - 1.0) - ratio.log()).sum(-1)

    def best(self, params: Tensor) -> Tensor:
        """The means."""
        return self.moments(params)[0]

    def sample(self, params: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Float32."""
        mean, deviation = self._moments_of_rows(params)
        noise = rng.standard_normal(mean.shape, np.float32)
        # Chunks with larger numbers are refused, and the actor would lose its episode.
        return (mean + deviation * noise).clip(-MAX_REAL, MAX_REAL)

    def _moments_of_rows(self, params: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        mean, deviation = self.moments(torch.from_numpy(params))
        return mean.numpy(), deviation.numpy()


class Normal(Reals):
    """Normals; an environment with bounds is given the nearest that it takes."""

    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor:
        """Of what was drawn, before it was clipped."""
        return _normal_log_density(actions, *self.moments(params)).sum(-1)

    def entropy(self, params: Tensor) -> Tensor:
        """Exact."""
        return (self.moments(params)[1].log() + 0.5 + _HALF_LOG_TAU).sum(-1)


class TanhNormal(Reals):
    """Normals, squashed into [-1, 1] by tanh.

    Beyond 0.999 the density would be large, and float32 no longer has what was squashed. What lies there is
    one event: the mass of the tail, spread evenly.
    """

    _EDGE = math.atanh(_END)

    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor:
        """Exact, but for the spreading of the tails."""
        mean, deviation = self.moments(params)
        # Both branches of the `where` below are computed, and gradients of the one that is not taken still
        # count: atanh(1) would make them nan.
        inner = actions.clamp(-_END, _END)
        density = _normal_log_density(torch.atanh(inner), mean, deviation) - torch.log1p(-inner.square())
        above = self._tail((mean - self._EDGE) / deviation)
        below = self._tail((-self._EDGE - mean) / deviation)
        ends = torch.where(actions > 0, above, below)
        # Without it, an action at the bound would have the density of a point that float32 cannot tell from
        # infinity, and a ratio of policies there would be noise.
        return torch.where(actions.abs() >= _END, ends, density).sum(-1)

    def entropy(self, params: Tensor) -> Tensor:
        """That of the normals, and the mean of `log(1 - tanh(u)^2)` by Gauss-Hermite quadrature."""
        mean, deviation = self.moments(params)
        nodes, weights = (constant(each, mean.device, mean.dtype) for each in _QUADRATURE)
        drawn = mean[..., None] + deviation[..., None] * nodes
        return (deviation.log() + 0.5 + _HALF_LOG_TAU + (_log_slope(drawn) * weights).sum(-1)).sum(-1)

    def reparametrized(self, params: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions, and the log of their densities `[...]`, for draws of a standard normal `[..., numbers]`.

        Both have gradients by `params` (Haarnoja et al. 2018b, equation 11, and appendix C for the density).
        The density is that of what was drawn before it was squashed: no bound is ever reached in it.
        """
        mean, deviation = self.moments(params)
        drawn = mean + deviation * noise
        # The standardised distance is the noise itself, so it is not computed back from `drawn`.
        normal = -0.5 * noise.square() - deviation.log() - _HALF_LOG_TAU
        return drawn.tanh(), (normal - _log_slope(drawn)).sum(-1)

    def best(self, params: Tensor) -> Tensor:
        """The squashed means."""
        return super().best(params).tanh()

    def sample(self, params: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Within [-1, 1]."""
        return np.tanh(super().sample(params, rng))

    @staticmethod
    def _tail(edge: Tensor) -> Tensor:
        return torch.special.log_ndtr(edge.clamp(min=_FARTHEST)) - math.log(1.0 - _END)


class Tanh(Distribution):
    """Real numbers without chance: tanh of the parameters. For cloning, not for exploration.

    Log-probabilities are those of normals of deviation 1 round it: their gradient is that of squared errors.
    """

    def __init__(self, numbers: int) -> None:
        self.size = numbers

    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor:
        """Half the squared distance, and a constant."""
        return (-0.5 * (actions - params.tanh()).square() - _HALF_LOG_TAU).sum(-1)

    def entropy(self, params: Tensor) -> Tensor:
        """Nothing is drawn: 0."""
        return torch.zeros_like(params).sum(-1)

    def kl(self, params: Tensor, others: Tensor) -> Tensor:
        """Of the normals that probabilities are taken from."""
        return (0.5 * (params.tanh() - others.tanh()).square()).sum(-1)

    def best(self, params: Tensor) -> Tensor:
        """The action."""
        return params.tanh()

    def sample(self, params: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """The action."""
        return np.tanh(params)


class Joint(Distribution):
    """Choices and real numbers, independent of each other; the parameters of the choices come first."""

    def __init__(self, choices: tuple[int, ...], reals: Distribution) -> None:
        self.size = sum(choices) + reals.size
        self._width = sum(choices)
        self._numbers = len(choices)
        self._choices, self._reals = MultiCategorical(choices), reals

    def log_prob(self, params: Tensor, actions: Tensor) -> Tensor:
        """The sum of both."""
        left, right = actions[..., : self._numbers], actions[..., self._numbers :]
        return self._choices.log_prob(params[..., : self._width], left) + self._reals.log_prob(
            params[..., self._width :], right
        )

    def entropy(self, params: Tensor) -> Tensor:
        """The sum of both."""
        left, right = params[..., : self._width], params[..., self._width :]
        return self._choices.entropy(left) + self._reals.entropy(right)

    def kl(self, params: Tensor, others: Tensor) -> Tensor:
        """The sum of both."""
        return self._choices.kl(params[..., : self._width], others[..., : self._width]) + self._reals.kl(
            params[..., self._width :], others[..., self._width :]
        )

    def best(self, params: Tensor) -> Tensor:
        """Both, float32."""
        left, right = params[..., : self._width], params[..., self._width :]
        # One row holds both, so choices travel as float32, which is exact for their few values.
        return torch.cat([self._choices.best(left).to(torch.float32), self._reals.best(right)], dim=-1)

    def sample(self, params: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Both, float32."""
        left, right = params[..., : self._width], params[..., self._width :]
        chosen = self._choices.sample(left, rng).astype(np.float32)
        return np.concatenate([chosen, self._reals.sample(right, rng)], axis=-1)


def distribution_of(
    actions: ActionSpec,
    kind: RealKind = "normal",
    deviation: DeviationKind = "softplus",
    floor: float = 1e-3,
    start: float = 1.0,
) -> Distribution:
    """The distribution over actions of which a policy gives the parameters; see the classes.

    Raises ValueError where real numbers without bounds are to be squashed.
    """
    if actions.count:
        return Categorical(actions.count)
    if not actions.reals:
        return MultiCategorical(actions.choices)
    if kind != "normal" and not all(actions.bounded):
        raise ValueError(f"{kind} squashes into bounds, and some of its numbers have none")
    reals: Distribution
    if kind == "tanh":
        reals = Tanh(actions.reals)
    else:
        family = Normal if kind == "normal" else TanhNormal
        reals = family(actions.reals, deviation, floor, start)
    return Joint(actions.choices, reals) if actions.choices else reals


# Nodes in deviations from the mean, and their weights, which add up to 1.
_QUADRATURE = tuple(_NODES * math.sqrt(2.0)), tuple(_WEIGHTS / math.sqrt(math.pi))


def _normal_log_density(values: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    return -0.5 * ((values - mean) / deviation).square() - deviation.log() - _HALF_LOG_TAU


def _log_slope(drawn: Tensor) -> Tensor:
    """`log(1 - tanh(u)^2)`, exact also where `tanh(u)` is 1 in float32."""
    # 1 - tanh(u)^2 = 4 / (e^u + e^-u)^2; the direct form is log(0) from |u| = 9 on.
    return 2.0 * (math.log(2.0) - drawn - softplus(-2.0 * drawn))
