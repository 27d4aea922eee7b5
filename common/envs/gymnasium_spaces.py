"""Gymnasium's spaces in Troupe's words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from troupe.common.envs.pictures import layout_of
from troupe.common.errors import ConfigError
from troupe.common.spaces import ActionSpec, Leaf, Path


def action_spec(env_id: str, space: Any, bins: int, bins_ratio: float) -> ActionSpec:
    """What an agent chooses for a Gymnasium action space; see `ActionSpec` for `bins` and `bins_ratio`.

    Raises ConfigError for a space of other parts than Discrete, MultiDiscrete, MultiBinary and Box.
    """
    try:
        spec = ActionSpec(tuple(_leaf(path, part) for path, part in leaves(space)), bins, bins_ratio)
    except ValueError as error:
        raise ConfigError(
            f"{env_id} has actions of {_short(space)} that no agent here can take: {error}"
        ) from None
    if bins and not any(spec.binned(leaf) for leaf in spec.leaves):
        raise ConfigError(f"env.action_bins would have no effect: {env_id} has no action between two bounds")
    return spec


def leaves(space: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The spaces in a nest of Dict and Tuple, each with the keys and places that lead to it."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        for key, part in space.spaces.items():
            if not isinstance(key, str):
                raise ValueError(f"the key {key!r} is no text")
            yield from leaves(part, (*path, key))
    elif isinstance(space, spaces.Tuple):
        for place, part in enumerate(space.spaces):
            yield from leaves(part, (*path, place))
    else:  # OneOf has spaces as well, but is one of them at a time
        yield path, space


def observation_leaves(space: Any) -> tuple[Leaf, ...]:
    """The parts of an observation that is no Box; empty for a Box.

    Raises ValueError for parts that are none of Box, Discrete, MultiDiscrete and MultiBinary.
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Box):
        return ()
    found = tuple(_seen(path, part) for path, part in leaves(space))
    if not found:
        raise ValueError("there is nothing in it")
    return found


def picture_scales(space: Any) -> tuple[float | None, ...]:
    """For each of `observation_leaves`: what its floats are multiplied with to be pixels, None for others."""
    layouts = (layout_of(part) for _, part in leaves(space))
    return tuple(layout.scale if layout else None for layout in layouts)


def stored_dtype(dtype: np.dtype) -> str:
    """The dtype in which numbers of an observation are stored: float32, or that of whole numbers."""
    if dtype.kind == "b":
        return "uint8"
    # float64 is stored as float32, which is what networks see; uint32 has no tensor of its own in torch.
    return dtype.name if dtype in _STORED else "int64" if dtype == np.uint32 else "float32"


_STORED = {np.dtype(name) for name in ("uint8", "int8", "int16", "int32", "int64", "float16", "float32")}


def _seen(path: Path, space: Any) -> Leaf:
    from gymnasium import spaces

    if not isinstance(space, spaces.Box):
        return _leaf(path, space)
    picture = _axes(space)
    return Leaf(path, space.shape, "uint8" if picture else stored_dtype(space.dtype), picture=picture)


def _axes(space: Any) -> Literal["", "hw", "hwc", "chw"]:
    """How the axes of a picture lie; empty where it is none."""
    layout = layout_of(space)
    if layout is None:
        return ""
    return "hw" if len(space.shape) == 2 else "chw" if layout.channels_first else "hwc"


def _leaf(path: Path, space: Any) -> Leaf:
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return Leaf(path, (), space.dtype.name, (int(space.n),), (int(space.start),))
    if isinstance(space, spaces.MultiDiscrete):
        starts = tuple(np.ravel(space.start).tolist())
        return Leaf(path, space.shape, space.dtype.name, tuple(np.ravel(space.nvec).tolist()), starts)
    if isinstance(space, spaces.MultiBinary):
        size = int(np.prod(space.shape))
        return Leaf(path, space.shape, space.dtype.name, (2,) * size, (0,) * size)
    if isinstance(space, spaces.Box):
        low, high = (_bounds(each) for each in (space.low, space.high))
        return Leaf(path, space.shape, space.dtype.name, low=low, high=high)
    raise ValueError(f"{type(space).__name__} is none of Discrete, MultiDiscrete, MultiBinary and Box")


def _bounds(values: np.ndarray) -> tuple[float | None, ...]:
    return tuple(each if np.isfinite(each) else None for each in np.ravel(values).astype(float).tolist())


def _short(space: Any) -> str:
    text = " ".join(str(space).split())
    return text if len(text) <= 100 else text[:97] + "..."
