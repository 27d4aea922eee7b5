"""What the agents that learn Q values share: exploration, and learning against a target network."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from common.agents.fitting import checkpoint_of
from common.agents.tensors import (
    below,
    load_optimizer,
    module_arrays,
    optimizer_arrays,
    prefixed,
    tensors,
)


def epsilon_ladder(base: float, alpha: float, indices: list[int], total_slots: int) -> np.ndarray:
    """`base ** (1 + i / (N - 1) * alpha)` for slots `i` of `N`, float32; a single slot gets `base` itself.

    Horgan et al. 2018, section 4.1.
    """
    place = np.asarray(indices, np.float64) / max(1, total_slots - 1)
    ladder: np.ndarray = base ** (1.0 + place * alpha)
    return ladder.astype(np.float32)


def epsilon_greedy(q: np.ndarray, epsilon: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Best actions `[S]` of `q [S, A]`, or with chance `epsilon [S]` any action alike."""
    explores = rng.random(len(q)) < epsilon
    return np.where(explores, rng.integers(0, q.shape[1], len(q)), q.argmax(axis=1))


Network = TypeVar("Network", bound=nn.Module)


class TargetLearning(Generic[Network]):
    """What only a learner holds: target network, optimiser, update count.

    Args:
        online: the network that learns.
        target: another of the same shape; takes over the weights of `online`.
        optimizer: of the parameters of `online`.
        target_period_updates: updates between two copies of `online` to `target`.
        max_grad_norm: the gradient's global norm is clipped to this; 0: not clipped.
    """

    def __init__(
        self,
        online: Network,
        target: Network,
        optimizer: torch.optim.Optimizer,
        *,
        target_period_updates: int,
        max_grad_norm: float,
    ) -> None:
        self.target = target
        self.target.load_state_dict(online.state_dict())
        self.target.requires_grad_(False)
        self.updates = 0
        self._online = online
        self._optimizer = optimizer
        self._period = target_period_updates
        self._max_norm = max_grad_norm or float("inf")

    def step(self, loss: Tensor) -> Tensor:
        """Moves the online network down the gradient of `loss`; returns the norm before clipping."""
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._online.parameters(), self._max_norm)
        self._optimizer.step()
        self.updates += 1
        if self.updates % self._period == 0:
            self.target.load_state_dict(self._online.state_dict())
        return norm

    def state(self, algorithm: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Online and target weights, optimiser moments, update count."""
        arrays = prefixed("online/", module_arrays(self._online))
        arrays |= prefixed("target/", module_arrays(self.target))
        arrays |= prefixed("optimizer/", optimizer_arrays(self._optimizer))
        return arrays, {"algorithm": algorithm, "updates": self.updates}

    def load_state(self, algorithm: str, arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> None:
        """Restores what `state` gave; raises CheckpointError where it does not fit."""
        with checkpoint_of(algorithm, meta):
            self._online.load_state_dict(tensors(below("online/", arrays)))
            self.target.load_state_dict(tensors(below("target/", arrays)))
            load_optimizer(self._optimizer, below("optimizer/", arrays))
        self.updates = int(meta["updates"])
