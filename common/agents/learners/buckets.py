"""Gradients of several learners on their way to each other, while the backward pass still runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from troupe.common.agents.learners.hearsay import MisledError, check_all

if TYPE_CHECKING:
    from troupe.common.agents.learners.reduction import Group

MIN_BYTES, MAX_BYTES = 1 << 20, 1 << 22
"""Of a part, where parameters permit. Each message costs round trips and wakes every learner, so there are
few of them; each is half of what is left, so that the last one, which no computation hides, is small."""


class Buckets:
    """Means of the gradients of these parameters over several learners, in flat parts.

    Their memory is kept: gradients that have been reduced are views of it, until the next ones are.
    """

    def __init__(self, group: Group, parameters: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        """See `Reduction.averaging`; gradients are sent as `dtype`."""
        self._group, self._parameters, self._dtype = group, list(parameters), dtype
        self._parts = parts_of(parameters)
        sizes = [sum(parameter.numel() for parameter in part) for part in self._parts]
        # Which parameters have a gradient at all (an optimiser may let the others rest), and the weight.
        whole = parameters[0].new_zeros(sum(sizes) + len(parameters) + 1)
        *self._flats, self._tail = whole.split([*sizes, len(parameters) + 1])
        self._last = whole[sum(sizes[:-1]) :]  # the last part with the tail
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def begin(self, weight: float) -> None:
        """Watch the backward pass that comes; with the weight 0 its gradients are not looked at."""
        self._weight = weight
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
        """Send what is left, wait for all, and set the gradients. Raises what the group does, MisledError."""
        if self._failure is not None:
            raise self._failure
        while len(self._sent) < len(self._parts):  # of parameters that the loss does not depend on, or all
            self._send()
        for flat, (sent, wait) in zip(self._flats, self._sent, strict=True):
            wait()
            if sent.dtype != flat.dtype:
                flat.copy_(sent)
        *used, total = self._tail.tolist()
        for flat in self._flats:
            if total:
                flat /= total
        # A sum, not each number: one reads memory only.
        if not all(each.sum().isfinite() for each in (self._tail, *self._flats)):
            self._ask_who()
        wanted = dict(zip(self._parameters, used, strict=True))
        for part, flat in zip(self._parts, self._flats, strict=True):
            pieces = flat.split([parameter.numel() for parameter in part])
            for parameter, piece in zip(part, pieces, strict=True):
                parameter.grad = _gradient(parameter, piece) if wanted[parameter] else None

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
        number = len(self._sent)
        flat = self._flats[number]
        self._fill(flat, self._parts[number])
        sent = flat.to(self._dtype)
        if number == len(self._parts) - 1:
            used = [bool(self._weight) and parameter.grad is not None for parameter in self._parameters]
            self._tail.copy_(torch.tensor([*used, self._weight], dtype=torch.float32))
            if sent is flat:
                sent = self._last
            else:  # the weight is not rounded
                self._group.sum(self._tail)
        self._sent.append((sent, self._group.sum_later(sent)))

    def _fill(self, flat: Tensor, part: Sequence[nn.Parameter]) -> None:
        """Put the gradients of a part into `flat`, weighed."""
        if not self._weight:
            flat.zero_()
            return
        gradients = [
            parameter.new_zeros(parameter.numel()) if parameter.grad is None else parameter.grad.reshape(-1)
            for parameter in part
        ]
        torch.cat(gradients, out=flat)
        flat *= self._weight

    def _ask_who(self) -> None:
        """Raise MisledError unless training has diverged for rank 0, or the numbers are only large."""
        own = True
        for flat, part in zip(self._flats, self._parts, strict=True):
            weighed = torch.empty_like(flat)
            self._fill(weighed, part)  # gradients are still those of this share
            own = own and bool(weighed.isfinite().all())
        said = torch.cat(self._group.gather(torch.tensor([float(own)])))
        if said[0] != 1.0:
            return  # one learner would have such a gradient too: whoever has the run notices
        check_all(said.numpy() == 1.0, "sent a gradient that is not finite")
        if not all(each.isfinite().all() for each in (self._tail, *self._flats)):
            raise MisledError("claims that its gradient is finite, which it is not")


def parts_of(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters in the order in which a backward pass comes to them, in parts."""
    parts: list[list[nn.Parameter]] = []
    room, left = 0, sum(parameter.nbytes for parameter in parameters)
    for parameter in reversed(parameters):
        if parameter.nbytes > room:
            parts.append([])
            room = min(max(left // 2, MIN_BYTES), MAX_BYTES)
        parts[-1].append(parameter)
        room -= parameter.nbytes
        left -= parameter.nbytes
    return parts


def _gradient(parameter: nn.Parameter, flat: Tensor) -> Tensor:
    """The numbers of `flat` as a gradient, which lies in memory as the parameter does."""
    whole = flat.view_as(parameter)
    # Fused optimisers go through memory as it lies; convolutions are channels-last.
    return whole if parameter.is_contiguous() else torch.empty_like(parameter).copy_(whole)
