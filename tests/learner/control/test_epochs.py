"""Who shares batches with whom, by a clock of our own."""

from troupe.services.learner.control.epochs import OWN, PATIENCE_S, Epochs


def meeting():
    return "127.0.0.1", 5000


def test_a_learner_alone_begins_at_once_and_needs_no_meeting():
    seat = Epochs().formed([], 0.0, lambda: 1 / 0)
    assert (seat.rank, seat.learners, seat.host, seat.port) == (0, 1, "", 0)


def test_the_first_epoch_waits_for_those_that_are_expected_and_not_for_ever():
    epochs = Epochs(expected=3, start_s=60.0)
    assert epochs.formed([], 0.0, meeting) is None
    assert epochs.asked(7, -1) is None
    assert epochs.formed([7], 59.0, meeting) is None
    assert epochs.formed([7], 60.0, meeting).learners == 2


def test_an_epoch_begins_when_all_who_are_alive_have_asked_or_patience_ends():
    epochs = Epochs()
    epochs.asked(7, -1)
    epochs.asked(8, -1)
    first = epochs.formed([7, 8], 0.0, meeting)
    assert [epochs.asked(each, -1).rank for each in (7, 8)] == [1, 2]
    assert first.learners == 3
    # 8 has died, and its lease has not ended.
    assert epochs.asked(7, first.epoch) is None
    assert epochs.formed([7, 8], 100.0, meeting) is None
    second = epochs.formed([7, 8], 100.0 + PATIENCE_S, meeting)
    assert (second.epoch, second.learners) == (first.epoch + 1, 2)
    assert epochs.asked(7, first.epoch).rank == 1


def test_one_that_comes_later_waits_until_the_others_leave():
    epochs = Epochs()
    first = epochs.formed([], 0.0, meeting)
    assert not epochs.waits([7])
    assert epochs.asked(7, -1) is None
    assert epochs.waits([7])
    second = epochs.formed([7], 5.0, meeting)
    assert epochs.asked(7, -1).rank == 1
    assert (second.epoch, second.rank, second.learners) == (first.epoch + 1, OWN, 2)
    assert not epochs.waits([7])


def test_one_that_has_died_while_it_waited_gets_no_seat():
    epochs = Epochs()
    epochs.asked(7, -1)
    assert epochs.formed([], 0.0, meeting).learners == 1


def test_a_restarted_owner_numbers_on_from_what_the_others_know():
    epochs = Epochs()
    assert epochs.asked(7, 41) is None
    assert epochs.formed([7], 0.0, meeting).epoch == 42
    assert epochs.asked(7, 41).epoch == 42
