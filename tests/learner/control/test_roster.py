import pytest

from troupe.common import timing
from troupe.common.config import load_config
from troupe.common.wire.codec import decode, encode
from troupe.common.wire.control import messages
from troupe.common.wire.security import claims
from troupe.common.wire.types import MAX_SHARDS
from troupe.services.learner.control.budget import StepBudget
from troupe.services.learner.control.roster import Peer, RefusedError, Roster
from troupe.services.learner.control.slots import SlotRules, ranges


def peer(name: str, incarnation: int = 1, role: str = "actor", **more) -> Peer:
    return Peer(f"{name}.{incarnation}".encode(), role, name, incarnation, **more)


def join(roster: Roster, who: Peer, wanted: int, now_s: float = 0.0, held: tuple[int, ...] = ()) -> list[int]:
    roster.join(who, wanted, list(held), now_s)
    return who.slots


@pytest.fixture
def roster() -> Roster:
    return Roster(SlotRules(8), heartbeat_s=1.0, liveness_s=10.0)


def test_the_lowest_free_slots_are_leased(roster):
    assert join(roster, peer("actor-0"), 3) == [0, 1, 2]
    assert join(roster, peer("actor-1"), 3) == [3, 4, 5]
    roster.leave(b"actor-0.1")
    assert join(roster, peer("actor-2"), 4) == [0, 1, 2, 6]


def test_slots_may_be_spread_over_all_that_are_free():
    roster = Roster(SlotRules(12, spread=True), heartbeat_s=1.0, liveness_s=10.0)
    assert join(roster, peer("actor-0"), 3) == [0, 4, 8]
    assert join(roster, peer("actor-1"), 3) == [1, 5, 9]
    assert join(roster, peer("actor-2"), 3, held=(7,)) == [2, 6, 7]
    roster.leave(b"actor-0.1")
    assert join(roster, peer("actor-3"), 20) == [0, 3, 4, 8, 10, 11]
    assert join(roster, peer("evaluator"), 0) == []


def test_it_counts_the_processes_that_had_a_name_before(roster):
    def restarts():
        return {each["name"]: each["restarts"] for each in roster.snapshot(0.0)}

    for incarnation in (1, 1, 2, 3):  # joining again is no restart
        join(roster, peer("actor-0", incarnation), 2)
    join(roster, peer("actor-1"), 2)
    assert restarts() == {"actor-0": 2, "actor-1": 0}
    roster.leave(b"actor-0.3")
    join(roster, peer("actor-0", 4), 2)
    assert restarts()["actor-0"] == 3
    roster.expire(100.0)  # it has said no more than HELLO: it may have been dead before
    join(roster, peer("actor-0", 5), 2)
    assert restarts()["actor-0"] == 3


def test_all_shards_of_a_run_fit_into_one_header(roster):
    """Each address is listed once, and a shard too many is told so: no WELCOME is too long to be read."""
    longest = [f"tcp://{'h' * 245}{number:03}:65535" for number in range(MAX_SHARDS)]
    for number, endpoint in enumerate(longest):
        join(roster, peer(f"replay-{number}", role="replay", endpoint=endpoint), 0)
    join(roster, peer("replay-1000", role="replay", endpoint=longest[0]), 0)
    assert sorted(roster.shards()) == sorted(longest)
    with pytest.raises(RefusedError, match=f"more than {MAX_SHARDS} replay shards"):
        join(roster, peer("replay-1001", role="replay", endpoint="tcp://one.more:1"), 0)
    config = load_config("atari57-r2d2-paper").model_dump(mode="json")
    welcome = messages.Welcome(
        config=config, slots=list(range(1024)), total_slots=1024, announce="a", shards=roster.shards(),
        heartbeat_s=1.0, liveness_s=10.0, session=1, version=1, steps=1, updates=1, stopping=False,
    )  # fmt: skip
    read = messages.Welcome.of(decode(encode(welcome.message())))
    assert len(read.shards) == MAX_SHARDS


def test_a_key_has_so_many_members_and_no_more(roster, monkeypatch):
    monkeypatch.setattr(claims, "MAX_MEMBERS", 3)
    for name in ("a", "b", "c"):
        join(roster, peer(name, role="viewer", key="one"), 0)
    with pytest.raises(RefusedError, match="3 members have the key of d"):
        join(roster, peer("d", role="viewer", key="one"), 0)
    join(roster, peer("d", role="viewer", key="other"), 0)
    join(roster, peer("a", 2, role="viewer", key="one"), 0)  # in the place of the first
    roster.leave(b"b.1")
    join(roster, peer("e", role="viewer", key="one"), 0)
    assert roster.expire(11.0)
    assert roster.members == 0
    join(roster, peer("f", role="viewer", key="one"), 0, 11.0)


def test_a_lease_lives_on_any_message_and_dies_of_silence(roster):
    join(roster, peer("actor-0"), 3, now_s=0)
    join(roster, peer("actor-1"), 3, now_s=0)
    assert roster.seen(b"actor-0.1", 9.0).name == "actor-0"
    assert [gone.name for gone in roster.expire(10.5)] == ["actor-1"]
    assert roster.names() == ["actor-0"]
    assert roster.seen(b"actor-1.1", 10.6) is None
    assert join(roster, peer("actor-2"), 5, now_s=10.6) == [3, 4, 5, 6, 7]


def test_a_name_gets_its_own_slots_back(roster):
    join(roster, peer("actor-0"), 2)
    assert join(roster, peer("actor-1"), 2) == [2, 3]
    roster.leave(b"actor-0.1")
    roster.leave(b"actor-1.1")
    assert join(roster, peer("actor-1", 2), 2) == [2, 3]


def test_slots_held_before_the_learner_restarted_are_granted_again(roster):
    assert join(roster, peer("actor-1"), 3, held=(5, 6, 7)) == [5, 6, 7]
    assert join(roster, peer("actor-0"), 3, held=(4, 5, 99, -1)) == [0, 1, 4]


def test_a_restarted_process_takes_over_at_once_and_the_old_one_cannot_return(roster):
    assert join(roster, peer("actor-0", 1), 8) == list(range(8))
    assert join(roster, peer("actor-0", 2), 8) == list(range(8))
    assert roster.seen(b"actor-0.1", 1.0) is None
    with pytest.raises(RefusedError, match="unique") as caught:
        join(roster, peer("actor-0", 1), 8)
    assert caught.value.kind == "superseded"
    assert roster.names() == ["actor-0"]


def test_a_dead_process_from_before_a_power_cut_keeps_a_name_for_its_lease_at_most(roster):
    dead, alive = peer("replay-0", 1, role="replay"), peer("replay-0", 2, role="replay")
    dead.boot, alive.boot = "before", "after"
    join(roster, alive, 0, now_s=0.0)
    join(roster, dead, 0, now_s=0.0)  # read after that of the other, though it was said before
    again = peer("replay-0", 2, role="replay")
    again.boot = "after"
    with pytest.raises(RefusedError, match="when its lease ends") as caught:
        join(roster, again, 0, now_s=1.0)
    assert caught.value.kind == "name_taken"
    assert [gone.incarnation for gone in roster.expire(10.5)] == [1]
    join(roster, again, 0, now_s=10.5)
    # One that lives and has been replaced stays out.
    other = peer("replay-0", 3, role="replay")
    other.boot = "third"
    join(roster, other, 0, now_s=11.0)
    other.spoke = True
    with pytest.raises(RefusedError, match="unique"):
        join(roster, again, 0, now_s=12.0)


def test_the_same_process_may_join_again_through_a_new_socket(roster):
    join(roster, peer("actor-0", 1), 4)
    again = peer("actor-0", 1)
    again.identity = b"actor-0.1.second"
    assert join(roster, again, 4) == [0, 1, 2, 3]
    assert roster.seen(b"actor-0.1", 1.0) is None
    assert roster.seen(b"actor-0.1.second", 1.0) is again


def test_without_a_free_slot_an_actor_has_to_wait(roster):
    join(roster, peer("actor-0"), 8)
    with pytest.raises(RefusedError) as caught:
        join(roster, peer("actor-1"), 1)
    assert caught.value.kind == "no_slots"
    assert roster.names() == ["actor-0"]
    join(roster, peer("evaluator"), 0)


def test_fewer_slots_than_wanted_only_while_every_holder_is_well(roster):
    join(roster, peer("actor-0"), 6, now_s=0.0)
    with pytest.raises(RefusedError):
        join(roster, peer("actor-1"), 4, now_s=5.0)
    roster.seen(b"actor-0.1", 5.0)
    assert join(roster, peer("actor-1"), 4, now_s=5.1) == [6, 7]


def test_more_slots_than_there_are_is_all_of_them(roster):
    assert join(roster, peer("actor-0"), 100) == list(range(8))


def test_shards_are_in_the_order_of_their_numbers(roster):
    for index in (10, 2, 0):
        join(roster, peer(f"replay-{index}", role="replay", endpoint=f"tcp://h:{index}"), 0)
    assert roster.shards() == ["tcp://h:0", "tcp://h:2", "tcp://h:10"]
    assert [entry["name"] for entry in roster.snapshot(1.5)] == ["replay-0", "replay-2", "replay-10"]
    assert roster.snapshot(1.5)[0]["seen_s_ago"] == 1.5
    assert roster.snapshot(1.5)[0]["heartbeat_s"] == 1.0


def test_ranges_are_short():
    assert [ranges(s) for s in ([], [4], [0, 1, 2], [0, 1, 3, 5, 6])] == ["none", "4", "0-2", "0-1,3,5-6"]


def test_a_dead_process_does_not_take_the_name_from_the_one_that_started_after_it(roster):
    """A learner that stood still reads both HELLOs, in any order."""
    first, second, third = (
        peer("actor-0", number, boot="b", started_s=10.0 * number) for number in (1, 2, 3)
    )
    join(roster, first, 2)
    join(roster, third, 2)
    with pytest.raises(RefusedError, match="another process has joined as actor-0 since"):
        join(roster, second, 2)
    assert join(roster, third, 2) == [0, 1]
    # The clock of another kernel says nothing about who came first.
    assert join(roster, peer("actor-0", 4, boot="other", started_s=1.0), 2) == [0, 1]
    assert join(roster, peer("actor-0", 5), 2) == [0, 1]


def known_of(roster: Roster, name: str = "actor-0", key: str = "") -> list[int]:
    """Which of the first processes of a name are known to have been replaced."""
    found = (roster.replaced_peer(f"{name}.{each}".encode(), key) for each in range(5))
    return [peer.incarnation for peer in found if peer is not None]


def test_who_was_replaced_is_known_until_it_leaves_or_its_time_is_over(roster):
    for incarnation in (1, 2, 3):
        join(roster, peer("actor-0", incarnation, key="mine"), 3, now_s=5.0 + incarnation)
    assert known_of(roster, key="mine") == [1, 2]
    assert not known_of(roster, key="theirs")
    roster.forget_replaced(b"actor-0.1")
    assert known_of(roster, key="mine") == [2]
    roster.seen(b"actor-0.3", 17.9, "mine")
    roster.expire(18.0)
    assert known_of(roster, key="mine") == [2]
    roster.leave(b"actor-0.3")
    assert known_of(roster, key="mine") == [2]
    roster.expire(18.1)
    assert not known_of(roster, key="mine")


def test_two_who_chose_one_identity_and_were_replaced_are_both_forgotten():
    budget = StepBudget()
    roster = Roster(SlotRules(8), heartbeat_s=1.0, liveness_s=10.0, budget=budget)
    for number, name in enumerate(("actor-0", "actor-1")):
        who = Peer(b"of-both", "actor", name, 10 + number)
        join(roster, who, 2)
        budget.extend(who.incarnation, 0, 0)
        join(roster, peer(name, 20 + number), 2)
    assert roster.replaced_peer(b"of-both", "").name == "actor-1"
    roster.expire(now_s=11.0)
    assert budget._ahead._processes == {}


def test_of_those_without_slots_and_of_the_same_process_nothing_is_kept(roster):
    for incarnation in (1, 2):
        join(roster, peer("replay-0", incarnation, role="replay"), 0)
    for identity in ("a", "b"):
        again = peer("actor-0")
        again.identity = identity.encode()
        join(roster, again, 2)
    assert not known_of(roster, "replay-0")
    assert roster.replaced_peer(b"a", "") is None


def test_of_many_actors_each_beats_less_often_and_all_others_as_ever():
    roster = Roster(SlotRules(1000), heartbeat_s=1.0, liveness_s=15.0)
    beats = []
    for number in range(512):
        who = peer(f"actor-{number}")
        join(roster, who, 1)
        beats.append(who.beat_s)
    assert beats[:32] == [1.0] * 32
    assert beats[63] == 2.0
    assert max(beats) == beats[-1] == 5.0, "three heartbeats within a lease"
    assert sum(1 / beat_s for beat_s in beats) < 160
    evaluator = peer("evaluator", role="evaluator")
    join(roster, evaluator, 0)
    assert evaluator.beat_s == 1.0


def test_no_actor_is_told_an_interval_that_it_would_refuse():
    roster = Roster(SlotRules(1000), heartbeat_s=10.0, liveness_s=600.0)
    for number in range(250):
        join(roster, peer(f"actor-{number}"), 1)
    assert roster.beat_s("actor") == timing.HEARTBEAT_S[1]


def test_names_are_in_natural_order_whoever_comes_and_leaves():
    roster = Roster(SlotRules(4), heartbeat_s=1.0, liveness_s=15.0)
    for name in ("actor-10", "actor-9", "replay-0"):
        join(roster, peer(name), 0)
    assert roster.names() == ["actor-9", "actor-10", "replay-0"]
    roster.leave(b"actor-9.1")
    assert roster.names() == ["actor-10", "replay-0"]
    join(roster, peer("actor-2"), 0)
    assert [each["name"] for each in roster.snapshot(0.0)] == ["actor-2", "actor-10", "replay-0"]


@pytest.mark.parametrize(("silent_s", "granted"), [(2.9, [39]), (3.1, None)])
def test_an_actor_that_beats_less_often_counts_as_silent_later(silent_s, granted):
    roster = Roster(SlotRules(40), heartbeat_s=1.0, liveness_s=15.0)
    for number in range(39):
        join(roster, peer(f"actor-{number}"), 1)
    for number in range(38):
        assert roster.seen(b"actor-%d.1" % number, silent_s)
    # The last to join beats each 39 / 32 seconds, and is silent after two and a half times that.
    late = peer("late")
    if granted is None:
        with pytest.raises(RefusedError, match="only 1 of the 2"):
            join(roster, late, 2, now_s=silent_s)
    else:
        assert join(roster, late, 2, now_s=silent_s) == granted
