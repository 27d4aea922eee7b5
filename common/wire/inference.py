"""What actors and the learner say to each other where inference is central."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import UNSET, Meta, UnsetType

from troupe.common.wire import types
from troupe.common.wire.body import Body


class Infer(Body, kw_only=True):
    """Actor -> learner: a group of slots begins, or has carried out its actions; answered with ACTIONS.

    Attributes:
        incarnation: that of HELLO
        group: which of the actor's groups; its slots step together
        slots: the leased slots that begin here, one per row; absent if they continue
        after: request ID of the ACTIONS that were carried out; absent if slots begin
        first: whole observations [E, ...]: of all rows if slots begin; otherwise, for the rows with ended
            above 0, in order, the first of the next episode; anything while its agent is away
        obs: observations [S, ...] after the step; at the end of an episode, its last one; only the newest
            frame if frames are stacked; absent if slots begin, like all below
        reward: [S], as the agent learns from it
        ended: [S], 0 no, 1 terminated, 2 truncated, 3 void, because the environment failed, 4 no step: the
            agent took no part in it
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
        version: of the parameters that chose the actions
        actions: one per row: int64 [S] if each is one choice, [S, N] if several; float32 [S, N] with real
            numbers, choices first
    """

    TYPE: ClassVar[str] = "ACTIONS"
    version: types.Version
    actions: types.AnyArray
