"""What a message costs the learner, in instructions of Python: the same for any number of members."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.harness import Context
from troupe.common.wire import messages
from troupe.common.wire.body import Body
from troupe.common.wire.codec import decode, encode
from troupe.services.learner.control.budget import StepBudget
from troupe.services.learner.control.requests import Terms
from troupe.services.learner.control.server import ControlServer
from troupe.services.learner.control.slots import SlotRules

FEW, MANY = 8, 512
SLOTS = 2


class Run:
    """A learner with so many actors, which talk to it without sockets."""

    def __init__(self, context: Context, actors: int) -> None:
        address = f"inproc://cost-{actors}"
        self.server = ControlServer(
            context,
            address,
            address + "-announce",
            Terms({"run": {"seed": 0}}, run="run"),
            SlotRules(MANY * SLOTS * 2),
            budget=StepBudget(1 << 40),
        )
        self.server.bind()
        self.answers: list[Any] = []
        self.server._server.send = lambda peer, body, number=0: self.answers.append(body) or True
        self.limits: dict[int, int] = {}
        for actor in range(actors):
            self.join(actor)
        for actor in range(actors):
            self.beat(actor)

    def say(self, actor: int, body: Body) -> Any:
        self.answers.clear()
        message = decode(list(map(bytes, encode(body.message(1)))))
        with self.server._lock:
            self.server._server.serve(b"%d" % actor, message)
        answer = self.answers[0] if self.answers else None
        assert not isinstance(answer, messages.Error), answer
        return answer

    def join(self, actor: int, incarnation: int | None = None) -> None:
        hello = messages.Hello(
            role="actor",
            name=f"actor-{actor}",
            incarnation=actor if incarnation is None else incarnation,
            slots_wanted=SLOTS,
            host="h",
        )
        self.limits[actor] = self.say(actor, hello).steps_limit

    def beat(self, actor: int) -> None:
        made = min(100, self.limits[actor])
        self.say(actor, messages.Heartbeat(steps_made=made, steps_limit=self.limits[actor], version=1))


def instructions(work: Callable[[], object]) -> int:
    """How many instructions of the interpreter some work takes."""
    count = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(former)
    return count


WORK: dict[str, Callable[[Run], object]] = {
    "HEARTBEAT": lambda run: run.beat(3),
    "HELLO of one more": lambda run: run.join(1000),
    "HELLO again": lambda run: run.join(3),
    "HELLO of a successor": lambda run: run.join(3, incarnation=2000),
    "BYE": lambda run: run.say(3, messages.Bye(steps_made=100)),
    "a look for those who are silent": lambda run: run.server._handlers.expire(),
    "a look for learners that wait": lambda run: run.server.seating.waits,
}


@pytest.mark.parametrize("what", WORK)
def test_a_message_costs_the_same_for_any_number_of_members(what):
    context = Context()
    try:
        # The first time everything that is made once is made.
        runs = [Run(context, members) for members in (4, FEW, MANY)]
        _, few, many = (instructions(functools.partial(WORK[what], run)) for run in runs)
    finally:
        context.destroy(linger=0)
    # An instruction for each member would be 504 more; some depend on what is collected or due meanwhile.
    assert abs(many - few) < 200, f"{few} instructions with {FEW} members, {many} with {MANY}"
