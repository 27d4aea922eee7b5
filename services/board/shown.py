"""Values as the page has them: short, and safe to print."""

from __future__ import annotations

from typing import Any

from troupe.common.config.text import format_value
from troupe.common.runtime.logging import printable


def short(value: float) -> float:
    """A number with the six digits that a page can show."""
    return float(f"{value:.6g}")


def text(value: Any, at_most: int = 300) -> str:
    """A value of a configuration, for people: its first `at_most` characters."""
    if not isinstance(value, str):
        try:
            value = "none" if value is None else format_value(value)
        except (TypeError, ValueError, OverflowError):  # a date, which TOML has and no configuration
            value = str(value)
    return printable(value[:at_most])
