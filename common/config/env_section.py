"""The configuration's section `[env]`: which environment, and its preprocessing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, field_validator, model_validator

from troupe.common.config.fields import MAX_PROCESSES, Section, operational, structural, tunable
from troupe.common.families import FORMS

DEFAULT_ENV = "atari:pong"


# A name to import, checked for its form only: the package need not be installed where the configuration is
# read.
def _wrapper(value: str) -> str:
    if not re.fullmatch(r"\w+(\.\w+)*:\w+", value):
        raise ValueError(f"should be package.module:Name, not {value!r}")
    return value


Wrapper = Annotated[str, AfterValidator(_wrapper)]


class EnvConfig(Section):
    """The environment and its preprocessing. Fields that do not apply to an environment are refused."""

    id: str = structural(
        DEFAULT_ENV,
        f"Environment: {', '.join(f'`{form}`' for form in FORMS)} (a registered ID, a class or a function), "
        "or an ID of an installed family.",
    )
    frame_skip: int = structural(4, "Emulator frames per step (action repeat).", ge=1, le=1024)
    frame_size: int = structural(84, "Height and width of an observation, in pixels.", ge=16, le=1024)
    grayscale: bool = structural(True, "Convert frames to one grey channel.")
    frame_stack: int = structural(4, "Number of newest frames in one observation.", ge=1, le=64)
    noop_max: int = structural(
        30, "Maximum number of no-op actions at the start of an episode, chosen uniformly.", ge=0, le=1 << 16
    )
    episodic_life: bool = structural(True, "Learn as if a lost life ended the episode (never in evaluation).")
    fire_reset: bool = structural(True, "Press FIRE after a reset in games that require it to start.")
    reward_clip: Literal["none", "sign"] = structural(
        "none", "Reward used for learning: raw, or its sign (the default for `atari:` games)."
    )
    sticky_actions: float = structural(0.0, "Probability that the previous action is repeated.", ge=0, le=1)
    full_action_space: bool = structural(
        False, "Offer all actions of Atari (18) or MinAtar (6) instead of the game's own."
    )
    max_episode_frames: int = structural(
        108_000, "Emulator frames after which a training episode is truncated.", ge=1
    )
    flatten: bool = structural(
        False, "Flatten images and grids of a `gym:` environment to one vector, for an MLP."
    )
    action_bins: int = structural(
        0,
        "Discretise continuous actions: number of values for each bounded component; 0 = off.",
        ge=0,
        le=1 << 16,
    )
    action_bins_ratio: float = structural(
        0.0,
        "Logarithmic spacing of these values: ratio of the largest to the smallest, on either side of the "
        "middle, with an odd number of bins; 0 = even spacing.",
        ge=0,
        le=1e9,
    )
    kwargs: dict[str, Any] = structural(
        {}, "Further keyword arguments of `gymnasium.make`, or options of the family."
    )
    processes: int = tunable(
        0,
        "Separate processes that step the copies of one actor, or of the evaluator. One that crashes or "
        "hangs is restarted. 0 = the actor steps them itself.",
        ge=0,
        le=MAX_PROCESSES,
    )
    step_timeout_s: float = tunable(
        30.0, "With `processes`: seconds after which a process is ended if a call has not returned.", gt=0
    )
    wrappers: tuple[Wrapper, ...] = structural(
        (),
        "Wrappers of a Gymnasium environment, each `package.module:Name`, called with the environment; "
        "the first is the innermost.",
    )
    check_timeout_s: float = operational(
        60.0,
        "Maximum seconds for a single call in the environment check before training; 0 = no check.",
        ge=0,
    )

    @model_validator(mode="before")
    @classmethod
    def _clip_of_the_family(cls, values: Any) -> Any:
        # Scores of Atari games differ by orders of magnitude, and its literature learns from their signs.
        # Elsewhere a reward is what its author wants to be learned from.
        is_atari = isinstance(values, Mapping) and str(values.get("id", DEFAULT_ENV)).startswith("atari:")
        return {"reward_clip": "sign", **values} if is_atari else values

    @field_validator("id", mode="after")
    @classmethod
    def _moved(cls, value: str) -> str:
        # Runs that began when the packages were at the top level.
        return f"troupe.{value}" if value.startswith("common.envs.") else value
