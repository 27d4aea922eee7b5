"""What services report to the learner, as far as their keys and steps permit it."""

from __future__ import annotations

import queue
from dataclasses import dataclass, field

import msgspec
import numpy as np
from msgspec import UNSET

from troupe.common import system
from troupe.common.errors import RefusedError
from troupe.common.wire import messages
from troupe.common.wire.control.messages import TelemetryFields
from troupe.common.wire.control.params import Published
from troupe.common.wire.security import claims
from troupe.services.learner.control.evaluations import Evaluations
from troupe.services.learner.control.roster import Peer

_QUEUE = 10_000


@dataclass(slots=True)
class Report:
    """A TELEMETRY that its sender may send, and who that was.

    Attributes:
        source: name of the service.
        role: its role.
        incarnation: random number of its process: counters start at zero where it changes.
        metrics: numbers by name.
        fields: everything that is not a number, such as games that have ended.
        blobs: arrays by name; see `messages.Telemetry`.
        played: the parameters that were evaluated when an evaluator sent it.
    """

    source: str
    role: str
    incarnation: int
    metrics: dict[str, float] = field(default_factory=dict)
    fields: TelemetryFields = field(default_factory=TelemetryFields)
    blobs: dict[str, np.ndarray] = field(default_factory=dict)
    played: Published | None = None


class Reports:
    """Checks reports, and queues those that are taken.

    Attributes:
        queue: in the order of arrival; the learner drains it.
    """

    def __init__(self, evaluations: Evaluations | None) -> None:
        """Without `evaluations`, nothing hands out parts of any, and evaluators report what they like."""
        self.queue: system.Queue[Report] = system.Queue(_QUEUE)
        self._evaluations = evaluations
        self._videos = claims.Allowance(claims.VIDEOS_AT_ONCE, claims.VIDEOS_PER_S)
        self._metric_names = claims.MetricNames()
        self._games = claims.PlayedGames()
        self._idle: dict[str, claims.Allowance] = {}
        self._idle_headers: dict[str, claims.Allowance] = {}

    def admit(self, peer: Peer | None, key: str, header_bytes: int) -> None:
        """Refuse a message that takes long to decode, after more of these than reports may be: RefusedError.

        Args:
            peer: its sender; None for a stranger.
            key: that the sender has shown.
            header_bytes: of the message.
        """
        if header_bytes <= claims.SMALL_HEADER_BYTES:
            return
        if peer is None or _idle(peer):
            allowance = self._idle_headers.setdefault(key, claims.headers())
        else:
            allowance = peer.headers
        if not allowance.take(header_bytes):
            raise RefusedError(messages.TOO_MANY, "more bytes in headers than a service may send")

    def take(
        self, peer: Peer, body: messages.Telemetry, made: int, played: Published | None
    ) -> list[tuple[str, str]]:
        """Queue a report, or what is credible of it. Raises `RefusedError`.

        Args:
            peer: its sender.
            body: the report.
            made: steps that the sender has made, as far as they are counted.
            played: the parameters that are being evaluated.

        Returns:
            Kind and detail of what was left out.
        """
        # Of actors without slots a key may have any number, and a report takes time to look at.
        allowance = self._idle.setdefault(peer.key, claims.reports()) if _idle(peer) else peer.reports
        if not allowance.take():
            raise RefusedError(messages.TOO_MANY, "more reports than a service may make")
        claims.check_telemetry(peer.role, body)
        fields = self._credible_games(peer, body.fields, made) if peer.role == "actor" else body.fields
        if body.blobs and not self._videos.take():
            raise RefusedError(messages.TOO_MANY, "more videos than a run may make")
        metrics = self._metric_names.known(peer.role, peer.key, body.metrics)
        left_out = []
        if more := len(body.metrics) - len(metrics):
            most = claims.MAX_METRIC_NAMES
            detail = f"{more} metrics dropped: more than {most} names of the role {peer.role} and its key"
            left_out.append((messages.TOO_MANY, detail))
        if fields is not body.fields:
            detail = f"episodes left out: {peer.name} does not hold their slots, or has not made their steps"
            left_out.append((messages.REFUSED_CLAIM, detail))
        metrics |= self._hand_in(peer, body)
        played = played if peer.role == "evaluator" else None
        report = Report(peer.name, peer.role, peer.incarnation, metrics, fields, body.blobs, played)
        try:
            self.queue.put_nowait(report)
        except queue.Full:
            raise RefusedError("telemetry_full", "the learner does not drain its telemetry") from None
        return left_out

    def _hand_in(self, peer: Peer, body: messages.Telemetry) -> dict[str, float]:
        """Take note that a part of an evaluation has been played; the metrics that have to stay with it."""
        if self._evaluations is None:
            return {}
        claims.check_evaluation(body)
        part = body.fields.part
        if part is UNSET or self.queue.full():  # then it is to be played once more
            return {}
        version = body.metrics["eval/version"]
        # None where its environment only fails: to hand it out again would bring the same.
        games = len(body.fields.episodes) or None
        self._evaluations.hand_in(peer.incarnation, int(version), part, games)
        # Whatever names came before: the version is how the parts find each other.
        return {"eval/version": version}

    def _credible_games(self, peer: Peer, fields: TelemetryFields, made: int) -> TelemetryFields:
        """An actor's fields without games of slots that it does not hold, or whose steps it has not made."""
        games = fields.episodes
        places = self._games.credible(peer.key, peer.incarnation, peer.slots, games, made)
        if len(places) == len(games):
            return fields
        tasks = [fields.tasks[place] for place in places] if fields.tasks else []
        return msgspec.structs.replace(fields, episodes=[games[place] for place in places], tasks=tasks)


def _idle(peer: Peer) -> bool:
    """Whether it is an actor without slots: of those a key may have any number."""
    return peer.role == "actor" and not peer.slots
