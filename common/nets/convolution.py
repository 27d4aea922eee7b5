"""A convolution that learns in bfloat16 on cores which other programs want, too."""

from __future__ import annotations

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

_START_S = 60.0


class Convolution(nn.Conv2d):
    """`nn.Conv2d`, whose weight's gradient in bfloat16 on a processor is divided among threads of our own.

    oneDNN's wait for each other without leaving their cores (as of torch 2.13): where another has one,
    a gradient that takes 3 ms takes seconds, see docs/benchmarks.md. So each of our threads makes that of its
    part of the batch alone, and they wait asleep. Autocast alone computes in bfloat16.
    """

    def __init__(self, channels: int, filters: int, size: int, stride: int = 1, padding: int = 0) -> None:
        super().__init__(channels, filters, size, stride, padding)  # the gradient in parts knows no more

    def forward(self, x: Tensor) -> Tensor:
        """Map `[B, C, H, W]` to `[B, filters, H', W']`."""
        # Acting, float32 and GPUs take torch's own way, which is the faster one there.
        learns = torch.is_grad_enabled() and self.weight.requires_grad
        kernel = self.kernel()
        if not (learns and x.device.type == "cpu" and torch.is_autocast_enabled("cpu")):
            return self._conv_forward(x, kernel, self.bias)
        assert self.bias is not None
        inputs = (each.to(torch.get_autocast_dtype("cpu")) for each in (x, kernel, self.bias))
        convolved: Tensor = _InParts.apply(*inputs, self.stride, self.padding)
        return convolved

    def kernel(self) -> Tensor:
        """What images are convolved with: the weight."""
        return self.weight


class _InParts(torch.autograd.Function):
    """A convolution over `x`, `weight` and `bias` of one dtype; see `Convolution`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, stride: Any, padding: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.padding = stride, padding
        return nn.functional.conv2d(x, weight, bias, stride, padding)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        threads = torch.get_num_threads()

        def gradients(grad: Tensor, x: Tensor, *wanted: bool) -> tuple[Tensor, ...]:
            of_all: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
                grad, x, weight, weight.shape[:1], ctx.stride, ctx.padding, (1, 1), False, (0, 0), 1, wanted
            )
            return of_all

        def of_part(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            _, of_weight, of_bias = gradients(grad, x, False, True, True)
            # Summed in float32: in bfloat16 each sum would be rounded to eight bits.
            return of_weight.float(), of_bias.float()

        of_x = gradients(grads[0], x, True, False, False)[0] if ctx.needs_input_grad[0] else None
        parts = _own_threads(threads).map(of_part, grads[0].chunk(threads), x.chunk(threads))
        of_weight, of_bias = (torch.stack(each).sum(0) for each in zip(*parts, strict=True))
        return of_x, of_weight.to(weight.dtype), of_bias.to(weight.dtype), None, None


@functools.cache
def _own_threads(count: int) -> ThreadPoolExecutor:
    """As many threads, in each of which torch computes alone."""
    started = threading.Barrier(count + 1, timeout=_START_S)

    def alone() -> None:
        torch.get_num_threads()  # asked for the first time, torch gives a thread what is set for all
        torch.set_num_threads(1)
        started.wait()

    threads = ThreadPoolExecutor(count, "gradient", alone)
    for _ in range(count):
        threads.submit(int)
    started.wait()
    torch.set_num_threads(count)  # MKL has one number for all threads, and theirs was the last
    return threads
