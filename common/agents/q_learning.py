"""What the agents that learn Q values share: exploration, transitions, learning against a target network."""

from __future__ import annotations

import copy
from abc import abstractmethod
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from troupe.common.agents.base import Act, Batch, Inputs, Update
from troupe.common.agents.fitting import PixelConfig, network_inputs, suited
from troupe.common.agents.network import Learning, NetworkAgent, NetworkConfig, Step
from troupe.common.agents.tensors import below, module_arrays, prefixed, tensors
from troupe.common.agents.transitions import StoresTransitions, Transitions
from troupe.common.data.accumulator import PRIORITY_FLOOR
from troupe.common.nets.q_network import QNetwork
from troupe.common.rl import returns


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


class QConfig(NetworkConfig, Protocol):
    """Fields of an agent that learns Q values."""

    epsilon_base: float
    epsilon_alpha: float
    max_grad_norm: float
    target_update_period_updates: int


class TransitionConfig(QConfig, PixelConfig, Protocol):
    """Fields of one that learns from transitions."""

    hidden_units: int
    mlp_units: tuple[int, ...]
    gamma: float
    huber_delta: float


Config = TypeVar("Config", bound=QConfig)
OnTransitions = TypeVar("OnTransitions", bound=TransitionConfig)
Network = TypeVar("Network", bound=nn.Module)


class TargetLearning(Learning, Generic[Network]):
    """Learning against a target network.

    The target is a copy of the network with its weights and the statistics of its inputs. Were these shared,
    the target's values would move with every update, as those of no network that ever learned: between two
    copies it has to be one fixed function.

    Args:
        net: see `Learning`.
        optimizer: see `Learning`.
        target_period_updates: updates between two copies.
        max_grad_norm: see `Learning`.
    """

    def __init__(
        self,
        net: Network,
        optimizer: torch.optim.Optimizer,
        *,
        target_period_updates: int,
        max_grad_norm: float,
    ) -> None:
        super().__init__(net, optimizer, max_grad_norm)
        self.target = copy.deepcopy(net).requires_grad_(False)
        self._period = target_period_updates

    def step(self, loss: Tensor) -> Tensor:
        """See `Learning`; copies the network to the target when it is time to."""
        norm = super().step(loss)
        if self.updates % self._period == 0:
            self.target.load_state_dict(self._net.state_dict())
        return norm

    def arrays(self) -> dict[str, np.ndarray]:
        """See `Learning`: the target network."""
        return prefixed("target/", module_arrays(self.target))

    def load_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """See `Learning`."""
        self.target.load_state_dict(tensors(below("target/", arrays)))


class QAgent(NetworkAgent[Config, Network, TargetLearning[Network]]):
    """An agent that learns Q values against a target network, and explores by an epsilon for each slot."""

    @abstractmethod
    def _optimizer(self) -> torch.optim.Optimizer:
        """A new optimiser of the network."""

    def slot_epsilons(self, indices: list[int], total_slots: int) -> np.ndarray:
        """Ape-X's ladder, `epsilon_base ** (1 + i / (N - 1) * epsilon_alpha)`."""
        return epsilon_ladder(self.config.epsilon_base, self.config.epsilon_alpha, indices, total_slots)

    def _make_learning(self) -> TargetLearning[Network]:
        return TargetLearning(
            self._net,
            self._optimizer(),
            target_period_updates=self.config.target_update_period_updates,
            max_grad_norm=self.config.max_grad_norm,
        )


class TransitionAgent(
    StoresTransitions[OnTransitions, QNetwork, TargetLearning[QNetwork]], QAgent[OnTransitions, QNetwork]
):
    """All of an agent without memory on n-step transitions but its targets and its optimiser."""

    @property
    def network_type(self) -> type[QNetwork]:
        """What is made of these fields."""
        return QNetwork

    @property
    def dueling(self) -> bool:
        """Whether value and advantages have a stream each."""
        return False

    @torch.inference_mode()
    def act(self, inputs: Inputs, epsilon: np.ndarray, rng: np.random.Generator) -> Act:
        """Epsilon-greedy actions; the accumulator learns the values that give initial priorities."""
        q = self._net(self._to_device(inputs.obs)).cpu().numpy()
        action = epsilon_greedy(q, epsilon, rng)
        return Act(action, {"value_taken": q[np.arange(len(q)), action], "value_max": q.max(axis=1)})

    def decide(self, step: Step) -> dict[str, Tensor]:
        """See the base class."""
        q = self._net(step.obs)
        return {"action": q.argmax(1), "q": q}

    @torch.inference_mode()
    def values(self, inputs: Inputs) -> np.ndarray:
        """The largest Q `[S]` float32."""
        return self._net(self._to_device(inputs.obs)).amax(dim=1).cpu().numpy()

    def update(self, batch: Batch) -> Update:
        """One step of the chosen actions' Q towards their targets; new priorities are `|TD error|`."""
        learning = self._start_learning()
        transitions = self._transitions(batch.fields)
        losses, error, q = self._judged(transitions, learning)
        loss = (self._to_device(batch.weights) * losses).mean()
        norm = learning.step(loss)
        self._net.observe(transitions.obs)
        metrics: dict[str, float] = {}
        if batch.measure:
            metrics = {
                "learner/loss": loss.item(),
                "learner/grad_norm": norm.item(),
                "learner/q_mean": q.mean().item(),
                "learner/td_error_mean": error.abs().mean().item(),
            }
        priorities = error.detach().abs().double().cpu().numpy() + PRIORITY_FLOOR
        return Update(priorities=priorities, metrics=metrics)

    def _judged(
        self, transitions: Transitions, learning: TargetLearning[QNetwork]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, TD error and Q of each transition, `[B]`."""
        with torch.no_grad():
            target = self._targets(transitions, learning.target)
        q = self._net(transitions.obs).gather(1, transitions.action[:, None]).squeeze(1)
        error = target - q
        return returns.huber(error, self.config.huber_delta), error, q

    @abstractmethod
    def _targets(self, transitions: Transitions, target: QNetwork) -> Tensor:
        """What the Q of the actions should be, `[B]`; no gradient flows through it."""

    def _network(self) -> QNetwork:
        config, spec = self.config, self.spec

        def make(torso: str) -> QNetwork:
            units = config.hidden_units, config.mlp_units
            pixels = network_inputs(config, spec)
            made = self.network_type
            return made(spec.seen_shape, spec.actions.count, torso, *units, self.dueling, pixels)

        return suited(config, spec, make)
