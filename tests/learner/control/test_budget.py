"""The book-keeping of steps: no order of messages takes a run beyond its total and one round of the slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from troupe.common.wire.control.member import Member
from troupe.services.learner.control import budget as control
from troupe.services.learner.control.budget import MAX_STEPS_PER_SLOT_S, NO_TOTAL


class StepBudget(control.StepBudget):
    """A budget that is told with each report who holds slots, as a roster tells it of each change."""

    def extend(
        self,
        incarnation: int,
        made: int,
        obeyed: int,
        slots: Mapping[int, int],
        replaced: Mapping[int, int] | None = None,
    ) -> int:
        """Take a report; `replaced` has who may still tell of steps, and the process in its place."""
        replaced = replaced or {}
        for gone, process in list(self._ahead._processes.items()):
            if gone not in slots and gone not in replaced:
                self.forget(gone, process.place)
        places: dict[int, str] = {}
        for one, successor in sorted(replaced.items()):
            places.setdefault(successor, str(one))  # the name that the first of them had
        for one, successor in replaced.items():
            self.hold(one, places[successor], 0)
        for one, count in slots.items():
            self.hold(one, places.get(one, str(one)), count)
        return super().extend(incarnation, made, obeyed)


def test_reports_are_running_totals_of_each_process():
    budget = StepBudget()
    budget.report(7, 100, 4)
    budget.report(7, 100, 4)  # repeated
    budget.report(8, 50, 4)
    budget.report(7, 90, 4)  # late
    budget.report(7, 160, 4)
    assert budget.steps == 210


def test_what_is_known_of_processes_that_come_and_go_has_an_end():
    budget = control.StepBudget(1000)
    budget.hold(1, "actor-0", 4)
    limit = budget.extend(1, 0, 0)
    for stranger in range(2, 150_000):
        budget.extend(stranger, 0, 0)
    assert sum(len(known) for known in vars(budget).values() if isinstance(known, dict)) < 140_000
    assert budget.permitted(1) == limit


def test_without_a_total_nobody_waits():
    budget = StepBudget()
    assert budget.extend(1, 0, 0, {1: 8}) > NO_TOTAL // 4


def test_alone_it_gets_half_of_the_rest_and_then_round_by_round():
    budget, made, obeyed, asked = StepBudget(1000), 0, 0, 0
    while budget.steps < 1000:
        obeyed = budget.extend(1, made, obeyed, {1: 7})
        made, asked = obeyed, asked + 1
        assert asked < 30, "it has to ask too often"
        budget.report(1, made, 7)
    assert 1000 <= budget.steps < 1007
    assert budget.extend(1, made, obeyed, {1: 7}) == made, "and then no more"


def test_one_that_hangs_does_not_hold_up_the_others():
    budget, slots = StepBudget(10_000), {1: 4, 2: 4}
    told = budget.extend(1, 0, 0, slots)  # and now it hangs, but for the thread of its heartbeats
    assert told > 1000
    made = obeyed = 0
    for _ in range(200):
        told = budget.extend(1, 0, told, slots)
        obeyed = budget.extend(2, made, obeyed, slots)
        made = obeyed
    budget.report(2, made, 4)
    assert 10_000 <= budget.steps < 10_008


def test_one_that_is_gone_gives_back_what_it_did_not_use():
    budget = StepBudget(1000)
    budget.extend(1, 0, 0, {1: 4})
    made = obeyed = 0
    for _ in range(30):
        obeyed = budget.extend(2, made, obeyed, {2: 4})
        made = obeyed
    budget.report(2, made, 4)
    assert 1000 <= budget.steps < 1004


def test_a_limit_that_was_lowered_counts_until_it_is_obeyed():
    budget, slots = StepBudget(400), {1: 4, 2: 4}
    high = budget.extend(1, 0, 0, slots)
    made = obeyed = 0
    for _ in range(100):  # the second one takes all that is not the first one's
        obeyed = budget.extend(2, made, obeyed, slots)
        made = obeyed
    assert budget.steps + high < 408
    low = budget.extend(1, 0, high, slots)
    assert low < high
    assert budget.extend(2, made, obeyed, slots) == made, "the first one may not have heard of it yet"
    for _ in range(5):
        low = budget.extend(1, 0, low, slots)
    assert budget.extend(2, made, obeyed, slots) > made


def test_the_count_and_its_processes_survive_in_a_checkpoint():
    before = StepBudget(1000)
    before.extend(7, 100, 0, {7: 4})
    after = StepBudget(1000)
    after.load_meta(before.to_meta())
    after.extend(7, 130, 400, {7: 4})
    assert after.steps == 130


class Actor:
    """Makes steps as far as it may, and talks to the learner through two lines that keep the order."""

    def __init__(self, name: int, slots: int) -> None:
        self.name, self.slots = name, slots
        self.made = self.limit = 0
        self.up: deque[tuple[int, int]] = deque()
        self.down: deque[int] = deque()

    def step(self) -> None:
        if self.made + self.slots <= self.limit:
            self.made += self.slots


@settings(max_examples=300, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    total=st.integers(1, 500),
    moves=st.lists(st.tuples(st.integers(0, 3), st.sampled_from("sssswwhhlr")), max_size=400),
)
def test_whatever_is_late_the_total_is_kept(sizes, total, moves):
    budget = StepBudget(total)
    actors = [Actor(name, slots) for name, slots in enumerate(sizes)]
    slots = {actor.name: actor.slots for actor in actors}

    def deliver(actor: Actor) -> None:
        if actor.up:
            actor.down.append(budget.extend(actor.name, *actor.up.popleft(), slots))

    for which, move in moves:
        actor = actors[which % len(actors)]
        if move == "s":
            actor.step()
        elif move == "w":
            actor.up.append((actor.made, actor.limit))
        elif move == "h":
            deliver(actor)
        elif actor.down:
            actor.limit = actor.down.popleft()
        assert sum(one.made for one in actors) < total + sum(sizes)
    for _ in range(2000):  # and with the lines open again it ends
        if budget.steps >= total:
            break
        for actor in actors:
            actor.up.append((actor.made, actor.limit))
            while actor.up:
                deliver(actor)
            while actor.down:
                actor.limit = actor.down.popleft()
            actor.step()
    assert total <= budget.steps < total + sum(sizes)


def test_nobody_can_claim_more_than_was_permitted():
    budget = StepBudget(1000)
    limit = budget.extend(7, 0, 0, {7: 4})
    budget.extend(7, 1 << 53, limit, {7: 4})
    assert budget.steps == limit < 1000
    # One that this learner does not know: the one before had no more than half to give to it.
    budget.report(8, 1 << 53, 4)
    assert limit < budget.steps <= limit + (1000 - limit) // 2


def test_a_false_claim_gets_no_further_limit_than_an_honest_one():
    """Two heartbeats of one actor once ended any run: the second limit stood on the first claim."""
    budget = StepBudget(100_000_000, clock=lambda: 0.0)
    for _ in range(5):
        limit = budget.extend(7, 1 << 53, 0, {7: 1})
        assert limit - (1 << 53) <= 100_000_000
    assert budget.steps <= MAX_STEPS_PER_SLOT_S


def test_an_honest_process_goes_on_whatever_a_restarted_learner_has_forgotten():
    """It had made all that the learner before permitted, which began again without a checkpoint."""
    budget, made, limit = StepBudget(60), 60, 60
    for _ in range(20):
        limit = budget.extend(7, made, limit, {7: 4})
        assert budget.permitted(7) == limit >= made
        made = limit
        if budget.steps >= 60:
            break
    assert 60 <= budget.steps < 64


@settings(max_examples=300, deadline=None)
@given(
    total=st.integers(1, 10**9),
    messages=st.lists(
        st.tuples(
            st.integers(0, 3),
            st.sampled_from(["extend", "report"]),
            st.integers(0, 1 << 53) | st.integers(0, 2000),
            st.integers(0, 1 << 53) | st.integers(0, 2000),
            st.floats(0.0, 10.0),
        ),
        max_size=60,
    ),
)
def test_no_sequence_of_claims_counts_or_grants_more_than_the_total_and_a_round(total, messages):
    now_s = [0.0]
    budget = StepBudget(total, clock=lambda: now_s[0])
    slots = {0: 1, 1: 3, 2: 8, 3: 2}
    limits = dict.fromkeys(slots, 0)
    for which, kind, made, obeyed, pause_s in messages:
        now_s[0] += pause_s
        before = budget.steps
        if kind == "extend":
            limits[which] = budget.extend(which, made, obeyed, slots) - budget._uncounted.get(which, 0)
        else:
            budget.report(which, made, slots[which])
        assert budget.steps - before <= slots[which] * MAX_STEPS_PER_SLOT_S * (now_s[0] + 1.0)
        assert budget.steps <= total + sum(slots.values()) - 1
        assert max(limits.values()) <= total + sum(slots.values()) - 1


def test_steps_that_are_being_made_count_though_their_limit_is_lowered_meanwhile():
    """However many heartbeats go out before they are made: the actor obeys the lower limit only then."""
    budget, member, slots, obeyed = StepBudget(10), Member(), {1: 4, 2: 4}, 0
    member.permit(budget.extend(1, 0, 0, slots))
    assert member.begin(4)
    for made in (0, 4, 8, 12):  # the other actor completes the run
        obeyed = budget.extend(2, made, obeyed, slots)
    for _ in range(3):
        member.permit(budget.extend(1, 0, member.progress()["steps_limit"], slots))
    assert not member.begin(1)
    assert budget.permitted(1) == 4
    member.made(4)
    budget.extend(1, 4, member.progress()["steps_limit"], slots)
    assert budget.steps == 16
    assert member.progress()["steps_limit"] == member.steps_limit


def test_steps_that_were_permitted_before_the_lease_ended_are_no_lie():
    """They may not count any more, for others were given the room; but their actor is heard all the same."""
    budget, slots = StepBudget(20), {1: 4, 2: 4}
    for one in slots:
        assert budget.extend(one, 0, 0, slots) == 4
    budget.extend(2, 4, 4, {2: 4})  # the first one's lease has ended
    budget.extend(2, 12, 12, {2: 4})
    limit = budget.extend(1, 4, 4, slots)
    assert budget.permitted(1) >= 4
    assert limit >= budget.made(1)
    again = StepBudget(20)  # a learner that was started again, from an older checkpoint
    again.load_meta(budget.to_meta() | {"reported": {}})
    again.extend(1, 8, 12, slots)
    assert again.permitted(1) >= 8


def test_steps_that_are_being_made_while_a_lease_ends_are_no_lie():
    """By a limit that this learner, or the one before, told: it is remembered longer than the lease."""
    for budget in (StepBudget(60), StepBudget(45)):
        limit = budget.extend(1, 0, 0, {1: 3, 2: 3})
        for made in (0, 12, 24, 36):  # the lease of the first has ended, and the second uses up the rest
            told = budget.extend(2, made, made, {2: 3})
            assert told >= made
        budget.extend(1, 3, limit, {1: 3, 2: 3})  # it is back, in the midst of its steps
        assert budget.permitted(1) >= limit
        budget.extend(1, limit, limit, {1: 3, 2: 3})


def test_the_last_round_counts_though_others_have_left():
    budget, slots = StepBudget(10), {1: 4, 2: 4}
    limits = {one: budget.extend(one, 0, 0, slots) for one in slots}
    limits = {one: budget.extend(one, 4, limits[one], slots) for one in slots}
    assert limits == {1: 8, 2: 8}
    budget.extend(1, 8, 8, slots)
    budget.extend(2, 4, 8, {2: 4})
    budget.report(2, 8, 4)
    assert budget.steps == 16


def test_what_a_replaced_process_may_still_tell_of_is_kept_for_it():
    budget = StepBudget(1000)
    limit = budget.extend(1, 0, 0, {1: 4})
    made = obeyed = 0
    for _ in range(30):
        obeyed = budget.extend(2, made, obeyed, {2: 4}, {1: 2})
        made = obeyed
    budget.report(1, limit, 4)  # read late
    assert 1000 - 4 <= budget.steps < 1004
    for _ in range(5):
        obeyed = budget.extend(2, made, obeyed, {2: 4})
        made = obeyed
    assert 1000 <= budget.steps < 1004


def test_any_number_of_restarts_leaves_steps_for_the_next():
    """Also of an actor that is alone, in a run without an end."""
    for budget in (StepBudget(1_000_000), StepBudget()):
        for process in range(8):
            replaced = dict.fromkeys(range(process), process)
            assert budget.extend(process, 0, 0, {process: 4}, replaced) >= 4 * 100


def test_one_that_was_replaced_holds_back_no_more_than_its_successors_round():
    budget, slots = StepBudget(20), {3: 4, 2: 4}
    assert budget.extend(1, 0, 0, {1: 4, 2: 4}) == 4
    made = 0
    for _ in range(10):
        made = budget.extend(2, made, made, slots, {1: 3})
    assert budget.steps == 20, "the last round is due to it"
    assert budget.extend(3, 0, 0, slots, {1: 3}) == 0
    budget.report(1, 4, 4)
    assert budget.steps == 24


def test_who_claims_anothers_incarnation_takes_nothing_from_it():
    budget = control.StepBudget(1000)
    budget.hold(7, "actor-0", 4)
    limit = budget.extend(7, 0, 0)
    budget.hold(7, "actor-1", 1)
    budget.hold(7, "actor-1", 0)
    budget.forget(7, "actor-1")
    assert budget.permitted(7) == limit
    assert budget.extend(7, 4, limit) > 4
    budget.forget(7, "actor-0")
    assert budget.extend(7, 4, limit) == 4, "it holds no slots any more"
