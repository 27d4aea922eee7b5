"""What a service knows about the run that it is a member of, shared by its threads and its control link."""

from __future__ import annotations

import os
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.errors import TroupeError
from common.wire.codec import Buffer, Message


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
    def of(message: Message) -> RunState:
        """The state that WELCOME, HEARTBEAT_OK, PARAMS and ANNOUNCE carry."""
        return RunState(
            message.integer("steps"),
            message.integer("updates"),
            message.integer("version", low=-1),
            message.boolean("stopping"),
            message.integer("session"),
        )


@dataclass(frozen=True, slots=True)
class Welcome:
    """What a service learns when it joins; `slots` are the exploration slots on lease to it."""

    config: dict[str, Any]
    slots: list[int]
    total_slots: int
    announce: str
    shards: list[str]
    steps: int
    updates: int
    version: int = -1
    heartbeat_s: float = 1.0
    liveness_s: float = 15.0
    session: int = 0
    run: str = ""
    inference: str = ""

    def seed(self, incarnation: int, *place: int) -> int:
        """Draw the seed of a generator at `place` (a slot, a shard) of this run.

        It follows from the run's seed while the run is new. Whoever joins later, or again, must not repeat
        the games or draws that were there before: then its incarnation counts as well.
        """
        entropy = [int(self.config["run"]["seed"]), *place]
        if self.steps:
            entropy += [self.steps, incarnation]
        return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])

    @staticmethod
    def of(message: Message) -> Welcome:
        """Read a WELCOME."""
        state = RunState.of(message)
        return Welcome(
            message.mapping("config"),
            message.sequence("slots", of=int),
            message.integer("total_slots"),
            message.text("announce"),
            message.sequence("shards", of=str),
            state.steps,
            state.updates,
            state.version,
            message.number("heartbeat_s"),
            message.number("liveness_s"),
            state.session,
            message.text("run", "", max_chars=64),
            message.text("inference", ""),
        )


@dataclass(frozen=True, slots=True)
class Params:
    """A parameter set: read-only arrays by name, and the manifest and the buffer as they came."""

    version: int
    params: dict[str, np.ndarray] = field(repr=False)
    session: int = 0
    encoded: tuple[list[Any], np.ndarray] | None = field(default=None, repr=False)


class Member:
    """The state between `ControlClient` and its thread. Everything is guarded by `changed`.

    Attributes:
        welcome: the newest WELCOME, None before the first.
        state: the newest counters.
        shards: endpoints of the live replay shards.
        failure: what ended the membership for good.
        connected: whether the learner has answered lately.
        joins: number of WELCOMEs.
        waiting_for: why it is not connected, for people.
        params: the parameter set fetched last.
        want_params: whether to fetch the newest.
        version_in_use: version that the service took last, -1 for none.
        error: last error that the service reported.
        telemetry: encoded reports that are not sent yet, oldest first.
        rejected: messages of the learner that could not be understood or served.
        relays: whether this process feeds parameters to the others of its host.
        relayed: parameter sets that came from such a process.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.welcome: Welcome | None = None
        self.state = RunState()
        self.shards: list[str] = []
        self.failure: TroupeError | None = None
        self.connected = False
        self.joins = 0
        self.waiting_for = "no answer yet"
        self.params: Params | None = None
        self.want_params = False
        self.version_in_use = -1
        self.error = ""
        self.telemetry: deque[list[Buffer]] = deque()
        self.rejected = 0
        self.relays = False
        self.relayed = 0

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
        return params.version if params is not None and params.session == self.state.session else -1

    def former(self) -> dict[str, Any]:
        """What HELLO says about the membership that there was before."""
        return {"slots_held": self.slots(), "run": self.welcome.run if self.welcome else ""}

    def slots(self) -> list[int]:
        """The slots on lease, empty before the first WELCOME."""
        return [] if self.welcome is None else list(self.welcome.slots)


def new_incarnation() -> int:
    """A random number to name a process by, positive and below 2^63."""
    return (int.from_bytes(os.urandom(8), "little") >> 1) | 1


def differences(ours: dict[str, Any], theirs: dict[str, Any], prefix: str = "") -> list[str]:
    """What differs between two configs, in their structural sections: `env.id='a' against 'b'`, ..."""
    found: list[str] = []
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        if not prefix and name not in ("env", "agent", "replay"):
            continue
        mine, other = ours.get(name), theirs.get(name)
        if isinstance(mine, dict) and isinstance(other, dict):
            found += differences(mine, other, f"{prefix}{name}.")
        elif mine != other:
            found.append(f"{prefix}{name}={mine!r} against {other!r}")
    return found
