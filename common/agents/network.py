"""What agents of one network share: its making, its parameters, its state, and the steps of its optimiser."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from troupe.common.agents.fitting import checkpoint_of, load_parameters
from troupe.common.agents.tensors import (
    below,
    load_optimizer,
    module_arrays,
    optimizer_arrays,
    prefixed,
    shared_tensor,
    tensors,
)
from troupe.common.errors import ConfigError
from troupe.common.memory import memory_limit_bytes
from troupe.common.nets.initializers import Output, initialize

if TYPE_CHECKING:
    from troupe.common.envs import EnvSpec


class NetworkConfig(Protocol):
    """Fields that every agent's configuration has."""

    eval_epsilon: float

    @property
    def algorithm(self) -> str:
        """Its name."""


def descend(
    loss: Tensor, net: nn.Module, optimizer: torch.optim.Optimizer, max_grad_norm: float = 0.0
) -> Tensor:
    """One step down the gradient of `loss`; returns the norm of the network's before clipping.

    It is clipped to `max_grad_norm`, if that is not 0.
    """
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), max_grad_norm or float("inf"))
    optimizer.step()
    return norm


def _check_size(make: Callable[[], nn.Module]) -> None:
    """Raise ConfigError where the network that `make` returns is larger than this machine's memory."""
    with torch.device("meta"):  # shapes without data, in milliseconds
        net = make()
    wanted = sum(each.nbytes for each in itertools.chain(net.parameters(), net.buffers()))
    limit = memory_limit_bytes()
    if wanted > limit:
        raise ConfigError(
            f"the network would take {wanted / 2**30:,.1f} GiB of the {limit / 2**30:,.1f} GiB of memory "
            "here: lower agent.*_units and agent.*_layers"
        )


class Step(NamedTuple):
    """What a network may look at in `S` slots: `troupe.common.agents.base.Inputs` in tensors."""

    obs: Tensor
    """`[S, *obs_shape]`."""
    last_action: Tensor
    """`[S, *actions.shape]`."""
    last_reward: Tensor
    """`[S]`."""
    first: Tensor
    """`[S]` bool."""
    memory: Tensor
    """`[S, memory_size]`."""

    def sequence(self) -> tuple[Tensor, ...]:
        """Arguments of a network of sequences, of which this is one step."""
        return (*(part[None] for part in self[:-1]), self.memory)


class LearningState(Protocol):
    """What only a learner holds."""

    optimizer: torch.optim.Optimizer
    updates: int

    def arrays(self) -> dict[str, np.ndarray]:
        """What a checkpoint needs of it besides the optimiser's moments and the update count."""

    def load_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """Takes over what `arrays` gave, of all arrays of a checkpoint."""


class Learning:
    """A `LearningState` that makes one step in each update; subclasses add what else they hold.

    Args:
        net: the network that learns.
        optimizer: of its parameters, and possibly of others.
        max_grad_norm: the global norm of the network's gradient is clipped to this; 0: not clipped.
    """

    def __init__(self, net: nn.Module, optimizer: torch.optim.Optimizer, max_grad_norm: float) -> None:
        self.optimizer = optimizer
        self.updates = 0
        self._net = net
        self._max_grad_norm = max_grad_norm

    def step(self, loss: Tensor) -> Tensor:
        """Moves down the gradient of `loss`; returns the norm of the network's gradient before clipping."""
        norm = descend(loss, self._net, self.optimizer, self._max_grad_norm)
        self.updates += 1
        return norm

    def arrays(self) -> dict[str, np.ndarray]:
        """See `LearningState`."""
        return {}

    def load_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """See `LearningState`."""


Config = TypeVar("Config", bound=NetworkConfig)
Network = TypeVar("Network", bound=nn.Module)
OwnLearning = TypeVar("OwnLearning", bound=LearningState)


class NetworkAgent(ABC, Generic[Config, Network, OwnLearning]):
    """The part of an `Agent` that has nothing to do with how it acts or learns; see there."""

    def __init__(self, config: Config, spec: EnvSpec, *, seed: int = 0, device: str = "cpu") -> None:
        self.config = config
        self.spec = spec
        self.eval_epsilon = config.eval_epsilon
        self._seed = seed
        self._device = torch.device(device)
        # Layers draw their first weights from the generator of the whole process, which is not ours to seed.
        with torch.random.fork_rng(devices=[]):
            torch.random.default_generator.manual_seed(seed)
            _check_size(self._network)
            self._net = self._network().to(self._device)
            self._initialize()
        self._learning: OwnLearning | None = None

    @abstractmethod
    def _network(self) -> Network:
        """A new network; ConfigError where the observations are not for it."""

    def _initialize(self) -> None:
        """Begin with the weights that the configuration asks for, if it has these fields."""
        fields: dict[Output, str] = {"policy": "policy_gain", "values": "value_gain"}
        gains = {of: getattr(self.config, name) for of, name in fields.items() if hasattr(self.config, name)}
        initialize(self._net, getattr(self.config, "initializer", "auto"), gains)

    @property
    def network(self) -> Network:
        """What acts, and is published."""
        return self._net

    @abstractmethod
    def _make_learning(self) -> OwnLearning:
        """What is needed to learn."""

    def _start_learning(self) -> OwnLearning:
        """What is needed to learn, made on first use: an actor never needs it."""
        if self._learning is None:
            self._learning = self._make_learning()
        return self._learning

    def decide(self, step: Step) -> dict[str, Tensor]:
        """What it thinks best, as a function of tensors, for other programs: `action` first.

        `q` or `policy` are what the network says, `next_memory` is the memory after the step.
        """
        raise ConfigError(f"{self.config.algorithm} does not say how it decides: it cannot be exported")

    def params(self) -> dict[str, np.ndarray]:
        """Weights and statistics of the network, as views where it lives on the CPU."""
        return module_arrays(self._net)

    def load_params(self, params: dict[str, np.ndarray]) -> None:
        """Copies `params` into the network."""
        load_parameters(self._net, params)

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """The network, the optimiser's moments, update count, and what else learning holds."""
        learning = self._start_learning()
        arrays = prefixed("net/", self.params())
        arrays |= prefixed("optimizer/", optimizer_arrays(learning.optimizer))
        arrays |= learning.arrays()
        return arrays, {"algorithm": self.config.algorithm, "updates": learning.updates}

    def load_state(
        self, arrays: dict[str, np.ndarray], meta: dict[str, Any], *, to_learn: bool = True
    ) -> None:
        """Restores what `state` gave, or only the network."""
        with checkpoint_of(self.config.algorithm, meta):
            self._net.load_state_dict(tensors(below("net/", arrays)))
            if to_learn:
                learning = self._start_learning()
                load_optimizer(learning.optimizer, below("optimizer/", arrays))
                learning.load_arrays(arrays)
                learning.updates = int(meta["updates"])

    def _to_device(self, array: np.ndarray) -> Tensor:
        return shared_tensor(array).to(self._device, non_blocking=True)
