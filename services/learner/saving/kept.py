"""Which checkpoints outlast the newest ones: one every so often, and the best by evaluation."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from troupe.common import system
from troupe.common.errors import CheckpointError
from troupe.common.runtime.checkpoint import (
    ARCHIVE,
    BEST,
    CheckpointWriter,
    keep_checkpoint,
    load_newest,
    newest_first,
)
from troupe.common.wire.control.params import Published, decode_params

_log = logging.getLogger(__name__)


class Archive:
    """Keeps a checkpoint for good every `period_s` seconds; 0: none. For the thread that writes them."""

    def __init__(self, checkpoints: Path, period_s: float) -> None:
        self._directory = checkpoints / ARCHIVE
        self._period_s = period_s
        # The wall clock and the file's own time: a resumed run goes on with the period of the session before.
        self._since_s = self._last_s() if period_s else 0.0

    def _last_s(self) -> float:
        """When the newest was kept or, with none, when the empty folder for them was made."""
        last = next(newest_first(self._directory), None)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            return (last or self._directory).stat().st_mtime
        except OSError:  # a full disk, perhaps not for long
            return system.time()

    def take(self, path: Path) -> None:
        """Keep what has just been written, if it is time to."""
        # Negative where the clock was put back, which must not put off the next one by as much.
        if not self._period_s or 0 <= system.time() - self._since_s < self._period_s:
            return
        try:
            keep_checkpoint(path, self._directory)
        except OSError as error:  # training goes on, and the next one is tried
            _log.error("cannot keep %s in %s: %s", path.name, self._directory, error)
            return
        self._since_s = system.time()


class Best:
    """Keeps the network with the best evaluation so far, in a checkpoint of its own that only acts."""

    def __init__(self, checkpoints: Path, meta: Callable[[], dict[str, Any]]) -> None:
        """`meta` is that of checkpoints."""
        self._meta = meta
        self._directory = checkpoints / BEST
        self._writer = CheckpointWriter(self._directory, keep=1)
        self._return = -math.inf
        self._next: tuple[dict[str, np.ndarray], dict[str, Any]] | None = None
        if next(newest_first(self._directory), None) is not None:
            try:
                self._return = float(load_newest(self._directory).meta["evaluation"]["mean_return"])
            except (CheckpointError, KeyError, TypeError, ValueError) as error:
                _log.warning("cannot read the best checkpoint so far, another one replaces it: %s", error)

    def evaluated(self, played: Published, mean_return: float) -> None:
        """Keep the network of an evaluation that no other surpasses; of equals the newest."""
        if mean_return < self._return:
            return
        self._return = mean_return
        # The weights that were played, not the newest, which may be worse by now.
        params = decode_params(played.manifest, played.blob)
        evaluation = {"version": played.version, "mean_return": mean_return}
        meta = self._meta() | {"steps": played.steps, "updates": played.updates, "evaluation": evaluation}
        # One place: a better network that comes while another is written takes the place of what waits.
        self._next = {f"net/{name}": array for name, array in params.items()}, meta
        self.go_on()

    def go_on(self) -> None:
        """Begin to write what waits, once the one before is on the disk."""
        if self._next is not None and self._writer.wait(0.0):
            (arrays, meta), self._next = self._next, None
            self._writer.begin(arrays, meta, lambda path: _log.info("best checkpoint so far: %s", path.name))

    def wait(self, timeout_s: float) -> None:
        """Write the rest, within a limit for each."""
        if self._writer.wait(timeout_s):
            self.go_on()
            self._writer.wait(timeout_s)
