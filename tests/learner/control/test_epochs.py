"""Who shares batches with whom, by a clock of our own."""

import math

import pytest

from troupe.common.errors import ConfigError, RefusedError
from troupe.common.wire.types import MAX_LEARNERS
from troupe.services.learner.control.epochs import ASKS_S, MAX_CLAIMED, PATIENCE_S, PAUSE_S, Epochs
from troupe.services.learner.peers import change

JUST_NOW = math.inf
"""Whenever it is."""


def meeting():
    return "127.0.0.1", 5000


def test_a_learner_alone_begins_at_once_and_needs_no_meeting():
    seat = Epochs().formed([], 0.0, lambda: 1 / 0)
    assert (seat.rank, seat.learners, seat.host, seat.port) == (0, 1, "", 0)


def test_the_first_epoch_waits_for_those_that_are_expected_and_not_for_ever():
    epochs = Epochs(expected=3, start_s=60.0)
    assert epochs.formed([], 0.0, meeting) is None
    assert epochs.asked(7, -1, JUST_NOW) is None
    assert epochs.formed([7], 59.0, meeting) is None
    assert epochs.formed([7], 60.0, meeting).learners == 2


def test_an_epoch_begins_when_all_who_are_alive_have_asked_or_patience_ends():
    epochs = Epochs()
    epochs.asked(7, -1, JUST_NOW)
    epochs.asked(8, -1, JUST_NOW)
    first = epochs.formed([7, 8], 0.0, meeting)
    assert [epochs.asked(each, -1, JUST_NOW).rank for each in (7, 8)] == [1, 2]
    assert first.learners == 3
    # 8 has died, and its lease has not ended.
    assert epochs.asked(7, first.epoch, JUST_NOW) is None
    assert epochs.formed([7, 8], 100.0, meeting) is None
    second = epochs.formed([7, 8], 100.0 + PATIENCE_S, meeting)
    assert (second.epoch, second.learners) == (first.epoch + 1, 2)
    assert epochs.asked(7, first.epoch, JUST_NOW).rank == 1


def test_one_that_comes_later_waits_until_the_others_leave():
    epochs = Epochs()
    first = epochs.formed([], 0.0, meeting)
    assert not epochs.waits([7], 1.0)
    assert epochs.asked(7, -1, JUST_NOW) is None
    assert epochs.waits([7], 2.0)
    second = epochs.formed([7], 5.0, meeting)
    assert epochs.asked(7, -1, JUST_NOW).rank == 1
    assert (second.epoch, second.rank, second.learners) == (first.epoch + 1, 0, 2)
    assert not epochs.waits([7], 6.0)


def test_one_that_was_waited_for_in_vain_is_not_waited_for_again_before_it_asks():
    epochs = Epochs()
    for each in (7, 8):
        epochs.asked(each, -1, JUST_NOW)
    epochs.formed([7, 8], 0.0, meeting)
    # 8 has died, and its lease has not ended.
    epochs.asked(7, 0, JUST_NOW)
    assert epochs.formed([7, 8], 10.0, meeting) is None
    assert epochs.formed([7, 8], 10.0 + PATIENCE_S, meeting).learners == 2
    # Another comes.
    for each in (7, 9):
        epochs.asked(each, 1, JUST_NOW)
    assert epochs.formed([7, 8, 9], 13.0, meeting).learners == 3
    # It had only hung.
    for each, ended in ((7, 2), (8, 0), (9, 2)):
        epochs.asked(each, ended, JUST_NOW)
    assert epochs.formed([7, 8, 9], 14.0, meeting).learners == 4
    for each in (7, 9):
        epochs.asked(each, 3, JUST_NOW)
    assert epochs.formed([7, 8, 9], 15.0, meeting) is None


def test_one_that_has_died_while_it_waited_gets_no_seat():
    epochs = Epochs()
    epochs.asked(7, -1, JUST_NOW)
    assert epochs.formed([], 0.0, meeting).learners == 1


def test_a_restarted_owner_numbers_on_from_what_the_others_know():
    epochs = Epochs()
    assert epochs.asked(7, 41, JUST_NOW) is None
    assert epochs.formed([7], 0.0, meeting).epoch == 42
    assert epochs.asked(7, 41, JUST_NOW).epoch == 42


def test_one_that_has_not_asked_for_long_gets_no_seat_that_the_others_would_wait_at():
    epochs = running(7)
    epochs.asked(8, -1, 10.0)
    assert epochs.waits([7, 8], 10.0 + ASKS_S)
    # 8 has died, and its lease has not ended.
    assert not epochs.waits([7, 8], 10.1 + ASKS_S)
    epochs.asked(7, 0, 10.1 + ASKS_S)
    assert epochs.formed([7, 8], 10.1 + ASKS_S, meeting).learners == 2
    # It had only hung.
    epochs.asked(8, -1, 20.0)
    assert epochs.planned([0, 1], [7, 8], 20.0, meeting).learners == 3


def test_no_incarnation_takes_the_seat_of_the_owner():
    epochs = Epochs()
    epochs.asked(0, -1, JUST_NOW)
    assert epochs.formed([0], 0.0, meeting).rank == 0
    assert epochs.asked(0, -1, JUST_NOW).rank == 1


def test_an_epoch_that_cannot_have_been_is_refused_and_leaves_the_others_theirs():
    epochs = Epochs()
    with pytest.raises(RefusedError, match="was never"):
        epochs.asked(7, 2**63 - 1, JUST_NOW)
    epochs.asked(8, 41, JUST_NOW)
    assert epochs.formed([8], 0.0, meeting).epoch == 42


def test_the_latest_epoch_that_one_can_claim_leaves_numbers_that_learners_can_tell_each_other():
    epochs = Epochs()
    epochs.asked(7, MAX_CLAIMED, JUST_NOW)
    assert epochs.formed([7], 0.0, meeting).epoch + 1000 < change.MAX_EPOCHS


def test_no_more_get_a_seat_than_there_may_be():
    epochs, crowd = Epochs(), range(1, MAX_LEARNERS + 10)
    for each in crowd:
        epochs.asked(each, -1, JUST_NOW)
    assert epochs.formed(crowd, 0.0, meeting).learners == MAX_LEARNERS


def test_where_learners_cannot_meet_the_owner_goes_on_alone():
    def nowhere():
        raise ConfigError("this machine has no address there")

    epochs = Epochs()
    epochs.asked(7, -1, JUST_NOW)
    assert epochs.formed([7], 0.0, nowhere).learners == 1
    assert "no address" in epochs.closed_because
    assert not epochs.waits([7], 1e9)


def test_one_that_does_not_come_twice_is_left_out_for_longer_each_time_until_it_comes():
    epochs = Epochs()

    def formed(ended, now_s):
        for each in (7, 8):
            epochs.asked(each, ended, JUST_NOW)
        return epochs.formed([7, 8], now_s, meeting)

    formed(-1, 0.0)
    epochs.failed([2], 1.0)
    assert formed(0, 1.0).learners == 3
    epochs.failed([2], 2.0)
    assert formed(1, 2.0).learners == 2
    assert epochs.asked(8, 1, JUST_NOW) is None
    assert not epochs.waits([7, 8], 1.9 + PAUSE_S)
    assert epochs.waits([7, 8], 2.0 + PAUSE_S)
    assert formed(2, 40.0).learners == 3
    epochs.failed([2], 50.0)
    assert formed(3, 49.9 + 2 * PAUSE_S).learners == 2
    assert formed(4, 50.0 + 2 * PAUSE_S).learners == 3
    epochs.begun()
    epochs.failed([], 200.0)
    assert formed(5, 200.0).learners == 3, "it came the last time"


def test_one_that_lies_is_left_out_at_once_and_longer_each_time_as_long_as_it_lives():
    epochs = Epochs()

    def formed(ended, now_s, live=(7, 8)):
        for each in live:
            epochs.asked(each, ended, JUST_NOW)
        return epochs.formed(live, now_s, meeting)

    formed(-1, 0.0)
    epochs.begun()
    epochs.misled([2], 1.0)
    assert formed(0, 1.0).learners == 2
    assert formed(1, 1.0 + PAUSE_S).learners == 3
    epochs.begun()  # which it had come to the first time as well
    epochs.misled([2], 50.0)
    assert formed(2, 49.9 + 2 * PAUSE_S).learners == 2
    assert formed(3, 50.0 + 2 * PAUSE_S).learners == 3
    # Another process has its place.
    formed(4, 200.0, live=(7, 9))
    epochs.misled([2], 200.0)
    assert formed(5, 200.1, live=(7, 9)).learners == 2
    assert epochs.waits([7, 9], 200.0 + PAUSE_S)


def test_where_it_is_not_known_who_lies_all_others_are_left_out_the_second_time():
    epochs = Epochs()
    for number, learners in enumerate([3, 3, 1]):
        for each in (7, 8):
            epochs.asked(each, number - 1, JUST_NOW)
        assert epochs.formed([7, 8], float(number), meeting).learners == learners
        epochs.misled([], float(number))


def running(*incarnations):
    """Epochs, the newest of which these are in."""
    epochs = Epochs()
    for each in incarnations:
        epochs.asked(each, -1, JUST_NOW)
    epochs.formed(incarnations, 0.0, meeting)
    epochs.begun()
    return epochs


def test_who_comes_while_the_others_learn_gets_a_seat_behind_those_who_stay():
    epochs = running(7, 8, 9)
    epochs.asked(1, -1, JUST_NOW)  # before the others, by its number
    own = epochs.planned([0, 1, 3], [1, 7, 8, 9], 1.0, meeting)
    assert (own.epoch, own.rank, own.learners) == (1, 0, 4)
    seat = epochs.asked(1, -1, JUST_NOW)
    assert (seat.epoch, seat.rank, seat.learners, seat.port) == (1, 3, 4, 5000)
    assert not epochs.waits([1, 7, 8, 9], 1.0)
    epochs.changed()
    # 9 has the third place now, and lies.
    epochs.misled([2], 2.0)
    for each in (1, 7, 9):
        epochs.asked(each, 1, JUST_NOW)
    assert epochs.formed([1, 7, 9], 2.0, meeting).learners == 3


def test_who_stays_and_loses_the_others_meanwhile_is_not_sent_to_the_epoch_that_was_planned():
    epochs = running(7)
    epochs.asked(8, -1, JUST_NOW)
    epochs.planned([0, 1], [7, 8], 1.0, meeting)
    assert epochs.asked(7, 0, JUST_NOW) is None
    assert epochs.formed([7, 8], 1.0 + PATIENCE_S, meeting) is None, "it waits for 8, which has a seat"
    assert epochs.asked(8, 1, JUST_NOW) is None
    assert epochs.formed([7, 8], 2.0 + PATIENCE_S, meeting).epoch == 2
    assert [epochs.asked(7, 0, JUST_NOW).rank, epochs.asked(8, 1, JUST_NOW).rank] == [1, 2]


def test_one_that_does_not_come_to_what_was_planned_twice_is_left_out_and_nobody_else():
    epochs = running(7)
    for now_s in (1.0, 2.0):
        assert epochs.asked(8, -1, JUST_NOW) is None
        assert epochs.planned([0, 1], [7, 8], now_s, meeting).learners == 3
        epochs.failed([], now_s)
    epochs.asked(8, -1, JUST_NOW)
    assert not epochs.waits([7, 8], 3.0)
    assert epochs.waits([7, 8], 3.0 + PAUSE_S)
    # Those who were in the epoch that goes on have nothing to do with it.
    epochs.asked(7, 0, JUST_NOW)
    assert epochs.formed([7, 8], 3.0 + PATIENCE_S, meeting).learners == 2


def comes(epochs, incarnation, *live):
    """One asks, and an epoch is planned for it beside those of the newest."""
    assert epochs.asked(incarnation, -1, JUST_NOW) is None
    epochs.planned([0, 1, 2], [*live, incarnation], 0.0, meeting)


def test_one_that_connects_to_nobody_who_comes_loses_its_own_seat():
    epochs = running(7, 8)
    for comer in (21, 22):
        comes(epochs, comer, 7, 8)
        assert not epochs.unreached([1], 0.0)
        epochs.failed([], 0.0)
    comes(epochs, 22, 7, 8)
    assert not epochs.unreached([1], 0.0), "it may be the fault of that one"
    epochs.failed([], 0.0)
    assert not epochs.waits([7, 8, 22], PAUSE_S - 1.0)
    comes(epochs, 23, 7, 8, 22)
    assert epochs.unreached([1], 0.0)
    epochs.failed([], 0.0)
    for each in (7, 8, 22, 23):
        epochs.asked(each, epochs._newest, JUST_NOW)
    assert epochs.formed([7, 8, 22, 23], 1.0, meeting).learners == 4
    assert epochs.asked(7, epochs._newest, JUST_NOW) is None, "left out"
    assert epochs.waits([7], 1.0 + PAUSE_S)


def test_several_who_come_at_once_are_one_of_whom_one_says_that_it_cannot_connect():
    epochs = running(7)
    for comer in (21, 22, 23):
        epochs.asked(comer, -1, JUST_NOW)
    comes(epochs, 24, 7, 21, 22, 23)
    assert not epochs.unreached([1], 0.0)


def test_what_one_said_of_others_is_forgotten_when_an_epoch_begins_well():
    epochs = running(7)
    for comer in (21, 22, 23, 24):
        comes(epochs, comer, 7)
        assert not epochs.unreached([1], 0.0)
        epochs.failed([], 0.0)
        epochs.begun()


def test_where_learners_cannot_meet_nothing_is_planned():
    def nowhere():
        raise ConfigError("this machine has no address there")

    epochs = running()
    epochs.asked(7, -1, JUST_NOW)
    assert epochs.planned([0], [7], 1.0, nowhere) is None
    assert epochs.formed([7], 1.0, nowhere).learners == 1


def test_an_epoch_is_over_once_one_asks_for_another_or_is_gone():
    epochs = running(1, 2)
    assert not epochs.over([1, 2])
    assert not epochs.over([1, 2, 3]), "one more has joined"
    assert epochs.over([2])
    epochs.asked(3, -1, 10.0)
    assert not epochs.over([1, 2, 3]), "it had none"
    epochs.asked(2, 0, 10.0)
    assert epochs.over([1, 2, 3])
