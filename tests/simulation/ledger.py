"""An account of the run that the services know nothing of, made of what is on the wire."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
import zmq

from tests.simulation.checkpoints import Checkpoints
from tests.simulation.configuration import BATCH, EPISODES
from tests.simulation.contents import Contents
from tests.simulation.conversations import Conversations, Header
from tests.simulation.lineage import Lineage
from tests.simulation.plan import Plan
from tests.simulation.world import World

if TYPE_CHECKING:
    from tests.simulation.sockets import Socket

GONE_S = 6.0
"""Who has said nothing for so long at the end of the run has left before."""
ROUTER, DEALER = int(zmq.ROUTER), int(zmq.DEALER)

Key = tuple[str, int, int]
"""Address of the shard, incarnation of the producer, number of the insert."""


class Ledger:
    """Notes what was sent and acknowledged, and what is wrong.

    Attributes:
        problems: what should not be, in words.
    """

    def __init__(self, world: World, plan: Plan) -> None:
        self.problems: list[str] = []
        self.sent: dict[Key, tuple[int, ...]] = {}
        self.acked: set[Key] = set()
        self._acked_s: dict[Key, float] = {}
        self.unanswered: dict[tuple[str, int], set[Key]] = defaultdict(set)  # by shard and producer
        self.credit: dict[tuple[str, int], int] = {}
        self.max_credit: dict[tuple[str, int], int] = defaultdict(int)
        self.owner: dict[int, Key | None] = {}  # step number: where it was sent
        self.given: Counter[int] = Counter()  # step numbers in batches that shards have sent
        self.learned_numbers: Counter[int] = Counter()
        self.heard_s: dict[bytes, float] = {}  # by identity, at the learner
        self.made: dict[int, int] = {}
        self.acting: dict[int, tuple[int, float]] = {}  # by slot: who acted last, and when
        self.versions: dict[tuple[int, int], int] = {}
        self.batches_after_faults = 0
        self.steps: int | None = None
        self.updates = 0
        self._world, self.plan = world, plan
        self.given_up = 0
        self._members: dict[bytes, int] = {}
        self._told: dict[int, tuple[int, float]] = {}
        """Steps that the learner has been told by a process, and when."""
        self._finished_s = 0.0
        self.cuts_s: list[float] = []
        """When shards lost power."""
        self.last_start_s = 0.0
        """Of a process."""
        self._incarnations: dict[str, int] = {}
        self._numbers = 0
        calm_until_s = plan.faults[0].at_s if plan.faults else float("inf")
        self.lineage = Lineage(self, plan)
        self.talk = Conversations(self, calm_until_s)
        self.checkpoints = Checkpoints(self)
        self.contents = Contents(self, plan)
        self._before: dict[int, int] = {}  # by step: the one before, where it has to be in the same insert
        self._steps_of: dict[tuple[int, int], list[int]] = defaultdict(list)  # by incarnation and slot

    @property
    def power_cuts(self) -> int:
        """How often shards lost power."""
        return len(self.cuts_s)

    def may_be_given(self, number: int) -> int:
        """How often a step of a queue may be handed out.

        After a power cut what was handed out may be there again; and once more where its insert had not been
        acknowledged, and was sent again.
        """
        acked_s = self._acked_s.get(self.owner.get(number) or ("", 0, 0), float("inf"))
        return 1 + len(self.cuts_s) + sum(cut_s < acked_s for cut_s in self.cuts_s)

    @property
    def calm_from_s(self) -> float:
        """When the last fault was over: one that waits for an update or an insert strikes after its time."""
        return max(self.plan.end_s, self.last_start_s)

    @property
    def now_s(self) -> float:
        """The time."""
        return self._world.now

    def wrong(self, what: str) -> None:
        """Something is not as it should be."""
        if len(self.problems) < 20:
            self.problems.append(f"at {self._world.now:.3f} s: {what}")
        self._world.log("WRONG", what)
        self._world.news = True

    # -- what is on the wire --

    def on_send(self, socket: Socket, parts: list[bytes]) -> None:
        """A process sends this."""
        if socket.kind == DEALER:
            header = _header(parts)
            if header is None or socket.node.name == "stranger":
                return
            self.talk.client_sends(socket.label, header)
            if header["t"] == "CREDIT":
                self._incarnations[socket.label] = header["f"].get("incarnation", 0)
            elif header["t"] == "INSERT":
                self._insert(socket, header, parts)
        elif socket.kind == ROUTER and b"BATCH" in parts[0][:40]:
            header = msgpack.unpackb(parts[0])
            numbers, lengths = _array(header, parts, "field/number"), _array(header, parts, "lengths")
            if numbers is not None and lengths is not None:
                rows = numbers.reshape(len(lengths), -1)
                for row, length in zip(rows, lengths, strict=True):
                    self.given.update(row[:length].tolist())

    def on_receive(self, socket: Socket, parts: list[bytes], identity: bytes) -> None:
        """A process reads this."""
        if socket.kind == ROUTER:
            if socket.node.name == "learner":
                self.heard_s[identity] = self._world.now
                header = _header(parts)
                if header is not None:
                    self.talk.learner_hears(identity, header)
                    self._hear_steps(identity, header)
            return
        header = _header(parts) if socket.kind == DEALER else None
        if header is None or socket.node.name == "stranger":
            return
        self.talk.client_hears(socket.label, header)
        kind, fields = header["t"], header["f"]
        if kind not in ("INSERTED", "CREDIT", "ERROR"):
            return
        # An evaluator that was cut off hands in what another plays by then, or nobody any more.
        late = kind == "ERROR" and fields["detail"].endswith("is not its to play") and not self.talk.calm
        if kind == "ERROR" and fields["kind"] == "claim" and not late:
            self.wrong(f"an honest {socket.node.name} is refused: {fields['detail']}")
        incarnation = self._incarnations.get(socket.label)
        if incarnation is None:
            return
        key = (socket.address, incarnation, header["i"])
        if kind == "INSERTED":
            if key not in self.sent:
                self.wrong(f"an insert is acknowledged that was never sent: {key}")
            if key in self.acked and self.talk.calm:
                self.wrong(f"insert {key} is acknowledged twice")
            self.acked.add(key)
            self._acked_s.setdefault(key, self._world.now)
            self.unanswered[key[:2]].discard(key)
        elif kind == "ERROR":
            if fields.get("about") == "INSERT" and fields["kind"] != "gap":
                self.wrong(f"an insert is refused: {fields}")
            return
        self.credit[key[:2]] = fields["credit"]
        self.max_credit[key[:2]] = max(self.max_credit[key[:2]], fields["credit"])

    def _insert(self, socket: Socket, header: Header, parts: list[bytes]) -> None:
        incarnation = header["f"]["incarnation"]
        self._incarnations[socket.label] = incarnation
        key = (socket.address, incarnation, header["i"])
        array = _array(header, parts, "chunk/number")
        assert array is not None
        numbers = tuple(array.tolist())
        if key in self.sent:
            if self.sent[key] != numbers:
                self.wrong(f"insert {key} is sent again with other contents")
            elif self.talk.calm:
                self.wrong(f"insert {key} is sent again, and nothing was lost")
            return
        producer = key[:2]
        waiting = len(self.unanswered[producer])
        if waiting >= max(1, self.max_credit[producer]):
            self.wrong(
                f"{waiting + 1} inserts of {producer} are unacknowledged, {self.max_credit[producer]} may"
            )
        if self.talk.calm and self.credit.get(producer, 1) == 0:
            self.wrong(f"insert {key} is sent without credit")
        self.sent[key] = numbers
        self.unanswered[producer].add(key)
        for before, number in zip((0, *numbers), numbers, strict=False):
            if self.owner[number] is not None:
                self.wrong(f"step {number} is in insert {self.owner[number]} and in {key}")
            if before and self._before[number] not in (0, before):
                self.wrong(
                    f"in insert {key} step {number} follows {before}: {self._before[number]} is left out"
                )
            self.owner[number] = key

    # -- what services say --

    def new_number(self, before: int = 0, of: tuple[int, int] | None = None) -> int:
        """A number for a step of an environment, which follows the one of `before`.

        `of` an incarnation and slot: all of these are sent in order.
        """
        self._numbers += 1
        if of is not None:
            self._steps_of[of].append(self._numbers)
        self._before[self._numbers] = before
        self.owner[self._numbers] = None
        return self._numbers

    def acted(self, incarnation: int, slots: list[int], version: int, made: int) -> None:
        """An actor process has made a step in these slots; `made` since it began."""
        now_s = self._world.now
        self.made[incarnation] = made
        settled = now_s > self.plan.end_s + 20.0
        for slot in slots:
            who, when_s = self.acting.get(slot, (incarnation, 0.0))
            if who != incarnation and now_s - when_s < 1.0 and settled:
                self.wrong(f"slot {slot} is acted in by two processes")
            self.acting[slot] = incarnation, now_s

    def loaded(self, incarnation: int, session: int, version: int, params: dict[str, np.ndarray]) -> None:
        """An actor process takes these parameters."""
        before = self.versions.get((incarnation, session), -1)
        if version <= before:
            self.wrong(f"version {version} after {before}")
        if int(params["version"][0]) != version:
            self.wrong(f"parameters of version {params['version'][0]} are called {version}")
        self.versions[incarnation, session] = version

    def learned(self, batch: Any) -> None:
        """The learner has this batch."""
        from tests.simulation.actors import contents

        if self._world.now > self.plan.end_s:
            self.batches_after_faults += 1
        for row, length in enumerate(batch.lengths.tolist()):
            numbers = batch.fields["number"][row, :length]
            if not np.array_equal(batch.fields["obs"][row, :length], contents(numbers)):
                self.wrong(f"a row of a batch is torn: {numbers.tolist()}")
            for number in numbers.tolist():
                key = self.owner.get(number)
                if key is None or key[0] != batch.shard:
                    self.wrong(f"step {number} of a batch from {batch.shard} was never stored there")
            self.learned_numbers.update(numbers.tolist())
            if self.plan.table == "queue" and any(
                self.learned_numbers[number] > self.may_be_given(number) for number in numbers.tolist()
            ):
                self.wrong(f"steps {numbers.tolist()} of a queue are learned from twice")

    def expired(self, identity: bytes, liveness_s: float) -> None:
        """The learner gives up a member."""
        self.given_up += 1
        silent_s = self._world.now - self.heard_s.get(identity, -1e9)
        if silent_s < liveness_s - 0.01:
            self.wrong(f"a member that was heard {silent_s:.3f} s ago is given up")

    def leases(self, leases: dict[int, set[int]]) -> None:
        """Who holds which slots now."""
        self.talk.leases(leases)
        count = Counter(slot for slots in leases.values() for slot in slots)
        if any(holders > 1 for holders in count.values()):
            self.wrong(f"slots are leased twice: {leases}")

    def evaluated(self, evaluation: Any, before: int) -> None:
        """The learner has all games of a version."""
        version, games = evaluation.version, evaluation.games
        if len(games) != EPISODES and self.talk.calm:
            self.wrong(f"the evaluation of version {version} has {len(games)} games")
        if len(games) > EPISODES or version <= before:
            self.wrong(f"an evaluation of version {version} with {len(games)} games after version {before}")
        if any(game.episode_return != version for game in games):
            self.wrong(f"games of version {version} were played by others: {games}")

    def not_evaluated(self, version: int, waited_s: float) -> None:
        """The last version was not evaluated within this time."""
        if self._world.now - waited_s > self.plan.end_s + GONE_S:
            self.wrong(f"version {version}, the last, was not evaluated within {waited_s:.0f} s")

    def not_told(self, name: str) -> None:
        """The run has ended, and this process goes on."""
        # Those who have been without a learner for long try again every ten seconds or so, and it lingers for
        # five.
        if self._world.now > self.calm_from_s + 30.0:
            self.wrong(f"{name} has not been told of the end")

    def finished(self, steps: int, updates: int) -> None:
        """The run is complete, as the learner sees it."""
        self.steps, self.updates = steps, updates
        self._finished_s = self._world.now
        self._world.news = True

    def _hear_steps(self, identity: bytes, header: dict[str, Any]) -> None:
        fields = header["f"]
        if header["t"] == "HELLO":
            self._members[identity] = fields.get("incarnation", 0)
        if "steps_made" in fields and identity in self._members:
            self._told[self._members[identity]] = fields["steps_made"], self._world.now

    def _never_told(self) -> int:
        """Steps of processes that left over connections which nothing passed any more: nobody has heard."""
        untold = 0
        for incarnation, made in self.made.items():
            told, when_s = self._told.get(incarnation, (0, 0.0))
            if when_s < self._finished_s - GONE_S:
                untold += max(0, made - told)
        return untold

    # -- at the end --

    def check_steps(self, kills: dict[str, int]) -> None:
        """Compare what was counted with what was made."""
        plan, made = self.plan, sum(self.made.values())
        limit = plan.total_steps + plan.actors * plan.slots - 1
        assert self.steps is not None
        if not plan.total_steps <= self.steps <= limit:
            self.wrong(f"the run ends with {self.steps} steps of {plan.total_steps}")
        if self.steps > made:
            self.wrong(f"{self.steps} steps are counted, {made} were made")
        died = sum(count for name, count in kills.items() if not name.startswith("replay"))
        if not died and not self.given_up and made - self._never_told() > limit:
            self.wrong(f"{made} steps were made, {limit} at most were permitted")
        if self.talk.calm and made != self.steps:
            self.wrong(f"{made} steps were made, {self.steps} counted, and nothing went wrong")

    def check_order(self) -> None:
        """Whatever a process made of a slot it has sent, up to the last that it sent."""
        for (incarnation, slot), numbers in self._steps_of.items():
            sent = [self.owner[number] is not None for number in numbers]
            if sent != sorted(sent, reverse=True):
                self.wrong(f"{incarnation} left out steps of slot {slot}: {numbers[sent.index(False)]}")

    def check_ratio(self, limiter: Any, kills: int) -> None:
        """Compare samples per insert with the band."""
        surplus = limiter.samples_per_insert * (limiter.inserted - limiter.min_items) - limiter.sampled
        if limiter.sampled and surplus < -limiter.error - kills * BATCH - 1e-6:
            self.wrong(f"{limiter.sampled} samples of {limiter.inserted} items are too many")


def _header(parts: list[bytes]) -> Header | None:
    """The header of a message of this protocol; strangers send others."""
    return _unpacked(parts[0]) if parts else None


@functools.lru_cache(maxsize=256)
def _unpacked(data: bytes) -> Header | None:
    """Cached, for whoever reads a message has it unpacked after whoever sent it."""
    try:
        header = msgpack.unpackb(data)
        return header if {"t", "i", "f", "a"} <= header.keys() else None
    except (ValueError, AttributeError):
        return None


def _array(header: dict[str, Any], parts: list[bytes], name: str) -> np.ndarray | None:
    for index, entry in enumerate(header["a"]):
        if entry["n"] == name:
            return np.frombuffer(parts[1 + index], entry["d"])
    return None
