from troupe.common.agents.pace import Pace


def acted(pace, version, rounds, steps=3):
    """Acts rounds of unrolls with one version for as long as it may; how many steps were made."""
    made = 0
    while made < rounds * steps and not pace.holds(version):
        pace.stepped(version)
        made += 1
    return made


def test_on_policy_every_round_wants_a_version_of_its_own():
    pace = Pace(3, 0)
    assert [acted(pace, version, 5) for version in (7, 7, 8, 9, 9)] == [3, 0, 3, 3, 0]


def test_with_staleness_so_many_more_rounds_may_begin():
    pace = Pace(3, 2)
    assert [acted(pace, version, 9) for version in (0, 0, 1, 2, 2, 5)] == [9, 0, 3, 3, 0, 9]


def test_a_round_goes_on_whatever_comes_meanwhile():
    pace = Pace(3, 0)
    pace.stepped(0)
    assert not pace.holds(0)
    pace.stepped(1)
    pace.stepped(1)
    assert pace.holds(0)
    assert not pace.holds(1)  # newer than what began the round


def test_released_it_lets_one_more_round_begin():
    pace = Pace(3, 0)
    acted(pace, 0, 1)
    pace.release()
    assert [acted(pace, 0, 5), acted(pace, 0, 5)] == [3, 0]
