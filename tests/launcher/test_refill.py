"""A resumed run says what replay has kept."""

import pytest

from troupe.common.data.table_config import TableConfig
from troupe.services.launcher.refill import items_before_learning, refill_line


@pytest.mark.parametrize(
    ("restored", "line"),
    [
        (0, "replay starts empty, refills 50,000 items before learning goes on"),
        (12_345, "replay: 12,345 items restored, learning goes on at 50,000"),
        (60_000, "replay: 60,000 items restored"),
    ],
)
def test_the_line(restored, line):
    assert refill_line(restored, 50_000) == line


def test_items_before_learning_are_those_of_all_tables():
    queue = TableConfig("fresh", limiter="queue", capacity=8, share=4)
    again = TableConfig("again", capacity=100, min_items=30, share=4)
    assert items_before_learning([again]) == 30
    assert items_before_learning([queue]) == 0
    assert items_before_learning([queue, again]) == 8 + 30
