"""The parameters that the learner offers: the newest, those under evaluation, and a few before."""

from __future__ import annotations

import numpy as np

from troupe.common.wire.control.params import Published, decode_params

# Versions of which the parameters are kept for `fetched`.
_FETCHED = 4


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
        self._fetched: dict[int, Published] = {}

    def evaluate(self, newest: Published, version: int) -> Published:
        """The parameters of the evaluation of `version`, which is the newest where it has only just begun."""
        if self.evaluated is None or self.evaluated.version != version:
            self.evaluated, self.against = newest, self.opponent
            self.keep(newest)
        return self.evaluated

    def keep(self, params: Published) -> None:
        """Remember what an evaluator was given."""
        self._fetched[params.version] = params
        if len(self._fetched) > _FETCHED:
            del self._fetched[min(self._fetched)]

    def fetched(self, version: int) -> tuple[dict[str, np.ndarray], Published] | None:
        """The parameters that an evaluator was given as this version, and how they were published.

        None where none was, or it is long ago. What is older is let go.
        """
        found = self._fetched.get(version)
        self._fetched = {each: kept for each, kept in self._fetched.items() if each >= version}
        return None if found is None else (decode_params(found.manifest, found.blob), found)
