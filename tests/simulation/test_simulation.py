"""The simulation itself: planted bugs are found, and nothing escapes it."""

import time as real_time

import pytest

from tests.simulation.machine import simulated_machine
from tests.simulation.plan import KINDS, Fault, make_plan
from tests.simulation.planted import seeds_for
from tests.simulation.seeds import simulate
from tests.simulation.shrink import shrunk
from troupe.common import system


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_planted_bugs_are_found():
    bugs = (  # each by one of the first seeds that are run
        "repeated_inserts_are_stored_again",
        "inserts_are_acknowledged_before_they_are_stored",
        "held_inserts_are_forgotten_in_credit",
        "batches_of_a_queue_are_sent_before_they_are_taken",
        "inserts_are_acknowledged_before_the_sync",
        "records_are_left_out_of_a_sync",
        "the_oldest_chunk_leaves_after_a_power_cut",
        "a_full_table_drops_more_than_it_has_to",
        "a_restart_goes_on_from_the_oldest_checkpoint",
    )
    code, said = simulate("--seeds", 50, "--tries", 12, "--find", *bugs)
    assert code == 0, said


def test_the_fewest_faults_are_found():
    plan = next(plan for seed in range(1000) if len((plan := make_plan(seed)).faults) == 8)
    needed = {plan.faults[1], plan.faults[6]}
    assert set(shrunk(plan, lambda each: needed <= set(each.faults)).faults) == needed
    assert shrunk(plan, lambda each: True).faults == ()


def test_a_plan_is_that_of_its_seed():
    assert make_plan(7) == make_plan(7) != make_plan(8)
    assert str(Fault(1.5, "kill", "learner", amount=2.0)) == "1.50 kill learner 2"


def test_seeds_that_come_near_a_bug_are_run_first():
    seeds = seeds_for("a_silent_server_is_never_given_up", range(1, 51))
    assert sorted(seeds) == list(range(1, 51))
    near = ["forget" in {fault.kind for fault in make_plan(seed).faults} for seed in seeds]
    assert near == sorted(near, reverse=True)
    assert any(near)


def test_every_kind_of_fault_is_drawn():
    drawn = {fault.kind for seed in range(300) for fault in make_plan(seed).faults}
    assert drawn == set(KINDS)


def run_in_world(body):
    """What simulated code did that it may not."""
    with simulated_machine(1) as (world, _, _):
        node = world.node("one")
        node.start(body)
        world.run(10.0)
        return world.violations, node.result


def test_what_touches_the_real_machine_is_noted(tmp_path):
    def opens():
        (tmp_path / "strange").write_text("x")

    assert run_in_world(opens)[0] == [f"open {tmp_path / 'strange'}"]

    def connects():
        import socket

        socket.socket().close()

    assert "socket.__new__" in run_in_world(connects)[0][0]
    scope = {"time": real_time, "__name__": "troupe.services.example"}
    exec("def looks(): time.monotonic()", scope)
    assert run_in_world(scope["looks"])[0] == ["time.monotonic in troupe.services.example"]


def test_threads_conditions_and_clocks_are_those_of_the_world():
    found = []

    def body():
        changed, event = system.Condition(), system.Event()

        def other():
            system.sleep(5.0)
            with changed:
                found.append("told")
                changed.notify_all()
            event.wait(1000.0)
            found.append(system.monotonic() - began_s)

        began_s = system.monotonic()
        thread = system.Thread(target=other)
        thread.start()
        with changed:
            assert changed.wait_for(lambda: found, 100.0)
            assert not changed.wait_for(lambda: False, 2.0)
        assert 7.0 <= system.monotonic() - began_s < 7.1
        event.set()
        thread.join(10.0)
        assert not thread.is_alive()

    violations, error = run_in_world(body)
    assert (violations, error) == ([], None)
    assert found[0] == "told"
    assert 7.0 <= found[1] < 7.1
