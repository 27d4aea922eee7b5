"""Child processes that are watched, restarted with back-off, and stopped for certain."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from troupe.common.errors import (
    OF_EXIT_CODE,
    OWN_ERROR,
    AuthError,
    CheckpointError,
    ConfigError,
    PeerError,
    TroupeError,
    sameness,
)
from troupe.common.runtime import watchdog
from troupe.services.launcher.guard import guarded
from troupe.services.launcher.signs import Signs

_log = logging.getLogger(__name__)

QUICK_DEATH_S = 30.0  # a child that lived longer than this died for a reason of its own, not of its start
MAX_QUICK_DEATHS = 5
MAX_SAME_DEATHS = 3
"""Deaths of one error, or hangs at one place, without progress in between, at whatever intervals: such work
never ends."""
MAX_BACKOFF_S = 15.0
_STACKS_S = 0.5
"""How long a child that hangs is given to write its stacks, which it does in C."""
# Trying again cannot help against a wrong configuration, a refused key or a run that has no whole checkpoint.
FINAL_EXIT_CODES = tuple(error.exit_code for error in (ConfigError, AuthError, CheckpointError))
_WITHOUT_A_WORD: dict[int, str] = {
    signal.SIGKILL: "killed from outside, possibly for lack of memory",
    signal.SIGTERM: "stopped from outside",
}
_EXCEPTION = re.compile(r"[\w.]*(Error|ERROR|Exception|Interrupt|Fault|Fatal)\b")
_TAIL_BYTES = 8192

Command = Callable[[int], Sequence[str]]


@dataclass(frozen=True)
class ChildSpec:
    """What to run.

    Attributes:
        name: `actor-0`; also the name of its log file.
        command: gives the argument vector of a start from the number of starts before it.
        log_path: file that stdout and stderr are appended to.
        essential: whether the run cannot go on without it.
        environment: variables set beside those of this process.
        nice: added to the child's nice value.
        orphan_signal: what the kernel sends the child when this process dies.
        signs_path: where it sends signs of life (NOTIFY_SOCKET); None for one that sends none.
        hang_s: seconds without a sign after which it is killed, to be started again; 0: never.
        last_words: says of a pid and its exit code why it ended, where it could not say so itself; or "".
        progress: what its work has come to that a restart keeps; a child that dies of the same error, or
            hangs at the same place, again and again without getting further is given up. None: not known.
    """

    name: str
    command: Command
    log_path: Path
    essential: bool = True
    environment: dict[str, str] = field(default_factory=dict)
    nice: int = 0
    orphan_signal: signal.Signals = signal.SIGKILL
    signs_path: Path | None = None
    hang_s: float = 0.0
    last_words: Callable[[int, int], str] | None = None
    progress: Callable[[], object] | None = None


class Child:
    """One supervised process. States: `running`, `waiting` (to be restarted), `done`, `failed`."""

    def __init__(self, spec: ChildSpec, *, backoff_s: float = 1.0) -> None:
        """Create without starting; `backoff_s` is the pause after the first quick death, then it doubles."""
        self.spec = spec
        self.state = "waiting"
        self.restarts = self.deaths = 0
        self.last_death = ""
        self.exit_code: int | None = None
        self.failure: TroupeError | None = None
        """What its last death by an error of its own or a hang is told as; none by a signal from outside."""
        self._backoff_s = backoff_s
        self._quick_deaths = 0
        self._died_of: deque[tuple[object, object]] = deque(maxlen=MAX_SAME_DEATHS)
        self._process: subprocess.Popen[bytes] | None = None
        self._swept = False
        self._started_at = 0.0
        self._restart_at = 0.0
        self._log_offset = 0
        self._signs: Signs | None = None
        if spec.signs_path is not None and spec.hang_s:
            self._signs = Signs(spec.signs_path, starts_in_s=watchdog.LONG * spec.hang_s)
        self._hung = ""

    @property
    def name(self) -> str:
        """The spec's name."""
        return self.spec.name

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process is not None and self.state == "running" else None

    @property
    def state_text(self) -> str:
        """State for people."""
        if self.state == "waiting":
            return f"restarts in {max(0.0, self._restart_at - time.monotonic()):.0f} s"
        return self.state

    def start(self) -> None:
        """Start the process in a process group of its own, so that Ctrl-C reaches only the launcher.

        It stays in the launcher's session: Linux shares the CPU among sessions first (autogroup), and `nice`
        would count for nothing across them.
        """
        # The guard asks the kernel for a signal at this process's death (PR_SET_PDEATHSIG) and then becomes
        # the child: Python's own `preexec_fn` would run in a fork of a process with threads.
        command = guarded(self.spec.command(self.restarts), self.spec.orphan_signal, self.spec.nice)
        with self._open_log() as log:
            self._log_offset = log.tell()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                process_group=0,
            )
        self._swept, self._hung = False, ""
        if self._signs is not None:
            self._signs.begin()
        self._started_at = time.monotonic()
        self.state = "running"
        self.exit_code = None

    def _environment(self) -> dict[str, str]:
        """The child's variables; what supervises this process is no business of its children."""
        variables = {name: value for name, value in os.environ.items() if name != "NOTIFY_SOCKET"}
        if self._signs is not None:
            variables["NOTIFY_SOCKET"] = str(self.spec.signs_path)
        return variables | self.spec.environment

    def poll(self, *, may_be_done: bool) -> None:
        """Notice a death, end one that hangs, and restart when the time has come.

        Args:
            may_be_done: whether exit code 0 means that the work is finished (else it is a death like others).

        Raises:
            TroupeError: an essential child cannot be kept alive; says why and where its log is.
        """
        if self.state == "waiting" and time.monotonic() >= self._restart_at:
            self.restarts += 1
            self.start()
            return
        code = self.returncode() if self.state == "running" else None
        if code is None:
            self._end_if_it_hangs()
            return
        self.exit_code = code
        if code == 0 and may_be_done:
            self.state = "done"
            return
        self._on_death(code)

    def _end_if_it_hangs(self) -> None:
        """Kill a child that has been silent for too long: one that is stopped cannot end itself."""
        if self._signs is None or self._process is None or self._hung or self.state != "running":
            return
        if self._signs.silent_s() >= self.spec.hang_s:
            self._hung = f"it did not respond for {self.spec.hang_s:g} s (run.hang_s) and was killed"
            self._process.send_signal(signal.SIGUSR1)  # see enable_stack_dumps
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STACKS_S)
            self._sweep_group()
            # As its own watchdog would: who reads the log alone sees why it ends.
            with contextlib.suppress(OSError), self.spec.log_path.open("a") as log:
                log.write(f"{OWN_ERROR} {self._hung}\n")

    def _on_death(self, code: int) -> None:
        quick = time.monotonic() - self._started_at < QUICK_DEATH_S
        self._quick_deaths = self._quick_deaths + 1 if quick else 1
        how = f"died ({describe_exit(code)})"
        why = self._hung or self.last_error()
        if inherited := self._last_words(code):
            # Not our exit code: an environment that calls os._exit(3) has not missed a peer.
            code, why = TroupeError.exit_code, inherited
        self.deaths, self.last_death = self.deaths + 1, f"{describe_exit(code)}: {why}"
        if code > 0 or self._hung:  # any other signal may come at any time, and says nothing of the work
            self.failure = _error_for(code, f"{self.name} {how}: {why} (log: {self.spec.log_path})")
            # One that has waited in vain for another service says nothing of its own work either.
            if self.spec.progress is not None and code != PeerError.exit_code:
                self._died_of.append((sameness(why), self.spec.progress()))
        dies_so_again = len(self._died_of) == MAX_SAME_DEATHS and len(set(self._died_of)) == 1
        if code in FINAL_EXIT_CODES or dies_so_again or self._quick_deaths >= MAX_QUICK_DEATHS:
            self.state = "failed"
            if dies_so_again:
                how += f" {MAX_SAME_DEATHS} times without progress"
            elif code not in FINAL_EXIT_CODES:
                how += f" {self._quick_deaths} times in a row"
            message = f"{self.name} {how}: {why} (log: {self.spec.log_path})"
            if self.spec.essential:
                raise _error_for(code, message)
            _log.error("%s; the run goes on without it", message)
            return
        pause = min(MAX_BACKOFF_S, self._backoff_s * 2 ** (self._quick_deaths - 1))
        self._restart_at = time.monotonic() + pause
        self.state = "waiting"
        _log.warning("%s %s: %s; restarting in %.0f s", self.name, how, why, pause)

    def _last_words(self, code: int) -> str:
        """Why it ended, of a child that could not say so itself."""
        if self.spec.last_words is None or self._process is None:
            return ""
        with contextlib.suppress(OSError):
            if any(OWN_ERROR in line for line in self._log_lines()):
                return ""
        return self.spec.last_words(self._process.pid, code)

    def last_error(self) -> str:
        """Find the line of this start's log that says best why it ended."""
        try:
            lines = self._log_lines()
        except OSError:
            return "its log cannot be read"
        code = self.exit_code if self.exit_code is not None else 0
        return best_error_line(
            [line for line in lines if line], _WITHOUT_A_WORD.get(-code, "it gave no reason")
        )

    def _log_lines(self) -> list[str]:
        """The end of what this start has logged."""
        with self.spec.log_path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            # From this start on: an error of the start before would otherwise be told as that of this one.
            log.seek(max(self._log_offset, size - _TAIL_BYTES))
            return [line.strip() for line in log.read().decode("utf-8", "replace").splitlines()]

    def signal(self, number: int) -> None:
        """Send a signal, if it runs."""
        if self._process is not None and self.alive():
            self._process.send_signal(number)

    def kill(self) -> None:
        """Kill it and everything that it started (its whole process group)."""
        if self.alive() and self._process is not None:
            self._sweep_group()
            self._process.wait()

    def close(self) -> None:
        """Listen to it no longer."""
        if self._signs is not None:
            self._signs.close()
            self._signs = None

    def alive(self) -> bool:
        """Whether the process exists."""
        return self._process is not None and self.returncode() is None

    def returncode(self) -> int | None:
        """Exit status of the last process, negative for a signal; None while it runs."""
        if self._process is None:
            return None
        code = self._process.poll()
        if code is not None:
            self._sweep_group()
        return code

    def _sweep_group(self) -> None:
        """Kill the process group, once: later its number may belong to somebody else."""
        if self._process is not None and not self._swept:
            self._swept = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _open_log(self) -> IO[bytes]:
        try:
            return self.spec.log_path.open("ab")
        except OSError as error:
            raise ConfigError(f"cannot write the log {self.spec.log_path}: {error.strerror}") from error


def stop(children: Sequence[Child], timeout_s: float, hurry: Callable[[], bool] = lambda: False) -> list[str]:
    """Ask children to stop with SIGTERM, wait, and kill those that are left.

    Args:
        children: running or not.
        timeout_s: how long to wait for all of them.
        hurry: called while waiting; True cuts the wait short.

    Returns:
        Names of those that had to be killed.
    """
    for child in children:
        child.signal(signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while any(child.alive() for child in children) and time.monotonic() < deadline and not hurry():
        time.sleep(0.05)
    killed = [child.name for child in children if child.alive()]
    for child in children:
        child.kill()
        child.close()
        if child.state in ("running", "waiting"):
            child.state = "stopped"
    return killed


def describe_exit(code: int) -> str:
    """`exit code 2`, or the name of the signal."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def without_a_word(code: int) -> str:
    """What an exit code says of an end for which there are no other words."""
    return _WITHOUT_A_WORD.get(-code, describe_exit(code))


def best_error_line(lines: Sequence[str], otherwise: str) -> str:
    """Choose the last `troupe: error:` line, else the last that looks like an exception, else `otherwise`."""
    for line in reversed(lines):
        if OWN_ERROR in line:
            return line.split(OWN_ERROR, 1)[1].strip()
    for line in reversed(lines):
        if _EXCEPTION.match(line) or " ERROR " in line:
            return line
    return otherwise


def _error_for(code: int, message: str) -> TroupeError:
    return OF_EXIT_CODE.get(code, TroupeError)(message)
