"""What a replay client has sent and not been answered: inserts, requests for batches, pings; and refusals.

Inserts and requests are numbered, and remember after which ping they were sent last. The answer to a ping
overtakes no other answer, and says what the server keeps waiting: everything else that was sent before the
ping and is not answered by then got lost, and is sent again.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from msgspec import UNSET

from troupe.common import system
from troupe.common.errors import AuthError, ConfigError, TroupeError
from troupe.common.wire import messages
from troupe.common.wire.body import Body
from troupe.common.wire.link import Link
from troupe.common.wire.types import MAX_SUSPECTS

PING_S = 0.5

Send = Callable[[Body, int], bool]
"""Sends a message with this request id if that is possible at once."""

NOT_SENT = -1


class ReplayRefusedError(TroupeError):
    """The server will never serve this request. `kind` is a word to branch on."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"replay refused: {detail} ({kind})")
        self.kind = kind


# Kinds that the user's settings are the cause of, and the only cure.
_USERS_OWN = {
    "signature": ConfigError,
    "plan": ConfigError,
    "snapshot": ConfigError,
    messages.REFUSED_KEY: AuthError,
}


def refusal(endpoint: str, kind: str, detail: str) -> TroupeError:
    """The error that an ERROR of this kind from `endpoint` is."""
    error = _USERS_OWN.get(kind)
    return error(f"replay at {endpoint} refused: {detail}") if error else ReplayRefusedError(kind, detail)


class Pings:
    """Questions for the credit, which keep it fresh and find out what got lost.

    Attributes:
        sent: how many; they are numbered from 1 over all connections.
    """

    def __init__(self, name: str, incarnation: int) -> None:
        """Ask for the inserts of `incarnation`."""
        self.sent = 0
        self._question = messages.CreditQuestion(incarnation=incarnation, name=name)
        self._tried_s = 0.0

    def soon(self) -> None:
        """Ask at the next opportunity."""
        self._tried_s = 0.0

    def unanswered(self, link: Link) -> bool:
        """Whether the server has not been heard since it was asked, or was to be asked."""
        return link.silent or self._tried_s > link.heard_s  # a new connection is no answer

    def send(self, link: Link, *, asking: bool) -> None:
        """Ask a server that has not been heard for a while; with `asking` any other, too."""
        now_s = system.monotonic()
        if now_s - self._tried_s >= PING_S and (
            asking or not self._tried_s or now_s - link.heard_s >= PING_S
        ):
            self._tried_s = now_s
            # The number only grows where it was really sent: an answer to an unsent ping would never come.
            self.sent += link.send(self._question, self.sent + 1)


@dataclass
class _Insert:
    """An insert that is not acknowledged, and the number of pings before it was sent."""

    body: messages.Insert
    sent_at_ping: int = NOT_SENT


class Inserts:
    """Inserts from the first that is not acknowledged on, each to be sent in its turn."""

    def __init__(self) -> None:
        self._made = 0
        self._inserts: OrderedDict[int, _Insert] = OrderedDict()
        self._unsent: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._inserts)

    def add(self, body: messages.Insert) -> None:
        """Give `body` the next number."""
        self._made += 1
        self._inserts[self._made] = _Insert(body)
        self._unsent.append(self._made)

    def send(self, send: Send, pings: int) -> None:
        """Send what has not been sent, in order, after `pings` pings."""
        while self._unsent:
            number = self._unsent[0]
            insert = self._inserts.get(number)
            if insert is not None:
                # At the time of sending, so the server may forget the numbers below: they are acknowledged,
                # and will not come again.
                insert.body.oldest = next(iter(self._inserts))
                if not send(insert.body, number):
                    return
                insert.sent_at_ping = pings
            self._unsent.popleft()

    def answered(self, number: int) -> bool:
        """Forget `number`, which is stored, or was refused; whether it was still waited for."""
        return self._inserts.pop(number, None) is not None

    def repeat(self, start: int = 0) -> int:
        """Have `start` and what follows sent again, for the server takes them in order only; how many."""
        count = 0
        for number, insert in self._inserts.items():
            if number >= start and insert.sent_at_ping != NOT_SENT:
                count += 1
                insert.sent_at_ping = NOT_SENT
        self._unsent = deque(n for n, insert in self._inserts.items() if insert.sent_at_ping == NOT_SENT)
        return count

    def ping_answered(self, ping: int, held: int) -> int:
        """Have sent again what got lost; how many. Those from `held` on wait for room at the server."""
        sent = ((n, insert.sent_at_ping) for n, insert in self._inserts.items())
        # One lost insert means all behind it are refused as a gap: they are sent again together.
        lost = next((n for n, at in sent if NOT_SENT != at < ping and n < held), None)
        return 0 if lost is None else self.repeat(lost)


@dataclass
class SampleRequest:
    """A request for a batch that is not answered.

    Attributes:
        shares: rows by table.
        windows: request data instead of file offsets, because the last offsets were stale.
        suspects: rows of chunks that did not match their checksums.
        token: that it was sent with.
        sent_at_ping: number of pings before it was sent.
        sent_s: and when.
        not_before_s: when it may be sent again, or given up.
        given_up: it is not to be sent again.
    """

    shares: Mapping[str, int]
    windows: bool = False
    suspects: Sequence[int] = ()
    token: str = ""
    sent_at_ping: int = NOT_SENT
    sent_s: float = 0.0
    not_before_s: float = 0.0
    given_up: bool = False


class SampleRequests:
    """Requests for batches by number. None is sent again before it is certain that no answer will come."""

    def __init__(self, *, retry_samples: bool = True) -> None:
        """`retry_samples`: what was turned down is sent again."""
        self._retry_samples = retry_samples
        self._made = 0
        self._requests: OrderedDict[int, SampleRequest] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, shares: Mapping[str, int]) -> int:
        """A new request; returns its number."""
        self._made += 1
        self._requests[self._made] = SampleRequest(shares)
        return self._made

    def answered(self, number: int) -> SampleRequest | None:
        """The request `number`, which is forgotten; None where nobody asked for it, or does any more."""
        return self._requests.pop(number, None)

    def ask_for_windows(self, number: int, shares: Mapping[str, int], suspects: Sequence[int] = ()) -> None:
        """Ask again for what was answered with places that had gone when they were read, or are damaged."""
        self._requests[number] = SampleRequest(shares, windows=True, suspects=suspects)

    def turn_down(self, number: int, request: SampleRequest | None = None, pause_s: float = 0.0) -> None:
        """There is no batch for `number`, which was that of `request` if it is forgotten already.

        After a pause it is sent again, or `take_turned_down` has it.
        """
        request = request or self._requests.get(number)
        if request is not None:
            request.sent_at_ping, request.not_before_s = NOT_SENT, system.monotonic() + pause_s
            request.given_up = not self._retry_samples
            self._requests[number] = request

    def take_turned_down(self) -> list[int]:
        """Forget the requests that are not to be sent again; their numbers."""
        now_s = system.monotonic()
        numbers = [n for n, each in self._requests.items() if each.given_up and now_s >= each.not_before_s]
        for number in numbers:
            del self._requests[number]
        return numbers

    def clear(self) -> None:
        """Forget them all."""
        self._requests.clear()

    def overdue(self, patience_s: float) -> bool:
        """Whether one was sent so long ago that it, or its answer, may have got lost."""
        before_s = system.monotonic() - patience_s
        return any(
            each.sent_at_ping != NOT_SENT and each.sent_s < before_s for each in self._requests.values()
        )

    def repeat(self, number: int | None = None) -> None:
        """Have `number` sent again, or everything."""
        for each, request in self._requests.items():
            if number in (None, each):
                request.sent_at_ping = NOT_SENT

    def ping_answered(self, ping: int, parked: Collection[int]) -> None:
        """Have sent again what got lost. Those in `parked` wait at the server."""
        for number, request in self._requests.items():
            # Sent before the ping, so the server has seen it before it answered; it neither waits there nor
            # was it answered.
            if request.sent_at_ping < ping and number not in parked:
                request.sent_at_ping = NOT_SENT

    def send(self, send: Send, pings: int, token_of: Callable[[SampleRequest], str]) -> None:
        """Send what has not been sent, with the token `token_of` it, which is noted."""
        now_s = system.monotonic()
        for number, request in self._requests.items():
            if request.sent_at_ping != NOT_SENT or request.given_up or now_s < request.not_before_s:
                continue
            request.token = token_of(request)
            shares, token = list(request.shares.items()), request.token or UNSET
            if len(shares) == 1:
                table, count = shares[0]
                body = messages.Sample(table=table, batch_size=count, plain=True, token=token)
            else:
                body = messages.Sample(shares=shares, plain=True, token=token)
            body.suspects = list(request.suspects)[:MAX_SUSPECTS] or UNSET
            if not send(body, number):
                return
            request.sent_at_ping, request.sent_s = pings, system.monotonic()
