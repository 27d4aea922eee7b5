from troupe.common.wire.control.budget import StepBudget
from troupe.services.learner.counters import RunCounters


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
