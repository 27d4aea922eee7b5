"""Who is in the run, and which exploration slots they hold: the learner's book-keeping, without sockets."""

from __future__ import annotations

import math
import re
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Any

from troupe.common import timing
from troupe.common.errors import RefusedError
from troupe.common.wire import messages
from troupe.common.wire.security import claims
from troupe.common.wire.security.claims import Allowance
from troupe.common.wire.types import MAX_SHARDS
from troupe.services.learner.control.budget import StepBudget
from troupe.services.learner.control.slots import FreeSlots, SlotRules

FREQUENT_ACTORS = 32
"""More actors send no more HEARTBEATs together than so many do, until each beats only three times within a
lease: messages, not steps, would be what a learner with hundreds of them is busy with."""

_REMEMBERED_NAMES = 4096
_REMEMBERED_INCARNATIONS = 64
_REMEMBERED_REPLACED = 256


@dataclass(slots=True)
class Peer:
    """One service in the run.

    Attributes:
        identity: routing identity of its newest socket.
        role: one of `messages.ROLES`.
        name: unique in the run.
        incarnation: random number of its process.
        key: public key that it has shown, empty on a socket without keys.
        slots: exploration slots on lease, ascending.
        endpoint: where a replay shard is reached, empty for others.
        host: for logs.
        pid: for logs.
        boot: of the kernel that it runs on, as it says; empty: it does not.
        started_s: when it started, on the monotonic clock of that kernel.
        seen_s: monotonic time of its last message.
        version: parameter version that it uses, -1 for none.
        error: last error that it reported.
        software: name and version of its program, as it says.
        clock_s: seconds by which its clock is ahead of ours, as far as messages tell; None: it does not say.
        reports: how many it may make now.
        headers: bytes of headers that it may send now.
        told_end: it has been answered that the run is done.
        spoke: it has said more than HELLO.
        beat_s: how often it is to send HEARTBEAT.
        restarts: processes that had its name before it.
    """

    identity: bytes
    role: str
    name: str
    incarnation: int
    key: str = ""
    slots: list[int] = field(default_factory=list)
    endpoint: str = ""
    host: str = ""
    pid: int = 0
    boot: str = ""
    started_s: float = 0.0
    seen_s: float = 0.0
    version: int = -1
    error: str = ""
    software: str = ""
    clock_s: float | None = None
    reports: Allowance = field(default_factory=claims.reports)
    headers: Allowance = field(default_factory=claims.headers)
    told_end: bool = False
    spoke: bool = False
    beat_s: float = 1.0
    restarts: int = 0

    def take_clock(self, says_s: float, now_s: float) -> None:
        """Take in what its clock said when it sent a message that comes at `now_s` of ours."""
        ahead_s = says_s - now_s
        if self.clock_s is None or abs(ahead_s) < abs(self.clock_s):
            self.clock_s = (
                ahead_s  # the least of late: a message that was delayed seems to be of a slow clock
            )
        else:
            self.clock_s += 0.1 * (ahead_s - self.clock_s)


@dataclass(slots=True)
class _Past:
    """What is remembered of a name, so that it gets its slots back and an old process does not return."""

    incarnations: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    restarts: int = 0


def _older(peer: Peer, other: Peer) -> bool:
    """Whether `peer` is known to have started before `other`: clocks of two kernels tell nothing."""
    return bool(peer.boot) and peer.boot == other.boot and peer.started_s < other.started_s


def _may_be_dead(holder: Peer, peer: Peer) -> bool:
    """Whether the HELLO of `holder` may have been read after that of `peer`, though it was said before.

    Clocks tell in which order processes of one kernel started, but not those of two, as before and after a
    power cut. One that lives says more as soon as it is answered.
    """
    return not holder.spoke and bool(holder.boot and peer.boot) and holder.boot != peer.boot


class Roster:
    """Peers by name, and the leases of the exploration slots.

    A lease ends `liveness_s` after its holder's last message. A process that joins under the name of another,
    with the same role and key, replaces it (that is what a restart looks like); the replaced one cannot come
    back, unless the lease of the other ends before it has said more than HELLO. Until its lease ends, nobody
    else gets the name. Messages of one process may be read after the HELLO of the next, which has another
    connection: for `liveness_s` it is known who was replaced.

    A message costs the same whatever the number of members: nothing here goes through all of them but what
    is asked for now and then, `leases`, `names` and `snapshot`. The times that are passed never go back.

    Attributes:
        rules: how many slots there are, and who may hold them.
    """

    def __init__(
        self,
        rules: SlotRules,
        heartbeat_s: float,
        liveness_s: float,
        budget: StepBudget | None = None,
    ) -> None:
        """Create an empty roster.

        Args:
            rules: see the class.
            heartbeat_s: how often a peer is heard, while there are few actors.
            liveness_s: silence after which its lease ends.
            budget: is told who holds slots, and who may still tell of steps.
        """
        self.rules = rules
        self._budget = budget or StepBudget()
        self._heartbeat_s = heartbeat_s
        self._liveness_s = liveness_s
        self._by_name: dict[str, Peer] = {}
        self._names: list[str] = []  # of all, in natural order; empty: to be sorted anew
        # Both in the order in which they were last heard, the one not heard for longest first.
        self._by_identity: OrderedDict[bytes, Peer] = OrderedDict()
        self._holders: OrderedDict[bytes, Peer] = OrderedDict()  # those with slots
        self._of_role: dict[str, dict[str, Peer]] = {role: {} for role in messages.ROLES}
        self._free = FreeSlots(rules)
        self._members: Counter[str] = Counter()  # by key
        self._shards: list[str] = []  # another list after each change
        # By role and key, so that nobody can make us forget the names of others.
        self._past: dict[tuple[str, str], OrderedDict[str, _Past]] = {}
        # By identity, with the time; those who held slots.
        self._replaced: OrderedDict[bytes, tuple[Peer, float]] = OrderedDict()

    def join(self, peer: Peer, wanted: int, held: list[int], now_s: float) -> Peer | None:
        """Admit `peer` with up to `wanted` slots, preferring those it `held`; fills in `peer.slots`.

        Returns the peer that it replaces, if any. Raises `RefusedError`.
        """
        previous = self._by_name.get(peer.name)
        if previous is not None:
            self._check_owner(previous, peer)
        elif self._members[peer.key] >= claims.MAX_MEMBERS:
            raise RefusedError(
                messages.TOO_MANY, f"{claims.MAX_MEMBERS:,} members have the key of {peer.name}"
            )
        if peer.endpoint and len({*self._shards, peer.endpoint}) > MAX_SHARDS:
            raise RefusedError(messages.TOO_MANY, f"more than {MAX_SHARDS} replay shards; stop one first")
        past = self._remember(peer)
        was_replaced = peer.incarnation in past.incarnations[:-1]
        if was_replaced and previous is not None and _may_be_dead(previous, peer):
            raise RefusedError(
                messages.NAME_TAKEN,
                "a process on another machine, or from before this one rebooted, has said HELLO as "
                f"{peer.name} since, and nothing else: the name is free when its lease ends",
            )
        # A process that was replaced may still run, and must not take the name back. Nor must a dead one: its
        # HELLO may be read after that of the process that came after it.
        if was_replaced or (previous is not None and _older(peer, previous)):
            raise RefusedError(
                messages.REFUSED_SUPERSEDED,
                f"another process has joined as {peer.name} since; names must be unique in a run",
            )
        # What it says it held comes first, since a restarted learner remembers nothing; then what its name
        # had before.
        peer.slots = self._grant(peer, wanted, [*held, *past.slots], now_s)
        for former in (previous, self._by_identity.get(peer.identity)):  # a socket has one name
            if former is not None and self._by_name.get(former.name) is former:
                self._remove(former)
                if (former.name, former.incarnation) != (peer.name, peer.incarnation):
                    self._end(former, now_s, replaced=former is previous)
        if previous is not None:
            # Joining again does not fill them.
            peer.reports, peer.headers = previous.reports, previous.headers
            peer.spoke = previous.spoke and previous.incarnation == peer.incarnation
        if not past.incarnations or past.incarnations[-1] != peer.incarnation:
            past.restarts += bool(past.incarnations)
            past.incarnations = [*past.incarnations, peer.incarnation][-_REMEMBERED_INCARNATIONS:]
        past.slots, peer.restarts = peer.slots, past.restarts
        peer.seen_s = now_s
        self._add(peer)
        peer.beat_s = self.beat_s(peer.role)
        return previous

    def seen(self, identity: bytes, now_s: float, key: str = "") -> Peer | None:
        """The peer behind a message that has just come, its lease renewed; None for a stranger."""
        peer = self._by_identity.get(identity)
        if peer is None or peer.key != key:  # an identity is the sender's own choice
            return None
        peer.seen_s = now_s
        self._by_identity.move_to_end(identity)
        if peer.slots:
            self._holders.move_to_end(identity)
        return peer

    def leave(self, identity: bytes) -> Peer | None:
        """Forget a peer at its own wish; its slots are free at once."""
        peer = self._by_identity.get(identity)
        if peer is not None:
            self._remove(peer)
            self._budget.forget(peer.incarnation, peer.name)
        return peer

    def replaced_peer(self, identity: bytes, key: str) -> Peer | None:
        """The actor behind a message if another process has taken its name in the last `liveness_s`."""
        peer, _ = self._replaced.get(identity, (None, 0.0))
        return peer if peer is not None and peer.key == key else None

    def forget_replaced(self, identity: bytes) -> None:
        """Forget one that was replaced: it has left."""
        peer, _ = self._replaced.pop(identity)
        self._budget.forget(peer.incarnation, peer.name)

    def expire(self, now_s: float) -> list[Peer]:
        """Forget, and return, the peers that have been silent for too long."""
        while self._replaced:
            identity, (_, since_s) = next(iter(self._replaced.items()))
            if now_s - since_s <= self._liveness_s:
                break
            self.forget_replaced(identity)
        gone = []
        while self._by_identity:
            peer = next(iter(self._by_identity.values()))
            if now_s - peer.seen_s <= self._liveness_s:
                break
            self._remove(peer)
            self._budget.forget(peer.incarnation, peer.name)
            if not peer.spoke:  # it may have been dead before it joined: who came before it may come back
                past = self._remember(peer)
                past.incarnations = [each for each in past.incarnations if each != peer.incarnation]
                past.restarts = max(0, past.restarts - 1)
            gone.append(peer)
        return gone

    def names(self) -> list[str]:
        """The names of all peers, in natural order; to be read only."""
        if not self._names:  # sorting hundreds takes longer than all else that a status takes
            self._names = sorted(self._by_name, key=_natural)
        return self._names

    def leases(self) -> dict[int, set[int]]:
        """The slots of every peer that has any, by its incarnation."""
        return {peer.incarnation: set(peer.slots) for peer in self._by_name.values() if peer.slots}

    def processes(self, role: str, heard_s: float = -math.inf) -> set[int]:
        """The incarnations of all peers of a role that have been heard since then."""
        return {peer.incarnation for peer in self._of_role[role].values() if peer.seen_s >= heard_s}

    @property
    def members(self) -> int:
        """How many peers there are."""
        return len(self._by_name)

    def has(self, *roles: str) -> bool:
        """Whether there is a peer of one of these roles."""
        return any(self._of_role[role] for role in roles)

    def untold(self, role: str) -> bool:
        """Whether there is a peer of a role that has not been told of the end."""
        return any(not peer.told_end for peer in self._of_role[role].values())

    def shards(self) -> list[str]:
        """Endpoints of the replay shards, each once, in the natural order of their names; to be read only."""
        return self._shards

    def snapshot(self, now_s: float) -> list[dict[str, Any]]:
        """All peers as plain values, for logs and status files."""
        peers = (self._by_name[name] for name in self.names())
        return [
            {
                "role": peer.role,
                "name": peer.name,
                "slots": list(peer.slots),
                "seen_s_ago": round(now_s - peer.seen_s, 3),
                "heartbeat_s": round(peer.beat_s, 3),
                "version": peer.version,
                "error": peer.error,
                "endpoint": peer.endpoint,
                "host": peer.host,
                "pid": peer.pid,
                "software": peer.software,
                "restarts": peer.restarts,
                "clock_s": None if peer.clock_s is None else round(peer.clock_s, 3),
                "incarnation": peer.incarnation,
                "identity": peer.identity,
            }
            for peer in peers
        ]

    @staticmethod
    def _check_owner(owner: Peer, peer: Peer) -> None:
        """Refuse a name to any process but its owner, restarted."""
        gives_way = owner.role == "viewer" != peer.role
        if (owner.role, owner.key) != (peer.role, peer.key) and not gives_way:
            whose = f"role {owner.role}" if owner.role != peer.role else "another key"
            raise RefusedError(
                messages.NAME_TAKEN,
                f"the name {peer.name} belongs to a process with {whose} until its lease ends",
            )

    def _grant(self, peer: Peer, wanted: int, preferred: list[int], now_s: float) -> list[int]:
        former = self._by_name.get(peer.name)
        own = former.slots if former is not None else []
        most = self._free.most(peer.key, len(own))  # of the same key: `_check_owner` has seen to that
        if wanted and most <= 0:
            raise RefusedError(
                messages.NO_SLOTS,
                f"actors with the key of {peer.name} hold all {self.rules.max_per_key} slots that one key "
                "may have",
            )
        wanted = min(wanted, most)
        slots = self._free.choose(wanted, preferred, own)
        # Fewer slots than wanted are better than none, but not while a silent holder may be about to lose its
        # own: what is granted now is kept for good.
        longest = next((other for other in self._holders.values() if other is not former), None)
        # Two heartbeats missed, and a half for delays: silent, though its lease has not ended.
        quiet = longest is not None and now_s - longest.seen_s > timing.HEARTBEATS_LATE * longest.beat_s
        if wanted and (not slots or (len(slots) < wanted and quiet)):
            raise RefusedError(
                messages.NO_SLOTS,
                f"only {len(slots)} of the {wanted} slots that {peer.name} wants are free "
                f"(of {self.rules.total})",
            )
        return slots

    def beat_s(self, role: str) -> float:
        """How often one of this role is to send HEARTBEAT now."""
        beat_s, actors = self._heartbeat_s, len(self._of_role["actor"])
        if role != "actor" or actors <= FREQUENT_ACTORS:
            return beat_s
        # A client refuses an interval that no configuration may have.
        longest_s = min(self._liveness_s / 3, timing.HEARTBEAT_S[1])
        return max(beat_s, min(beat_s * actors / FREQUENT_ACTORS, longest_s))

    def _remember(self, peer: Peer) -> _Past:
        names = self._past.setdefault((peer.role, peer.key), OrderedDict())
        past = names.setdefault(peer.name, _Past())
        names.move_to_end(peer.name)
        while len(names) > _REMEMBERED_NAMES:
            names.popitem(last=False)
        return past

    def _add(self, peer: Peer) -> None:
        self._by_name[peer.name] = self._by_identity[peer.identity] = peer
        self._names = []
        self._of_role[peer.role][peer.name] = peer
        self._members[peer.key] += 1
        if peer.slots:
            self._holders[peer.identity] = peer
            self._free.lease(peer.key, peer.slots)
            self._budget.hold(peer.incarnation, peer.name, len(peer.slots))
        else:
            self._budget.forget(peer.incarnation, peer.name)
        if peer.endpoint:
            self._list_shards()

    def _remove(self, peer: Peer) -> None:
        del self._by_name[peer.name], self._by_identity[peer.identity], self._of_role[peer.role][peer.name]
        self._names = []
        self._members[peer.key] -= 1
        if peer.slots:
            del self._holders[peer.identity]
            self._free.end_lease(peer.key, peer.slots)
        if peer.endpoint:
            self._list_shards()

    def _end(self, peer: Peer, now_s: float, *, replaced: bool) -> None:
        """Have the budget know that another process has the name, or the socket, of this one."""
        if not (replaced and peer.slots):
            self._budget.forget(peer.incarnation, peer.name)
            return
        if peer.identity in self._replaced:  # of another process: an identity is the sender's own choice
            self.forget_replaced(peer.identity)
        self._budget.hold(peer.incarnation, peer.name, 0)
        self._replaced[peer.identity] = peer, now_s
        while len(self._replaced) > _REMEMBERED_REPLACED:
            self.forget_replaced(next(iter(self._replaced)))

    def _list_shards(self) -> None:
        shards = self._of_role["replay"]
        endpoints = (shards[name].endpoint for name in sorted(shards, key=_natural))
        self._shards = list(dict.fromkeys(filter(None, endpoints)))


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts replay-2 before replay-10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]
