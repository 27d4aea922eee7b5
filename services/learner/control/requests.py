"""What the learner answers to each message, called under the lock of the control server."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import UNSET

from troupe.common import system
from troupe.common.errors import RefusedError
from troupe.common.runtime.logging import Throttle, peer_text
from troupe.common.wire import messages
from troupe.common.wire.body import Body
from troupe.common.wire.rejections import GARBAGE_LOG_PERIOD_S, Rejections
from troupe.common.wire.security import claims
from troupe.common.wire.server import Envelope, Handler
from troupe.common.wire.types import FieldEntry
from troupe.services.learner.control.budget import StepBudget
from troupe.services.learner.control.epochs import Epochs
from troupe.services.learner.control.evaluations import Evaluations
from troupe.services.learner.control.offer import Offer
from troupe.services.learner.control.reports import Reports
from troupe.services.learner.control.roster import Peer, Roster
from troupe.services.learner.control.slots import SlotRules, ranges

_log = logging.getLogger(__name__)

NEWS_AT_ONCE, NEWS_PER_S = 512, 0.2
"""Lines about who comes and goes, for each key."""


@dataclass(frozen=True)
class Terms:
    """What every service is told when it joins, and what does not change while the learner runs.

    Attributes:
        config: the run's whole configuration.
        structural_hash: of its structural fields; a service with another one is turned down.
        run: random name of the run, the same for all of its learner processes.
        heartbeat_s: how often services send HEARTBEAT and are told what is new, actors only while there are
            few of them.
        liveness_s: silence after which either side gives up the other.
        fields: what a chunk of this run holds, for shards.
        item_steps: the shortest and the longest item that the run learns from, for shards.
    """

    config: dict[str, Any]
    structural_hash: str = ""
    run: str = ""
    heartbeat_s: float = 1.0
    liveness_s: float = 15.0
    fields: Sequence[FieldEntry] = ()
    item_steps: tuple[int, int] = (0, 0)


class RequestHandlers:
    """Serves one message at a time and never waits.

    Attributes:
        state: what every answer and announcement carries beside the steps.
        status: the answer to STATUS.
        roster: who is in the run.
        offer: the parameters that services fetch.
        reports: what services have reported.
        rejections: counts what could not be served; of the server, which sets it before anything is.
        inference_endpoint: told to all who join; empty where there is no central inference.
        announce_endpoint: told to all who join.
    """

    rejections: Rejections

    def __init__(
        self,
        terms: Terms,
        slots: SlotRules,
        budget: StepBudget,
        epochs: Epochs,
        evaluations: Evaluations | None,
        shard_directories: Collection[Path],
        session: int,
    ) -> None:
        """Prepare to serve; for the arguments see `ControlServer`.

        `shard_directories` are those in which a shard may have an ipc socket.
        """
        self.state: dict[str, Any] = {"session": session, "version": -1, "updates": 0, "stopping": False}
        self.status: dict[str, Any] = {}
        self.roster = Roster(slots, terms.heartbeat_s, terms.liveness_s, budget)
        self.offer = Offer()
        self.reports = Reports(evaluations)
        self.inference_endpoint = self.announce_endpoint = ""
        self._terms = terms
        self._budget = budget
        self._epochs = epochs
        self._evaluations = evaluations
        self._shard_directories = shard_directories
        self._status_of: dict[str, claims.Allowance] = {}
        self._news: dict[str, claims.Allowance] = {}
        self._throttle = Throttle(GARBAGE_LOG_PERIOD_S)

    def by_message(self) -> dict[type[Body], Handler]:
        """The handler of each message that services send here."""
        return {
            messages.Hello: self._on_hello,
            messages.Heartbeat: self._from_member(self._on_heartbeat),
            messages.ParamsGet: self._from_member(self._on_params_get),
            messages.Telemetry: self._from_member(self._on_telemetry),
            messages.Bye: self._from_member(self._on_bye),
            messages.Status: self._on_status,
        }

    def heard(self, envelope: Envelope, header_bytes: int) -> None:
        """Take note of whoever sent a message, before it is served."""
        peer = self.roster.seen(envelope.peer, system.monotonic(), envelope.key.public)
        self.reports.admit(peer, envelope.key.public, header_bytes)

    def expire(self) -> None:
        """Give up those that have been silent for too long."""
        for peer in self.roster.expire(system.monotonic()):
            line = "%s has been silent for %.0f s: given up, slots %s are free"
            self._tell(peer, logging.WARNING, line, peer.name, self._terms.liveness_s, ranges(peer.slots))

    def run_state(self) -> dict[str, Any]:
        """What every answer and announcement carries."""
        return {**self.state, "steps": self._budget.steps}

    def _from_member(self, serve: Callable[[Peer, Any], Body | None]) -> Handler:
        """A handler that serves those who have said HELLO."""

        def handler(envelope: Envelope, body: Body) -> Body | None:
            # The key as well as the identity: a stranger may choose any identity, and would speak for its
            # owner.
            peer = self.roster.seen(envelope.peer, system.monotonic(), envelope.key.public)
            if peer is None:
                self._hear_replaced(envelope, body)
                raise RefusedError(messages.UNKNOWN_PEER, "say HELLO first")
            peer.spoke = True
            return serve(peer, body)

        return handler

    def _on_hello(self, envelope: Envelope, body: messages.Hello) -> messages.Welcome:
        role, name, key = body.role, body.name, envelope.key
        if role not in messages.ROLES or not name or not name.isprintable():
            detail = f"no service called {name!r} of the role {role!r}; roles are {', '.join(messages.ROLES)}"
            raise RefusedError(messages.REFUSED_BAD_HELLO, detail)
        claims.check_role(role, name, key.role)
        if role == "learner" and self._epochs.closed_because:
            raise RefusedError(messages.REFUSED_CLAIM, self._epochs.closed_because)
        claims.check_slots(role, name, body.slots_wanted, body.slots_held)
        claims.check_progress(role, body.steps_made, body.steps_limit)
        claims.check_replay_endpoint(body.replay_endpoint, role, name, self._shard_directories)
        # Only clients of other makes send one: Troupe's services take their configuration from WELCOME.
        if body.hash and body.hash != self._terms.structural_hash:
            ours = f"the run (hash {self._terms.structural_hash})"
            detail = f"{name} has another structural config (hash {body.hash}) than {ours}"
            raise RefusedError(messages.REFUSED_HASH, detail, config=self._terms.config)
        # A service that outlived its run holds other weights, and chunks of another training.
        if body.run and body.run != self._terms.run:
            raise RefusedError(
                messages.REFUSED_RUN,
                f"{name} belongs to run {body.run}, and this learner runs {self._terms.run}: restart it",
            )
        peer = Peer(
            envelope.peer,
            role,
            name,
            body.incarnation,
            key=key.public,
            endpoint=body.replay_endpoint,
            host=body.host,
            pid=body.pid,
            boot=body.boot,
            started_s=body.started_s,
            software=peer_text(body.software)[:100],
        )
        previous = self.roster.join(peer, body.slots_wanted, body.slots_held, system.monotonic())
        again = previous is not None and previous.incarnation == peer.incarnation
        how = " again" if again else ""
        where = f"{peer.host}, slots {ranges(peer.slots)}" if role == "actor" else peer.host
        self._tell(peer, _level(peer), "%s joins%s (%s)", name, how, where)
        return self._welcome(peer, body)

    def _welcome(self, peer: Peer, body: messages.Hello) -> messages.Welcome:
        terms = self._terms
        stores = peer.role == "replay"
        least, most = terms.item_steps if stores else (0, 0)
        return messages.Welcome(
            config=terms.config,
            run=terms.run,
            slots=peer.slots,
            total_slots=self.roster.rules.total,
            announce=self.announce_endpoint,
            inference=self.inference_endpoint,
            shards=self.roster.shards(),
            heartbeat_s=peer.beat_s,
            liveness_s=terms.liveness_s,
            steps_limit=self._step_limit(peer, body),
            fields=list(terms.fields) if stores else [],
            least_item_steps=least,
            most_item_steps=most,
            **self.run_state(),
        )

    def _on_heartbeat(self, peer: Peer, body: messages.Heartbeat) -> messages.HeartbeatOk:
        peer.version, peer.error = body.version, body.error
        if body.clock_s:
            peer.take_clock(body.clock_s, system.time())
        limit = self._step_limit(peer, body)
        answer = messages.HeartbeatOk(shards=self.roster.shards(), steps_limit=limit, **self.run_state())
        peer.told_end = answer.stopping
        if (beat_s := self.roster.beat_s(peer.role)) != peer.beat_s:
            answer.heartbeat_s = peer.beat_s = beat_s
        if body.epoch_ended is not UNSET:
            claims.check_epoch(peer.role)
            now_s = system.monotonic()
            answer.seat = self._epochs.asked(peer.incarnation, body.epoch_ended, now_s) or UNSET
        return answer

    def _step_limit(self, peer: Peer, body: messages.Hello | messages.Heartbeat) -> int:
        """Count the steps of an actor, and say how far it may go; 0 for others."""
        claims.check_progress(peer.role, body.steps_made, body.steps_limit)
        claims.check_steps(peer.name, body.steps_made, self._budget.permitted(peer.incarnation))
        return self._budget.extend(peer.incarnation, body.steps_made, body.steps_limit)

    def _on_params_get(self, peer: Peer, body: messages.ParamsGet) -> messages.Params:
        if body.games:
            return self._on_games_wanted(peer, body)
        newest = self.offer.newest
        # An empty manifest says that there is nothing newer.
        if newest is None or body.version == self.state["version"]:
            return messages.Params(manifest=[], **self.run_state())
        self.offer.sent += 1
        return messages.Params(manifest=newest.manifest, blob=newest.blob, **self.run_state())

    def _on_games_wanted(self, peer: Peer, body: messages.ParamsGet) -> messages.Params:
        """The part of an evaluation that is next, with the parameters that it is of."""
        claims.check_games(peer.role)
        state, evaluations, now_s = self.run_state(), self._evaluations, system.monotonic()
        params = self.offer.newest
        if evaluations is None or params is None:
            return messages.Params(manifest=[], **state)
        live, newest, stopping = self.roster.processes("evaluator"), state["version"], state["stopping"]
        part = evaluations.next(peer.incarnation, live, newest, stopping, now_s)
        version = evaluations.version
        played = self.offer.evaluate(params, version)
        if part is None:
            return messages.Params(manifest=[], over=evaluations.over(newest, stopping, now_s), **state)
        answer = messages.Params(manifest=[], part=part, evaluated=version, **state)
        if body.version != version:
            self.offer.sent += 1
            answer.manifest, answer.blob = played.manifest, played.blob
        # With one part only: what is played against it is not divided.
        if part == 0 and (against := self.offer.against) is not None:
            answer.opponent = against.version
            answer.opponent_manifest, answer.opponent_blob = against.manifest, against.blob
        return answer

    def _on_telemetry(self, peer: Peer, body: messages.Telemetry) -> None:
        made = self._budget.made(peer.incarnation)
        left_out = self.reports.take(peer, body, made, self.offer.evaluated)
        for kind, detail in left_out:
            self.rejections.count(peer.identity, kind, detail)

    def _on_status(self, envelope: Envelope, body: messages.Status) -> messages.StatusOk:
        key = envelope.key.public
        if key and not self._status_of.setdefault(key, claims.status()).take():
            raise RefusedError(messages.TOO_MANY, "too many STATUS requests with one key")
        return messages.StatusOk(values={**self.status, "clock_s": system.time()})

    def _hear_replaced(self, envelope: Envelope, body: Body) -> None:
        """Count the steps that an actor tells of late: the HELLO of its successor was read before."""
        peer = self.roster.replaced_peer(envelope.peer, envelope.key.public)
        if peer is None or not isinstance(body, (messages.Heartbeat, messages.Bye)):
            return
        self._count_steps(peer, body)
        if isinstance(body, messages.Bye):
            self.roster.forget_replaced(peer.identity)

    def _count_steps(self, peer: Peer, body: messages.Heartbeat | messages.Bye) -> None:
        claims.check_progress(peer.role, body.steps_made, 0)
        claims.check_steps(peer.name, body.steps_made, self._budget.permitted(peer.incarnation))
        self._budget.report(peer.incarnation, body.steps_made, len(peer.slots))

    def _on_bye(self, peer: Peer, body: messages.Bye) -> None:
        self._count_steps(peer, body)
        # After the report: the budget has to know the slots that the steps were made in.
        self.roster.leave(peer.identity)
        self._tell(peer, _level(peer), "%s leaves (%s)", peer.name, body.reason or "no reason given")

    def _tell(self, peer: Peer, level: int, line: str, *words: object) -> None:
        """Log what a peer does, within the line limit of its key."""
        if not _log.isEnabledFor(level):
            return
        news = self._news.setdefault(peer.key, claims.Allowance(NEWS_AT_ONCE, NEWS_PER_S))
        if news.take():
            _log.log(level, line, *words)
        elif self._throttle(peer.key):
            _log.warning("services with the key of %s join and leave too often to report each", peer.name)


def _level(peer: Peer) -> int:
    """How much the log cares about a peer: one that only looks is no part of the run."""
    return logging.DEBUG if peer.role == "viewer" else logging.INFO
