"""What a run directory says of its run, and what a learner's status says of its members."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from troupe.common.config import Config
from troupe.common.errors import OWN_ERROR, CheckpointError, ConfigError
from troupe.common.installation import version
from troupe.common.runtime.checkpoint import check, newest_first
from troupe.common.runtime.files import STATUS_FILE, last_lines, read_status, silent_after_s, write_trouble
from troupe.common.runtime.logging import peer_text
from troupe.services.doctor.checks import Check
from troupe.services.launcher import evidence
from troupe.services.launcher.findings import findings, verdict
from troupe.services.launcher.learning import faults
from troupe.services.launcher.progress import recorded_view

FRESH_S = 30.0
"""A learner writes its status every second."""
CLOCK_S = 1.0
"""Clocks may differ by so much: evaluations and curves are dated by the learner's alone."""
CHECKPOINTS = 3
"""The newest ones, whose hashes are computed."""
_ERROR = re.compile(rf" (ERROR|CRITICAL) |^{OWN_ERROR} |^[A-Za-z]*Error: ")


def run_directory(folder: Path, config: Config) -> Iterator[Check]:
    """Everything that a run directory tells, of a run that goes on or has ended."""
    if why := write_trouble(folder):
        yield Check("run", str(folder), f"takes no file ({why})", "wrong", "make room there")
    status = read_status(folder)
    age_s = _age_s(folder / STATUS_FILE)
    live = bool(status) and age_s < FRESH_S
    if not status:
        yield Check("run", STATUS_FILE, "none: the learner has not started, or cannot write", "note")
    else:
        said = "" if live else f", {age_s:,.0f} s ago"
        note = f" ({status['note']})" if live and status.get("note") else ""
        yield Check("run", "steps", f"{status.get('steps', 0):,} of {config.run.total_steps:,}{said}{note}")
    yield from _checkpoints(folder / "checkpoints")
    yield from _replay(folder / "replay", config)
    yield from _logs(folder / "logs")
    if status:
        yield from members(status, config, live=live)
    yield from _learning(folder)


def _learning(folder: Path) -> Iterator[Check]:
    """What keeps the run from learning, as far as it has recorded anything."""
    with contextlib.suppress(ConfigError):
        for found in faults(evidence.of_run(folder)):
            yield Check("learning", found.name, found.what, "note", found.advice)


def _age_s(file: Path) -> float:
    try:
        return max(0.0, time.time() - file.stat().st_mtime)
    except OSError:
        return 0.0


def _checkpoints(folder: Path) -> Iterator[Check]:
    found = list(newest_first(folder)) if folder.is_dir() else []
    if not found:
        yield Check("run", "checkpoints", "none yet", "note")
    for path in found[:CHECKPOINTS]:
        try:
            check(path)
        except CheckpointError as error:
            advice = "remove it: a resumed run takes the next older one"
            yield Check("run", path.name, str(error).partition(": ")[2] or str(error), "wrong", advice)
        else:
            yield Check("run", path.name, "matches its manifest")


def _replay(folder: Path, config: Config) -> Iterator[Check]:
    shards = sorted(each for each in folder.glob("shard-*") if each.is_dir()) if folder.is_dir() else []
    if not shards:
        yield Check("run", "replay", "no shard keeps its files here", "note")
        return
    size = sum(file.stat().st_blocks * 512 for shard in shards for file in shard.glob("*"))
    few = len(shards) < config.replay.shards
    figure = f"{len(shards)} of {config.replay.shards} shards here, {size / 2**20:,.0f} MiB"
    yield Check("run", "replay", figure, "note" if few else "ok", "others may be elsewhere" if few else "")


def _logs(folder: Path) -> Iterator[Check]:
    """The last error of each log; that with which a service ended is wrong."""
    for file in sorted(folder.glob("*.log")) if folder.is_dir() else []:
        try:
            lines = last_lines(file)
        except OSError as error:  # the members that come after it are worth more
            yield Check("run", file.name, f"cannot be read ({error.strerror})", "note")
            continue
        errors = [line for line in lines if _ERROR.search(line)]
        if errors:
            last = errors[-1] == lines[-1]
            advice = f"the last line of {file}" if last else f"see {file}: the service has continued since"
            yield Check("run", file.name, peer_text(errors[-1])[:300], "wrong" if last else "note", advice)


def members(status: Mapping[str, Any], config: Config, *, live: bool) -> Iterator[Check]:
    """What a learner says of who is in its run, and what limits it. `live`: it says so now."""
    peers = [peer for peer in status.get("peers", []) if peer.get("role") != "viewer"]
    complete = status.get("steps", 0) >= config.run.total_steps
    if live and "peers" in status and not complete:  # a run in one process has none
        for peer in peers:
            yield from _member(peer)
        if not any(peer.get("role") == "actor" for peer in peers):
            advice = "start one, or see its log"
            yield Check("members", "actors", "none has joined", "wrong", advice)
    metrics = status.get("metrics", {})
    if failed := metrics.get("learner/failed_writes_total", 0):
        advice = "make room where the run directory is; logs/learner.log says what failed"
        yield Check("run", "writes", f"{failed:,.0f} failed", "wrong", advice)
    troubles = status.get("environments", {})
    if troubles.get("failures") or troubles.get("hangs"):
        figure = f"{troubles.get('failures', 0):,} failures, {troubles.get('hangs', 0):,} hangs"
        yield Check("run", "environments", figure, "note", peer_text(str(troubles.get("last", "")))[:200])
    if not complete:
        # What an ended learner said last is no state of the run.
        yield from _verdict(status if live else {**status, "note": ""}, config)


def _member(peer: Mapping[str, Any]) -> Iterator[Check]:
    name, host = peer_text(str(peer.get("name", ""))), peer_text(str(peer.get("host", "")))
    who = f"{name} on {host}" if host else name
    silent_s, ahead_s = float(peer.get("seen_s_ago") or 0.0), peer.get("clock_s")
    if silent_s >= silent_after_s(peer):
        advice = "it hangs, is cut off, or is starved of CPU: see its log"
        yield Check("members", who, f"silent for {silent_s:.0f} s", "wrong", advice)
    else:
        yield Check("members", who, f"last heard {silent_s:.1f} s ago")
    if peer.get("error"):
        yield Check("members", f"{who}, last error", peer_text(str(peer["error"]))[:200], "note")
    if isinstance(ahead_s, int | float):
        yield clock(who, float(ahead_s), "the learner's")
    software = peer_text(str(peer.get("software") or ""))
    if software and software != f"troupe {version()}":
        advice = "one version everywhere: messages keep their meaning, algorithms may not"
        yield Check("versions", who, f"{software}, here troupe {version()}", "wrong", advice)


def clock(who: str, ahead_s: float, of: str, error_s: float = 0.0) -> Check:
    """A clock beside another one; `error_s` is what is not known of the difference."""
    off = abs(ahead_s) - error_s > CLOCK_S
    side = "ahead of" if ahead_s > 0 else "behind"
    figure = f"{abs(ahead_s):.2f} s {side} {of}"
    advice = "set it by NTP (timedatectl set-ntp true): logs and films are dated by it" if off else ""
    return Check("clocks", who, figure, "wrong" if off else "ok", advice)


def _verdict(status: Mapping[str, Any], config: Config) -> Iterator[Check]:
    """What limits the run, in the words of the panel; below it whatever else does."""
    view = recorded_view(status, config)
    what, advice = verdict(view)
    yield Check(
        "bottleneck", "of the run", what.removeprefix("bottleneck: "), "note" if advice else "ok", advice
    )
    for found in findings(view) if view.metrics.get("speed/updates_per_s") else []:
        if found.what != what:
            yield Check(
                "bottleneck",
                "of the run",
                f"also, {found.what.removeprefix('bottleneck: ')}",
                "note",
                found.advice,
            )
