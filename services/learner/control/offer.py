"""The parameters that the learner offers: the newest, and those under evaluation."""

from __future__ import annotations

from troupe.common.wire.control.params import Published


class Offer:
    """What services fetch.

    Attributes:
        newest: published last; None before the first.
        evaluated: those of the evaluation that was begun last.
        opponent: the earlier version that the next evaluation plays against; None for none.
        against: that of the evaluation that was begun last.
        sent: how many times parameters have been sent to a peer.
    """

    def __init__(self) -> None:
        self.newest: Published | None = None
        self.evaluated: Published | None = None
        self.opponent: Published | None = None
        self.against: Published | None = None
        self.sent = 0

    def evaluate(self, newest: Published, version: int) -> Published:
        """The parameters of the evaluation of `version`, which is the newest where it has only just begun."""
        if self.evaluated is None or self.evaluated.version != version:
            self.evaluated, self.against = newest, self.opponent
        return self.evaluated
