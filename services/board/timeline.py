"""What each service did over the last minutes: shares of its time, from what all of them report."""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from troupe.common.config import Config
from troupe.common.config.loading import read_config
from troupe.common.errors import ConfigError
from troupe.common.runtime.files import CONFIG_FILE, STATUS_FILE, is_locked, read_status
from troupe.common.runtime.logging import peer_text
from troupe.common.runtime.metrics import CSV_FILE
from troupe.services.board.following import Follower
from troupe.services.board.opening import stamp
from troupe.services.board.traces import Traces, row_of
from troupe.services.launcher.findings import findings, verdict
from troupe.services.launcher.progress import recorded_view

WORK = ("emulator", "inference", "packing", "unpacking", "update", "publish", "serving", "evaluation")
WAITS = (
    *("waiting for credit", "waiting for a batch"),
    *("waiting for items", "waiting for the samples per insert", "waiting for a reader"),
)
KINDS = (*WORK, *WAITS)
"""What time goes into, in the order in which it is drawn; the rest is idle."""
WINDOW_S = 600.0
COLUMNS = 120
MAX_SERVICES = 64
_TAIL_BYTES = 1 << 22
_GAP_S = 45.0
"""A service that says nothing for longer is not known to have done what it does next."""
_MAX_MOMENTS = 100_000
_MAX_CONFIGS = 64

_NAMES = frozenset(
    f"{name}".encode()
    for name in (
        *("actor/env_share", "actor/inference_share", "actor/accumulate_share", "actor/pack_share"),
        *("actor/env_ms", "actor/inference_ms", "actor/accumulate_ms", "actor/steps_per_s", "actor/slots"),
        *(
            "actor/insert_blocked_share",
            "learner/wait_share",
            "learner/update_share",
            "learner/publish_share",
        ),
        *("learner/unpack_share", "inference/busy_share", "inference/pack_share", "eval/cpu_cores"),
        *("inference/insert_blocked_share", "replay/cpu_cores", "replay/waits_for_items_share"),
        *("replay/waits_for_ratio_share", "replay/waits_for_reader_share"),
    )
)
Shares = dict[str, float]
"""Shares of a service's time by kind; they add up to 1 at most."""


def shares_of(source: str, metrics: Mapping[str, float]) -> dict[str, Shares]:
    """What a service did, from what it reported at one moment.

    Args:
        source: its name, such as `actor-0`.
        metrics: of it, by name.

    Returns:
        By row: the service's, and of a learner also those of its threads that act centrally and unpack.
    """
    kind, get = source.partition("-")[0], metrics.get
    if kind == "actor":
        return {source: _actor(metrics)}
    if kind == "replay":
        waits = zip(WAITS[2:], ("items", "ratio", "reader"), strict=True)
        row = {"serving": get("replay/cpu_cores", 0.0)}
        return {
            source: _row(row | {name: get(f"replay/waits_for_{word}_share", 0.0) for name, word in waits})
        }
    if kind == "evaluator":
        return {source: _row({"evaluation": get("eval/cpu_cores", 0.0)})}
    if kind != "learner":
        return {}
    rows: dict[str, Shares] = {}
    if "learner/wait_share" in metrics:
        waited, published = metrics["learner/wait_share"], get("learner/publish_share", 0.0)
        # Runs of former versions have said only how long they waited.
        update = get("learner/update_share", 1.0 - waited - published)
        rows[source] = _row({"update": update, "publish": published, "waiting for a batch": waited})
    if "learner/unpack_share" in metrics:
        rows[f"{source}, unpacking"] = _row({"unpacking": metrics["learner/unpack_share"]})
    if "inference/busy_share" in metrics:
        row = {"inference": metrics["inference/busy_share"], "packing": get("inference/pack_share", 0.0)}
        row["waiting for credit"] = get("inference/insert_blocked_share", 0.0)
        rows[f"{source}, inference"] = _row(row)
    return rows


def _actor(metrics: Mapping[str, float]) -> Shares:
    get = metrics.get
    if "actor/env_share" in metrics:
        parts = [get(f"actor/{name}_share", 0.0) for name in ("env", "inference", "accumulate")]
    else:  # of a former version: milliseconds of a call, which steps all slots
        calls_per_s = get("actor/steps_per_s", 0.0) / max(1.0, get("actor/slots", 1.0))
        parts = [
            get(f"actor/{name}_ms", 0.0) * calls_per_s / 1e3 for name in ("env", "inference", "accumulate")
        ]
    emulator, inference, accumulating = parts
    row = {"emulator": emulator, "inference": inference}
    # Chunks are cut from what was accumulated, and packed.
    row["packing"] = accumulating + get("actor/pack_share", 0.0)
    row["waiting for credit"] = get("actor/insert_blocked_share", 0.0)
    return _row(row)


def _row(shares: Mapping[str, float]) -> Shares:
    """Shares that add up to 1 at most: work comes first, since waits overlap with it."""
    found, left = {}, 1.0
    work = {name: min(1.0, max(0.0, share)) for name, share in shares.items() if name in WORK}
    if (total := sum(work.values())) > 1.0:  # measured over times that are not quite the same
        work = {name: share / total for name, share in work.items()}
    for name, share in work.items():
        found[name] = share
        left -= share
    for name in WAITS:
        if share := min(left, max(0.0, shares.get(name, 0.0))):
            found[name] = share
            left -= share
    return found


class Moments(Follower):
    """What services of a run have reported of their time, over the last minutes."""

    def __init__(self, run: Path) -> None:
        """Read nothing yet."""
        super().__init__(run, CSV_FILE)
        self._moments: deque[tuple[float, str, dict[str, float]]] = deque(maxlen=_MAX_MOMENTS)
        self._is_first = False

    def start_at(self, size: int) -> int:
        """Only the end is of the last minutes."""
        start = max(0, size - _TAIL_BYTES)
        self._is_first = start > 0
        return start

    def clear(self) -> None:
        """See `Follower`."""
        self._moments.clear()

    @property
    def count(self) -> int:
        """See `Follower`."""
        return 32 * len(self._moments)

    def take(self, block: bytes) -> None:
        """See `Follower`."""
        if self._is_first:  # perhaps half a line, which could be read as another
            block = block.partition(b"\n")[2]
            self._is_first = False
        moments: dict[tuple[float, str], dict[str, float]] = {}
        for line in block.split(b"\n"):
            name = line[line.rfind(b",", 0, line.rfind(b",")) + 1 : line.rfind(b",")]
            if name in _NAMES and (row := row_of(line)) is not None:
                moments.setdefault((row.wall_s, row.source), {})[row.name] = row.value
        for (wall_s, source), metrics in moments.items():
            self._moments.append((wall_s, source, metrics))
            self.changed()
        if self._moments:
            newest_s = self._moments[-1][0]
            while self._moments[0][0] < newest_s - 2 * WINDOW_S:
                self._moments.popleft()

    def rows(self) -> tuple[float, dict[str, list[tuple[float, float, Shares]]]]:
        """The newest moment, and by row from when to when it did what, oldest first."""
        moments = self._moments.copy()  # another page's question may have more read meanwhile
        now_s = max((wall_s for wall_s, _, _ in moments), default=0.0)
        found: dict[str, list[tuple[float, float, Shares]]] = OrderedDict()
        for wall_s, source, metrics in moments:
            for name, shares in shares_of(source, metrics).items():
                spans = found.setdefault(name, [])
                before_s = spans[-1][1] if spans and wall_s - spans[-1][1] <= _GAP_S else wall_s - 10.0
                if before_s < wall_s and wall_s > now_s - WINDOW_S:
                    spans.append((max(before_s, now_s - WINDOW_S), wall_s, shares))
        return now_s, {name: spans for name, spans in found.items() if spans}


def moments_of(traces: Traces, run: Path) -> Moments:
    """What its services have reported of their time, as far as the file goes now."""
    return traces.follow((run, "timeline"), lambda: Moments(run))


def as_values(moments: Moments) -> dict[str, Any]:
    """The timeline for JSON.

    Returns:
        `now_s` and `window_s`; `kinds`, of which the first `work` are work; `rows`, each with `name`, `mean`
        (shares by kind) and `spans`: `[column, shares]` of the columns in which it said something, 0 the
        oldest of `columns`, and a share for each kind; `more`, rows that are left out.
    """
    now_s, found = moments.rows()
    names = sorted(found, key=_order)
    width_s = WINDOW_S / COLUMNS
    rows = []
    for name in names[:MAX_SERVICES]:
        columns: dict[int, list[tuple[float, Shares]]] = defaultdict(list)
        for begin_s, end_s, shares in found[name]:
            first = int((begin_s - now_s + WINDOW_S) / width_s + 1e-6)
            last = min(COLUMNS - 1, int((end_s - now_s + WINDOW_S) / width_s - 1e-6))
            for column in range(max(0, first), last + 1):
                columns[column].append((end_s - begin_s, shares))
        spans = [[column, _mean(parts)] for column, parts in sorted(columns.items())]
        mean = _mean([(end_s - begin_s, shares) for begin_s, end_s, shares in found[name]])
        said = {kind: share for kind, share in zip(KINDS, mean, strict=True) if share > 0}
        rows.append({"name": peer_text(name), "mean": said, "spans": spans})
    return {
        "now_s": round(now_s, 1),
        "window_s": WINDOW_S,
        "columns": COLUMNS,
        "kinds": KINDS,
        "work": len(WORK),
        "rows": rows,
        "more": max(0, len(names) - MAX_SERVICES),
    }


class Limits:
    """What limits runs, in the words of the panel.

    Their algorithms are not imported: a run directory may name anybody's.
    """

    def __init__(self) -> None:
        self._configs: OrderedDict[Path, tuple[object, Config]] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, run: Path) -> dict[str, Any]:
        """The `verdict` on a run, and `others`: what also limits it."""
        status = read_status(run)
        if not status:
            return {"verdict": "nothing is known yet: the learner has not begun", "others": []}
        try:
            view = recorded_view(status, self._config(run))
            if view.steps >= view.total_steps and not is_locked(run / ".lock"):
                return {"verdict": "complete", "others": []}  # what was said last is no state of it any more
            what, advice = verdict(view)
            others = findings(view) if view.metrics.get("speed/updates_per_s") else []
        except ConfigError as error:
            return {"verdict": peer_text(str(error)), "others": []}
        except (TypeError, ValueError, AttributeError, KeyError, ArithmeticError):  # it may be anybody's
            return {"verdict": f"its {STATUS_FILE} is not one that a learner writes", "others": []}
        also = [peer_text(f"{each.what}: {each.advice}") for each in others if each.what != what]
        return {"verdict": peer_text(f"{what}: {advice}" if advice else what), "others": also[:5]}

    def _config(self, run: Path) -> Config:
        """Its configuration, read again where the file has changed."""
        found = stamp(run, CONFIG_FILE)
        with self._lock:
            kept = self._configs.get(run)
            if kept is None or kept[0] != found:
                kept = self._configs[run] = (found, read_config(run / CONFIG_FILE, typed_agent=False))
                while len(self._configs) > _MAX_CONFIGS:
                    self._configs.popitem(last=False)
            return kept[1]


def _mean(parts: list[tuple[float, Shares]]) -> list[float]:
    """A share for each kind, over spans of these lengths."""
    total = sum(weight for weight, _ in parts) or 1.0
    sums = [sum(weight * shares.get(kind, 0.0) for weight, shares in parts) / total for kind in KINDS]
    return [round(value, 3) for value in sums]


def _order(name: str) -> tuple[int, str, int]:
    """Actors first, then what they fill, then who learns: as experience goes."""
    kind, _, number = name.partition(",")[0].partition("-")
    places = {"actor": 0, "replay": 1, "learner": 2, "evaluator": 3}
    return (
        places.get(kind, 4),
        kind + name.partition(",")[2],
        int(number) if number.isdecimal() and len(number) < 9 else 0,
    )
