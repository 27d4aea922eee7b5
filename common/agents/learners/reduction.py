"""What several learners do as one: gradients, statistics and draws are those of the whole batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn


class Group(Protocol):
    """The learners of one update, as they reach each other. Errors of either method end the group."""

    rank: int
    size: int

    def sum(self, tensor: Tensor) -> None:
        """Put the sum over all learners in the place of `tensor`: the same bits in each of them."""

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors `[...]` of all learners, by rank; all have one shape and dtype."""


class Reduction:
    """Makes one update of the shares of several learners; with no `group` it changes nothing.

    `exchange` begins each update. What follows must be called in the same order by all: each method waits
    for the others. Everything is weighed by rows, so that shares may differ. A learner without rows goes
    through the same motions with others that count for nothing.

    Attributes:
        alone: whether this learner is the only one.
        rows_of: of each learner's share, by rank.
        rows: of this learner's share of the batch.
        all_rows: of the whole batch.
    """

    def __init__(self, group: Group | None = None) -> None:
        self.alone = group is None
        self.rows = self.all_rows = 0
        self._group = group
        self.rows_of: list[int] = []
        self._window = self._longest = 0

    def exchange(self, rows: int, window: int = 0, said: Sequence[float] = ()) -> np.ndarray:
        """Tell the others of this learner's share; wait for theirs.

        Args:
            rows: items of the share.
            window: entries of the longest of them: what is drawn for each step has this length.
            said: what else they should know.

        Returns:
            `[learners, len(said)]` float64, what each said, by rank.
        """
        told = [torch.tensor([rows, window, *said], dtype=torch.float64)]
        if self._group is not None:
            told = self._group.gather(told[0])
        table = torch.stack(told).numpy()
        self.rows_of = [int(each) for each in table[:, 0]]
        self.rows, self.all_rows = rows, sum(self.rows_of)
        self._window, self._longest = window, int(table[:, 1].max())
        return table[:, 2:]

    def average(self, parameters: Iterable[nn.Parameter], weight: float | None = None) -> None:
        """Put the mean over the whole batch in the place of each gradient of a mean over this share.

        Args:
            parameters: of float32, the same in all learners.
            weight: of this share, its rows if None; gradients of one with 0 are not looked at.
        """
        if self._group is None:
            return
        weight = float(self.rows if weight is None or not self.rows else weight)
        parameters = list(parameters)
        grads = [parameter.grad if weight else None for parameter in parameters]
        # One flat bucket: a message for each of some dozens of tensors would cost a round trip each. Behind
        # the gradients, which parameters have one (an optimiser may let the others rest), and the weight.
        flat = torch.cat(
            [
                *(
                    parameter.new_zeros(parameter.numel()) if grad is None else grad.reshape(-1) * weight
                    for parameter, grad in zip(parameters, grads, strict=True)
                ),
                parameters[0].new_tensor([*(float(grad is not None) for grad in grads), weight]),
            ]
        )
        self._group.sum(flat)
        sums = flat[: -len(parameters) - 1]
        *used, total = flat[-len(parameters) - 1 :].tolist()
        if total:
            sums /= total
        for parameter, part, wanted in zip(
            parameters, sums.split([each.numel() for each in parameters]), used, strict=True
        ):
            if not wanted:
                parameter.grad = None
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.copy_(part.view_as(parameter))

    def moments(self, count: int, mean: Tensor, variance: Tensor) -> tuple[int, Tensor, Tensor]:
        """Count, mean and variance (about the mean, not the estimate) of the samples of all learners.

        Args:
            count: samples of this one; with 0 the others are not looked at.
            mean: `[...]`.
            variance: `[...]`.
        """
        if self._group is None:
            return count, mean, variance
        count = count if self.rows else 0
        own = torch.cat([mean.new_tensor([count]), mean.reshape(-1), variance.reshape(-1)]).double()
        counts, means, variances = torch.stack(self._group.gather(own)).split(
            (1, *(mean.numel(),) * 2), dim=1
        )
        total = counts.sum()
        shares = counts / total.clamp(min=1.0)
        whole = (shares * means).sum(0)
        spread = (shares * (variances + (means - whole).square())).sum(0)
        return int(total), whole.view_as(mean).to(mean.dtype), spread.view_as(mean).to(mean.dtype)

    def means(self, parts: Sequence[tuple[float, int]]) -> np.ndarray:
        """Means `[n]` float64 over all learners of the n means that each gives, every one with its weight."""
        means, weights = torch.tensor(parts, dtype=torch.float64).T
        if self._group is None:
            return means.numpy()
        sums = torch.stack([means * weights, weights]) * bool(self.rows)
        self._group.sum(sums)
        return (sums[0] / sums[1]).numpy()

    # What follows needs no message: all know the rows of all.

    def scaled_sum(self, total: Tensor) -> Tensor:
        """A sum over this share, as one whose mean over learners, by rows, is the sum over the batch."""
        return total if self.alone or not self.rows else total * (self.all_rows / self.rows)

    def drawn(self, generator: torch.Generator, shape: Sequence[int], *, normal: bool) -> Tensor:
        """Draws `[..., rows, n]`, or `[..., steps, rows, n]`: those of this share out of the whole batch's.

        One learner would draw these for the same rows, and generators stay alike. Uniform, or standard
        normal.
        """
        draw = torch.randn if normal else torch.rand
        if self.alone:
            return draw(*shape, generator=generator)
        whole = [*shape[:-2], self.all_rows, shape[-1]]
        steps = len(shape) == 4
        if steps:
            whole[1] += self._longest - self._window
        first = sum(self.rows_of[: self._rank])
        drawn = draw(*whole, generator=generator)
        if not self.rows:
            return torch.zeros(*shape)
        own = drawn.narrow(-2, first, shape[-2])
        return own.narrow(1, 0, shape[1]) if steps else own

    def places(self, columns: int) -> tuple[Tensor, int]:
        """Where the `columns` of this share stand among those of the batch `[n]`, and how many these are.

        Columns are rows, or steps of rows, step by step.
        """
        if self.alone:
            return torch.arange(columns), columns
        if not self.rows:
            # Of the same number of steps as the others' rows, which is all of one row.
            return torch.arange(0), columns * self.all_rows
        steps = columns // self.rows
        first = sum(self.rows_of[: self._rank])
        rows = torch.arange(first, first + self.rows)
        return (torch.arange(steps)[:, None] * self.all_rows + rows).flatten(), steps * self.all_rows

    @property
    def _rank(self) -> int:
        return 0 if self._group is None else self._group.rank


ALONE = Reduction()
"""That of the only learner."""
