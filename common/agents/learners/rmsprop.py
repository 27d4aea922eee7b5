"""RMSProp as the papers mean it: their values can be written down as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from troupe.common.agents.learners.optimizers import Optimizer


class RMSProp(Optimizer):
    """RMSProp with epsilon under the root, as in TensorFlow 1, with which IMPALA was published.

    For each gradient g, with all operations elementwise::

        s = decay * s + (1 - decay) * g ** 2        # begins at 1, so the first steps are small
        m = decay * m + (1 - decay) * g             # begins at 0
        v = s - m ** 2 if centered else s
        b = momentum * b + g / sqrt(v + epsilon)
        parameter -= lr * b

    (Tieleman and Hinton 2012; centred as in Graves 2013, equations 38 to 41.) torch's own adds epsilon to the
    root, so that 1.5e-7 there damps like 2e-14 here, and makes NaN of a variance that rounds below zero.

    The state is named as that of torch's, whose checkpoints can be loaded.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float,
        decay: float,
        epsilon: float,
        momentum: float = 0.0,
        centered: bool = False,
    ) -> None:
        """Arguments as in the class' formulas; `lr` is read at every step, from the only parameter group.

        There it may be a tensor, which a CUDA graph reads anew each time.
        """
        if lr < 0 or epsilon <= 0 or not 0 <= decay < 1 or momentum < 0:
            raise ValueError("lr and momentum of 0 or more, epsilon above 0, and decay in [0, 1) are needed")
        super().__init__(parameters, {"lr": lr})
        self._decay = decay
        self._epsilon = epsilon
        self._momentum = momentum
        self._centered = centered

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Move all parameters that have a gradient; a `closure` is not supported."""
        if closure is not None:
            raise NotImplementedError("RMSProp looks at the gradient once: step() takes no closure")
        for group in self.param_groups:
            # A parameter without a gradient had no part in this loss; decaying its averages would forget what
            # they were for.
            moved = [parameter for parameter in group["params"] if parameter.grad is not None]
            if moved:
                self._move(moved, group["lr"])

    def _move(self, parameters: list[Tensor], lr: float | Tensor) -> None:
        decay = self._decay
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        squares = self._averages(parameters, "square_avg", torch.ones_like)
        # `_foreach` functions make one call for all parameters, on the CPU as on a GPU; a loop over some
        # dozens of small tensors spends its time in Python.
        torch._foreach_mul_(squares, decay)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - decay)
        variances = squares
        if self._centered:
            means = self._averages(parameters, "grad_avg", torch.zeros_like)
            torch._foreach_lerp_(means, gradients, 1 - decay)
            variances = list(torch._foreach_addcmul(squares, means, means, value=-1))
            # s and m ** 2 are nearly the same where a gradient hardly varies: rounding may go below zero.
            torch._foreach_clamp_min_(variances, 0.0)
        roots = torch._foreach_add(variances, self._epsilon)
        torch._foreach_sqrt_(roots)
        if not self._momentum:
            if isinstance(lr, Tensor):
                gradients, lr = list(torch._foreach_mul(gradients, -lr)), -1.0
            torch._foreach_addcdiv_(parameters, gradients, roots, value=-lr)
            return
        steps = self._averages(parameters, "momentum_buffer", torch.zeros_like)
        torch._foreach_mul_(steps, self._momentum)
        torch._foreach_addcdiv_(steps, gradients, roots)
        if isinstance(lr, Tensor):  # rounded once more than in one call
            steps, lr = list(torch._foreach_mul(steps, lr)), 1.0
        torch._foreach_add_(parameters, steps, alpha=-lr)

    def _averages(
        self, parameters: list[Tensor], name: str, begin: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """One running average for each parameter."""
        for parameter in parameters:
            if name not in self.state[parameter]:
                self.state[parameter][name] = begin(parameter)
        return [self.state[parameter][name] for parameter in parameters]
