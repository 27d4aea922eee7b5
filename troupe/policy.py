"""What a run has learned, for use elsewhere: observations in, actions out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from troupe.common.agents import Act, Agent, Inputs
from troupe.common.config import Config
from troupe.common.envs import EnvSpec
from troupe.common.envs.base import clip_rewards
from troupe.common.envs.returned import BadReturn, check_finite, check_parts
from troupe.common.errors import ConfigError
from troupe.common.policies import agent_of, config_of, spec_of
from troupe.common.runtime.checkpoint import Checkpoint, open_checkpoint
from troupe.common.spaces import packed


def load(
    path: str | Path,
    *,
    epsilon: float | None = None,
    seed: int = 0,
    device: str = "cpu",
    modules: Collection[str] = (),
) -> Policy:
    """The policy of a run's newest whole checkpoint, or of the given one. Needs no environment.

    Args:
        path: run directory, directory of checkpoints, or checkpoint.
        epsilon: exploration; None: that of evaluation, `agent.eval_epsilon`.
        seed: of the exploration.
        device: where the network runs, as `learner.device`.
        modules: that the algorithm may be from, in addition to Troupe's own: importing one runs it.

    Raises:
        ConfigError: there is no checkpoint at `path`, or its algorithm's module is not permitted.
        CheckpointError: it is damaged.
    """
    checkpoint = open_checkpoint(Path(path))
    config = config_of(checkpoint, modules, plays=False)
    spec = spec_of(checkpoint)
    agent = agent_of(checkpoint, config, spec, device)
    epsilon = agent.eval_epsilon if epsilon is None else epsilon
    if not 0 <= epsilon <= 1:
        raise ConfigError(f"epsilon should be from 0 to 1, not {epsilon}")
    return Policy(agent, config, spec, epsilon=epsilon, seed=seed, checkpoint=checkpoint)


class Policy:
    """Chooses actions for one environment, or for a batch of `S` that step together.

    Observations are what training's network got: `spec.obs_shape` and `spec.obs_dtype`, so pictures resized,
    grey and stacked as `config.env` says, which is the caller's to do; numbers as one vector. Where
    `spec.packed_bits`, pixels of 0 or 255 `[*seen_shape]` become `numpy.packbits(pixels, axis=-1)`.

    Attributes:
        config: of the run.
        spec: shape of an observation, what an action is.
        agent: the network, and how it acts.
        epsilon: exploration.
        checkpoint: where it is from.
    """

    def __init__(
        self,
        agent: Agent,
        config: Config,
        spec: EnvSpec,
        *,
        epsilon: float,
        seed: int,
        checkpoint: Checkpoint,
    ) -> None:
        self.config = config
        self.spec = spec
        self.agent = agent
        self.epsilon = epsilon
        self.checkpoint = checkpoint._replace(arrays={})  # they are in the agent
        self._rng = np.random.default_rng(seed)
        self._last: tuple[Inputs, Act] | None = None
        self._ended = np.zeros(0, bool)

    def reset(self, ended: Sequence[bool] | np.ndarray | None = None) -> None:
        """Say that the next observation begins an episode: memory of the last one is forgotten.

        `ended` `[S]` says of which environments; None: of all, and there may be another number of them.
        """
        if ended is None:
            self._last = None
            return
        flags = np.asarray(ended, bool)
        if self._last is not None:
            if flags.shape != self._ended.shape:
                raise ConfigError(f"reset: flags {list(flags.shape)} for {len(self._ended)} environments")
            self._ended |= flags

    def act(self, obs: np.ndarray, reward: float | Sequence[float] | np.ndarray | None = None) -> Any:
        """The action for an observation, as its environment takes it, or actions for a batch of them.

        Args:
            obs: `[*obs_shape]` or `[S, *obs_shape]`. Where the environment shows several parts, these, with
                pixels from 0 to 255, or a list of what several environments show.
            reward: what the last action earned, unclipped: a number, or `[S]`. Policies with a memory need
                it, but where episodes begin; others do not look at it.

        Returns:
            One action: an int, an array, or a nest of them. For a batch an array `[S, ...]`, or a list.

        Raises:
            ConfigError: shape, type, number or reward is not what the policy needs, or not finite.
        """
        array = self._checked(obs)
        single = array.ndim == len(self.spec.obs_shape)
        inputs = self._inputs(array[None] if single else array, reward)
        act = self.agent.act(inputs, np.full(len(inputs.obs), self.epsilon, np.float32), self._rng)
        self._last, self._ended = (inputs, act), np.zeros(len(inputs.obs), bool)
        action = act.action.copy()  # the caller may write into what it gets
        return self.spec.actions.native(action[0]) if single else self.spec.actions.natives(action)

    def _inputs(self, batch: np.ndarray, reward: float | Sequence[float] | np.ndarray | None) -> Inputs:
        size, memory_size = len(batch), self.agent.memory_size
        if self._last is None or (size != len(self._ended) and not memory_size):
            return Inputs.start(batch, memory_size, self.spec.actions)
        if size != len(self._ended):
            raise ConfigError(
                f"{size} observations after {len(self._ended)}: call reset() where others' episodes begin"
            )
        if reward is None:
            if memory_size and not self._ended.all():
                raise ConfigError(
                    "this policy has a memory: give act() the reward of the last step, or call reset() where "
                    "an episode begins"
                )
            reward = 0.0
        with np.errstate(over="ignore"):  # as in `_checked`
            rewards = np.asarray(reward, np.float32)
        if rewards.shape not in ((), (size,)):
            raise ConfigError(f"{size} observations with rewards {list(rewards.shape)}")
        if not np.isfinite(rewards).all():
            raise ConfigError(f"a reward is not finite: {reward}")
        rewards = rewards + np.zeros(size, np.float32)
        inputs, act = self._last
        return inputs.after(act, batch, clip_rewards(rewards, self.config.env.reward_clip), self._ended)

    def _rows(self, obs: Any) -> Any:
        """Packed, where they are the environment's own of several parts: one, or a list of them."""
        leaves = self.spec.obs_leaves
        if not leaves or isinstance(obs, np.ndarray):
            return obs
        try:
            if isinstance(obs, list):
                return np.stack([packed(leaves, each) for each in obs])
            return packed(leaves, obs)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            message = (
                f"an observation does not fit the policy of {self.spec.id}: {type(error).__name__}: {error}"
            )
            raise ConfigError(message) from None

    def _checked(self, obs: Any) -> np.ndarray:
        array, spec = np.asarray(self._rows(obs)), self.spec
        shape, dtype = array.shape, np.dtype(spec.obs_dtype)
        if spec.obs_shape not in (shape, shape[1:]) or not np.can_cast(array.dtype, dtype, "same_kind"):
            wanted = ", ".join(map(str, spec.obs_shape))
            raise ConfigError(
                f"an observation is {array.dtype} {list(shape)}; this policy, of {spec.id}, takes "
                f"{dtype} [{wanted}], or a batch [S, {wanted}]"
            )
        if not shape[0] and shape != spec.obs_shape:
            raise ConfigError("a batch of no observations")
        with np.errstate(over="ignore"):  # what is too large becomes infinite, which is looked for
            array = np.array(array, dtype)  # a copy: callers may write into theirs
        try:
            if not spec.obs_leaves:
                check_finite(array)
            else:
                for row in array.reshape(-1, *spec.obs_shape):
                    check_parts(spec.obs_leaves, row)
        except BadReturn as error:  # as in training, where such an episode is discarded
            raise ConfigError(f"{spec.id} {error}") from None
        return array
