"""One episode of a data set as an agent sees it, from an environment's own arrays and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from troupe.common.spaces import nested

if TYPE_CHECKING:
    from troupe.common.envs import EnvSpec


@dataclass(frozen=True)
class Trajectory:
    """An episode of `T` steps."""

    obs: np.ndarray
    """`[T + 1, *obs_shape]`, the true last observation included."""
    actions: np.ndarray
    """`[T, *actions.shape]`, rows of `troupe.common.spaces.ActionSpec`."""
    rewards: np.ndarray
    """`[T]` float64, as the environment gave them: not clipped."""
    terminated: bool
    """The last step ended the episode, and nothing follows; else it was cut off there."""

    @property
    def steps(self) -> int:
        """Steps of the episode."""
        return len(self.rewards)


def seen(spec: EnvSpec, nest: Any) -> np.ndarray:
    """Observations `[T + 1, *obs_shape]` of arrays `[T + 1, ...]`, or of dictionaries and tuples of such.

    Raises ValueError for others than the environment's, and for numbers that are not finite.
    """
    if spec.obs_leaves:
        parts = []
        for leaf in spec.obs_leaves:
            value = nest
            for key in leaf.path:
                value = value[key]
            parts.append(_fitting(value, leaf.shape, leaf.dtype).reshape(len(value), -1).view(np.uint8))
        return np.concatenate(parts, axis=1)
    return _fitting(nest, spec.obs_shape, spec.obs_dtype)


def shown(spec: EnvSpec, obs: np.ndarray) -> Any:
    """What `seen` makes `obs` of."""
    if not spec.obs_leaves:
        return obs
    arrays, begin = [], 0
    for leaf in spec.obs_leaves:
        column = np.ascontiguousarray(obs[:, begin : begin + leaf.nbytes])
        arrays.append(column.view(leaf.dtype).reshape(len(obs), *leaf.shape))
        begin += leaf.nbytes
    return nested([leaf.path for leaf in spec.obs_leaves], arrays)


def _fitting(value: Any, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    if not isinstance(value, np.ndarray):
        raise ValueError(f"observations in parts instead of {dtype}{list(shape)}")
    # A vector may have any number of axes of the same numbers, as `gymnasium.spaces.flatten` takes it.
    if value[:1].size != np.prod(shape, dtype=int) or (len(shape) > 1 and value.shape[1:] != shape):
        raise ValueError(f"observations {value.dtype}{list(value.shape[1:])} instead of {dtype}{list(shape)}")
    with np.errstate(over="ignore", invalid="ignore"):  # it becomes infinite, which is looked for
        array = value.reshape(len(value), *shape).astype(dtype)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError("observations that are not finite")
    if array.dtype.kind in "iu" and not np.array_equal(array, value.reshape(array.shape)):
        raise ValueError(f"observations that are no {dtype}")
    return np.ascontiguousarray(array)
