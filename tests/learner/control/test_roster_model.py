"""A roster beside a naive one, which goes through all of its members each time."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from troupe.common.errors import RefusedError
from troupe.services.learner.control.budget import StepBudget
from troupe.services.learner.control.roster import Peer, Roster
from troupe.services.learner.control.slots import SlotRules

SLOTS, HEARTBEAT_S, LIVENESS_S = 12, 1.0, 10.0


class Naive:
    """Who is there, in a list; what is asked is worked out from that."""

    def __init__(self, spread: bool, max_per_key: int) -> None:
        self.spread, self.max_per_key = spread, max_per_key
        self.peers: list[Peer] = []

    def grant(self, peer: Peer, wanted: int, preferred: list[int], now_s: float) -> list[int] | None:
        others = [other for other in self.peers if other.name != peer.name]
        taken = {slot for other in others for slot in other.slots}
        free = [slot for slot in range(SLOTS) if slot not in taken]
        share = SLOTS
        if peer.key and self.max_per_key:
            share = self.max_per_key - sum(len(other.slots) for other in others if other.key == peer.key)
            if wanted and share <= 0:
                return None
        wanted = min(wanted, SLOTS, share)
        kept = [slot for slot in dict.fromkeys(preferred) if slot in free][:wanted]
        rest = [slot for slot in free if slot not in kept]
        missing = min(wanted - len(kept), len(rest))
        slots = kept + [rest[i * len(rest) // missing if self.spread else i] for i in range(missing)]
        quiet = any(other.slots and now_s - other.seen_s > 2.5 * HEARTBEAT_S for other in others)
        if wanted and (not slots or (len(slots) < wanted and quiet)):
            return None
        return sorted(slots)

    def join(self, peer: Peer) -> None:
        self.peers = [
            other for other in self.peers if other.name != peer.name and other.identity != peer.identity
        ]
        self.peers.append(peer)

    def gone(self, now_s: float) -> set[bytes]:
        gone = {peer.identity for peer in self.peers if now_s - peer.seen_s > LIVENESS_S}
        self.peers = [peer for peer in self.peers if peer.identity not in gone]
        return gone


def check(roster: Roster, naive: Naive, budget: StepBudget) -> None:
    assert roster.leases() == {peer.incarnation: set(peer.slots) for peer in naive.peers if peer.slots}
    shards = sorted((peer.name, peer.endpoint) for peer in naive.peers if peer.endpoint)
    assert roster.shards() == list(dict.fromkeys(endpoint for _, endpoint in shards))
    for role in ("actor", "replay"):
        assert roster.processes(role) == {peer.incarnation for peer in naive.peers if peer.role == role}
        assert roster.has(role) == any(peer.role == role for peer in naive.peers)
    held = {peer.incarnation: len(peer.slots) for peer in naive.peers if peer.slots}
    assert {one: each.slots for one, each in budget._ahead._processes.items() if each.slots} == held
    replaced = {peer.incarnation for peer, _ in roster._replaced.values()}
    assert {one for one, each in budget._ahead._processes.items() if not each.slots} == replaced


@settings(max_examples=300, deadline=None)
@given(
    spread=st.booleans(),
    max_per_key=st.sampled_from([0, 5]),
    moves=st.lists(
        st.tuples(
            st.sampled_from(["join", "join", "again", "seen", "leave", "wait"]),
            st.integers(0, 3),
            st.integers(0, 8),
            st.lists(st.integers(-1, SLOTS + 1), max_size=4),
            st.sampled_from(["", "mine", "theirs"]),
            st.sampled_from([0.0, 0.5, 3.0, 11.0]),
        ),
        max_size=50,
    ),
)
def test_whoever_comes_and_goes_a_roster_is_as_a_naive_one(spread, max_per_key, moves):
    budget = StepBudget()
    roster = Roster(SlotRules(SLOTS, spread, max_per_key), HEARTBEAT_S, LIVENESS_S, budget)
    naive, now_s, processes, past = Naive(spread, max_per_key), 0.0, 0, {}
    for move, number, wanted, held, key, pause_s in moves:
        name = ("actor-1", "actor-2", "actor-3", "replay-1")[number]
        role = name.partition("-")[0]
        there = next((peer for peer in naive.peers if peer.name == name), None)
        if move in ("join", "again"):
            processes += 1
            incarnation = there.incarnation if there and move == "again" else processes
            identity = b"%d.%d" % (incarnation, processes)
            endpoint = f"tcp://h:{wanted % 2}" if role == "replay" else ""
            peer = Peer(identity, role, name, incarnation, key=key, endpoint=endpoint)
            wanted = wanted if role == "actor" else 0
            preferred = [*held, *past.get((role, key, name), [])]
            expected = naive.grant(peer, wanted, preferred, now_s)
            if there is not None and there.key != key:
                expected = None
            try:
                roster.join(peer, wanted, held, now_s)
            except RefusedError:
                assert expected is None
            else:
                assert peer.slots == expected
                past[role, key, name] = peer.slots
                naive.join(peer)
        elif move == "seen" and there is not None:
            assert roster.seen(there.identity, now_s, there.key) is there
        elif move == "leave" and there is not None:
            roster.leave(there.identity)
            naive.peers.remove(there)
        elif move == "wait":
            now_s += pause_s
            assert {peer.identity for peer in roster.expire(now_s)} == naive.gone(now_s)
        check(roster, naive, budget)
