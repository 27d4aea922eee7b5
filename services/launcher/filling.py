"""The data set of a run becomes the files of its shards, by a command of its own, before they start."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from troupe.common.config import Config
from troupe.common.errors import OWN_ERROR, ConfigError, DatasetError, TroupeError
from troupe.common.runtime import Deadline, StopSignal
from troupe.common.runtime.files import CONFIG_FILE
from troupe.services.launcher.guard import guarded

START_S = 600.0
STEPS_PER_S = 200.0
"""Least speed of reading; usual are tens of thousands."""
POLL_S = 0.5


def fill(config: Config, run_dir: Path, stop: StopSignal) -> None:
    """Fill `RUN/replay` and say with what; where that fails, the directory holds no run.

    Raises:
        TroupeError: what the command says, or that it crashed or took too long.
        KeyboardInterrupt: a stop was asked for.
    """
    words = ["replay", "import", str(run_dir / CONFIG_FILE), "--data-dir", str(run_dir / "replay")]
    # By itself, because a damaged file may crash the library that reads it, or keep it busy for ever.
    # The kernel ends it with this process, as it does the services.
    process = subprocess.Popen(
        guarded([sys.executable, "-P", "-m", "troupe.services", *words], signal.SIGKILL),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        print(_said(process, config, stop), flush=True)
    except BaseException:
        process.kill()
        process.wait()
        (run_dir / CONFIG_FILE).unlink()
        for name in ("replay", "replay.unfinished"):
            shutil.rmtree(run_dir / name, ignore_errors=True)
        raise


def _said(process: subprocess.Popen[str], config: Config, stop: StopSignal) -> str:
    """What the command prints. Raises as `fill` does."""
    deadline = Deadline(START_S + config.replay.capacity_items / STEPS_PER_S)
    name, out, errors = config.run.offline, "", ""
    while process.returncode is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            out, errors = process.communicate(timeout=POLL_S)
        if stop:
            raise KeyboardInterrupt
        if deadline.expired:
            raise DatasetError(
                f"data set {name}: not read after {deadline.elapsed_s:.0f} s: it may be damaged"
            )
    code = process.returncode
    if code < 0:
        raise DatasetError(f"data set {name}: its reader was killed by signal {-code}: it may be damaged")
    if code:
        said = (errors.strip().splitlines() or [f"reading the data set {name} failed with code {code}"])[-1]
        kind = ConfigError if code == ConfigError.exit_code else TroupeError
        raise kind(said.removeprefix(f"{OWN_ERROR} "))
    return out.strip()
