"""Curves in a terminal, drawn with block characters."""

from __future__ import annotations

import sys
from collections.abc import Sequence

_BLOCKS = " ▁▂▃▄▅▆▇█"
Points = Sequence[Sequence[float]]
"""`(steps, value)`, by rising steps."""


def drawable() -> bool:
    """Whether standard output can show the characters."""
    stdout = sys.__stdout__  # the panel puts another one before it, which knows no encoding
    try:
        _BLOCKS.encode(stdout.encoding if stdout is not None else "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def sparkline(points: Points, width: int) -> str:
    """A curve in one line of at most `width` characters, its lowest value `▁`, its highest one `█`."""
    values = [value for _, value in points] if len(points) <= width else _columns(points, width)
    return "".join(_BLOCKS[1 + round(7 * share)] for share in _shares(values))


def chart(points: Points, title: str, width: int = 60, height: int = 6) -> list[str]:
    """Lines of a curve over steps, with its range at the left and its steps below; none for a point.

    Args:
        points: to draw.
        title: stands above.
        width: of the curve itself, in characters.
        height: likewise.
    """
    if len(points) < 2 or points[0][0] == points[-1][0]:
        return []
    columns = _columns(points, width)
    labels = {height - 1: f"{max(columns):,.2f}", 0: f"{min(columns):,.2f}"}
    if max(columns) == min(columns):
        labels = {(height - 1) // 2: f"{columns[0]:,.2f}"}  # where `_shares` has all bars end
    margin = max(map(len, labels.values()))
    eighths = [max(1, round(8 * height * share)) for share in _shares(columns)]
    lines = [title]
    for row in reversed(range(height)):
        bars = "".join(_BLOCKS[min(8, max(0, filled - 8 * row))] for filled in eighths)
        lines.append(f"{labels.get(row, ''):>{margin}} |{bars}")
    first, last = f"{points[0][0]:,.0f}", f"{points[-1][0]:,.0f} steps"
    return [*lines, f"{'':>{margin}}  {first}{last:>{width - len(first)}}"]


def _columns(points: Points, width: int) -> list[float]:
    """The value at each of `width` evenly spaced numbers of steps: that of the newest point until then."""
    first, last = points[0][0], points[-1][0]
    values, at = [], 0
    for column in range(width):
        steps = first + (last - first) * column / (width - 1)
        while at + 1 < len(points) and points[at + 1][0] <= steps:
            at += 1
        values.append(points[at][1])
    return values


def _shares(values: Sequence[float]) -> list[float]:
    """Where each value lies between the lowest, 0, and the highest, 1; in the middle where all agree."""
    if not values:
        return []
    low, high = min(values), max(values)
    return [(value - low) / (high - low) if high > low else 0.5 for value in values]
