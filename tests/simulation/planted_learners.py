"""Bugs to be found in what several learners agree on; see `planted.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from tests.simulation import learners
from tests.simulation.plan import PARTING, UPDATE, Plan
from tests.simulation.plants import NEAR, Change, around, bug
from troupe.services.learner.control.epochs import Epochs
from troupe.services.learner.peers import group, shares
from troupe.services.learner.peers.seats import GivenSeats, OwnSeats
from troupe.services.learner.peers.survivors import Survivors
from troupe.services.learner.peers.team import Team


def of_learners(
    table: str = "",
    least: int = 2,
    *,
    dies: str = "",
    long_s: float = 0.0,
    still_s: float = 0.0,
    parts: bool = True,
    within: bool = False,
) -> Callable[[Callable[[], Change]], Callable[[], Change]]:
    """A bug that plans come near with so many learners, of which the owner, or any, dies for so long."""

    def plan_is_near(plan: Plan) -> bool:
        targets = {"": (), "owner": ("learner",), "any": plan.learner_names()}[dies]
        deaths = [f for f in plan.faults if f.kind == "kill" and f.target in targets]
        deaths = [f for f in deaths if f.other == UPDATE] if within else deaths
        died = not dies or any(death.amount >= long_s for death in deaths)
        still = not still_s or any(f.kind == "stall" and f.amount >= still_s for f in plan.faults)
        parted = any(fault.kind in PARTING for fault in plan.faults)
        return (
            plan.learners >= least
            and plan.table.startswith(table)
            and died
            and still
            and (parts or not parted)
        )

    def decorate(function: Callable[[], Change]) -> Callable[[], Change]:
        NEAR[function.__name__] = plan_is_near
        return bug(function)

    return decorate


class _Changed:
    """A group whose gathered tensors are changed the first time."""

    def __init__(self, group: Any, change: Callable[[list[Any]], None]) -> None:
        self._real, self._change = group, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def gather(self, tensor: Any) -> list[Any]:
        found: list[Any] = self._real.gather(tensor)
        change, self._change = self._change, lambda found: None
        change(found)
        return found


@of_learners(dies="owner", parts=False)
def the_state_of_the_owner_is_taken() -> Change:
    real = learners._equalize

    def equalize(group: Any, agent: Any, counters: Any) -> bool:
        def change(found: list[Any]) -> None:
            found[0][0] = 1 << 40

        return real(_Changed(group, change), agent, counters)  # type: ignore[arg-type]

    return learners, "_equalize", equalize


@of_learners(dies="any")
def a_newcomer_keeps_its_state() -> Change:
    def equalize(group: Any, agent: Any, counters: Any) -> bool:
        return False

    return learners, "_equalize", equalize


@of_learners(dies="any")
def the_half_of_an_update_is_kept() -> Change:
    def whole_or_not(real: Any, self: Any, share: Any) -> Any:
        with mock.patch.object(self._agent, "load_state"):
            return real(self, share)

    return around(Team, "_whole_or_not", whole_or_not)


@of_learners(dies="owner")
def epochs_are_numbered_anew() -> Change:
    def asked(real: Any, self: Any, incarnation: int, ended: int, now_s: float) -> Any:
        newest = self._newest
        seat = real(self, incarnation, ended, now_s)
        self._newest = newest
        return seat

    return around(Epochs, "asked", asked)


@of_learners(dies="any")
def newcomers_are_not_let_in() -> Change:
    return around(OwnSeats, "wanted", lambda real, self: False)


@of_learners(dies="owner", long_s=4.0)
def survivors_do_not_yield_to_the_owner() -> Change:
    return around(GivenSeats, "wanted", lambda real, self: False)


@of_learners(least=3, dies="owner", long_s=4.0, parts=False)
def survivors_do_not_wait_for_each_other() -> Change:
    return around(Survivors, "_meet", lambda real, self, name: _alone(real, self, name))


def _alone(real: Any, survivors: Any, name: str) -> Any:
    places, survivors._places = survivors._places, [""] * len(survivors._places)
    try:
        return real(survivors, name)
    finally:
        survivors._places = places


@of_learners("queue", least=3, dies="any", within=True)
def a_share_is_brought_again_that_others_have_learned_from() -> Change:
    def learn(real: Any, self: Any, share: Any, **told: float) -> Any:
        self._tried = False
        return real(self, share, **told)

    return around(Team, "learn", learn)


@of_learners(dies="")
def each_learner_asks_for_whole_batches() -> Change:
    def part_of(whole: dict[str, int], rank: int, learners: int) -> dict[str, int]:
        return whole

    return shares, "part_of", part_of


@of_learners(least=3, dies="owner", still_s=50.0)
def stores_are_waited_for_without_end() -> Change:
    return group, "within", lambda timeout_s, ask: ask()
