"""A curve stays small and keeps its shape."""

import itertools

from troupe.services.learner.record.curve import Curve


def test_short_curves_are_kept_as_they_are():
    curve = Curve(8)
    for i in range(7):
        curve.add(i, i * i)
    assert curve.points() == [(i, i * i) for i in range(7)]


def test_long_curves_are_averaged_evenly_and_end_with_the_newest():
    curve = Curve(8)
    for i in range(1001):
        curve.add(i, float(i))
        points = curve.points()
        assert len(points) <= 8
        assert points[-1][0] == i
        assert [steps for steps, _ in points] == sorted({steps for steps, _ in points})
    # The means of runs of as many values, one after the other, are as far apart.
    values = [value for _, value in curve.points()[:-1]]
    assert len({b - a for a, b in itertools.pairwise(values)}) == 1
