"""What peers say to each other, read off the wire: what is said twice, too late, or after a farewell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulation.ledger import Ledger

Header = dict[str, Any]


class Conversations:
    """Checks of the order of messages. Most hold until something goes wrong, for then any may be lost."""

    def __init__(self, ledger: Ledger, calm_until_s: float) -> None:
        self._ledger = ledger
        self._calm_until_s = calm_until_s
        self._asked: set[tuple[str, int]] = set()  # by socket and number: requests for batches
        self._credit: dict[str, int] = {}  # by socket: what it was told last
        self._incarnations: dict[bytes, int] = {}  # by identity, at the learner
        self._left: set[int] = set()  # incarnations

    @property
    def calm(self) -> bool:
        """Whether nothing has gone wrong yet."""
        return self._ledger.now_s < self._calm_until_s

    def client_sends(self, label: str, header: Header) -> None:
        """A client asks this."""
        if header["t"] == "SAMPLE":
            if (label, header["i"]) in self._asked and self.calm:
                self._wrong(f"{label} repeats request {header['i']}, which nobody has answered or lost")
            self._asked.add((label, header["i"]))

    def client_hears(self, label: str, header: Header) -> None:
        """A client reads this."""
        kind, fields = header["t"], header["f"]
        if kind in ("BATCH", "WAIT", "ERROR"):
            self._asked.discard((label, header["i"]))
        if kind in ("CREDIT", "INSERTED"):
            # The news of it goes to every writer before anything else says so.
            unasked = kind == "CREDIT" and header["i"] == 0
            if fields["credit"] and self._credit.get(label) == 0 and not unasked and self.calm:
                self._wrong(f"{label} was not told that it may go on")
            self._credit[label] = fields["credit"]

    def learner_hears(self, identity: bytes, header: Header) -> None:
        """The learner reads this."""
        if header["t"] == "HELLO" and "incarnation" in header["f"]:
            self._incarnations[identity] = header["f"]["incarnation"]
            self._left.discard(header["f"]["incarnation"])
        elif header["t"] == "BYE" and identity in self._incarnations:
            self._left.add(self._incarnations[identity])

    def leases(self, leases: dict[int, set[int]]) -> None:
        """Who holds slots now."""
        for incarnation in self._left & leases.keys():
            self._wrong(f"{incarnation} has left, and holds slots {sorted(leases[incarnation])}")
            self._left.discard(incarnation)

    def _wrong(self, what: str) -> None:
        self._ledger.wrong(what)
