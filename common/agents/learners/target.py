"""Learning against a target network."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic

import numpy as np
import torch
from torch import Tensor

from troupe.common.agents.network import Learner
from troupe.common.agents.tensors import Network, below, frozen_copy, module_arrays, prefixed, tensors
from troupe.common.nets.spectral import spectral_layers


class TargetLearner(Learner, Generic[Network]):
    """A learner with a target network, and possibly with a generator of what is drawn in an update.

    The target is a copy of the network with its weights and the statistics of its inputs. Were these shared,
    the target's values would move with every update, as those of no network that ever learned: between two
    copies it has to be one fixed function.

    Args:
        net: see `Learner`.
        optimizer: see `Learner`.
        max_grad_norm: see `Learner`.
        apart: see `Learner`.
        period_updates: updates between two moves of the target.
        tau: how far it moves towards the network then; 1: all the way (Mnih et al. 2015).
        draws: the name that the generator's state has in a checkpoint; empty: nothing is drawn.
        seed: of the generator.

    Attributes:
        target: the target network.
        generator: draws from it are repeated by a resumed run.
    """

    def __init__(
        self,
        net: Network,
        optimizer: torch.optim.Optimizer,
        max_grad_norm: float,
        apart: Iterable[Tensor] = (),
        *,
        period_updates: int,
        tau: float = 1.0,
        draws: str = "",
        seed: int = 0,
    ) -> None:
        super().__init__(net, optimizer, max_grad_norm, apart)
        self.target = frozen_copy(net)
        self._target_parameters: list[Tensor] = list(self.target.parameters())
        self._target_spectral = spectral_layers(self.target)
        self.generator = torch.Generator().manual_seed(seed)
        self._period = period_updates
        self._tau = tau
        self._draws = draws

    def step(self, loss: Tensor, weight: float | None = None) -> Tensor:
        """See `Learner`; moves the target when it is time to."""
        moves = self.branch
        norm = super().step(loss, weight)
        if moves:
            with torch.no_grad():
                self._move()
        return norm

    @property
    def branch(self) -> bool:
        """See `Learner`: whether the next update moves the target."""
        # By the count that a checkpoint holds, so that a resumed run moves the target at the same updates.
        return (self.updates + 1) % self._period == 0

    def _move(self) -> None:
        if self._tau == 1.0:
            self.target.load_state_dict(self.net.state_dict())
            return
        torch._foreach_lerp_(self._target_parameters, self._parameters, self._tau)
        for held, own in zip(self.target.buffers(), self.net.buffers(), strict=True):
            held.copy_(own)  # statistics of inputs are no weights: a mean of two would fit neither network
        for layer in self._target_spectral:
            layer.settle()  # the network's singular vectors are not those of weights that lie behind

    def arrays(self) -> dict[str, np.ndarray]:
        """See `Learner`: the target network, and the generator's state."""
        state = {self._draws: self.generator.get_state().numpy().copy()} if self._draws else {}
        return prefixed("target/", module_arrays(self.target)) | state

    def load_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """See `Learner`."""
        self.target.load_state_dict(tensors(below("target/", arrays)))
        if self._draws:
            self.generator.set_state(torch.from_numpy(arrays[self._draws].copy()))
