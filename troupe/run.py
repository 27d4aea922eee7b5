"""A training in the background of a program or a notebook."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from troupe.common.errors import OF_EXIT_CODE, OWN_ERROR, ConfigError, TroupeError
from troupe.common.runtime.files import CONFIG_FILE, read_status
from troupe.common.runtime.lifecycle import INTERRUPTED
from troupe.common.runtime.metrics import CSV_FILE, read_rows
from troupe.following import Follower
from troupe.services.launcher.guard import guarded

if TYPE_CHECKING:
    from troupe.policy import Policy
    from troupe.services.experiments.runs import Series

_LOOK_S = 0.2
_BEGINS_S = 600.0
"""An environment's check may take minutes before there is a run directory."""
_STOPS_S = 90.0
"""The launcher gives the learner 40 seconds for its checkpoint, and the others 10 each."""
_SAYS_ERROR = f"{OWN_ERROR} "


class Run:
    """A run that trains while the program goes on; made by `troupe.start`.

    A run is stopped at the latest when the program ends, however it ends. As a context manager it is stopped
    at the end of the block. Functions that take the path of a run take a `Run`.

    Attributes:
        path: the run directory.
    """

    def __init__(
        self, command: Sequence[str], path: Path, variables: Mapping[str, str], told: Follower
    ) -> None:
        self.path = path
        self._told = told
        self._failure: BaseException | None = None
        self._killed = False  # by us, since it did not stop
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (closed below)
        weakref.finalize(self, self._said.close)
        self._shown_bytes = 0
        self._ending = threading.Lock()
        # The kernel ends it where this process dies without a word; the launcher in it ends its services.
        self._process = subprocess.Popen(
            guarded(command, signal.SIGTERM),
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **variables},
            process_group=0,  # Ctrl-C is for the program
        )
        _RUNS.difference_update([run for run in list(_RUNS) if not run.running])
        _RUNS.add(self)
        self._watcher: threading.Thread | None = None

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        code = self._process.poll()
        state = "running" if code is None else "ended" if code in (0, INTERRUPTED) else f"exit code {code}"
        return f"<troupe.Run {self.path}: {state}, {self.steps:,} steps>"

    @property
    def running(self) -> bool:
        """Whether it still trains."""
        return self._process.poll() is None

    @property
    def steps(self) -> int:
        """Environment steps made so far."""
        return int(read_status(self.path).get("steps", 0))

    def metrics(self) -> dict[str, float]:
        """The newest value of every metric, by the names in docs/metrics.md; empty before the first one."""
        with contextlib.suppress(FileNotFoundError):
            return {row.name: row.value for row in read_rows(self.path / CSV_FILE)}
        return {}

    def series(self, name: str) -> Series:
        """All values of a metric so far: its lists `steps`, `wall_s` and `values` have one length."""
        from troupe.services.experiments.runs import read_series

        return read_series(self.path / CSV_FILE, [name])[name]

    def policy(self, **options: Any) -> Policy:
        """The policy of the newest checkpoint; `options` are those of `troupe.load`.

        Raises:
            CheckpointError: there is none yet.
        """
        from troupe.policy import load

        return load(self.path, **options)

    def output(self) -> str:
        """Everything that it has printed."""
        return os.pread(self._said.fileno(), 1 << 30, 0).decode("utf-8", "replace")

    def stop(self) -> None:
        """Have it write a checkpoint and end, and wait for that; nothing is left of it then."""
        with self._ending:
            if self.running:
                self._process.send_signal(signal.SIGTERM)
                try:
                    self._process.wait(_STOPS_S)
                except subprocess.TimeoutExpired:
                    self._killed = True
                    self._process.kill()  # its services end with it
                    self._process.wait()
        _RUNS.discard(self)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is complete, or was stopped; returns False where `timeout_s` seconds are over before.

        Ctrl-C (the interrupt of a notebook) while it waits stops the run.

        Raises:
            TroupeError: the run failed; says why.
            Exception: a callback raised it.
        """
        return self._wait(timeout_s, show=False)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.wait()

    # ------------------------------------------------------------------ for `troupe.running`

    def begin(self) -> None:
        """Wait until there is a run directory. Raises what a training raises that cannot begin."""
        deadline_s = time.monotonic() + _BEGINS_S
        try:
            while self.running and not (self.path / CONFIG_FILE).is_file():
                if time.monotonic() > deadline_s:
                    raise ConfigError(
                        f"the training did not start within {_BEGINS_S:.0f} s: {self.output()[-200:]}"
                    )
                time.sleep(_LOOK_S / 4)
        except BaseException:
            self.stop()
            raise
        self._check()

    def watch(self) -> None:
        """Call the callbacks from a thread, as long as it trains."""
        if self._told:
            self._watcher = threading.Thread(target=self._follow, name="troupe-run", daemon=True)
            self._watcher.start()

    def show_until_end(self) -> None:
        """Print what it says and call the callbacks, until it ends; see `wait`."""
        self._wait(None, show=True)

    # ------------------------------------------------------------------

    def _wait(self, timeout_s: float | None, *, show: bool) -> bool:
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while self.running:
                if deadline_s is not None and time.monotonic() >= deadline_s:
                    return False
                self._turn(show)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_LOOK_S)
        except BaseException:
            self.stop()
            raise
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join(None if deadline_s is None else max(0.0, deadline_s - time.monotonic()))
            if self._watcher.is_alive():  # in a callback
                return False
        self._turn(show)
        _RUNS.discard(self)
        self._check()
        return True

    def _turn(self, show: bool) -> None:
        if show:
            text = os.pread(self._said.fileno(), 1 << 20, self._shown_bytes)
            text = text[: text.rfind(b"\n") + 1]
            self._shown_bytes += len(text)
            if text:
                print(text.decode("utf-8", "replace"), end="", flush=True)
        if self._watcher is None and not self._told.look():
            self.stop()

    def _follow(self) -> None:
        try:
            while self.running:
                if not self._told.look():
                    self.stop()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_LOOK_S)
            self._told.look()
        except BaseException as error:  # it belongs to whoever waits for the run
            self._failure = error
            self.stop()

    def _check(self) -> None:
        """Raise what ended the run, unless it is complete, goes on, or was asked to stop."""
        if self._failure is not None:
            raise self._failure
        code = self._process.poll()
        if code in (None, 0, INTERRUPTED, -signal.SIGTERM) or self._killed:
            return
        lines = self.output().splitlines()
        said = [line.removeprefix(_SAYS_ERROR) for line in lines if line.startswith(_SAYS_ERROR)]
        why = said[-1] if said else f"the training ended with exit code {code}: {' '.join(lines[-1:])}"
        raise OF_EXIT_CODE.get(code or 0, TroupeError)(why)


# Held here, so that a run whose handle nobody keeps goes on; the next one lets go of those that have ended.
_RUNS: set[Run] = set()


@atexit.register
def _stop_all() -> None:
    """Have no process outlive the program: first all are asked, then each is waited for."""
    runs = [run for run in list(_RUNS) if run.running]
    for run in runs:
        run._process.send_signal(signal.SIGTERM)
    for run in runs:
        run.stop()
