"""What a run is to reach: `return>=18`."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from troupe.common.errors import ConfigError

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_COUNTERS = ("steps", "frames", "updates", "wall_s")
EVALUATED, TRAINED = "eval/episode_return", "train/episode_return"


@dataclass(frozen=True)
class Goal:
    """A value of the learner's status, and what it is compared with."""

    name: str
    comparison: str
    bound: float

    def value(self, status: Mapping[str, Any]) -> float | None:
        """The value, None as long as there is none."""
        found = status.get(self.name) if self.name in _COUNTERS else status.get("metrics", {}).get(self.name)
        return float(found) if isinstance(found, int | float) else None

    def is_reached(self, status: Mapping[str, Any]) -> bool:
        """Whether the run is there."""
        value = self.value(status)
        return value is not None and _COMPARISONS[self.comparison](value, self.bound)

    def __str__(self) -> str:
        return f"{self.name} {self.comparison} {self.bound:g}"


def parse_goal(text: str, *, evaluated: bool) -> Goal:
    """Return the goal that `return>=18` and its like say.

    Args:
        text: NAME, a comparison and a number; a metric's whole name, a counter, or `return`.
        evaluated: whether the run has an evaluator, whose returns `return` is then.

    Raises:
        ConfigError: it says none.
    """
    found = re.fullmatch(r"\s*([\w/]+)\s*(>=|<=|>|<)\s*([-+]?\d+(?:\.\d*)?(?:e[-+]?\d+)?)\s*", text)
    if found is None:
        raise ConfigError(f"--until {text!r}: should look like 'return>=18' or 'steps>=1000000'")
    name = found[1]
    if name == "return":
        name = EVALUATED if evaluated else TRAINED
    elif "/" not in name and name not in _COUNTERS:
        raise ConfigError(
            f"--until {text!r}: {name} is not a goal; use return, {', '.join(_COUNTERS)}, or the name of a "
            "metric, such as eval/episode_return"
        )
    elif name == EVALUATED and not evaluated:
        raise ConfigError(f"--until {text!r}: the run has no evaluator (evaluator.enabled = false)")
    return Goal(name, found[2], float(found[3]))
