"""torch's optimizers without its compiler, whose import takes over a second and which nothing here uses."""

from __future__ import annotations

import inspect
from typing import Any

import torch


def _undecorated(function: Any) -> Any:
    """What torch has wrapped in words for its compiler, which each call of them imports."""
    return inspect.unwrap(function)


class Optimizer(torch.optim.Optimizer):
    """What they have in common."""

    add_param_group = _undecorated(torch.optim.Optimizer.add_param_group)
    zero_grad = _undecorated(torch.optim.Optimizer.zero_grad)
    state_dict = _undecorated(torch.optim.Optimizer.state_dict)
    load_state_dict = _undecorated(torch.optim.Optimizer.load_state_dict)


class Adam(Optimizer, torch.optim.Adam):
    """See `torch.optim.Adam`; not differentiable."""

    step = torch.no_grad()(_undecorated(torch.optim.Adam.step))


class RAdam(Optimizer, torch.optim.RAdam):
    """See `torch.optim.RAdam`; not differentiable."""

    step = torch.no_grad()(_undecorated(torch.optim.RAdam.step))
