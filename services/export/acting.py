"""An agent's decisions as one function of named tensors, for programs that know nothing of Troupe."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from troupe.common.agents.base import Agent
from troupe.common.agents.network import NetworkAgent, Step
from troupe.common.errors import ConfigError
from troupe.common.nets.parts import PartInputs
from troupe.common.nets.recurrent import SequenceBody
from troupe.common.nets.soft_actor_critic import SoftActorCritic


class Acting(nn.Module):
    """What an agent does when it does not explore, for `slots` environments that step together.

    Attributes:
        inputs: an example of each argument by name: `obs`, or `obs.KEY` for each part of one, and of
            `last_action`, `last_reward`, `first` and `memory` those that the network looks at.
        outputs: names of what `forward` returns: `action`, `q` or `policy`, and `next_memory` if it
            has one.
    """

    def __init__(self, agent: Agent, slots: int = 1) -> None:
        """Raises ConfigError for an agent that is no `NetworkAgent`, or does not say how it decides."""
        super().__init__()
        if not isinstance(agent, NetworkAgent):
            raise ConfigError(f"the agent of {type(agent).__module__} has no network that could be exported")
        self.net = agent.net
        self._decide = agent.decide
        self._leaves = agent.spec.obs_leaves
        spec = agent.spec
        self._empty = Step(
            _zeros((slots, *spec.obs_shape), spec.obs_dtype),
            torch.from_numpy(spec.actions.zeros(slots)),
            torch.zeros(slots),
            torch.ones(slots, dtype=torch.bool),
            torch.zeros(slots, agent.memory_size),
        )
        self.inputs: dict[str, Tensor] = {"obs": self._empty.obs}
        if self._leaves:
            self.inputs = {
                ".".join(["obs", *map(str, leaf.path)]): _zeros((slots, *leaf.shape), leaf.dtype)
                for leaf in self._leaves
            }
        self._parts = len(self.inputs)
        # What the network ignores is no argument: exporters drop unused inputs, each in its own way, and the
        # file would then not take what its description says.
        self.inputs |= {name: getattr(self._empty, name) for name in _looked_at(self.net, agent.memory_size)}
        with torch.inference_mode():
            # Run once to see which outputs there are: an agent without memory gives a `next_memory` of width
            # 0.
            decided = self._decide(self._step(tuple(self.inputs.values())))
        self.outputs = tuple(name for name, value in decided.items() if value.numel())

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Arguments in the order of `inputs`, results in that of `outputs`."""
        decided = self._decide(self._step(inputs))
        return tuple(decided[name] for name in self.outputs)

    def _step(self, inputs: tuple[Tensor, ...]) -> Step:
        seen, rest = inputs[: self._parts], inputs[self._parts :]
        obs = seen[0]
        if self._leaves:
            # The network takes parts as one flat row; programs outside give them by name, as the environment
            # does.
            parts = self.net.inputs
            assert isinstance(parts, PartInputs)
            obs = parts.of_parts(seen)
        named = dict(zip(list(self.inputs)[self._parts :], rest, strict=True))
        return self._empty._replace(obs=obs, **named)


def _looked_at(net: nn.Module, memory_size: int) -> list[str]:
    """Names of what it is given apart from observations."""
    last = isinstance(net, SequenceBody | SoftActorCritic) and net.see_last_step
    names = ["last_action", "last_reward"] if last else []
    names += ["first"] if last or memory_size else []
    return [*names, "memory"] if memory_size else names


def _zeros(shape: tuple[int, ...], dtype: str) -> Tensor:
    return torch.from_numpy(np.zeros(shape, dtype))
