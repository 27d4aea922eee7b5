"""An actor's end of central inference: what its slots saw goes out, actions come back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from troupe.common import system
from troupe.common.errors import AuthError, ConfigError
from troupe.common.wire import messages, sockets
from troupe.common.wire.codec import Message, WireError
from troupe.common.wire.link import Link, Question

RESEND_S = 2.0
"""A request without an answer is sent again after this; the learner takes it once."""
AGAIN_S = 0.5
"""Pause before slots begin again that the learner did not take: it may not know yet whose they are."""


@dataclass(frozen=True)
class Answer:
    """What came for one group.

    Attributes:
        group: which.
        actions: `[S]`; None where the group has to begin again.
        version: of the parameters that chose.
        waited_s: since it was asked.
    """

    group: int
    actions: np.ndarray | None
    version: int = -1
    waited_s: float = 0.0


@dataclass
class _Asked:
    """A request that is not answered."""

    question: Question
    refused_until_s: float = 0.0
    """Not 0: the learner did not take it; the group begins again then."""


class InferenceClient:
    """One connection to the learner's inference socket, for use by one thread.

    Each group of slots has at most one request under way. Nothing blocks but `poll`, for as long as it is
    told. A silent learner gets the request again, after `liveness_s` on a new connection.

    Attributes:
        wait_reason: why the learner has not answered yet, as far as it said.
        answered: whether the learner has served anything at all, or has said why it does not yet.
    """

    def __init__(
        self,
        ctx: sockets.Context,
        endpoint: str,
        *,
        name: str,
        incarnation: int,
        liveness_s: float = 15.0,
        security: sockets.Security | None = None,
    ) -> None:
        self.wait_reason = ""
        self.answered = False
        self._name = name
        self._incarnation = incarnation
        self._number = 0
        self._asked: dict[int, _Asked] = {}
        self._carried_out: dict[int, int] = {}  # request id of the newest actions of each group
        self._link = Link(
            ctx,
            endpoint,
            "learner",
            name=name,
            incarnation=incarnation,
            liveness_s=liveness_s,
            security=security,
        )
        self._link.connect()

    def begin(self, group: int, slots: Sequence[int], arrays: Mapping[str, Any]) -> None:
        """A group begins with observations of these slots of the run; forgets what it asked before."""
        body = messages.Infer(incarnation=self._incarnation, group=group, slots=list(slots), **arrays)
        self._ask(group, body)

    def go_on(self, group: int, arrays: Mapping[str, Any]) -> None:
        """A group has carried out its newest actions. Leave the arrays alone until the answer."""
        # With the number of the actions that were carried out the learner can tell a repeated request from
        # the next one.
        after = self._carried_out[group]
        body = messages.Infer(incarnation=self._incarnation, group=group, after=after, **arrays)
        self._ask(group, body)

    def forget(self) -> None:
        """No group waits for anything any more; those that go on have to begin."""
        self._asked.clear()

    def move(self, endpoint: str) -> None:
        """The learner's socket is elsewhere now."""
        if endpoint != self._link.endpoint:
            self._link.connect(endpoint)

    @property
    def bad_messages(self) -> int:
        """How much of what came could not be understood."""
        return self._link.bad_messages

    @property
    def socket(self) -> sockets.Socket:
        """The present socket, to be polled for reading together with others."""
        return self._link.socket

    def poll(self, timeout_ms: int) -> list[Answer]:
        """Send what has to be sent, and return the answers that are here within `timeout_ms`.

        Raises ConfigError where the learner will never take such requests, AuthError for our keys.
        """
        answers = self._receive()
        if self._link.maintain(waiting=bool(self._asked)):
            self.wait_reason = "it does not answer"
        self._send()
        answers += self._due_again()
        if not answers and self._link.wait(timeout_ms):
            answers = self._receive()
        return answers

    def close(self) -> None:
        """Close the connection; what waits is of no use to anybody."""
        self._link.close(0)

    def _ask(self, group: int, body: messages.Infer) -> None:
        self._number += 1
        self._asked[group] = _Asked(Question(body.message(self._number), RESEND_S))
        self._send()

    def _send(self) -> None:
        for asked in self._asked.values():
            if not asked.refused_until_s and not asked.question.send(self._link):
                return

    def _due_again(self) -> list[Answer]:
        """Groups that were refused a while ago."""
        now_s = system.monotonic()
        due = [group for group, asked in self._asked.items() if 0 < asked.refused_until_s <= now_s]
        for group in due:
            del self._asked[group]
        return [Answer(group, None) for group in due]

    def _receive(self) -> list[Answer]:
        """The answers among what has come."""
        answers = []
        for message in self._link.receive():
            try:
                answer = self._on_message(message)
            except WireError as error:
                self._link.bad(error)
                continue
            if answer is not None:
                answers.append(answer)
        return answers

    def _on_message(self, message: Message) -> Answer | None:
        numbers = {asked.question.message.request_id: group for group, asked in self._asked.items()}
        group = numbers.get(message.request_id)
        if group is None and message.request_id:
            return None  # a second answer to what was asked twice
        if message.type == messages.Error.TYPE:
            return self._on_error(group, message)
        if group is None:
            raise WireError("bad_type", f"the learner does not send {message.type} unasked")
        # Only an answer that serves us: an ERROR also comes from a learner that does not know us.
        if message.type in (messages.Wait.TYPE, messages.Actions.TYPE):
            self.answered = True
            self._link.welcomed()
        if message.type == messages.Wait.TYPE:
            self.wait_reason = messages.Wait.of(message).reason
            return None
        if message.type != messages.Actions.TYPE:
            raise WireError("bad_type", f"the learner does not answer INFER with {message.type}")
        body = messages.Actions.of(message)
        asked = self._asked.pop(group)
        self._carried_out[group] = message.request_id
        self.wait_reason = ""
        # A copy: the array is a view of the frame, which would be kept for as long as the actions are.
        return Answer(
            group, np.array(body.actions), body.version, system.monotonic() - asked.question.asked_s
        )

    def _on_error(self, group: int | None, message: Message) -> Answer | None:
        body = messages.Error.of(message)
        kind, detail = body.kind, body.detail
        if kind == messages.REFUSED_KEY:
            raise AuthError(f"{self._link} refuses {self._name}: {detail}")
        if kind in (messages.TOO_MANY_ROWS, messages.REFUSED_VERSION):
            raise ConfigError(f"{self._link} refuses {self._name}: {detail}")
        if group is None:
            raise WireError("bad_type", f"the learner could not read a message: {detail}")
        if kind == messages.UNKNOWN_GROUP:
            del self._asked[group]
            return Answer(group, None)
        self.wait_reason = detail
        # Not at once: leases are granted over another socket, and ours may still be on its way.
        self._asked[group].refused_until_s = system.monotonic() + AGAIN_S
        if kind not in (messages.UNKNOWN_PEER, messages.NOT_LEASED):
            self._link.bad(WireError(kind, detail))
        return None
