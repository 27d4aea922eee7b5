"""What a local run needs before its first process: a directory of its own, sockets, a free port, a log."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import logging
import os
import shlex
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from troupe.common.config.schema import NetConfig
from troupe.common.errors import CheckpointError, ConfigError
from troupe.common.installation import install_command
from troupe.common.machine import temporary_prefix
from troupe.common.runtime.checkpoint import check, newest_first, steps_of
from troupe.common.runtime.files import (
    CONFIG_FILE,
    SERIAL_FOLDER,
    hold_run_dir,
    is_locked,
    make_directory,
    readable,
)
from troupe.common.runtime.logging import LogFile

_log = logging.getLogger(__name__)

_DIRECTORIES = ("logs", "checkpoints", "tensorboard", "videos", "replay")
_MAX_SOCKET_PATH = 100  # the kernel's limit is 107 bytes
_PORTS_TRIED = 20
BOARD_PORT = 6007
_SOCKET_NAME_LENGTH = 40  # of the directory and the longest socket in it


@contextlib.contextmanager
def claimed_run_dir(run_dir: Path, *, resume: bool) -> Iterator[str]:
    """Make the run directory, or check the one to resume, and hold it against a second launcher.

    Yields the `damage` of what is resumed, before anything of it is changed.

    Raises:
        ConfigError: it holds a run (or none, to resume), is in use, or cannot be written.
        CheckpointError: there is nothing to resume from.
    """
    with readable(run_dir):
        has_run = (run_dir / CONFIG_FILE).exists()
    if resume and not has_run:
        raise ConfigError(f"{run_dir} is not a run directory: it has no {CONFIG_FILE}")
    if has_run and not resume:
        raise ConfigError(in_the_way(run_dir))
    with hold_run_dir(run_dir):
        for name in _DIRECTORIES:
            make_directory(run_dir / name, "directory")
        if resume and not has_checkpoint(run_dir):
            raise CheckpointError(_nothing_to_resume(run_dir, "it has no checkpoint"))
        # Of a run in one process that was killed: this one fills its tables anew.
        shutil.rmtree(run_dir / SERIAL_FOLDER, ignore_errors=True)
        yield damage(run_dir) if resume else ""


@contextlib.contextmanager
def socket_directory() -> Iterator[Path]:
    """Yield a private directory for the sockets, with a path that the kernel accepts; removed afterwards."""
    short_enough = len(tempfile.gettempdir()) < _MAX_SOCKET_PATH - _SOCKET_NAME_LENGTH
    try:
        # An ipc path has room for 107 bytes, and TMPDIR of some clusters is longer than that alone.
        parent = None if short_enough else "/tmp"
        path = Path(tempfile.mkdtemp(prefix=temporary_prefix(), dir=parent))
    except OSError as error:
        raise ConfigError(
            f"cannot make a directory for sockets ({error}); set TMPDIR to another directory"
        ) from error
    remove_abandoned(path.parent)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def remove_abandoned(parent: Path) -> None:
    """Remove directories of processes of ours that were killed and could not do it themselves."""
    for path in parent.glob("troupe-*-*"):
        pid = path.name.split("-")[1]
        with contextlib.suppress(OSError):
            # Our own only: the temporary folder is everybody's.
            if pid.isdecimal() and not psutil.pid_exists(int(pid)) and path.stat().st_uid == os.getuid():
                shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def launcher_log(run_dir: Path) -> Iterator[logging.Logger]:
    """Keep what the launcher does in `logs/launcher.log`."""
    try:
        handler = LogFile(run_dir / "logs" / "launcher.log")
    except OSError as error:
        raise ConfigError(f"cannot write into {run_dir / 'logs'}: {error.strerror}") from error
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s launcher: %(message)s"))
    logger = logging.getLogger("troupe")
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    # Its lines are for the file; the panel shows those that people need.
    logger.propagate = False
    try:
        yield logger
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
        handler.close()


def run_name(preset: str | Path | None, algo: str, env_id: str) -> str:
    """What a run is called after: its preset, or its algorithm and the end of its environment's id."""
    if preset is not None:
        return Path(preset).stem
    return f"{algo}-{env_id.replace('/', ':').rpartition(':')[2]}"


def dated_directory(name: str) -> Path:
    """The run directory of a run that begins now."""
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


class TensorBoardPort:
    """Where a run's TensorBoard is.

    Attributes:
        title: what it is called.
        number: `wanted` or the next port that is free, 0 where none is wanted.
    """

    title = "TensorBoard"

    def __init__(self, wanted: int) -> None:
        """Look for a port; raises ConfigError where there is none, or no TensorBoard."""
        self._wanted = wanted
        self.number = self._find()

    @property
    def url(self) -> str:
        """For a browser on this machine; empty where there is no TensorBoard."""
        return f"http://localhost:{self.number}" if self.number else ""

    @property
    def taken(self) -> int:
        """The port that it should have had, where that was in use; else 0."""
        return self._wanted if self.number not in (0, self._wanted) else 0

    def of_start(self, restarts: int) -> int:
        """Choose the port of a start; one that was taken before TensorBoard had it is passed over."""
        if restarts:
            with contextlib.suppress(
                ConfigError
            ):  # none is free now: the former one may be at the next start
                number, self.number = self.number, self._find()
                if self.number != number:
                    _log.warning("port %d was taken: %s of this run is on %s", number, self.title, self.url)
        return self.number

    def _find(self) -> int:
        return tensorboard_port(self._wanted)


class BoardPort(TensorBoardPort):
    """Where a run's board is; nowhere, where nobody asked for it and it cannot be."""

    title = "board"

    def __init__(self, net: NetConfig, taken: int) -> None:
        """Look for a port other than `taken`; raises ConfigError where one is asked for and there is none."""
        self._is_asked, self._taken = net.board_port is not None, taken
        default = BOARD_PORT if net.tensorboard_port else 0
        super().__init__(default if net.board_port is None else net.board_port)

    def _find(self) -> int:
        if not self._wanted:
            return 0
        if any(importlib.util.find_spec(module) is None for module in ("starlette", "uvicorn")):
            if not self._is_asked:
                return 0
            how = install_command("board")
            raise ConfigError(f"the board is not installed; {how}, or set net.board_port to 0")
        try:
            return _free_port(self._wanted, "the board", "net.board_port", self._taken)
        except ConfigError:
            if self._is_asked:
                raise
            return 0


def tensorboard_port(wanted: int) -> int:
    """Find a port for TensorBoard: `wanted`, or the next one that is free; 0 where none is wanted.

    Raises:
        ConfigError: there is none, or no TensorBoard; names the field and how to do without.
    """
    if not wanted:
        return 0
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            f"tensorboard is not installed; {install_command('tensorboard')}, "
            "or set net.tensorboard_port to 0"
        )
    return _free_port(wanted, "TensorBoard", "net.tensorboard_port")


def _free_port(wanted: int, page: str, field: str, taken: int = 0) -> int:
    last = min(wanted + _PORTS_TRIED, 65535)
    for port in range(wanted, last + 1):
        try:
            if port != taken:  # by what this run is about to start
                _check_free(port)
                return port
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ConfigError(
                    f"port {port} for {page} cannot be used ({error.strerror}); "
                    f"set {field} to another port, or to 0 to turn it off"
                ) from error
    raise ConfigError(
        f"ports {wanted} to {last} for {page} are in use; set {field} to another port, or to 0 to turn it off"
    )


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        # As TensorBoard binds: without it a port that was closed a minute ago would count as taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))


def named_events(run_dir: Path, private: Path) -> Path:
    """Make a directory for TensorBoard in which the event files stand under the run's name, not under `.`."""
    directory = private / "logdir"
    directory.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (directory / run_dir.name).symlink_to(run_dir / "tensorboard", target_is_directory=True)
    return directory


def has_checkpoint(run_dir: Path) -> bool:
    """Whether there is a checkpoint to try."""
    with readable(run_dir / "checkpoints"):
        return next(newest_first(run_dir / "checkpoints"), None) is not None


def in_the_way(run_dir: Path) -> str:
    """Say why no run can begin in this directory, which holds one."""
    if is_locked(run_dir / ".lock"):
        return f"{run_dir} holds a run that is training; choose another --run-dir"
    if not has_checkpoint(run_dir):
        return f"{run_dir} holds a run that wrote no checkpoint: remove it, or choose another --run-dir"
    continues = f"`{own_command()} resume {shell_path(run_dir)}` continues it"
    return f"{run_dir} holds a run already; {continues}, or choose another --run-dir"


def saved_steps(run_dir: Path) -> int:
    """Return the steps that a resumed run begins with, as far as names of checkpoints tell."""
    newest = next(newest_first(run_dir / "checkpoints"), None)
    return 0 if newest is None else steps_of(newest)


def damage(run_dir: Path) -> str:
    """Say what is wrong with the newest checkpoint of a run to resume; empty where it is whole.

    Raises:
        CheckpointError: no checkpoint is whole.
    """
    problems: list[str] = []
    with readable(run_dir / "checkpoints"):
        # Only until one is whole: hashing all of them could take minutes.
        for path in newest_first(run_dir / "checkpoints"):
            try:
                check(path)
            except CheckpointError as error:
                problems.append(str(error))
            else:
                return problems[0] if problems else ""
    if problems:
        raise CheckpointError(_nothing_to_resume(run_dir, f"all {len(problems)} checkpoints are damaged"))
    return ""


def _nothing_to_resume(run_dir: Path, why: str) -> str:
    begins = f"`{own_command()} train {shell_path(run_dir / CONFIG_FILE)}` begins it again"
    return f"nothing to resume in {run_dir}: {why}; {begins}"


def own_command(program: str = "troupe") -> str:
    """How a user runs a program of this very installation: its name where a shell finds it, or its path."""
    beside = Path(sys.executable).parent / program
    found = shutil.which(program)
    # A virtual environment that is not activated: the bare name would run another installation, or none.
    if beside.is_file() and (found is None or not os.path.samefile(found, beside)):
        return shell_path(beside)
    return program


def shell_path(path: Path) -> str:
    """Write a path for a shell, relative where it lies below the working directory."""
    with contextlib.suppress(ValueError):
        return shlex.quote(str(path.relative_to(Path.cwd())))
    return shlex.quote(str(path))
