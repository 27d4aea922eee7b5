"""What services and the learner say to each other: membership, parameters, telemetry."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType

from troupe.common.runtime.logging import peer_text
from troupe.common.wire import types
from troupe.common.wire.body import Body
from troupe.common.wire.codec import Message


class State(Body, kw_only=True):
    """Where the run is.

    Attributes:
        session: random number of this learner process; another one means a restarted learner
        version: newest published parameter version; -1 before the first
        steps: environment steps of the run so far
        updates: learner updates of the run so far
        stopping: the run is done: finish up and say BYE
    """

    session: types.U64
    version: types.Version
    steps: types.U64
    updates: types.U64
    stopping: bool


class Hello(Body, kw_only=True):
    """Service -> learner.

    Attributes:
        role: `actor`, `replay`, `evaluator`, `viewer` or `learner`
        name: unique in the run, such as actor-0 or replay-0
        incarnation: random, chosen once per process
        hash: of the structural config; empty if the service knows none yet
        slots_wanted: how many exploration slots an actor asks for; 0 for others
        slots_held: held before a re-join, granted again if free; at most `slots_wanted`
        replay_endpoint: address of a replay shard; empty for others
        host: for logs
        pid: for logs
        boot: boot ID of the kernel that the process runs on; empty if unknown
        started_s: on that kernel's monotonic clock; of two processes with one name, the later counts
        software: for logs
        run: the run that the service is in; empty if this process was in none yet
        steps_made: environment steps that this process has made; 0 if it is no actor
        steps_limit: the newest `steps_limit` that it obeys, of any learner; 0 for none
    """

    TYPE: ClassVar[str] = "HELLO"
    role: Annotated[str, Meta(max_length=32)]
    name: types.Name
    incarnation: types.U64
    hash: Annotated[str, Meta(max_length=256)] = ""
    slots_wanted: Annotated[int, Meta(ge=0, le=types.MAX_PROCESS_SLOTS)] = 0
    slots_held: types.Slots = msgspec.field(default_factory=list)
    replay_endpoint: types.Endpoint = ""
    host: Annotated[str, Meta(max_length=255)] = ""
    pid: types.U64 = 0
    boot: types.Name = ""
    started_s: types.Clock = 0.0
    software: types.Text = ""
    run: types.Name = ""
    steps_made: types.StepsMade = 0
    steps_limit: types.StepCount = 0

    def __post_init__(self) -> None:
        if len(self.slots_held) > self.slots_wanted:
            raise ValueError("more `slots_held` than `slots_wanted`")


class Welcome(State, kw_only=True):
    """Learner -> service.

    Attributes:
        config: the run's whole config
        run: random name of the run, the same for all of its learner processes
        slots: leased to this process, ascending
        total_slots: slots of the whole run
        announce: endpoint of the announce PUB; a wildcard host means the learner's
        inference: endpoint of central inference, likewise; empty if there is none
        shards: endpoints of the live replay shards
        heartbeat_s: how often to send HEARTBEAT
        liveness_s: silence after which either side gives up the other
        steps_limit: how many steps this process may have made in all; see the budget
        fields: what a chunk of this run holds, for a shard: as in INSERT
        least_item_steps: the shortest item that the run learns from, for a shard
        most_item_steps: the longest, for a shard; 0 if not limited
    """

    TYPE: ClassVar[str] = "WELCOME"
    config: dict[str, Any]
    run: types.Name = ""
    slots: types.Slots
    total_slots: types.SlotCount
    announce: types.Text
    inference: types.Text = ""
    shards: types.Endpoints
    heartbeat_s: types.Heartbeat
    liveness_s: types.Liveness
    steps_limit: types.StepCount = 0
    fields: types.AnyFields = msgspec.field(default_factory=list)
    least_item_steps: types.Size = 0
    most_item_steps: types.Size = 0

    def seed(self, incarnation: int, *place: int) -> int:
        """Draw the seed of a generator at `place` (a slot, a shard) of this run.

        It follows from the run's seed while the run is new. One that joins later, or again, must not repeat
        the games or draws that were there before: then its incarnation counts as well.
        """
        entropy = [int(self.config["run"]["seed"]), *place]
        if self.steps:
            entropy += [self.steps, incarnation]
        return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])


class Heartbeat(Body, kw_only=True):
    """Service -> learner.

    Attributes:
        version: parameter version in use; -1 for none
        error: the last error worth showing; empty for none
        steps_made: environment steps that this process has made; 0 if it is no actor
        steps_limit: the newest `steps_limit` that it obeys, of any learner; 0 for none
        clock_s: its clock, seconds since 1970 (UTC); 0 if not stated
        epoch_ended: from a learner that waits for an epoch: its last one, -1 for none; otherwise absent
    """

    TYPE: ClassVar[str] = "HEARTBEAT"
    version: types.Version = -1
    error: types.Text = ""
    steps_made: types.StepsMade = 0
    steps_limit: types.StepCount = 0
    clock_s: types.Clock = 0.0
    epoch_ended: types.Version | UnsetType = UNSET

    def __post_init__(self) -> None:
        self.error = peer_text(self.error)


class Seat(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """The place of a learner in an epoch, in which the same learners share each batch. On the wire a list.

    Attributes:
        epoch: its number, which grows
        rank: of the learner; 0 has the run
        learners: their number
        port: where they meet, at the address of rank 0; 0 if it is alone
        host: that address
    """

    epoch: types.Version
    rank: Annotated[int, Meta(ge=0, lt=types.MAX_LEARNERS)]
    learners: Annotated[int, Meta(ge=1, le=types.MAX_LEARNERS)]
    port: Annotated[int, Meta(ge=0, lt=65536)]
    host: types.Name = ""


class HeartbeatOk(State, kw_only=True):
    """Learner -> service.

    Attributes:
        shards: endpoints of the live replay shards
        steps_limit: how many steps this process may have made in all; see the budget
        heartbeat_s: how often to send HEARTBEAT from now on; absent if that has not changed
        seat: of a learner, in the epoch after the one that it has left: [epoch, rank, learners, port, host];
            absent if there is none yet
    """

    TYPE: ClassVar[str] = "HEARTBEAT_OK"
    shards: types.Endpoints
    steps_limit: types.StepCount | UnsetType = UNSET
    heartbeat_s: types.Heartbeat | UnsetType = UNSET
    seat: Seat | UnsetType = UNSET

    def message(self, request_id: int = 0) -> Message:
        """As that of every body, with the seat as a list."""
        message = super().message(request_id)
        if isinstance(self.seat, Seat):
            message.fields["seat"] = list(msgspec.structs.astuple(self.seat))
        return message


class ParamsGet(Body, kw_only=True):
    """Service -> learner.

    Attributes:
        version: the one that the sender has; -1 for none
        games: the sender, an evaluator, has nothing to play and wants a part of an evaluation
    """

    TYPE: ClassVar[str] = "PARAMS_GET"
    version: types.Version = -1
    games: bool = False


class Params(State, kw_only=True):
    """Learner -> service.

    Attributes:
        manifest: list of [name, dtype, shape, offset in bytes]; empty if there is nothing newer
        blob: [bytes], all tensors; absent if there is nothing newer
        part: part of an evaluation for the receiver to play, counted from 0; -1 for none
        evaluated: the version that plays it, then also the version of `blob`; -1 for none
        over: nothing more will be evaluated in this run
        opponent: an earlier version, against which the receiver also plays the games of
            `evaluator.elo_games`; -1 for none
        opponent_manifest: of `opponent_blob`, as `manifest`
        opponent_blob: [bytes], all tensors of that version; absent if there is none
    """

    TYPE: ClassVar[str] = "PARAMS"
    manifest: list[types.Tensor]
    blob: types.Uint8s | UnsetType = UNSET
    part: Annotated[int, Meta(ge=-1, lt=types.MAX_PARTS)] = -1
    evaluated: types.Version = -1
    over: bool = False
    opponent: types.Version = -1
    opponent_manifest: list[types.Tensor] = msgspec.field(default_factory=list)
    opponent_blob: types.Uint8s | UnsetType = UNSET


class Game(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """A finished game. On the wire a list, without what is absent at its end.

    Attributes:
        episode_return: sum of its rewards, unclipped
        steps: agent steps
        slot: of the run, that played it; only from an actor
        score: from the environment, if it gives one
    """

    episode_return: types.Value
    steps: Annotated[int, Meta(ge=0, le=types.MAX_EXACT)]
    slot: Annotated[int, Meta(ge=0, lt=types.MAX_RUN_SLOTS)] | None = None
    score: types.Value | None = None

    def entry(self) -> list[float]:
        """The game as it stands in a message."""
        entry: list[float] = [self.episode_return, self.steps]
        if self.slot is not None:
            entry.append(self.slot)
            if self.score is not None:
                entry.append(self.score)
        return entry


class TelemetryFields(msgspec.Struct, forbid_unknown_fields=True):
    """What a report says beside its metrics.

    Attributes:
        episodes: games that have ended; slot (of the run) and score are left out if there are none
        tasks: the level of each episode, if the environment has several
        part: part of an evaluation that the episodes are; without them, one that cannot be played
        trouble: the last failure of an environment, or why the part cannot be played
    """

    episodes: Annotated[list[Game], Meta(max_length=types.MAX_EPISODES)] = []
    tasks: list[types.Level] = []
    part: Annotated[int, Meta(ge=0, lt=types.MAX_PARTS)] | UnsetType = UNSET
    trouble: Annotated[str, Meta(max_length=types.MAX_TROUBLE)] = ""

    def __post_init__(self) -> None:
        if self.tasks and len(self.tasks) != len(self.episodes):
            raise ValueError("`tasks` are not one for each of the `episodes`")

    def cut(self, first: int, last: int) -> TelemetryFields:
        """These games only, counted from 0, with their levels."""
        return msgspec.structs.replace(self, episodes=self.episodes[first:last], tasks=self.tasks[first:last])

    def entries(self) -> dict[str, Any]:
        """What stands in a message."""
        entries = {name: getattr(self, name) for name in self.__struct_fields__}
        entries["episodes"] = [game.entry() for game in self.episodes]
        return {name: value for name, value in entries.items() if value not in ([], "", UNSET)}


class Telemetry(Body, kw_only=True):
    """Service -> learner, not answered.

    Attributes:
        metrics: numbers by name
        fields: everything that is not a number
        blobs: by name: video, a video as GIF; mp4, the same as MP4; uint8 [bytes]
    """

    TYPE: ClassVar[str] = "TELEMETRY"
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    fields: TelemetryFields = msgspec.field(default_factory=TelemetryFields)
    blobs: types.AnyArrays = msgspec.field(name="*")

    def message(self, request_id: int = 0) -> Message:
        """As that of every body, with games that end where there is nothing more to say."""
        message = super().message(request_id)
        message.fields["fields"] = self.fields.entries()
        return message


class Bye(Body, kw_only=True):
    """Service -> learner, not answered.

    Attributes:
        reason: for logs
        steps_made: as in HEARTBEAT
    """

    TYPE: ClassVar[str] = "BYE"
    reason: types.Text = ""
    steps_made: types.StepsMade = 0

    def __post_init__(self) -> None:
        self.reason = peer_text(self.reason)


class Announce(State, kw_only=True):
    """Learner -> everyone (PUB, one frame)."""

    TYPE: ClassVar[str] = "ANNOUNCE"


class Error(Body, kw_only=True):
    """Any server -> the sender of a message that it could not serve; repeats its request ID if readable.

    Attributes:
        kind: a word to branch on
        detail: one line for people
        about: type of that message; empty if it could not be read
        expected: number of the insert to continue with; only if kind is gap
        config: the run's config; only if kind is hash
    """

    TYPE: ClassVar[str] = "ERROR"
    kind: types.Name = ""
    detail: types.Text = ""
    about: types.Name = ""
    expected: types.Number | UnsetType = UNSET
    config: dict[str, Any] | UnsetType = UNSET

    def __post_init__(self) -> None:
        self.kind, self.detail = peer_text(self.kind), peer_text(self.detail)
