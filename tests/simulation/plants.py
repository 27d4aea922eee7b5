"""What planting a bug in the services takes: its name, and which plans come near it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

from tests.simulation.plan import Plan, make_plan

Change = tuple[Any, str, Callable[..., Any]]
BUGS: dict[str, Callable[[], Change]] = {}
NEAR: dict[str, Callable[[Plan], bool]] = {}
"""Which plans come near a bug, by its name; where there is none, any."""


def bug(function: Callable[[], Change]) -> Callable[[], Change]:
    BUGS[function.__name__] = function
    return function


def near(
    table: str = "", *kinds: str, calm_s: float = 0.0, early_s: float = math.inf, actors: int = 1
) -> Callable[..., Callable[[], Change]]:
    """A bug that plans come near with such tables and actors, and one of these faults early, or none long."""

    def plan_is_near(plan: Plan) -> bool:
        first_s = plan.faults[0].at_s if plan.faults else 1e9
        early = [fault for fault in plan.faults if fault.at_s < early_s]
        faults = {fault.kind for fault in early} | {f"{f.kind} {f.target[:5]}" for f in early}
        acting = plan.actors >= actors and (actors == 1 or not plan.central)
        likely = acting and (not kinds or bool(faults & {*kinds}))
        return plan.table.startswith(table) and first_s >= calm_s and likely

    def decorate(function: Callable[[], Change]) -> Callable[[], Change]:
        NEAR[function.__name__] = plan_is_near
        return bug(function)

    return decorate


def seeds_for(name: str, seeds: Iterable[int]) -> list[int]:
    """These seeds, those first that come near a bug."""
    close = NEAR.get(name, lambda plan: True)
    return sorted(seeds, key=lambda seed: (not close(make_plan(seed)), seed))


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant a bug; none where the name is empty."""
    if not name:
        yield
        return
    owner, attribute, changed = BUGS[name]()
    with mock.patch.object(owner, attribute, changed):
        yield


def around(owner: type, name: str, change: Callable[..., Any]) -> Change:
    """`change` is called with the method, and what it is called with."""
    real = getattr(owner, name)

    def changed(self: Any, *args: Any, **options: Any) -> Any:
        return change(real, self, *args, **options)

    return owner, name, changed
