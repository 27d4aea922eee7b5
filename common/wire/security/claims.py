"""What each role may claim, beyond which messages it may send: the one table, and the checks that follow it.

`docs/security.md` shows `CLAIMS`, by `make docs`. With keys a role is that of a key, so a claim is as good as
the key of who makes it; without, all who reach a port may claim any role, and the rules only keep members
from accidents.
"""

from __future__ import annotations

import ipaddress
import os
import re
import stat
import unicodedata
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from troupe.common import system, timing
from troupe.common.errors import RefusedError
from troupe.common.wire import messages, types
from troupe.common.wire.control.messages import Game

MAX_METRICS = 256
"""Metrics of one report."""
MAX_METRIC_NAMES = 512
"""Different names of metrics that all services of a role report in a run. Troupe's own are a few dozen."""
MAX_MEMBERS = 1 << 14
"""With one key, several times what a learner can hear once a second."""
GAME_STEPS_AHEAD = 10_000
"""Steps of a slot for which games may be reported before the steps are: they come by another message."""
REPORTS_AT_ONCE, REPORTS_PER_S = 256, 20.0
"""Reports of one service."""
HEADER_BYTES_AT_ONCE, HEADER_BYTES_PER_S = 1 << 21, float(1 << 18)
"""Of the messages of one service: to decode the 4,096 games of a report takes 3 ms of the learner's time."""
SMALL_HEADER_BYTES = 1024
"""Messages with no larger header are taken whatever came before: HEARTBEAT, and nearly every HELLO."""
STATUS_AT_ONCE, STATUS_PER_S = 64, 8.0
"""STATUS of all who have one key."""
VIDEOS_AT_ONCE, VIDEOS_PER_S = 4, 1 / 60
"""Films of all evaluators together."""
MAX_VIDEO_BYTES = 16 << 20
"""Of one film, encoded."""
MAX_VIDEO_SIDE = 4096
"""Height and width of a film, in pixels."""


@dataclass(frozen=True)
class Claim:
    """Who may claim something, and within what limits.

    Attributes:
        roles: the only ones that may; of those that say HELLO, or `learner`.
        rule: the limits, as `docs/security.md` words them.
        metrics: how the names of metrics begin that these roles may report.
    """

    roles: tuple[str, ...]
    rule: str
    metrics: tuple[str, ...] = ()


_METRICS_RULE = (
    f"{MAX_METRICS} metrics per report, with values within 10^30; names of letters, digits, `_`, `-`, and "
    f"`/` or `.` between them; {MAX_METRIC_NAMES} names per role and key, others are dropped"
)

CLAIMS: dict[str, Claim] = {
    "HELLO role": Claim(messages.ROLES, "the role of the key; `viewer` with any key"),
    "HELLO name": Claim(
        messages.ROLES,
        "belongs to the role and key of its holder until the lease ends; `ROLE` and `ROLE-NUMBER` are names "
        "of that role only, look-alikes are refused, and a viewer gives way to any other role; "
        f"{MAX_MEMBERS:,} members with one key",
    ),
    "HELLO replay_endpoint": Claim(
        ("replay",),
        "`tcp://HOST:PORT`, where with keys the listener has to prove the replay key; or an `ipc` socket "
        "in the directory of the learner's `net.control`, `net.announce` or `net.replay`, if nobody but its "
        "user may write there",
    ),
    "HELLO slots_wanted, slots_held": Claim(
        ("actor",), "as many as are free; at most `actor.max_slots_per_key` for all with one key"
    ),
    "HELLO, HEARTBEAT, BYE steps_made, steps_limit": Claim(
        ("actor",), "no more steps than permitted; at most 10,000 per second and slot are counted"
    ),
    "HEARTBEAT epoch_ended": Claim(
        ("learner",), "a learner that waits for others to share batches with; it receives the next epoch"
    ),
    "WELCOME heartbeat_s, liveness_s": Claim(
        ("learner",),
        f"{timing.HEARTBEAT_S[0]:g} to {timing.HEARTBEAT_S[1]:g} s, {timing.LIVENESS_S[0]:g} to "
        f"{timing.LIVENESS_S[1]:g} s; anything else ends the receiver",
    ),
    "HEARTBEAT_OK heartbeat_s": Claim(
        ("learner",),
        f"{timing.HEARTBEAT_S[0]:g} to {timing.HEARTBEAT_S[1]:g} s; an answer with anything else is not read",
    ),
    "WELCOME config env.id, agent.algorithm": Claim(
        ("learner",),
        "an environment of Troupe or Gymnasium and an algorithm of Troupe, or of a module that the service "
        "itself permits (`--modules`, `TROUPE_MODULES`); any other ends the receiver before anything is "
        "imported",
    ),
    "TELEMETRY": Claim(
        ("actor", "replay", "evaluator"),
        f"{REPORTS_AT_ONCE} reports at once and {REPORTS_PER_S:.0f} per second for each service, "
        f"with headers of {HEADER_BYTES_AT_ONCE >> 20} MiB at once and {HEADER_BYTES_PER_S / 1024:.0f} KiB "
        "per second; all actors with one key and without slots share one such allowance",
    ),
    "TELEMETRY actor/*, env/*, params/staleness": Claim(
        ("actor",), _METRICS_RULE, metrics=("actor/", "env/", "params/staleness")
    ),
    "TELEMETRY replay/*": Claim(("replay",), _METRICS_RULE, metrics=("replay/",)),
    "TELEMETRY eval/*": Claim(("evaluator",), _METRICS_RULE, metrics=("eval/",)),
    "TELEMETRY episodes": Claim(
        ("actor", "evaluator"),
        f"{types.MAX_EPISODES:,} episodes per report; returns and scores within 10^30, at most 2^53 steps; "
        "from an actor only while it holds slots, only for its slots, and with no more steps in total than "
        "it has made, except for the first episode of each slot",
    ),
    "TELEMETRY part": Claim(
        ("evaluator",),
        "with `eval/version` and `episodes`: the part of an evaluation that this process was given, and all "
        "of its episodes, or none with `trouble` where they cannot be played; `eval/version` is allowed only "
        "with them",
    ),
    "TELEMETRY tasks": Claim(
        ("actor", "evaluator"),
        "a name for each episode, from an evaluator with `part`; only names of the environment's levels "
        "count",
    ),
    "STATUS": Claim(
        messages.ROLES,
        f"{STATUS_AT_ONCE} at once and {STATUS_PER_S:.0f} per second at each server with one key",
    ),
    "PARAMS_GET games": Claim(("evaluator",), "one part of an evaluation at a time"),
    "TELEMETRY trouble": Claim(
        ("actor", "evaluator"),
        f"one line of at most {types.MAX_TROUBLE} characters; from an evaluator with `part`",
    ),
    "TELEMETRY video": Claim(
        ("evaluator",),
        f"a GIF of at most {MAX_VIDEO_BYTES >> 20} MiB and {MAX_VIDEO_SIDE} pixels a side, and the same "
        f"video as MP4 of at most {MAX_VIDEO_BYTES >> 20} MiB; {VIDEOS_AT_ONCE} at once and "
        f"{VIDEOS_PER_S * 60:.0f} per minute from all evaluators together",
    ),
}

_METRIC = re.compile(types.METRIC)
_MAX_NAME = 64
_PROCESSES = 4096
_OWN_NAME = re.compile(rf"({'|'.join(messages.ROLES)})(-\d+)?")
_TCP = re.compile(r"tcp://(\[[0-9a-fA-F:.]{2,45}\]|[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?):(\d{1,5})")
_MAX_SOCKET_PATH = 107  # the kernel's limit


def check_role(role: str, name: str, key_role: str) -> None:
    """Refuse a HELLO under another role than that of its key (empty: the socket has no keys)."""
    if key_role not in ("", role) and role != "viewer":
        raise RefusedError(
            messages.REFUSED_KEY, f"{name} claims the role {role}, but its key is for the role {key_role}"
        )
    # What people would take for it counts as well: other case, spaces around it, wide letters.
    owner = _OWN_NAME.fullmatch(unicodedata.normalize("NFKC", name).strip().lower())
    if owner is not None and name != owner[0]:
        raise _refusal(f"{name!r} looks like {owner[0]}: give another --name")
    if owner is not None and owner[1] != role:
        raise _refusal(f"{name} is a name for the role {owner[1]}, not for a {role}: give another --name")


def check_slots(role: str, name: str, wanted: int, held: Sequence[int]) -> None:
    """Refuse exploration slots to anything but an actor."""
    if wanted or held:
        _check(role, "HELLO slots_wanted, slots_held", f"{name} asks for exploration slots")


def check_progress(role: str, made: int, obeyed: int) -> None:
    """Refuse the steps that somebody says it has made, or the limit that it obeys, who is no actor."""
    if made or obeyed:
        _check(role, "HELLO, HEARTBEAT, BYE steps_made, steps_limit", "a report of steps")


def check_epoch(role: str) -> None:
    """Refuse a seat among the learners to anything else."""
    _check(role, "HEARTBEAT epoch_ended", "a wait for an epoch of learners")


def check_steps(name: str, made: int, permitted: int) -> None:
    """Refuse the report of more steps than the learner has permitted."""
    if made > permitted:
        raise RefusedError(
            messages.REFUSED_CLAIM,
            f"{name} claims {made} steps, but was permitted {permitted}",
        )


def check_replay_endpoint(endpoint: str, role: str, name: str, directories: Collection[Path]) -> None:
    """Refuse the address of a shard (empty: none) that is not a shard's, or that members could not use.

    Args:
        endpoint: the address.
        role: who announces it.
        name: the same, for the message.
        directories: where sockets of this run may be.
    """
    if not endpoint:
        return
    _check(role, "HELLO replay_endpoint", f"{name} announces a replay shard at {endpoint[:100]!r}")
    problem = unusable(endpoint)
    if not problem and endpoint.startswith("ipc://"):
        own = {os.path.realpath(directory) for directory in directories}
        # With links resolved: a link in a permitted directory may lead anywhere.
        if os.path.realpath(Path(endpoint.removeprefix("ipc://")).parent) not in own:
            problem = "this run has no ipc sockets there: use tcp://HOST:PORT"
    if problem:
        raise _refusal(f"{name} announces a replay shard at {endpoint[:100]!r}: {problem}")


def unusable(endpoint: str) -> str:
    """Why a shard at this address cannot be used; empty where it can, as far as the address tells."""
    if endpoint.startswith("ipc://"):
        return _not_private(endpoint.removeprefix("ipc://"))
    match = _TCP.fullmatch(endpoint)
    if match is None or not 0 < int(match[3]) < 65536 or not _is_host(match[1]):
        return "that is no address such as tcp://HOST:PORT"
    return ""


def ipc_directories(endpoints: Iterable[str]) -> set[Path]:
    """The directories of those addresses that are ipc sockets."""
    return {Path(each.removeprefix("ipc://")).parent for each in endpoints if each.startswith("ipc:///")}


def check_telemetry(role: str, body: messages.Telemetry) -> None:
    """Refuse a report that holds what its sender cannot know, or more than a report may."""
    _check(role, "TELEMETRY", "a report")
    metrics, fields, blobs = body.metrics, body.fields, body.blobs
    if len(metrics) > MAX_METRICS:
        raise _refusal(f"a report of {len(metrics)} metrics; at most {MAX_METRICS}")
    for name, value in metrics.items():
        if len(name) > _MAX_NAME or not _METRIC.fullmatch(name) or not name.startswith(_METRICS_OF[role]):
            raise _refusal(f"its role, {role}, does not report a metric {name[:_MAX_NAME]!r}")
        # A version is compared as an integer; beyond 2^53 two of them would be equal as floats.
        least, most = (0, types.MAX_EXACT) if name == "eval/version" else (-types.MAX_VALUE, types.MAX_VALUE)
        if not least <= value <= most:  # nor NaN
            raise RefusedError("bad_field", f"TELEMETRY.metrics: {name} is {value}")
    if fields.trouble:
        _check(role, "TELEMETRY trouble", "trouble of environments")
        if not fields.trouble.isprintable():
            raise _refusal("trouble of environments that is not one line")
    if fields.episodes:
        _check(role, "TELEMETRY episodes", "a report of episodes")
    if fields.part is not msgspec.UNSET:
        _check(role, "TELEMETRY part", "a part of an evaluation")
        if bool(fields.episodes) == bool(fields.trouble) or "eval/version" not in metrics:
            raise RefusedError("bad_field", "TELEMETRY.fields: part is not that of an evaluation")
    elif role == "evaluator" and (fields.tasks or fields.trouble):
        raise RefusedError(
            "bad_field", "TELEMETRY.fields: tasks or trouble of an evaluation that is no part of one"
        )
    for name, blob in blobs.items():
        if name not in ("video", "mp4"):
            raise _refusal(f"an array {name[:_MAX_NAME]!r} in a report")
        _check(role, "TELEMETRY video", "a video")
        (_check_video if name == "video" else _check_mp4)(blob)
    if "mp4" in blobs and "video" not in blobs:
        raise _refusal("an MP4 without the GIF of the same video")


class MetricNames:
    """The names of metrics that each role and key reports: what is kept by name keeps its size.

    By key as well, or one key could use up the names of all others with its role.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self._of: dict[tuple[str, str], set[str]] = {}

    def known(self, role: str, key: str, metrics: Mapping[str, float]) -> dict[str, float]:
        """Those of a report whose names are known, or for which there is room."""
        names = self._of.setdefault((role, key), set())
        for name in metrics:
            # Curves and CSV keep every name for the whole run, so a peer that invents names could fill memory
            # and disk.
            if len(names) < MAX_METRIC_NAMES:
                names.add(name)
        return {name: value for name, value in metrics.items() if name in names}


class PlayedGames:
    """Keeps the games that actors report within the steps that they have made.

    The first game of a slot is free: it may have begun under a learner that has been restarted since.
    """

    def __init__(self) -> None:
        """Begin with no games."""
        self._steps: OrderedDict[int, int] = OrderedDict()  # of the games of an actor process
        self._begun: set[tuple[str, int | None]] = set()  # keys and slots that have ended a game

    def credible(
        self, key: str, incarnation: int, slots: Collection[int], games: Sequence[Game], made: int
    ) -> list[int]:
        """Places of the games that may be; `made` are the steps of this actor process that are counted."""
        # Taken out and put back at the end, so that the first entry is the one not heard for longest.
        spent = self._steps.pop(incarnation, 0)
        most = made + GAME_STEPS_AHEAD * len(slots)
        places = []
        for place, game in enumerate(games):
            first = (key, game.slot)
            if game.slot is not None and game.slot not in slots:
                continue
            if game.slot in slots and first not in self._begun:
                self._begun.add(first)
            # At least one step each: a million games of no length would otherwise cost nothing.
            elif spent + max(1, game.steps) <= most:
                spent += max(1, game.steps)
            else:
                continue
            places.append(place)
        self._steps[incarnation] = spent
        if len(self._steps) > _PROCESSES:
            self._steps.popitem(last=False)
        return places


class Allowance:
    """A token bucket: a burst at once, and after that a rate per second."""

    def __init__(self, at_once: int, per_s: float) -> None:
        """Begin with all that may come at once."""
        self._at_once, self._per_s = at_once, per_s
        self._left, self._counted_s = float(at_once), system.monotonic()

    def take(self, count: int = 1) -> bool:
        """Take so many; False where fewer are left."""
        now_s = system.monotonic()
        self._left = min(self._at_once, self._left + (now_s - self._counted_s) * self._per_s)
        self._counted_s = now_s
        if self._left < count:
            return False
        self._left -= count
        return True


def reports() -> Allowance:
    """What a service may report."""
    return Allowance(REPORTS_AT_ONCE, REPORTS_PER_S)


def headers() -> Allowance:
    """Bytes that the headers of a service's messages may have."""
    return Allowance(HEADER_BYTES_AT_ONCE, HEADER_BYTES_PER_S)


def status() -> Allowance:
    """How often those with one key may ask a server for its status."""
    return Allowance(STATUS_AT_ONCE, STATUS_PER_S)


def check_evaluation(body: messages.Telemetry) -> None:
    """Refuse an evaluation that is no part which the learner gave out."""
    if "eval/version" in body.metrics and body.fields.part is msgspec.UNSET:
        raise _refusal("an evaluation that is no part of one")


def check_games(role: str) -> None:
    """Refuse games of an evaluation from anything but an evaluator."""
    _check(role, "PARAMS_GET games", "a request for episodes of an evaluation")


def _check_film(blob: np.ndarray, kind: str) -> None:
    if blob.dtype != np.uint8 or blob.ndim != 1:
        raise _refusal(f"a video of {blob.dtype} {list(blob.shape)[:8]}; it should be {kind}, uint8 [bytes]")
    if blob.nbytes > MAX_VIDEO_BYTES:
        raise _refusal(f"a video of {blob.nbytes} bytes; at most {MAX_VIDEO_BYTES}")


def _check_mp4(blob: np.ndarray) -> None:
    _check_film(blob, "an MP4")
    # Only what a browser looks at first: the file is stored and shown, never decoded here.
    if blob[4:8].tobytes() != b"ftyp":
        raise _refusal("a video that is no MP4")


def _check_video(blob: np.ndarray) -> None:
    _check_film(blob, "a GIF")
    head = blob[:10].tobytes()
    sides = int.from_bytes(head[6:8], "little"), int.from_bytes(head[8:10], "little")
    if (
        len(head) < 10
        or head[:6] not in (b"GIF87a", b"GIF89a")
        or not all(0 < side <= MAX_VIDEO_SIDE for side in sides)
    ):
        raise _refusal(f"a video that is no GIF of at most {MAX_VIDEO_SIDE} pixels a side")


def _check(role: str, claim: str, what: str) -> None:
    roles = CLAIMS[claim].roles
    if role not in roles:
        raise _refusal(f"{what}, and its role is {role}: that is for the role {' or '.join(roles)} only")


def _refusal(detail: str) -> RefusedError:
    return RefusedError(messages.REFUSED_CLAIM, detail)


_METRICS_OF = {
    role: tuple(name for claim in CLAIMS.values() if role in claim.roles for name in claim.metrics)
    for role in messages.ROLES
}


def _is_host(host: str) -> bool:
    if not host.startswith("["):
        return True
    try:
        ipaddress.IPv6Address(host.strip("[]"))
    except ValueError:
        return False
    return True


def _not_private(path: str) -> str:
    """Why whatever listens at an ipc socket may be anybody; empty where only this user can have bound it."""
    if not path.startswith("/") or not path.isprintable() or len(os.fsencode(path)) > _MAX_SOCKET_PATH:
        return "that is no absolute path of a socket"
    directory = os.path.dirname(path)
    try:
        status = os.stat(directory)
    except OSError as error:
        return f"there is no directory {directory} here ({error.strerror})"
    # Anyone who may write in a directory may replace a socket there, whatever the socket's own mode.
    if status.st_uid not in (0, os.getuid()) or stat.S_IMODE(status.st_mode) & 0o022:
        return f"others may write in {directory}: an ipc socket there proves nothing (chmod 700)"
    return ""
