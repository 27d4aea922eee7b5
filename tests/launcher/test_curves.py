"""Curves of block characters."""

from troupe.services.launcher.curves import chart, sparkline


def test_a_sparkline_spans_its_own_range():
    assert sparkline([(i, float(i)) for i in range(8)], 20) == "▁▂▃▄▅▆▇█"
    assert sparkline([(0, 5.0), (1, 5.0)], 20) == "▅▅"
    assert sparkline([], 20) == ""


def test_a_long_sparkline_shows_the_whole_run():
    line = sparkline([(i, float(i)) for i in range(1000)], 10)
    assert len(line) == 10
    assert (line[0], line[-1]) == ("▁", "█")


def test_a_chart_has_its_range_and_its_steps():
    assert chart([(0, -21.0), (500, 0.0), (1000, 21.0)], "return", width=14, height=3) == [
        "return",
        " 21.00 |             █",
        "       |       ▄▄▄▄▄▄█",
        "-21.00 |▁▁▁▁▁▁▁███████",
        "        0  1,000 steps",
    ]


def test_a_chart_of_one_value_names_it_once():
    assert chart([(0, 500.0), (1000, 500.0)], "return", width=14, height=4) == [
        "return",
        "       |              ",
        "       |              ",
        "500.00 |██████████████",
        "       |██████████████",
        "        0  1,000 steps",
    ]


def test_a_chart_of_nothing_is_nothing():
    assert chart([], "return") == []
    assert chart([(1, 2.0)], "return") == []
    assert chart([(7, 2.0), (7, 3.0)], "return") == []
