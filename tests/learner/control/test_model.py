"""Any order of joining, leaving, silence, stolen names and restarts, beside what actors know themselves."""

import collections
import random
from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.harness import CHAOS, Context
from troupe.common import system
from troupe.common.wire import messages
from troupe.common.wire.codec import decode, encode
from troupe.common.wire.sockets import PeerKey
from troupe.services.learner.control.budget import StepBudget
from troupe.services.learner.control.requests import Terms
from troupe.services.learner.control.server import ControlServer
from troupe.services.learner.control.slots import SlotRules

EXAMPLES = 2000 if CHAOS else 60
TOTAL, SLOTS = 60, 4
HEARTBEAT_S, LIVENESS_S = 1.0, 10.0
KEYS = {"mine": PeerKey("actor", "mine"), "theirs": PeerKey("actor", "theirs")}


@dataclass(eq=False)
class Actor:
    """A process that acts, and what it knows: what its last answers said.

    Attributes:
        joined: it was welcome, and has not been told otherwise since.
        spoke: it has said more than HELLO, and the learner has heard it.
    """

    name: str
    key: str
    wanted: int
    incarnation: int
    slots: list[int] = field(default_factory=list)
    made: int = 0
    limit: int = 0
    joined: bool = False
    spoke: bool = False
    heard_s: float = 0.0

    @property
    def identity(self):
        return b"%d" % self.incarnation


class Membership(RuleBasedStateMachine):
    """Actors that keep to the protocol, over connections that lose answers, and a learner that dies."""

    def __init__(self):
        super().__init__()
        self.real = {name: getattr(system, name) for name in ("monotonic", "time", "random")}
        self.now_s = 1000.0
        system.monotonic = system.time = lambda: self.now_s
        system.random = random.Random(7)
        self.context = Context()
        self.actors = []
        # By name and key, in the order in which they were welcome: only the last may come again.
        self.welcomed = collections.defaultdict(list)
        self.left_made = 0  # steps of those that are gone
        self.untold = False  # steps were made that the learner can no longer hear of, or has forgotten
        self.processes = 0
        self.saved = StepBudget(TOTAL).to_meta()
        self.server = None
        self._start()

    def _start(self):
        self.processes += 1
        if self.server is not None:
            self.server.stop()
        self.budget = StepBudget(TOTAL)
        self.budget.load_meta(self.saved)
        place = f"inproc://{id(self)}-{self.processes}"
        terms = Terms({"run": {"seed": 0}}, run="run", heartbeat_s=HEARTBEAT_S, liveness_s=LIVENESS_S)
        self.server = ControlServer(
            self.context, place, place + "-announce", terms, SlotRules(SLOTS), budget=self.budget
        )
        self.server.bind()
        self.answers = []
        self.server._server.send = lambda peer, body, number=0: self.answers.append(body) or True

    def teardown(self):
        self.server.stop()
        self.context.destroy(linger=0)
        for name, value in self.real.items():
            setattr(system, name, value)

    def say(self, actor, body):
        """One message through the codec; returns the answer."""
        self.answers.clear()
        message = decode(list(map(bytes, encode(body.message(1)))))
        with self.server._lock:
            self.server._server.serve(actor.identity, message, KEYS[actor.key])
        return self.answers[0] if self.answers else None

    def some(self, data, which=lambda actor: True):
        return data.draw(st.sampled_from([actor for actor in self.actors if which(actor)]))

    # ---------------------------------------------------------------- processes

    @rule(
        name=st.sampled_from(["actor-0", "actor-1", "actor-2"]),
        key=st.sampled_from(["mine", "mine", "mine", "theirs"]),
        wanted=st.integers(1, 3),
    )
    def begin(self, name, key, wanted):
        """A process starts; it may have the name of another, as after a restart or by mistake."""
        self.processes += 1
        self.actors.append(Actor(name, key, wanted, self.processes))

    @precondition(lambda self: self.actors)
    @rule(data=st.data(), answer_lost=st.booleans())
    def hello(self, data, answer_lost):
        actor = self.some(data)
        self.join(actor, answer_lost)

    def join(self, actor, answer_lost=False):
        owner = self._owner(actor.name)
        answer = self.say(
            actor,
            messages.Hello(
                role="actor",
                name=actor.name,
                incarnation=actor.incarnation,
                slots_wanted=actor.wanted,
                slots_held=actor.slots,
                steps_made=actor.made,
                steps_limit=actor.limit,
            ),
        )
        if owner is not None and owner.key != KEYS[actor.key].public:
            assert answer.kind == messages.NAME_TAKEN, "a name was stolen"
        if isinstance(answer, messages.Error):
            kinds = (messages.NAME_TAKEN, messages.NO_SLOTS, messages.REFUSED_SUPERSEDED)
            assert answer.kind in kinds, answer.detail
            assert self.replaced(actor) or answer.kind != messages.REFUSED_SUPERSEDED
            return
        assert not self.replaced(actor), "one that was replaced has come back"
        assert 0 < len(answer.slots) <= actor.wanted
        actor.spoke &= owner is not None and owner.incarnation == actor.incarnation
        self._replace(actor)
        if not answer_lost:
            actor.slots, actor.limit = answer.slots, answer.steps_limit
            actor.joined, actor.heard_s = True, self.now_s

    def _owner(self, name):
        return self.server._roster._by_name.get(name)

    def _replace(self, newest):
        """Whoever had the name before is out, and cannot come back."""
        welcomed = self.welcomed[newest.name, newest.key]
        if newest not in welcomed:
            welcomed.append(newest)
        leases = self.server.leases()
        for actor in self.actors:
            if actor is not newest and (actor.name, actor.key) == (newest.name, newest.key):
                assert actor.incarnation not in leases, "two processes under one name"

    def replaced(self, actor):
        """Whether the learner has welcomed it, and another under its name since."""
        return actor in self.welcomed[actor.name, actor.key][:-1]

    @precondition(lambda self: any(actor.joined for actor in self.actors))
    @rule(data=st.data(), answer_lost=st.booleans())
    def heartbeat(self, data, answer_lost):
        self.beat(self.some(data, lambda actor: actor.joined), answer_lost)

    def beat(self, actor, answer_lost=False):
        answer = self.say(actor, messages.Heartbeat(steps_made=actor.made, steps_limit=actor.limit))
        if isinstance(answer, messages.Error):
            assert answer.kind == messages.UNKNOWN_PEER, answer.detail
            actor.joined = False
            return
        assert not self.replaced(actor), "one that was replaced is served"
        actor.spoke = True
        if not answer_lost:
            actor.limit, actor.heard_s = answer.steps_limit, self.now_s

    @precondition(lambda self: any(actor.joined for actor in self.actors))
    @rule(data=st.data(), rounds=st.integers(1, 20))
    def act(self, data, rounds):
        self.step(self.some(data, lambda actor: actor.joined), rounds)

    def step(self, actor, rounds):
        """As many rounds of all its slots as it may make. One that hears nothing stops by itself."""
        while rounds and actor.made + len(actor.slots) <= actor.limit:
            if self.now_s - actor.heard_s > LIVENESS_S:
                return
            actor.made += len(actor.slots)
            rounds -= 1
            self.now_s += 0.001

    @precondition(lambda self: any(actor.joined for actor in self.actors))
    @rule(data=st.data())
    def bye(self, data):
        actor = self.some(data, lambda actor: actor.joined)
        self.say(actor, messages.Bye(steps_made=actor.made))
        self.remove(actor)

    @precondition(lambda self: self.actors)
    @rule(data=st.data())
    def die(self, data):
        """Without a word."""
        self.remove(self.some(data))

    def remove(self, actor):
        self.untold |= self.budget.made(actor.incarnation) < actor.made
        self.left_made += actor.made
        self.actors.remove(actor)

    # ---------------------------------------------------------------- time, and the learner

    @rule(seconds=st.sampled_from([0.5, HEARTBEAT_S, LIVENESS_S + 1]))
    def wait(self, seconds):
        self.now_s += seconds
        self.expire()
        for peer in self.server.peers():
            assert peer["seen_s_ago"] <= LIVENESS_S, "a lease without an end"

    def expire(self):
        held = self.server.leases().keys()
        self.server._handlers.expire()
        gone = held - self.server.leases().keys()
        for welcomed in self.welcomed.values():
            # One that has said nothing but HELLO may have been dead by then: who was replaced by it is not.
            welcomed[:] = [actor for actor in welcomed if actor.spoke or actor.incarnation not in gone]
        replaced = {peer.incarnation for peer, _ in self.server._roster._replaced.values()}
        heard = self.server.leases().keys() | replaced
        self.untold |= any(
            self.budget.made(actor.incarnation) < actor.made and actor.incarnation not in heard
            for actor in self.actors
        )

    @rule()
    def save(self):
        self.saved = self.budget.to_meta()

    @rule()
    def restart(self):
        """The learner begins again from its last checkpoint."""
        self._start()
        self.untold = True
        self.welcomed.clear()

    # ---------------------------------------------------------------- what is always so

    @invariant()
    def every_slot_has_one_holder(self):
        held = [slot for slots in self.server.leases().values() for slot in slots]
        assert len(held) == len(set(held)), "a slot with two holders"
        assert set(held) <= set(range(SLOTS))

    @invariant()
    def no_more_steps_than_the_total_and_a_round(self):
        assert self.budget.steps <= TOTAL + SLOTS - 1
        made = self.left_made + sum(actor.made for actor in self.actors)
        assert self.untold or made <= TOTAL + SLOTS - 1, f"{made} were made"

    @invariant()
    def nothing_is_counted_that_was_not_made(self):
        for actor in self.actors:
            assert self.budget.made(actor.incarnation) <= actor.made

    @rule()
    def come_to_the_end(self):
        """Whatever has happened: those that are there, and one more, bring the run to its total."""
        self.begin("actor-9", "mine", SLOTS)
        for _ in range(400):
            self.now_s += HEARTBEAT_S
            self.expire()
            for actor in self.actors:
                if not actor.joined:
                    self.join(actor)
                if actor.joined:
                    self.beat(actor)
                    self.step(actor, 100)
                    self.beat(actor)
            if self.budget.steps >= TOTAL:
                return
        raise AssertionError(f"the run stands at {self.budget.steps} of {TOTAL} steps")


Membership.TestCase.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestMembership = Membership.TestCase


def test_steps_of_a_replaced_actor_are_told_after_the_hello_of_its_successor():
    """The learner stood still, and reads the messages of two connections in its own order."""
    run = Membership()
    try:
        for each in range(3):  # the last in the place of two that still have to be heard
            run.begin("actor-0", "mine", SLOTS)
            run.join(run.actors[each])
            run.step(run.actors[each], 3)
        first, second, newest = run.actors
        for _ in range(20):
            run.beat(newest)
            run.step(newest, 100)
        run.no_more_steps_than_the_total_and_a_round()
        run.beat(first)
        assert run.budget.made(first.incarnation) == first.made > 0
        run.say(second, messages.Bye(steps_made=second.made))
        for actor in (first, second):
            run.remove(actor)
        run.come_to_the_end()
        run.no_more_steps_than_the_total_and_a_round()
        assert not run.untold
    finally:
        run.teardown()
