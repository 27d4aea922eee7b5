"""What learning looks like inside: weights, gradients, and the actions that were learned from."""

from __future__ import annotations

import numpy as np
import torch

from troupe.common.agents import Agent


class Histograms:
    """Values for histograms, taken between two updates; a GPU is waited for, and its arrays are copied.

    Args:
        agent: learns.
        period_updates: updates from one time to the next; 0: never.
    """

    def __init__(self, agent: Agent, period_updates: int) -> None:
        self._agent = agent
        self._period_updates = period_updates

    def due(self, updates: int) -> bool:
        """Whether this update, counted from 1, is one to be looked at."""
        return self._period_updates > 0 and updates % self._period_updates == 0

    def take(self, fields: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """Values by name, and the norm of each parameter's gradient in the last update.

        Gradients are those that the optimiser was given, after clipping; there are none of agents without a
        `net`, which the protocol does not ask for. `fields` are what was learned from.
        """
        params = self._agent.params().items()
        found = {f"weights/{name}": array for name, array in params if array.dtype.kind == "f"}
        norms: dict[str, float] = {}
        network = getattr(self._agent, "net", None)
        if isinstance(network, torch.nn.Module):
            for name, parameter in network.named_parameters():
                if parameter.grad is not None:
                    gradient = parameter.grad.float().cpu().numpy()
                    found[f"gradients/{name}"] = gradient
                    norms[f"learner/grad_norm/{name}"] = float(np.linalg.norm(gradient.ravel()))
        if "action" in fields:
            found["learner/actions"] = fields["action"]
        return found, norms
