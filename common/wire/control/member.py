"""What a service knows about the run that it is a member of, shared by its threads and its control link."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec import UNSET, UnsetType

from troupe.common import system
from troupe.common.errors import TroupeError
from troupe.common.wire.codec import Buffer
from troupe.common.wire.control.messages import Seat, State, Welcome
from troupe.common.wire.types import Tensor


@dataclass(frozen=True, slots=True)
class RunState:
    """The learner's counters, at most one heartbeat old while connected.

    Attributes:
        steps: environment steps of the run.
        updates: learner updates of the run.
        version: newest published parameter version, -1 before the first.
        stopping: the run is done: finish up and close.
        session: random number of the learner process.
    """

    steps: int = 0
    updates: int = 0
    version: int = -1
    stopping: bool = False
    session: int = 0

    @staticmethod
    def of(body: State) -> RunState:
        """The state that WELCOME, HEARTBEAT_OK, PARAMS and ANNOUNCE carry."""
        return RunState(body.steps, body.updates, body.version, body.stopping, body.session)


@dataclass(frozen=True, slots=True)
class Params:
    """A parameter set: read-only arrays by name, and the manifest and the buffer as they came."""

    version: int
    params: dict[str, np.ndarray] = field(repr=False)
    session: int = 0
    encoded: tuple[list[Tensor], np.ndarray] | None = field(default=None, repr=False)


def games_of_part(part: int, episodes: int, part_games: int) -> int:
    """Games of a part of an evaluation of `episodes`: learner and evaluator divide them alike."""
    return min(part_games, episodes - part * part_games)


@dataclass(frozen=True, slots=True)
class Games:
    """What an evaluator shall play: this part of an evaluation, with these parameters.

    `opponent` is an earlier version to play against as well, if there is one.
    """

    part: int
    params: Params
    opponent: Params | None = None


class Member:
    """The state between `ControlClient` and its thread. Everything is guarded by `changed`.

    Attributes:
        welcome: the newest WELCOME, None before the first.
        state: the newest counters.
        shards: endpoints of the live replay shards.
        failure: what ended the membership for good.
        connected: whether the learner has answered lately.
        joins: number of WELCOMEs.
        answers: how often the learner has answered HELLO and HEARTBEAT.
        heard_s: monotonic time of the newest of these.
        slots_wanted: slots that the HELLO asked for which was welcome, -1 before.
        waiting_for: why it is not connected, for people.
        params: the parameter set fetched last.
        want_params: whether to fetch the newest.
        want_games: whether to ask for games of an evaluation.
        games: those that were given and not yet taken.
        games_over: whether there will be no more in this run.
        version_in_use: version that the service took last, -1 for none.
        steps_made: steps that this process has made.
        steps_limit: how many it may make.
        steps_begun: how many it has made with those that it is making now.
        steps_obeyed: the limit that holds for these too: one that came meanwhile, and is lower, does not yet.
        steps_window: how many it might still make when it was told so.
        steps_told: the steps that the learner was told last.
        steps_wanted: whether a higher limit is needed sooner than with the next heartbeat.
        epoch_ended: of a learner that waits for an epoch of several: the last that it was in; else UNSET.
        seat: the newest that it was given.
        telemetry: encoded reports that are not sent yet, oldest first.
        rejected: messages of the learner that could not be understood or served.
        relays: whether this process feeds parameters to the others of its host.
        relayed: parameter sets that came from such a process.
    """

    def __init__(self) -> None:
        self.changed = system.Condition()
        self.welcome: Welcome | None = None
        self.state = RunState()
        self.shards: list[str] = []
        self.failure: TroupeError | None = None
        self.connected = False
        self.joins = 0
        self.answers = 0
        self.heard_s = system.monotonic()
        self.slots_wanted = -1
        self.waiting_for = "no answer yet"
        self.params: Params | None = None
        self.want_params = False
        self.want_games = False
        self.games: Games | None = None
        self.games_over = False
        self.version_in_use = -1
        self.steps_made = 0
        self.steps_limit = 0
        self.steps_begun = 0
        self.steps_obeyed = 0
        self.steps_window = 0
        self.steps_told = -1
        self.steps_wanted = False
        self.epoch_ended: int | UnsetType = UNSET
        self.seat: Seat | None = None
        self.telemetry: deque[list[Buffer]] = deque()
        self.rejected = 0
        self.relays = False
        self.relayed = 0

    def heard(self) -> None:
        """Note an answer of the learner."""
        self.answers += 1
        self.heard_s = system.monotonic()

    def has_newest(self) -> bool:
        """Whether the parameters here are the newest that the learner has published."""
        params = self.params
        return (
            params is not None
            and params.session == self.state.session
            and params.version == self.state.version
        )

    def known_version(self) -> int:
        """The version here, for the learner to compare with; -1 where another learner process made it."""
        params = self.params
        # Another session's versions are other weights under the same numbers.
        return params.version if params is not None and params.session == self.state.session else -1

    def former(self) -> dict[str, Any]:
        """What HELLO says about the membership that there was before."""
        return {
            "slots_held": self.slots(),
            "run": self.welcome.run if self.welcome else "",
            **self.progress(),
        }

    def progress(self) -> dict[str, Any]:
        """What HELLO and HEARTBEAT say about steps."""
        self.steps_told, self.steps_wanted = self.steps_made, False
        return {"steps_made": self.steps_made, "steps_limit": self.steps_obeyed}

    def permit(self, limit: int) -> None:
        """Take a limit for steps, which may be lower than the former one."""
        self.steps_limit, self.steps_window = limit, limit - self.steps_made
        if self.steps_begun <= limit:
            self.steps_obeyed = limit

    def made(self, steps: int) -> None:
        """Note the steps made so far; none is being made now, so that the newest limit is obeyed."""
        self.steps_made = self.steps_begun = steps
        self.steps_obeyed = self.steps_limit

    def begin(self, steps: int) -> bool:
        """Whether so many more steps are permitted; they count as begun then."""
        permitted = self.steps_made + steps <= self.steps_limit
        if permitted:
            self.steps_begun = max(self.steps_begun, self.steps_made + steps)
        return permitted

    def short_of_steps(self) -> bool:
        """Whether half of what was permitted is used up, and the learner does not know yet."""
        # At half, so that the answer comes before the other half is used: nobody pauses for a round trip.
        used_up = 2 * (self.steps_limit - self.steps_made) <= self.steps_window
        return used_up and self.steps_made > self.steps_told and not self.steps_wanted

    def slots(self) -> list[int]:
        """The slots on lease, empty before the first WELCOME."""
        return [] if self.welcome is None else list(self.welcome.slots)
