"""Between numpy, which everything outside an agent speaks, and torch on its devices."""

from __future__ import annotations

import copy
import re
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from troupe.common.errors import ConfigError

Network = TypeVar("Network", bound=nn.Module)


def shared_tensor(array: np.ndarray) -> Tensor:
    """A tensor in the array's own memory, which may be read-only not to be written to."""
    # `from_numpy` warns of memory that must not be written to, which nobody does.
    return torch.from_dlpack(array)


def on_device(array: np.ndarray | Tensor, device: torch.device | str) -> Tensor:
    """The array as a tensor there: in its own memory on the CPU, else a copy that is under way."""
    # The copy is ordered before the kernels that read it, on the same stream, so nothing has to wait for it
    # here.
    tensor = array if isinstance(array, Tensor) else shared_tensor(array)
    return tensor.to(device, non_blocking=True)


def joined_memory(entries: np.ndarray | Tensor, size: int, device: torch.device | str) -> Tensor:
    """Memory `[B, size]` on the device, of pieces `[B, T, width]`, as a field has one for each step."""
    return on_device(entries, device).flatten(1)[:, :size]


def frozen_copy(net: Network) -> Network:
    """A copy that shares nothing with `net`, and gets no gradients."""
    copied = copy.deepcopy(net).requires_grad_(False)
    for module in copied.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # else cuDNN copies its weights into one piece at every call
    return copied


def module_arrays(module: nn.Module) -> dict[str, np.ndarray]:
    """Weights and buffers by name, as views where they live on the CPU."""
    # Views: publishing encodes them at once, and a checkpoint copies what it keeps (`prefixed`).
    return {name: tensor.detach().cpu().numpy() for name, tensor in module.state_dict().items()}


def tensors(arrays: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """Copies of the arrays, which may be written to."""
    return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}


def prefixed(prefix: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Copies of the arrays, with `prefix` before their names."""
    return {prefix + name: array.copy() for name, array in arrays.items()}


def below(prefix: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def optimizer_arrays(optimizer: torch.optim.Optimizer) -> dict[str, np.ndarray]:
    """Moments and step counts as `INDEX/NAME`, where INDEX counts the parameters."""
    return {
        f"{index}/{name}": torch.as_tensor(value).detach().cpu().numpy()
        for index, slots in optimizer.state_dict()["state"].items()
        for name, value in slots.items()
    }


def load_optimizer(optimizer: torch.optim.Optimizer, arrays: dict[str, np.ndarray]) -> None:
    """Puts saved moments back; learning rate and the like stay as configured now."""
    # By order, as torch's own state does: names would change with every regrouping of the parameters.
    parameters = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    state: dict[int, dict[str, Tensor]] = {}
    for path, array in arrays.items():
        index, name = path.split("/")
        value = torch.from_numpy(array.copy())
        like = parameters[int(index)]
        # Step counts are scalars; only moments have the parameter's shape.
        if value.shape == like.shape:
            # Fused optimisers go through memory as it lies: a moment has to lie as its parameter does
            # (convolutions are channels-last), or elements get the moments of others.
            value = torch.empty_like(like, dtype=value.dtype).copy_(value)
        elif value.numel() != 1:
            raise ValueError(f"`{name}` of parameter {index} has the shape {tuple(value.shape)}")
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def check_device(device: str, name: str = "learner.device") -> None:
    """Refuse a device of torch, `cpu`, `cuda` or `cuda:N`, that is not on this machine; `name` gave it."""
    if device == "cpu":
        return
    if not re.fullmatch(r"cuda(:\d+)?", device):
        raise ConfigError(f"{name} should be cpu, cuda or cuda:N, not {device!r}")
    if not torch.cuda.is_available():
        without = f"torch {torch.__version__} is built without CUDA, install PyPI's"
        advice = "see what nvidia-smi says" if torch.version.cuda else without
        raise ConfigError(f"{name} is {device!r} but torch finds no GPU: {advice}, or use cpu")
    number = int(device.partition(":")[2] or 0)
    if number >= torch.cuda.device_count():
        raise ConfigError(
            f"{name} is {device!r} but there are {torch.cuda.device_count()} GPUs, counted from 0"
        )
