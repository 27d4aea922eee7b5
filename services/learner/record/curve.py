"""A curve of bounded size, however long the run: neighbours are averaged where it grows too long."""

from __future__ import annotations


class Curve:
    """Values over steps, thinned out evenly."""

    def __init__(self, max_points: int = 64) -> None:
        """Create an empty curve of at most `max_points` points, an even number."""
        self._max_points = max_points
        self._each = 1  # how many values make a point
        self._points: list[tuple[float, float]] = []
        self._pending: list[tuple[float, float]] = []

    def add(self, steps: float, value: float) -> None:
        """Append a value; `steps` do not fall."""
        self._pending.append((steps, value))
        if len(self._pending) == self._each:
            self._points.append(_mean(self._pending))
            self._pending.clear()
        if len(self._points) == self._max_points:
            # Halving keeps the curve evenly spaced, where dropping the oldest would lose its beginning.
            self._each *= 2
            self._points = [_mean(self._points[i : i + 2]) for i in range(0, self._max_points, 2)]

    def points(self) -> list[tuple[float, float]]:
        """`(steps, value)` in their order; the last one is the newest values, however few."""
        return [*self._points, _mean(self._pending)] if self._pending else list(self._points)


def _mean(points: list[tuple[float, float]]) -> tuple[float, float]:
    """The last point's steps, and the mean of the values."""
    return points[-1][0], sum(value for _, value in points) / len(points)
