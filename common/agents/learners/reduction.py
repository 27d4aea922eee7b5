"""What several learners do as one: gradients, statistics and draws are those of the whole batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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

    def sum_later(self, tensor: Tensor) -> Callable[[], None]:
        """Begin what `sum` does; what is returned waits for it. All do this in the same order."""

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors `[...]` of all learners, by rank; all have one shape and dtype."""


BUCKET_BYTES = 1 << 20
"""Gradients are reduced in parts of this size, or of one parameter: a message for each tensor would cost a
round trip each, and one for all would leave the network idle while the backward pass runs."""


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

    def __init__(self, group: Group | None = None, *, bfloat16: bool = False) -> None:
        """Of the learners of `group`; with `bfloat16` gradients travel, and are summed, in half the bytes."""
        self.alone = group is None
        self._dtype = torch.bfloat16 if bfloat16 else torch.float32
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
        weight = float(self.rows if weight is None or not self.rows else weight)
        buckets = Buckets(self._group, parameters, weight, self._dtype)
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


class Buckets:
    """Gradients of one backward pass on their way to the other learners, in flat parts."""

    def __init__(
        self, group: Group, parameters: Sequence[nn.Parameter], weight: float, dtype: torch.dtype
    ) -> None:
        """Watch the backward pass that comes; see `Reduction.averaging`."""
        self._group, self._parameters, self._weight, self._dtype = group, parameters, weight, dtype
        self._parts: list[list[nn.Parameter]] = [[]]
        size = 0
        # The backward pass comes to the last layers first.
        for parameter in reversed(parameters):
            if self._parts[-1] and size + parameter.nbytes > BUCKET_BYTES:
                self._parts.append([])
                size = 0
            self._parts[-1].append(parameter)
            size += parameter.nbytes
        self._missing = [len(part) for part in self._parts]
        self._sent: list[tuple[Tensor, Callable[[], None]]] = []
        self._failure: Exception | None = None
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._came, number))
            for number, part in enumerate(self._parts)
            for parameter in part
            if weight
        ]

    def close(self) -> None:
        """Watch no longer."""
        for hook in self._hooks:
            hook.remove()

    def finish(self) -> None:
        """Send what is left, wait for all, and set the gradients. Raises what the group does."""
        if self._failure is not None:
            raise self._failure
        while len(self._sent) < len(self._parts):  # of parameters that the loss does not depend on, or all
            self._send()
        used = [float(bool(self._weight) and parameter.grad is not None) for parameter in self._parameters]
        # Which parameters have a gradient at all (an optimiser may let the others rest), and all weights.
        told = torch.tensor([*used, self._weight])
        self._group.sum(told)
        *used, total = told.tolist()
        wanted = dict(zip(self._parameters, used, strict=True))
        for part, (flat, wait) in zip(self._parts, self._sent, strict=True):
            wait()
            sums = flat.float()
            if total:
                sums /= total
            pieces = sums.split([parameter.numel() for parameter in part])
            for parameter, piece in zip(part, pieces, strict=True):
                if not wanted[parameter]:
                    parameter.grad = None
                elif parameter.grad is None:
                    parameter.grad = piece.view_as(parameter).clone()
                else:
                    parameter.grad.copy_(piece.view_as(parameter))

    def _came(self, number: int, parameter: Tensor) -> None:
        """A gradient is complete. In order: the others do not know which part would be ready first here."""
        self._missing[number] -= 1
        try:
            while len(self._sent) < len(self._parts) and not self._missing[len(self._sent)]:
                self._send()
        except Exception as error:  # in autograd's hands, which would wrap it
            self._failure = self._failure or error
            self.close()

    def _send(self) -> None:
        flat = torch.cat(
            [
                parameter.new_zeros(parameter.numel())
                if parameter.grad is None or not self._weight
                else parameter.grad.reshape(-1) * self._weight
                for parameter in self._parts[len(self._sent)]
            ]
        ).to(self._dtype)
        self._sent.append((flat, self._group.sum_later(flat)))


ALONE = Reduction()
"""That of the only learner."""
