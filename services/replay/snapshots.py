"""Snapshots on request: one at a time, to places that are permitted."""

from __future__ import annotations

import logging
import os
import posixpath
from dataclasses import asdict
from typing import Any

from troupe.common.errors import RefusedError, TroupeError
from troupe.services.replay.storage.replay import Replay
from troupe.services.replay.storage.snapshot import Progress, Snapshot

_log = logging.getLogger(__name__)


class Snapshots:
    """Starts snapshots and knows how far the last one is."""

    def __init__(self, replay: Replay, permitted: str | None = "") -> None:
        """Snapshots may go to what begins with `permitted`, a directory or address; None permits none."""
        self._replay = replay
        self._permitted = os.path.abspath(permitted) if permitted and _is_path(permitted) else permitted
        self._snapshot: Snapshot | None = None
        self._token = ""
        self._announced = True

    def request(self, destination: str, token: str = "") -> dict[str, Any]:
        """Start a snapshot, if one is asked for; returns how far the last one is.

        The `token` of the last one says that it is meant: it is asked for again until it is complete, and
        by a client that did not get the answer. Raises RefusedError.
        """
        last = self._snapshot
        # A client asks until the copy is complete, and must not start another one by that.
        again = last is not None and token != "" and token == self._token
        if destination and not again:
            # One at a time: two would read the same disk at half the speed each, and hold twice the copies of
            # the tables.
            if last is not None and last.progress.state == "running":
                raise RefusedError(
                    "snapshot", f"a snapshot to {last.progress.destination} is being written already"
                )
            try:
                place = self._permit(destination)
                self._check_outside(place)
                self._snapshot = Snapshot(self._replay, place)
            except (TroupeError, OSError, ValueError) as error:  # the name is a stranger's, and may be any
                raise RefusedError("snapshot", str(error)) from None
            self._token = token
            _log.info("writing a snapshot to %s", destination)
            self._announced = False
            self._snapshot.start()
        return self.progress()

    def progress(self) -> dict[str, Any]:
        """How far the last one is."""
        return asdict(self._snapshot.progress if self._snapshot else Progress("", "none"))

    def announce(self) -> None:
        """Log the end of a snapshot, once."""
        if self._announced or self._snapshot is None or self._snapshot.progress.state == "running":
            return
        self._announced = True
        progress = self._snapshot.progress
        if progress.state == "done":
            detail = f", {progress.detail}" if progress.detail else ""
            _log.info("snapshot of %d items in %s%s", progress.items, progress.destination, detail)
        else:
            _log.error("no snapshot in %s: %s", progress.destination, progress.detail)

    def close(self) -> None:
        """Give up what is not complete."""
        if self._snapshot is not None:
            self._snapshot.stop()

    def _permit(self, destination: str) -> str:
        """The place that `destination` is, whatever links lead to it. Raises RefusedError."""
        if self._permitted is None:
            raise RefusedError(
                "snapshot", "this shard writes none without keys: start it with --snapshot-to DIRECTORY"
            )
        # Resolved once, and what was looked at is what is written: a link that changes in between leads
        # nowhere else.
        place = _resolved(destination)
        below = posixpath.join(_resolved(self._permitted), "")
        # With the slash: `/backup-of-others` is not below `/backup`.
        if self._permitted and not posixpath.join(place, "").startswith(below):
            raise RefusedError("snapshot", f"this shard writes snapshots only below {self._permitted}")
        return place

    def _check_outside(self, place: str) -> None:
        """Refuse what would be kept in the shard itself."""
        scheme = "" if _is_path(place) else place.partition("://")[0]
        if "memory" in scheme.lower().split("::"):
            raise RefusedError(
                "snapshot", "a snapshot in this shard's memory would fill it, and be lost with it"
            )
        own = os.path.realpath(self._replay.folder)
        if not scheme and posixpath.join(place, "").startswith(posixpath.join(own, "")):
            raise RefusedError("snapshot", f"{own} is the shard's own --data-dir: choose another directory")


def _is_path(place: str) -> bool:
    scheme, separator, _ = place.partition("://")
    return not separator or "/" in scheme


def _resolved(place: str) -> str:
    """A directory or address without detours: links of this machine's files are followed, here and once."""
    scheme, separator, path = place.partition("://")
    if _is_path(place):
        return os.path.realpath(place) if os.path.isabs(place) else place
    if scheme in ("file", "local"):
        return os.path.realpath(path)
    return scheme + separator + posixpath.normpath(path)
