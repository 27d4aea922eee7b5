"""Perceptrons of ReLUs, whose batches take fewer and faster steps on a CPU than layer by layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from troupe.common.nets.initializers import Output, output_layer
from troupe.common.nets.torsos import Style, VectorTorso

MIN_ROWS = 64
"""Batches of fewer rows go layer by layer: actors' are small, and the steps around a product count there."""
MIN_WIDTH = 64
"""Products narrower than this in any dimension are left to MKL, which has less to prepare."""
_ONEDNN = (
    torch.backends.mkldnn.is_available()
    and torch.backends.cpu.get_cpu_capability() == "AVX512"
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # torch's own compiler calls it, but promises nothing
)
"""Whether oneDNN multiplies: torch's own library, MKL, uses half of AVX-512's width on an AMD processor."""


class Perceptron(nn.Sequential):
    """Hidden layers of `units`, and a linear one of `outputs`.

    Attributes:
        short: products between two hidden layers are made in bfloat16, most of the arithmetic. The first
          layer is not, since observations have no spare digits, nor the last, since values have none.
    """

    short = False

    def __init__(self, features: int, units: tuple[int, ...], outputs: int, of: Output, style: Style) -> None:
        torso = VectorTorso((features,), units, style)
        super().__init__(torso, output_layer(nn.Linear(torso.features, outputs), of))
        self._linear = [layer for layer in self.modules() if isinstance(layer, nn.Linear)]
        self._parts = list(self.modules())[1:]
        self._simple = bool(units) and not (style.layer_norm or style.residual)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., features]` to `[..., outputs]` float32."""
        if self.short:
            return self._shortened(x)
        if not (self._simple and x.ndim == 2 and x.device.type == "cpu") or torch.jit.is_tracing():
            return self._by_layers(x)
        if len(x) < MIN_ROWS or x.dtype != torch.float32:
            return self._by_layers(x)
        # Whoever looks at single layers sees what these give. The result is the same bits, looked at or not.
        if any(module._forward_hooks or module._forward_pre_hooks for module in self._parts):
            with torch.no_grad():
                self._by_layers(x)
        parameters = [each for layer in self._linear for each in (layer.weight, layer.bias)]
        given: Tensor = _Layers.apply(x, *parameters)
        return given

    def _by_layers(self, x: Tensor) -> Tensor:
        given: Tensor = super().forward(x)
        return given

    def _shortened(self, x: Tensor) -> Tensor:
        torso, last = self
        first = True
        for layer in torso.layers:  # type: ignore[union-attr]
            product = isinstance(layer, nn.Linear)
            x = _in_bfloat16(layer, x) if product and not first else layer(x)
            first = first and not product
        values: Tensor = last(x)
        return values


class _Layers(torch.autograd.Function):
    """`linear(relu(... relu(linear(x)) ...))`, one step of autograd instead of two for each layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        """Of rows `[M, features]`, with weight and bias of each layer in turn."""
        *hidden, last = zip(parameters[::2], parameters[1::2], strict=True)
        inputs = [x.contiguous()]
        for weight, bias in hidden:
            # Not oneDNN's own ReLU, which makes 0 of NaN: a network that has diverged would look sound.
            inputs.append(_product(inputs[-1], weight, bias).relu_())
        ctx.save_for_backward(*inputs, *parameters[::2])
        return linear(inputs[-1], *last)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of those that need one."""
        saved, needed = ctx.saved_tensors, ctx.needs_input_grad
        layers = len(saved) // 2
        found: list[Tensor | None] = [None] * len(needed)
        gradient = gradient.contiguous()
        for layer in reversed(range(layers)):
            given, weight = saved[layer], saved[layers + layer]
            if needed[1 + 2 * layer]:
                found[1 + 2 * layer] = _product(gradient.t(), given.t())
            if needed[2 + 2 * layer]:
                found[2 + 2 * layer] = gradient.sum(0)
            if not any(needed[: 1 + 2 * layer]):
                break
            gradient = _product(gradient, weight.t())
            if layer:
                torch.ops.aten.threshold_backward.grad_input(gradient, given, 0, grad_input=gradient)
        else:
            found[0] = gradient
        return tuple(found)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `linear`."""
    if not _ONEDNN or min(*x.shape, *weight.shape) < MIN_WIDTH:
        return linear(x, weight, bias)
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return product


def _in_bfloat16(layer: nn.Linear, x: Tensor) -> Tensor:
    """What the layer makes of `x`, float32."""
    inputs = (each.to(torch.bfloat16) for each in (x, layer.weight, layer.bias))
    return nn.functional.linear(*inputs).float()
