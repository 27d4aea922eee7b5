from services.learner.counters import RunCounters


def test_reports_are_running_totals_of_each_process():
    counters = RunCounters(frames_per_step=4)
    counters.report_steps(7, 100)
    counters.report_steps(7, 100)  # repeated
    counters.report_steps(8, 50)
    counters.report_steps(7, 90)  # late
    counters.report_steps(7, 160)
    assert counters.steps == 210
    assert counters.frames == 840


def test_a_restored_learner_counts_on_from_its_checkpoint():
    before = RunCounters(4)
    before.report_steps(7, 100)
    before.updates, before.version = 5, 3
    meta = before.to_meta()
    after = RunCounters(4)
    after.load_meta(meta)
    assert (after.steps, after.updates, after.version) == (100, 5, 3)
    after.report_steps(7, 130)  # the same actor process goes on
    after.report_steps(9, 10)  # and a new one has joined
    assert after.steps == 140
