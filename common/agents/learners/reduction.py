"""What several learners do as one: gradients, statistics and draws are those of the whole batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from troupe.common.agents.learners.buckets import Buckets
from troupe.common.agents.learners.hearsay import (
    MAX_ROWS,
    check_moments,
    check_shares,
    check_weights,
)


class Group(Protocol):
    """The learners of one update, as they reach each other. Errors of either method end the group."""

    rank: int
    size: int

    def sum(self, tensor: Tensor) -> None:
        """Put the sum over all learners in the place of `tensor`: the same bits in each of them."""

    def sum_later(self, tensor: Tensor) -> Callable[[], None]:
        """Begin what `sum` does; what is returned waits for it. All do this in the same order."""

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors `[...]` of all learners, by rank; all have one shape and dtype."""


class Reduction:
    """Makes one update of the shares of several learners; with no `group` it changes nothing.

    `exchange` begins each update. What follows must be called in the same order by all: each method waits
    for the others. Everything is weighed by rows, so that shares may differ. A learner without rows goes
    through the same motions with others that count for nothing. Where what another says cannot be, all raise
    MisledError.

    Attributes:
        alone: whether this learner is the only one.
        rows_of: of each learner's share, by rank.
        rows: of this learner's share of the batch.
        all_rows: of the whole batch.
    """

    def __init__(
        self,
        group: Group | None = None,
        *,
        bfloat16: bool = False,
        max_rows: int = MAX_ROWS,
    ) -> None:
        """Of the learners of `group`.

        Args:
            group: None: this learner is the only one.
            bfloat16: gradients travel, and are summed, in half the bytes.
            max_rows: of a share.
        """
        self.alone = group is None
        self._dtype = torch.bfloat16 if bfloat16 else torch.float32
        self.rows = self.all_rows = 0
        self._group = group
        self.rows_of: list[int] = []
        self._max_rows = max_rows
        self._buckets: dict[tuple[int, ...], Buckets] = {}  # one for each optimiser

    def exchange(self, rows: int, said: Sequence[float] = ()) -> np.ndarray:
        """Tell the others of this learner's share; wait for theirs.

        Args:
            rows: items of the share.
            said: what else they should know.

        Returns:
            `[learners, len(said)]` float64, what each said, by rank.
        """
        told = [torch.tensor([rows, *said], dtype=torch.float64)]
        if self._group is not None:
            told = self._group.gather(told[0])
        table = torch.stack(told).numpy()
        check_shares(table, self._max_rows)
        self.rows_of = [int(each) for each in table[:, 0]]
        self.rows, self.all_rows = rows, sum(self.rows_of)
        return table[:, 1:]

    @contextlib.contextmanager
    def averaging(self, parameters: Sequence[nn.Parameter], weight: float | None = None) -> Iterator[None]:
        """Put the mean over the whole batch in the place of each gradient of a mean over this share.

        The backward pass is made within: what it has done with is reduced while it goes on. All gradients
        are None before.

        Args:
            parameters: of float32, the same in all learners.
            weight: of this share, its rows if None; gradients of one with 0 are not looked at.
        """
        if self._group is None:
            yield
            return
        key = tuple(map(id, parameters))  # which the buckets keep alive
        buckets = self._buckets.get(key)
        if buckets is None:
            buckets = self._buckets[key] = Buckets(self._group, parameters, self._dtype)
        buckets.begin(float(self.rows if weight is None or not self.rows else weight))
        try:
            yield
        finally:
            buckets.close()
        buckets.finish()

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
        check_moments(counts.squeeze(1), means, variances)
        # Those of no samples may be NaN, which no weight makes 0.
        means, variances = (torch.where(counts > 0, each, 0.0) for each in (means, variances))
        total = counts.sum()
        shares = counts / total.clamp(min=1.0)
        whole = (shares * means).sum(0)
        spread = (shares * (variances + (means - whole).square())).sum(0)
        return int(total), whole.view_as(mean).to(mean.dtype), spread.view_as(mean).to(mean.dtype)

    def means(self, parts: Sequence[tuple[Tensor, int]]) -> Tensor:
        """Means `[n]` float64 over all learners of the n means that each gives, every one with its weight."""
        means = torch.stack([mean.double() for mean, _ in parts])
        if self._group is None:
            return means
        weights = torch.tensor([weight for _, weight in parts], dtype=torch.float64, device=means.device)
        told = self._group.gather(torch.stack([means, weights * bool(self.rows)]))
        means, weights = torch.stack(told).unbind(1)
        check_weights(weights)
        weighed = torch.where(weights > 0, means * weights, 0.0)
        return weighed.sum(0) / weights.sum(0).clamp(min=1.0)

    # What follows needs no message: all know the rows of all.

    def scaled_sum(self, total: Tensor) -> Tensor:
        """A sum over this share, as one whose mean over learners, by rows, is the sum over the batch."""
        return total if self.alone or not self.rows else total * (self.all_rows / self.rows)

    def drawn(self, generator: torch.Generator, shape: Sequence[int], *, normal: bool) -> Tensor:
        """Draws `[..., rows, n]`: those of this share out of the whole batch's.

        One learner would draw these for the same rows, and generators stay alike, as all other dimensions are
        the same for all. Uniform, or standard normal.
        """
        draw = torch.randn if normal else torch.rand
        if self.alone:
            return draw(*shape, generator=generator)
        whole = [*shape[:-2], self.all_rows, shape[-1]]
        first = sum(self.rows_of[: self._rank])
        drawn = draw(*whole, generator=generator)
        if not self.rows:
            return torch.zeros(*shape)
        return drawn.narrow(-2, first, shape[-2])

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
