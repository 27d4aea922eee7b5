"""torch's optimizers without its compiler, whose import takes over a second and which nothing here uses."""

from __future__ import annotations

from inspect import unwrap

import torch


class Optimizer(torch.optim.Optimizer):
    """What they have in common, without what torch wraps it in: each call of that imports the compiler."""

    add_param_group = unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = unwrap(torch.optim.Optimizer.zero_grad)
    state_dict = unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = unwrap(torch.optim.Optimizer.load_state_dict)


class Adam(Optimizer, torch.optim.Adam):
    """See `torch.optim.Adam`; not differentiable."""

    step = torch.no_grad()(unwrap(torch.optim.Adam.step))


class RAdam(Optimizer, torch.optim.RAdam):
    """See `torch.optim.RAdam`; not differentiable."""

    step = torch.no_grad()(unwrap(torch.optim.RAdam.step))
