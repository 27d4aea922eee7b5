from __future__ import annotations

import pytest

from troupe.common.stats.ratings import win_rate_weights


def test_hard_opponents_are_drawn_more_often() -> None:
    # (1 - 0.9)^2 = 0.01, (1 - 0.5)^2 = 0.25, (1 - 0.2)^2 = 0.64
    assert win_rate_weights([0.9, 0.5, 0.2], 2.0).tolist() == pytest.approx([1 / 90, 25 / 90, 64 / 90])
    assert win_rate_weights([0.75, 0.25], 1.0).tolist() == pytest.approx([0.25, 0.75])
    assert win_rate_weights([0.9, 0.5, 1.0], 0.0).tolist() == pytest.approx([1 / 3] * 3)


def test_opponents_that_never_win_are_drawn_alike() -> None:
    assert win_rate_weights([1.0, 1.0], 2.0).tolist() == [0.5, 0.5]
