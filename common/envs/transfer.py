"""A step as arrays for the way to another process, every frame once; and a step again, on the other side.

Where frames are stacked, the other side has all but the newest of each slot already. It needs a whole
observation only where an episode begins.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from troupe.common.envs.base import EnvSpec, Step
from troupe.common.errors import RefusedError

RUNNING, TERMINATED, TRUNCATED, DISCARDED, IDLE = range(5)
"""Values of the array `ended`."""


class TransferError(RefusedError):
    """Arrays that are no step of these slots."""

    def __init__(self, detail: str) -> None:
        super().__init__("bad_field", detail)


def pack_start(obs: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays of slots that begin with `obs` `[S, *obs_shape]`."""
    return {"first": obs}


def pack_step(step: Step, stack: int) -> dict[str, np.ndarray]:
    """The arrays of one step of `S` slots.

    Returns:
        `reward` float32 `[S]`; `ended` uint8 `[S]`, see above; `obs` `[S, ...]`, where the step led (at an
        episode's end the last observation of that episode), with `stack` its newest frame only; and `first`
        `[E, *obs_shape]`, where the next episode begins, of the slots with `ended` other than 0 in their
        order.
    """
    obs = step.obs[:, -1] if stack else step.obs
    if step.final_obs:
        # `step.obs` is what the actor acts on next: the last observation must not get into it.
        obs = obs.copy()
        for slot, last in step.final_obs.items():
            obs[slot] = last[-1] if stack else last
    ended = np.zeros(len(obs), np.uint8)
    ended[step.truncated] = TRUNCATED
    ended[step.terminated] = TERMINATED
    ended[step.idle] = IDLE
    # Last, since it outweighs the others: nothing of such a step may be learned from.
    ended[step.discarded] = DISCARDED
    return {"obs": obs, "reward": step.reward, "ended": ended, "first": step.obs[ended != RUNNING]}


def unpack_start(arrays: Mapping[str, np.ndarray], slots: int, spec: EnvSpec) -> np.ndarray:
    """The observations that `pack_start` was given. Raises TransferError where these are other arrays."""
    return _checked(arrays, "first", spec.obs_dtype, (slots, *spec.obs_shape))


def unpack_step(arrays: Mapping[str, np.ndarray], before: np.ndarray, spec: EnvSpec) -> Step:
    """The step that `pack_step` was given, without its games. Raises TransferError likewise.

    Args:
        arrays: what has come.
        before: `[S, *obs_shape]`, the observations that were acted on.
        spec: of the environment.
    """
    slots = len(before)
    ended = _checked(arrays, "ended", "uint8", (slots,))
    reward = _checked(arrays, "reward", "float32", (slots,))
    if ended.max() > IDLE:
        raise TransferError(f"ended holds {ended.max()}")
    newest = _checked(arrays, "obs", spec.obs_dtype, (slots, *spec.obs_shape[1 if spec.stack else 0 :]))
    over = np.flatnonzero(ended)
    first = _checked(arrays, "first", spec.obs_dtype, (len(over), *spec.obs_shape))
    led_to = newest
    if spec.stack:
        led_to = np.concatenate([before[:, 1:], newest[:, None]], axis=1)
    obs = led_to
    if len(over):
        obs = led_to.copy()
        obs[over] = first
    over_list = over.tolist()
    return Step(
        obs,
        reward,
        ended == TERMINATED,
        ended == TRUNCATED,
        {slot: led_to[slot] for slot in over_list if ended[slot] in (TERMINATED, TRUNCATED)},
        discarded=[slot for slot in over_list if ended[slot] == DISCARDED],
        idle=[slot for slot in over_list if ended[slot] == IDLE],
    )


def _checked(arrays: Mapping[str, np.ndarray], name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    array = arrays.get(name)
    if array is None or array.shape != shape or array.dtype != np.dtype(dtype):
        got = "missing" if array is None else f"{array.dtype}{list(array.shape)}"
        raise TransferError(f"{name} should be {dtype}{list(shape)}, is {got}")
    # An actor checks its environments; this is for one of another make, whose NaN would reach every weight.
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise TransferError(f"{name} holds values that are not finite")
    return array
