"""What actor-critics that learn from unrolls share: acting by the policy, storing unrolls, reading them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from common.agents.base import Act, Inputs
from common.agents.fitting import BodyConfig, body_options, suited
from common.agents.network import NetworkAgent, NetworkConfig, OwnLearning
from common.data.unrolls import UnrollAccumulator, join_memory, unroll_fields
from common.nets.actor_critic import ActorCritic
from common.nets.frames import stacked

if TYPE_CHECKING:
    from common.envs import EnvSpec


class UnrollConfig(NetworkConfig, BodyConfig, Protocol):
    """Fields of an agent that learns from unrolls, besides those of its network's body."""

    unroll_steps: int

    @property
    def torso(self) -> str:
        """Name of a torso, or `auto`."""

    @property
    def allowed_staleness(self) -> int | None:
        """See `common.config.fields.AgentConfig`."""


Config = TypeVar("Config", bound=UnrollConfig)


class Unrolls(NamedTuple):
    """A batch, time-major, on the device. Entry t of `[T + 1]` belongs to observation t, or led to it."""

    obs: Tensor
    """`[T + 1, B, *obs_shape]`."""
    last_action: Tensor
    """`[T + 1, B]` int64."""
    last_reward: Tensor
    """`[T + 1, B]` float."""
    ended: Tensor
    """`[T + 1, B]` uint8: how the step that led to the observation ended the episode, if it did."""
    logits: Tensor
    """`[T, B, A]` of the behaviour policy."""
    final_value: Tensor
    """`[T, B]`."""
    memory: Tensor
    """`[B, memory_size]` before the first step."""


class UnrollAgent(NetworkAgent[Config, ActorCritic, OwnLearning]):
    """All of an `Agent` but how it learns: `update` and what that needs. See there for the contracts."""

    def __init__(self, config: Config, spec: EnvSpec, *, seed: int = 0, device: str = "cpu") -> None:
        super().__init__(config, spec, seed=seed, device=device)
        self.memory_size = self._net.state_size
        self.fields = unroll_fields(
            spec.obs_shape,
            spec.obs_dtype,
            spec.stack,
            spec.num_actions,
            config.unroll_steps,
            self.memory_size,
        )
        self.item_steps = (config.unroll_steps, config.unroll_steps)

    # ---------------------------------------------------------------- acting

    def slot_epsilons(self, indices: list[int], total_slots: int) -> np.ndarray:
        """Every slot draws from the policy: the stored logits are those of what was done."""
        return np.ones(len(indices), np.float32)

    @torch.inference_mode()
    def act(self, inputs: Inputs, epsilon: np.ndarray, rng: np.random.Generator) -> Act:
        """Actions drawn from the policy with chance `epsilon`, else its most likely ones."""
        policy_logits, _, memory = self._forward(inputs)
        logits = policy_logits[0].cpu().numpy()
        # The largest of logits plus Gumbel noise is distributed as the softmax of the logits.
        drawn = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
        explores = rng.random(len(logits)) < epsilon
        action = np.where(explores, drawn, logits.argmax(axis=1))
        if not self.memory_size:
            return Act(action, {"logits": logits})
        return Act(action, {"logits": logits, "memory": inputs.memory}, memory.cpu().numpy())

    @torch.inference_mode()
    def values(self, inputs: Inputs) -> np.ndarray:
        """The baseline `[S]` float32."""
        return self._forward(inputs)[1][0].cpu().numpy()

    def accumulator(self, chunk_steps: int, phase: float = 0.0) -> UnrollAccumulator:
        """An accumulator of unrolls for one slot; their length is `agent.unroll_steps`."""
        steps = self.config.unroll_steps
        # Where a policy is to be learned from by itself, all slots begin and end with it.
        skipped = int(phase * steps) if self.config.allowed_staleness is None else 0
        return UnrollAccumulator(steps, self.spec.stack, self.memory_size, skipped)

    def _forward(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """One step of the network: logits `[1, S, A]`, values `[1, S]`, memory `[S, memory_size]`."""
        arrays = (inputs.obs, inputs.last_action, inputs.last_reward, inputs.first)
        return self._net(*(self._to_device(array)[None] for array in arrays), self._to_device(inputs.memory))

    # -------------------------------------------------------------- learning

    def _evaluated(self, unrolls: Unrolls) -> tuple[Tensor, Tensor]:
        """Logits `[T, B, A]` of the steps and values `[T + 1, B]` of the observations, with these weights."""
        logits, values, _ = self._net(
            unrolls.obs, unrolls.last_action, unrolls.last_reward, unrolls.ended != 0, unrolls.memory
        )
        return logits[:-1], values

    def _unrolls(self, batch: dict[str, np.ndarray]) -> Unrolls:
        """What `update` is given, ready for the network."""
        data = {name: self._to_device(array) for name, array in batch.items() if name != "memory"}
        memory = torch.zeros(len(batch["action"]), 0, device=self._device)
        if self.memory_size:
            memory = self._to_device(join_memory(batch["memory"], self.memory_size))
        return Unrolls(
            self._observations(data),
            data["action"].T.long(),
            data["reward"].T,
            data["ended"].T,
            data["logits"].transpose(0, 1),
            data["final_value"].T,
            memory,
        )

    def _observations(self, data: dict[str, Tensor]) -> Tensor:
        """Observations `[T + 1, B, *obs_shape]`; stacks are put together from single frames."""
        if not self.spec.stack:
            return data["obs"].transpose(0, 1)
        return stacked(data["obs"].transpose(0, 1), data["frames"].T, self.spec.stack)

    # --------------------------------------------------------------- helpers

    def _network(self) -> ActorCritic:
        config, spec = self.config, self.spec

        def make(torso: str) -> ActorCritic:
            return ActorCritic(spec.obs_shape, spec.num_actions, torso, **body_options(config, spec))

        return suited(config.torso, "shallow", spec, make)
