"""What networks see of observations in Gymnasium's spaces, and the `EnvSpec` that says so.

Pictures go through grey, resize and stack; everything else becomes a flat vector, or several parts. What only
looks like a picture is refused, for little would learn from it as a vector, unless `env.flatten` says so.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from troupe.common.envs.base import EnvSpec
from troupe.common.envs.gymnasium_spaces import action_spec, observation_leaves, picture_scales, stored_dtype
from troupe.common.envs.pictures import FrameProcessor, Layout, layout_of, push_frame
from troupe.common.envs.returned import as_announced, check_finite, check_observation, check_parts
from troupe.common.errors import ConfigError
from troupe.common.installation import install_command
from troupe.common.spaces import Leaf, packed

if TYPE_CHECKING:
    from troupe.common.config.env_section import EnvConfig


class View:
    """Makes what the network sees of what one copy, or one agent, returns.

    Attributes:
        obs: `[*obs_shape]`, the newest that `of` has returned.
        plain: it is an array of numbers that `SlotVector` can check and convert, of all copies at once.
        returned: like that array; like `obs` where there is more to do.
    """

    def __init__(self, config: EnvConfig, spec: EnvSpec, space: Any) -> None:
        self._spec = spec
        self._space = space
        self._scales = picture_scales(space) if spec.obs_leaves else ()
        self.obs = np.zeros(spec.obs_shape, spec.obs_dtype)
        self._frames: FrameProcessor | None = None
        if spec.pixels:
            layout = _layout(config, space)
            self._frames = FrameProcessor(config.frame_size, grayscale=config.grayscale, layout=layout)
        self.plain = not spec.pixels and not spec.obs_leaves and hasattr(space, "low")
        self.returned = np.zeros(space.shape, space.dtype) if self.plain else self.obs

    def begin(self) -> None:
        """An episode begins: nothing that was seen before is seen with what comes."""
        if self._frames is not None:
            # A new array: the old stack may still be the last observation of the episode before.
            self.obs = np.zeros_like(self.obs)

    def of(self, raw: Any) -> np.ndarray:
        """What the network sees of `raw`, `[*obs_shape]`; BadReturn where it is not of the space."""
        if self.plain:
            row = as_announced(raw, self.returned).ravel()
            # Of several agents some may see less than others, and zeros for the rest.
            self.obs = np.zeros(self._spec.obs_shape, self._spec.obs_dtype)
            self.obs[: row.size] = row
            check_finite(self.obs)
            return self.obs
        check_observation(self._space, raw)
        if self._frames is not None:
            self.obs = push_frame(self.obs, self._frames(raw))
        elif self._spec.obs_leaves:
            self.obs = self._packed(raw)
        else:
            self.obs = import_gymnasium().spaces.flatten(self._space, raw).astype(np.float32)
        return self.obs

    def _packed(self, raw: Any) -> np.ndarray:
        leaves = self._spec.obs_leaves
        for leaf, scale in zip(leaves, self._scales, strict=True):
            if scale is not None:  # of pixels nothing would be left to see afterwards
                check_finite(np.asarray(functools.reduce(operator.getitem, leaf.path, raw)), leaf.path)
        row = packed(leaves, raw, self._scales)
        check_parts(leaves, row)
        return row


def spec_of(config: EnvConfig, space: Any, action_space: Any) -> EnvSpec:
    """What a network sees of observations in `space`, and chooses of `action_space`.

    Raises ConfigError where it can do neither.
    """
    actions = action_spec(config.id, action_space, config.action_bins, config.action_bins_ratio)
    pixels = _layout(config, space) is not None
    parts = _parts(config, space)
    dtype = "uint8"
    if parts:
        shape: tuple[int, ...] = (sum(leaf.nbytes for leaf in parts),)
    elif pixels:
        frame_shape = FrameProcessor(config.frame_size, grayscale=config.grayscale).frame_shape
        shape = (config.frame_stack, *frame_shape)
    else:
        shape = (_flat_size(config, space),)
        box = hasattr(space, "low")
        dtype = stored_dtype(space.dtype) if box else "float32"
    if not math.prod(shape):
        raise ConfigError(
            f"{config.id} has observations {space} without a number: there is nothing to learn from"
        )
    return EnvSpec(
        id=config.id,
        obs_shape=shape,
        obs_dtype=dtype,
        actions=actions,
        stack=config.frame_stack if pixels else 0,
        frames_per_step=1,
        pixels=pixels,
        obs_leaves=parts,
    )


def _layout(config: EnvConfig, space: Any) -> Layout | None:
    """How the environment shows pictures; None for vectors. ConfigError for pictures of no use."""
    if config.flatten:
        return None
    name, why = next(_unfit_pictures(space), ("", ""))
    if not why:
        return layout_of(space)
    size = _flat_size(config, space)
    raise ConfigError(
        f"{config.id} has pictures{name} {why}: wrap it, so that it returns one uint8 picture [H, W], "
        "[H, W, 1 or 3] or [1 or 3, H, W], or set env.flatten to true to have all that it returns as one "
        f"vector of {size:,} numbers"
    )


def _unfit_pictures(space: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Name and what is wrong of every picture that no convolution would get."""
    parts = getattr(space, "spaces", None)
    if parts is not None:
        for key, part in parts.items() if hasattr(parts, "items") else enumerate(parts):
            yield from _unfit_pictures(part, f"{name or ' in its observation'}[{key!r}]")
    else:
        try:
            layout_of(space)
        except ValueError as error:
            yield name, str(error)


def _flat_size(config: EnvConfig, space: Any) -> int:
    gym = import_gymnasium()
    try:
        return int(gym.spaces.flatdim(space))
    except (NotImplementedError, ValueError) as error:
        message = f"{config.id} has observations {space} that cannot be made a vector: wrap it"
        raise ConfigError(message) from error


def _parts(config: EnvConfig, space: Any) -> tuple[Leaf, ...]:
    """The parts of an observation that is no Box; ConfigError where one has no use."""
    if config.flatten:
        return ()
    try:
        return observation_leaves(space)
    except ValueError as error:
        message = f"{config.id} has observations {space} that no network here can take: {error}; wrap it"
        raise ConfigError(message) from None


def import_gymnasium() -> Any:
    """The package; ConfigError where it is missing."""
    try:
        import gymnasium
    except ImportError as error:
        raise ConfigError(f"environments need the package gymnasium: {install_command('actor')}") from error
    return gymnasium
