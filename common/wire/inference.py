"""What actors and the learner say to each other where inference is central."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import UNSET, Meta, UnsetType

from troupe.common.wire import types
from troupe.common.wire.body import Body


class Infer(Body, kw_only=True):
    """Actor -> learner: a group of slots begins, or has done what it was told; answered with ACTIONS.

    Attributes:
        incarnation: that of HELLO
        group: which of the actor's groups; its slots step together
        slots: those on lease that begin here, one a row; absent where they go on
        after: request id of the ACTIONS that were carried out; absent where slots begin
        first: observations [E, ...], whole: of all rows where slots begin; else of those with ended above 0,
            in their order, the first of the next episode
        obs: observations [S, ...], where the step led, at an episode's end that episode's last one; only the
            newest frame where frames are stacked; absent where slots begin, like all below
        reward: [S], as the agent is to learn from it
        ended: [S], 0 goes on, 1 terminated, 2 truncated, 3 the environment failed: void
    """

    TYPE: ClassVar[str] = "INFER"
    incarnation: types.U64
    group: Annotated[int, Meta(ge=0, le=types.MAX_GROUPS - 1)]
    slots: types.Slots | UnsetType = UNSET
    after: types.U64 | UnsetType = UNSET
    first: types.AnyArray | UnsetType = UNSET
    obs: types.AnyArray | UnsetType = UNSET
    reward: types.Float32s | UnsetType = UNSET
    ended: types.Uint8s | UnsetType = UNSET

    def __post_init__(self) -> None:
        if (self.slots is UNSET) == (self.after is UNSET):
            raise ValueError("either `slots` or `after`")


class Actions(Body, kw_only=True):
    """Learner -> actor, answer to INFER.

    Attributes:
        version: of the parameters that chose
        actions: one a row: int64 [S] where each is one choice, [S, N] of several; with real numbers
            float32 [S, N], choices first
    """

    TYPE: ClassVar[str] = "ACTIONS"
    version: types.Version
    actions: types.AnyArray
