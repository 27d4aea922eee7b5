"""One run of a sweep as a child process: `troupe train`, or `troupe resume`, in a directory of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from troupe.common.errors import ConfigError
from troupe.common.runtime.files import atomic_write, last_lines, make_directory
from troupe.services.experiments.plan import Planned, values_file
from troupe.services.experiments.runs import Run, is_run, read_run
from troupe.services.launcher.guard import guarded
from troupe.services.launcher.supervisor import best_error_line, without_a_word
from troupe.services.launcher.workspace import has_checkpoint

RUNS, VALUES, LOGS = "runs", "values", "logs"
"""Folders of a sweep: run directories, each run's file, and what each run's command printed."""
_PORT, _PORT_VARIABLE = "net.tensorboard_port", "TROUPE_NET__TENSORBOARD_PORT"
_TAIL_BYTES = 8192


def as_options(overrides: Mapping[str, str]) -> list[str]:
    """Fields as words of a command line."""
    return [f"--{name}={text}" for name, text in overrides.items()]


@dataclass
class Job:
    """One run, planned, under way or over.

    Attributes:
        planned: its name and fields.
        folder: of the sweep.
        state: `waiting`, `running`, `paused` (at a rung), `done`, `stopped`, `failed` or `pruned`.
        error: why it failed, one line.
        anew: it begins again, whatever its directory holds.
    """

    planned: Planned
    folder: Path
    state: str = "waiting"
    error: str = ""
    anew: bool = False
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _log_offset: int = field(default=0, repr=False)

    @property
    def name(self) -> str:
        """That of the run."""
        return self.planned.name

    @property
    def run_dir(self) -> Path:
        """Where it trains."""
        return self.folder / RUNS / self.name

    def run(self) -> Run | None:
        """What its directory says; None before it has begun."""
        try:
            return read_run(self.run_dir) if is_run(self.run_dir) else None
        except ConfigError as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
                raise  # nobody knows what is there
            return None  # its configuration is being written

    def check_place(self) -> None:
        """Refuse a link to a run that would be begun anew: `start` empties its directory."""
        if self.run_dir.is_symlink() and is_run(self.run_dir) and not has_checkpoint(self.run_dir):
            raise ConfigError(f"{self.run_dir} is a link to a run without a checkpoint: remove the link")

    def write_values(self) -> Path:
        """Write the fields of this run into a file for `--sweep`; returns it."""
        values = make_directory(self.folder / VALUES, "directory") / f"{self.name}.toml"
        fields = self.planned.fields
        if _PORT_VARIABLE not in os.environ:
            fields = {_PORT: 0, **fields}  # one TensorBoard shows all runs
        # A child reads it at once, and it can be made again, so nothing waits for the disk.
        atomic_write(values, values_file(fields).encode(), durable=False)
        return values

    def start(self, preset: str, overrides: Mapping[str, str], *options: str) -> None:
        """Train, or go on; in a process group of its own, so that Ctrl-C reaches only the sweep."""
        values = self.write_values()
        log_path = make_directory(self.folder / LOGS, "directory") / f"{self.name}.log"
        command = ["train", preset, *options, "--run-dir", str(self.run_dir)]
        if is_run(self.run_dir):
            if has_checkpoint(self.run_dir) and not self.anew:
                command = ["resume", str(self.run_dir)]
            else:
                shutil.rmtree(self.run_dir)  # it ended before there was anything to keep
        command += ["--sweep", str(values), "--no-progress"]
        # Also for `resume`: they may differ from what the run began with, as far as the fields' roles permit.
        command += as_options(overrides)
        with log_path.open("ab") as log:
            self._log_offset = log.tell()
            self._process = subprocess.Popen(
                # The launcher gets SIGTERM if this process dies, and then ends its own children. -P keeps the
                # working directory off the path, where a user's `signal.py` would hide Python's own.
                guarded([sys.executable, "-P", "-m", "troupe", *command], signal.SIGTERM),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        self.state, self.error, self.anew = "running", "", False

    def poll(self) -> bool:
        """Notice the end; returns whether it has just ended."""
        code = None if self._process is None else self._process.poll()
        if code is None:
            return False
        run = self.run()
        self._process = None
        # Its exit code is that of a run that was stopped, which would count as failed.
        if self.state in ("pruned", "paused"):
            return True
        if code == 0 and run is not None and run.state == "done":
            self.state = "done"
        # 0 without all steps is an orderly stop; 130 and SIGTERM come before a run has begun.
        elif code in (0, 130) or (code == -signal.SIGTERM):
            self.state = "stopped"
        else:
            self.state = "failed"
            self.error = best_error_line(self._last_lines(), without_a_word(code))
        return True

    def stop(self) -> None:
        """Ask for an orderly end; once more: for a quick one."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once; its children see to themselves."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def abandon(self) -> None:
        """End it at once, for it is another's now: a checkpoint of this one would be among those of that."""
        if self._process is not None:
            # A learner that outlives its launcher still writes a checkpoint, so it ends first. Meanwhile the
            # launcher must not start another.
            self._process.send_signal(signal.SIGSTOP)
            with contextlib.suppress(psutil.Error):
                for child in psutil.Process(self._process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        child.kill()
            self.kill()
        self._process, self.state = None, "running"

    @property
    def alive(self) -> bool:
        """Whether its process has not been seen to end."""
        return self._process is not None

    def _last_lines(self) -> Sequence[str]:
        """Of what this start has printed: an error of an earlier one is not what it has ended with."""
        log = self.folder / LOGS / f"{self.name}.log"
        try:
            return last_lines(log, min(_TAIL_BYTES, log.stat().st_size - self._log_offset))
        except OSError:
            return []
