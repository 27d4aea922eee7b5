"""One line of `troupe doctor`: what was looked at, the figure, and what to do."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["ok", "note", "wrong"]


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        area: what it belongs to, such as `ports`.
        looked_at: what it is.
        figure: what was found.
        state: `ok`; `note`, worth knowing; or `wrong`.
        advice: what to do; empty where that is nothing.
    """

    area: str
    looked_at: str
    figure: str
    state: State = "ok"
    advice: str = ""

    @property
    def line(self) -> str:
        """All of it, for a terminal."""
        told = self.state if not self.advice else f"{self.state}: {self.advice}"
        return f"{self.area:<11} {self.looked_at}: {self.figure} - {told}"

    def to_dict(self) -> dict[str, Any]:
        """All of it, for `--json`."""
        return asdict(self)


def guarded(area: str, checks: Iterable[Check]) -> Iterator[Check]:
    """Pass on the checks of an area; what a strange machine makes of looking is a line of its own."""
    try:
        yield from checks
    except (OSError, ValueError) as error:
        yield Check(area, "the rest", " ".join(f"{type(error).__name__}: {error}".split()), "note")


def service_of(command: list[str]) -> str:
    """The service that a command line runs, such as `learner`; empty for other programs."""
    for word in command:
        if word.startswith("troupe.services."):
            return word.split(".")[2]
    named = [os.path.basename(word) for word in command[:2]]
    if "troupe" in named and len(command) > named.index("troupe") + 1:
        return command[named.index("troupe") + 1]
    return ""
