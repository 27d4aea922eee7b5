"""Running means and deviations, and what they normalise: observations, rewards, returns and advantages.

Statistics are buffers of the network that uses them: they are published with its weights, saved with them,
and the same wherever these weights act. Only a learner updates them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from troupe.common.rl.fixed import shapes_are_fixed

Merge = Callable[[int, Tensor, Tensor], tuple[int, Tensor, Tensor]]
"""Count, mean and variance of the samples of several learners, of those of this one."""

# Samples that are summed at a time, and numbers of them, whichever is more: their float64 copies stay in the
# processor's cache.
_ROWS, _NUMBERS = 16, 1 << 12
_ROWS_OF_GPU = 1 << 10


class RunningMoments(nn.Module):
    """Mean and variance of every element of a sample, over all samples, or the newest, or up to a limit.

    A batch of n counts `n / min(count + n, window)`: without a window that is the average over everything
    (Welford 1962, in the form for batches of Chan et al. 1979), with one an exponential average as of the
    sample at which the window is full, which needs no correction of its beginning.

    The buffers have one dimension each, so that the wire never rounds them: `count` int64 `[1]`, `mean` and
    `variance` float64 `[size]`.

    Args:
        shape: of one sample; `()` for numbers.
        mean: of every element before the first update, which replaces it.
        deviation: likewise.
        window: samples over which older ones fade by a factor of e; None: none fades.
        limit: samples after which the statistics stay as they are; None: never, 0: from the beginning.

    Attributes:
        together: where several learners share a batch, what makes their samples one; None for one learner.
    """

    together: Merge | None = None
    count: Tensor
    mean: Tensor
    variance: Tensor

    def __init__(
        self,
        shape: tuple[int, ...],
        *,
        mean: float = 0.0,
        deviation: float = 1.0,
        window: int | None = None,
        limit: int | None = None,
    ) -> None:
        super().__init__()
        self.shape = shape
        self._window = window
        self._limit = limit
        size = math.prod(shape)
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("mean", torch.full((size,), mean, dtype=torch.float64))
        self.register_buffer("variance", torch.full((size,), deviation**2, dtype=torch.float64))

    @property
    def frozen(self) -> bool:
        """Whether the limit is reached; with fixed shapes only if that is so from the beginning."""
        if not self._limit:
            return self._limit == 0
        return not shapes_are_fixed() and int(self.count) >= self._limit

    @torch.no_grad()
    def update(self, samples: Tensor, counts: Tensor | None = None) -> None:
        """Take in samples `[..., *shape]` of any dtype, of them those where `counts` bool `[...]`.

        None, if frozen.
        """
        if self.frozen:
            return
        if shapes_are_fixed():
            self._update_fixed(samples, counts)
            return
        rows = (samples if counts is None else samples[counts]).reshape(-1, self.mean.numel())
        samples_in, mean, variance = len(rows), *self._moments(rows)
        if self.together is not None:
            samples_in, mean, variance = self.together(samples_in, mean, variance)
        if not samples_in:
            return
        total = int(self.count) + samples_in
        # At least the batch itself, which may be larger than the window: a share above 1 would make variances
        # negative.
        share = samples_in / max(samples_in, min(total, self._window or total))
        step = mean - self.mean
        # Of a mixture: the mean of both variances, and what the means lie apart.
        self.variance += share * (variance - self.variance + (1.0 - share) * step.square())
        self.mean += share * step
        self.count.fill_(total)

    def _update_fixed(self, samples: Tensor, counts: Tensor | None) -> None:
        """`update` by tensors alone: what does not count has weight 0, as everything has once frozen."""
        rows = samples.reshape(-1, self.mean.numel())
        weights = None if counts is None else counts.reshape(-1, 1).to(torch.float64)
        samples_in = self.count.new_full((1,), len(rows)) if weights is None else weights.sum(0).long()
        if self._limit is not None:
            samples_in = samples_in * (self.count < self._limit)
        mean, variance = self._moments(rows, weights)
        total = self.count + samples_in
        window = total if self._window is None else total.clamp(max=self._window)
        share = samples_in / torch.maximum(samples_in, window).clamp(min=1).to(torch.float64)
        step = mean - self.mean
        self.variance += share * (variance - self.variance + (1.0 - share) * step.square())
        self.mean += share * step
        self.count.copy_(total)

    def _moments(self, rows: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Mean and variance float64 `[size]` of `rows` `[n, size]`, counted by `weights` `[n, 1]`, 0 or 1.

        Zeros of no rows.
        """
        first, second = torch.zeros_like(self.mean), torch.zeros_like(self.mean)
        if not len(rows):
            return first, second
        # Sums of differences from a sample, not of squares: those would cancel where the mean is large.
        near = rows[0].to(torch.float64)
        # A GPU has no such cache, and a launch for each few rows would take longer than their sums.
        size = max(_ROWS, _NUMBERS // self.mean.numel()) if rows.is_cpu else _ROWS_OF_GPU
        parts = rows.split(size)
        masks = [None] * len(parts) if weights is None else weights.split(size)
        for part, mask in zip(parts, masks, strict=True):
            off = part.to(torch.float64) - near
            if mask is not None:
                off *= mask
            first += off.sum(0)
            second += off.square_().sum(0)
        count = len(rows) if weights is None else weights.sum().clamp(min=1.0)
        first /= count
        return near + first, (second / count - first.square()).clamp_(min=0.0)


class Normalizer(RunningMoments):
    """`(x - mean) / sqrt(variance + floor^2 + (floor_of_mean mean)^2)`, clipped to `[-clip, clip]`.

    Args:
        shape: of one sample; `()` for numbers, such as returns.
        floor: added to the deviation under the root: what hardly ever changes must not become loud.
        floor_of_mean: likewise, as a share of the mean: for what may be of any size.
        clip: None: not clipped.
        moments: as `RunningMoments`.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        *,
        floor: float = 1e-4,
        floor_of_mean: float = 0.0,
        clip: float | None = None,
        **moments: float | None,
    ) -> None:
        super().__init__(shape, **moments)  # type: ignore[arg-type]
        self._floor = floor
        self._floor_of_mean = floor_of_mean
        self._clip = math.inf if clip is None else clip

    @property
    def deviation(self) -> Tensor:
        """What is divided by, float64 `[size]`."""
        least = self._floor**2 + (self._floor_of_mean * self.mean).square()
        return (self.variance + least).sqrt()

    def forward(self, samples: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Map `[..., *shape]` to floats of the same shape."""
        # Statistics are float64, a forward pass is float32: they are rounded once per call, not the samples
        # widened.
        mean, scale = self._of_a_sample(self.mean), self._of_a_sample(1.0 / self.deviation)
        return ((samples.to(torch.float32) - mean) * scale).clamp(-self._clip, self._clip).to(dtype)

    def observe(self, samples: Tensor, counts: Tensor | None = None) -> None:
        """Take in samples `[..., *shape]`, of them those where `counts` bool `[...]`."""
        self.update(samples, counts)

    def inverse(self, normalized: Tensor) -> Tensor:
        """What `[..., *shape]` was before, where it was not clipped; float32."""
        return normalized * self._of_a_sample(self.deviation) + self._of_a_sample(self.mean)

    def _of_a_sample(self, values: Tensor) -> Tensor:
        return values.to(torch.float32).view(self.shape)


LONGEST_HORIZON = 1000.0
"""Items over which `ReturnScale` adds up at most: without a discount and an end rewards would have no sum."""


class ReturnScale(RunningMoments):
    """The root mean square of discounted returns as rewards alone tell it: rewards are divided by it.

    Returns themselves are not known where single transitions are replayed, and bootstrapped ones would be
    what the network says: while it is ignorant, its values have nothing to do with the unit of rewards.
    So it is the second moment of `G = R + D G'`, where `G'` is as `G` and independent of `R` and `D`:

        E[G]   = E[R] / (1 - E[D])
        E[G^2] = (E[R^2] + 2 E[R D] E[G]) / (1 - E[D^2])

    Only their size is taken away, not their mean: what is best stays the best, also where episodes end.
    All in float64; `size` `[1]`, 1 until there has been a reward, is published as the moments are.
    """

    size: Tensor

    def __init__(self) -> None:
        super().__init__((3,))  # R, D and R D
        self.register_buffer("size", torch.ones(1, dtype=torch.float64))

    @torch.no_grad()
    def observe(self, rewards: Tensor, discounts: Tensor, counts: Tensor | None = None) -> None:
        """Take in items, `[...]` each, of them those where `counts` bool `[...]`.

        Args:
            rewards: R, of one step, or the discounted sum of several.
            discounts: D, what the value after these steps counts: 0 where the episode terminated.
            counts: None: all.
        """
        rewards, discounts = rewards.to(torch.float64), discounts.to(torch.float64)
        self.update(torch.stack([rewards, discounts, rewards * discounts], dim=-1), counts)
        reward, discount, both = self.mean
        reward_square, discount_square, _ = self.variance + self.mean.square()
        longest = 1.0 - 1.0 / LONGEST_HORIZON
        mean = reward / (1.0 - discount.clamp(max=longest))
        square = (reward_square + 2.0 * both * mean) / (1.0 - discount_square.clamp(max=longest**2))
        # The mean square of rewards is what is left if the estimate fails, as rounding can make it.
        square = torch.where(square > 0.0, square, reward_square)
        self.size.copy_(torch.where(square > 0.0, square.sqrt(), 1.0))

    def forward(self, rewards: Tensor) -> Tensor:
        """Rewards `[...]`, divided by the size."""
        return rewards / self.size.to(rewards.dtype)

    def inverse(self, values: Tensor) -> Tensor:
        """Values `[...]` of a network that learns from such rewards, in the unit of those as they came."""
        return values * self.size.to(values.dtype)


def in_rewards(values: Tensor, scale: ReturnScale | None) -> Tensor:
    """Values `[...]` of a network in the unit of rewards; as they are where nothing is scaled.

    Priorities are given in it: the scale moves, and those given before stay comparable.
    """
    return values if scale is None else scale.inverse(values)


def normalized_advantages(advantages: Tensor, floor: float = 1e-8, together: Merge | None = None) -> Tensor:
    """Advantages of a batch, of any shape, with mean 0 and deviation 1; `floor` is added to the deviation.

    With `together`, mean and deviation are those of the shares of several learners.
    What PPO's reference implementation does in every minibatch (Dhariwal et al. 2017, `baselines`).
    """
    # Without Bessel's correction, as numpy's `std` in the reference; with it a batch of one would be nan.
    deviation, mean = torch.std_mean(advantages, correction=0)
    if together is not None:
        _, mean, variance = together(advantages.numel(), mean, deviation.square())
        deviation = variance.sqrt()
    return (advantages - mean) / (deviation + floor)
