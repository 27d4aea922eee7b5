"""What an environment may return. A wrong value is refused where it comes from, not where it does harm.

Otherwise a NaN in an observation would show as a loss that diverges, and a reward that is None as an internal
error. What is refused counts as a failure of the environment, as an exception would.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from troupe.common.data.schema import LARGEST_FLOAT
from troupe.common.spaces import Leaf, unpacked

_TOO_LARGE = f", beyond {LARGEST_FLOAT:.0e}, which cannot be learned from: scale it in the environment"
OLD_INTERFACE = "Gym's old interface is understood where env.id begins with old_gym:"


class BadReturn(Exception):
    """An environment returned what it must not; the text goes on a sentence that begins with its id."""


def check_step(result: Any) -> None:
    """Raise BadReturn unless what Gymnasium's `step` returned is five values; see `check_outcome`."""
    if not isinstance(result, tuple) or len(result) != 5:
        raise BadReturn(_wrong_length("step()", result, "observation, reward, terminated, truncated, info"))


def check_outcome(reward: Any, terminated: Any, truncated: Any) -> None:
    """Raise BadReturn for a reward that is no finite number, and for an ending that is None or text."""
    try:
        sound = abs(reward) <= LARGEST_FLOAT  # nor NaN
        finite = math.isfinite(reward)
    except (TypeError, ValueError, OverflowError):
        raise BadReturn(f"returned the reward {_shown(reward)}, which is no number") from None
    if not sound:
        raise BadReturn(f"returned the reward {float(reward)}{_TOO_LARGE if finite else ''}")
    for name, ending in (("terminated", terminated), ("truncated", truncated)):
        if ending is None or isinstance(ending, str):  # 'False' would be true
            raise BadReturn(f"returned {name} {_shown(ending)} instead of True or False")


def reset_result(result: Any) -> Any:
    """The observation of what Gymnasium's `reset` returned; BadReturn unless it comes with an info."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise BadReturn(_wrong_length("reset()", result, "observation, info"))
    return result[0]


def check_observation(space: Any, raw: Any, path: tuple[str | int, ...] = ()) -> None:
    """Raise BadReturn where `raw` has not the shape of the Gymnasium space, or a type that loses something.

    `path` leads to it where it is a part of an observation. See `as_announced`.
    """
    parts = getattr(space, "spaces", None)
    if isinstance(parts, dict) and isinstance(raw, dict):
        for name, part in parts.items():
            if name not in raw:
                raise BadReturn(f"returned an observation without {_named((*path, name))}")
            check_observation(part, raw[name], (*path, name))
    elif isinstance(parts, tuple) and isinstance(raw, tuple) and len(raw) == len(parts):
        for place, (part, value) in enumerate(zip(parts, raw, strict=True)):
            check_observation(part, value, (*path, place))
    elif hasattr(space, "low"):
        as_announced(raw, space, path)
    elif raw is None or not space.contains(raw):
        raise BadReturn(f"returned the observation {_shown(raw)}{_as(path)}, its space is {space}")


def as_announced(raw: Any, like: Any, path: tuple[str | int, ...] = ()) -> np.ndarray:
    """What was returned as an array of the dtype of `like`, an array or a Gymnasium Box.

    Raises BadReturn where it has another shape, or a type that loses something: a float64 where float32 was
    announced loses nothing that matters; a float where uint8 was announced does. Bounds are not looked at.
    """
    try:
        array = np.asarray(raw)
    except ValueError:  # lists of unlike lengths
        array = np.empty((), object)
    # Bounds are not looked at: many environments step over their own by a rounding, and nothing here depends
    # on them.
    if array.shape != like.shape or not taken_for(array, like):
        shown = _shown(raw) if array.dtype == object else _kind(array)
        raise BadReturn(f"returned an observation {shown}{_as(path)} instead of {_kind(like)}")
    return array.astype(like.dtype, copy=False)


def other_dtypes(space: Any, raw: Any, path: tuple[str | int, ...] = ()) -> list[str]:
    """What to say of each part of an observation whose dtype is not that of its space, and is converted."""
    parts = getattr(space, "spaces", None)
    if isinstance(parts, dict | tuple):
        named = parts.items() if isinstance(parts, dict) else enumerate(parts)
        return [line for name, part in named for line in other_dtypes(part, raw[name], (*path, name))]
    array = np.asarray(raw)
    if not hasattr(space, "low") or array.dtype == space.dtype:
        return []
    which = f"observation part {_named(path)}" if path else "observation"
    name = path[-1] if path and isinstance(path[-1], str) and path[-1].isidentifier() else "obs"
    return [
        f"the {which} is {array.dtype}, its space says {space.dtype}: return {name}.astype(np.{space.dtype})"
    ]


def taken_for(array: np.ndarray, like: Any) -> bool:
    """Whether its dtype may stand for the one that was announced."""
    return array.dtype == like.dtype or np.can_cast(array.dtype, like.dtype, "same_kind")


def check_finite(obs: np.ndarray, path: tuple[str | int, ...] = ()) -> None:
    """Raise BadReturn where a float observation, or its part at `path`, holds what `not_finite` looks for."""
    if not_finite(obs[None]):
        raise finite_error(obs, path)


def check_parts(leaves: Sequence[Leaf], row: np.ndarray) -> None:
    """`check_finite` of each part of an observation in one row, as `packed` makes it."""
    for leaf, part in zip(leaves, unpacked(leaves, row), strict=True):
        check_finite(part, leaf.path)


def finite_error(obs: np.ndarray, path: tuple[str | int, ...] = ()) -> BadReturn:
    """What to say of an observation, or of a part of one, that holds such values."""
    bad = obs[~(np.abs(obs) <= LARGEST_FLOAT)]
    of = f"{len(bad)} of its {obs.size} numbers"
    why = _TOO_LARGE if np.isfinite(bad[0]) else ""
    return BadReturn(f"returned an observation with {bad[0]}{_as(path)} ({of}){why}")


def _named(path: tuple[str | int, ...]) -> str:
    return repr(".".join(map(str, path)))


def _as(path: tuple[str | int, ...]) -> str:
    """Which part of an observation it is; empty for a whole one."""
    return f" as its part {_named(path)}" if path else ""


def one_line(error: BaseException) -> str:
    """What an error says."""
    return " ".join(str(error).split())


def not_finite(obs: np.ndarray) -> list[int]:
    """Rows of `[S, ...]` that hold NaN, infinity, or more than replay takes, `LARGEST_FLOAT`."""
    if obs.dtype.kind != "f":
        return []
    sound = np.abs(obs) <= LARGEST_FLOAT
    if b"\0" not in sound.tobytes():  # half of what `all` takes for a few numbers
        return []
    good: np.ndarray = sound.reshape(len(obs), -1).all(axis=1)
    return np.flatnonzero(~good).tolist()


def _wrong_length(call: str, result: Any, wanted: str) -> str:
    what = f"{len(result)} values" if isinstance(result, tuple) else _shown(result)
    # The old reset() returns the observation alone.
    old = isinstance(result, tuple) or (call == "reset()" and result is not None)
    return f"returned {what} from {call}, not ({wanted}){f'; {OLD_INTERFACE}' if old else ''}"


def _kind(array: Any) -> str:
    return f"{array.dtype} {list(array.shape)}"


def _shown(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return _kind(value)
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
