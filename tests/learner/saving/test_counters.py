import pytest

from troupe.services.learner.control.budget import StepBudget
from troupe.services.learner.saving.counters import RunCounters


def test_a_restored_learner_counts_on_from_its_checkpoint():
    before = RunCounters(4, StepBudget())
    before.budget.report(7, 100)
    before.updates, before.version = 5, 3
    assert before.frames == 400
    after = RunCounters(4, StepBudget())
    after.load_meta(before.to_meta())
    assert (after.steps, after.updates, after.version) == (100, 5, 3)
    after.budget.report(7, 130)  # the same actor process goes on
    after.budget.report(9, 10)  # and a new one has joined
    assert after.steps == 140


def test_progress_goes_on_from_a_checkpoint_and_from_one_that_is_older_than_it():
    before = RunCounters(4, StepBudget(1000))
    before.budget.report(7, 100)
    before.learned_steps = 40.0
    assert (before.progress(learned=True), before.progress(learned=False)) == (0.04, 0.1)
    meta = before.to_meta()
    after = RunCounters(4, StepBudget(1000))
    after.load_meta(meta)
    assert (after.progress(learned=True), after.progress(learned=False)) == (0.04, 0.1)
    del meta["learned_steps"]
    after.load_meta(meta)
    assert after.progress(learned=True) == 0.1
    after.learned_steps = 1001.0
    assert after.progress(learned=True) == 1.0


@pytest.mark.parametrize(
    "change",
    [
        {"steps": -1},
        {"updates": -1},
        {"version": -5},
        {"learned_steps": -1.0},
        {"learned_steps": float("inf")},
        {"reported": {"7": -3}},
        {"counted_unix_s": float("-inf")},
    ],
)
def test_a_checkpoint_of_less_than_nothing_is_not_taken(change):
    with pytest.raises(ValueError, match=r"negative|no time"):
        RunCounters(4, StepBudget()).load_meta({**RunCounters(4, StepBudget()).to_meta(), **change})
