"""Environments in processes of their own: whatever one does, to crash or to hang, stays there.

`env.processes` of them share the slots of an actor. One that ends, or takes longer for a call than
`env.step_timeout_s`, is killed and started again: the episodes of its slots are discarded, and the failure is
told with slot, step and seed like any other. Observations, actions and rewards are in shared memory; what is
rare, such as the end of an episode, is in the answers.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import TypeAdapter

from troupe.common.envs import calls, copy_slots
from troupe.common.envs.base import (
    KEPT_FAILURES,
    EnvError,
    EnvSpec,
    Episode,
    Failure,
    Rebuilder,
    Seed,
    Step,
    VectorEnv,
    split_slots,
)
from troupe.common.envs.shared import MAX_MESSAGE, SharedStep
from troupe.common.envs.spectator import NoPictureError
from troupe.common.errors import ConfigError, MissingEngineError, TroupeError
from troupe.common.machine import temporary_prefix

if TYPE_CHECKING:
    from troupe.common.config.env_section import EnvConfig

_log = logging.getLogger(__name__)

# Longest time for a process to start and to make its environments, if `env.step_timeout_s` is not longer.
_MAKING_S = 120.0
_CLOSING_S = 2.0
_ERRORS: dict[str, type[TroupeError]] = {
    error.__name__: error for error in (ConfigError, EnvError, MissingEngineError)
}


class WorkerVector(VectorEnv):
    """Slots that are stepped by other processes, side by side."""

    def __init__(
        self, config: EnvConfig, num_slots: int, seed: int, threads: int, *, evaluation: bool
    ) -> None:
        """`config.processes` processes, of `threads` threads each, share the slots as evenly as they can."""
        self.num_slots = num_slots
        self._config = config
        self._seeds = np.random.SeedSequence(seed)
        self._seed: Seed | None = seed  # of the next reset
        self.failures = deque(maxlen=KEPT_FAILURES)
        self.calls = calls.Calls(1, whole=True)  # nothing is ever in a call here
        # For the records of their calls, which outlive a process that crashes.
        self._folder = tempfile.TemporaryDirectory(prefix=temporary_prefix("envs-"))
        parts = split_slots(num_slots, config.processes, copy_slots(config))
        task = {"config": config.model_dump(mode="json"), "threads": threads, "evaluation": evaluation}
        self._workers: list[_Worker] = []
        try:
            for part in parts:
                first = int(part[0])
                worker = _Worker(task | {"slots": len(part)}, first, Path(self._folder.name))
                self._workers.append(worker)
                worker.start(self._draw())
            made = [worker.made(self._making_s) for worker in self._workers]
        except _WorkerError as error:
            self._discard_processes()
            raise EnvError(f"{config.id} {error.cause}{error.where}") from None
        except BaseException:
            self._discard_processes()
            raise
        self.spec = TypeAdapter(EnvSpec).validate_python(made[0]["spec"])
        self.steps_per_s = float(made[0]["steps_per_s"])
        self._shared = SharedStep(self.spec, num_slots)
        for worker in self._workers:
            worker.map(self._shared.fd, num_slots)

    @property
    def pids(self) -> list[int]:
        """Of the processes."""
        return [worker.pid for worker in self._workers]

    def assign(self, slots: Sequence[int], total_slots: int) -> None:
        """Each process is told of its part, now and when it is started again."""
        for worker in self._workers:
            worker.assignment = {"slots": list(slots[worker.slots]), "total_slots": total_slots}
            worker.tell({"do": "assign", **worker.assignment})

    def reset(self, seed: Seed | None = None) -> np.ndarray:
        """New episodes everywhere, `[S, *obs_shape]`."""
        seed, self._seed = self._seed if seed is None else seed, None
        each = list(seed) if isinstance(seed, Sequence) else None
        if seed is not None:
            self._seeds = np.random.SeedSequence(seed)
        for worker in self._workers:
            worker.tell({"do": "reset", "seed": self._draw() if each is None else each[worker.slots]})
        for worker, answer in self._answers():
            if isinstance(answer, _WorkerError):
                self._restart(worker, answer)
            else:
                self._note_failures(worker, answer)
        return self._shared.obs.copy()

    def step(self, actions: np.ndarray) -> Step:
        """One step of every slot."""
        shared = self._shared
        shared.actions[:] = actions
        for worker in self._workers:
            # All are told before any is asked, so that they step side by side.
            worker.tell({"do": "step"})
        final: list[int] = []
        episodes: list[Episode] = []
        discarded: list[int] = []
        idle: list[int] = []
        for worker, answer in self._answers():
            if isinstance(answer, _WorkerError):
                part = worker.slots
                self._restart(worker, answer)
                discarded += range(part.start, part.stop)
                shared.reward[part] = 0.0
                shared.terminated[part] = shared.truncated[part] = False
                continue
            worker.rebuilder.succeeded()
            first = worker.slots.start
            final += [first + slot for slot in answer.get("final", ())]
            discarded += [first + slot for slot in answer.get("discarded", ())]
            idle += [first + slot for slot in answer.get("idle", ())]
            episodes += [Episode(first + slot, *rest) for slot, *rest in answer.get("episodes", ())]
            self._note_failures(worker, answer)
        return Step(
            # Copies: the next step writes over shared memory while these are still on their way into chunks.
            shared.obs.copy(),
            shared.reward.copy(),
            shared.terminated.copy(),
            shared.truncated.copy(),
            {slot: shared.final_obs[slot].copy() for slot in final},
            episodes,
            discarded,
            idle,
        )

    def render_frame(self, slot: int) -> np.ndarray:
        """The environment's own picture."""
        worker = next(each for each in self._workers if each.slots.start <= slot < each.slots.stop)
        try:
            return worker.picture(slot - worker.slots.start, self._config.step_timeout_s)
        except _WorkerError as error:
            # The next step finds it dead, and starts it again.
            raise NoPictureError(f"{self.spec.id} cannot be rendered: it {error.cause}") from None

    def close(self) -> None:
        """End the processes: they are asked to, and killed where they do not."""
        self._discard_processes()
        self._shared.close()
        super().close()

    def _discard_processes(self) -> None:
        for worker in self._workers:
            # Closing the socket is the request: a process that is waiting for it ends by itself.
            worker.hang_up()
        deadline_s = time.monotonic() + _CLOSING_S
        for worker in self._workers:
            worker.end(deadline_s)
        self._folder.cleanup()

    def _answers(self) -> list[tuple[_Worker, dict[str, Any] | _WorkerError]]:
        """What each process answers, or why it does not; all have as long as one."""
        deadline_s = time.monotonic() + self._config.step_timeout_s
        found: list[tuple[_Worker, dict[str, Any] | _WorkerError]] = []
        for worker in self._workers:
            try:
                found.append((worker, worker.answer(self._config.step_timeout_s, deadline_s)[0]))
            except _WorkerError as error:
                found.append((worker, error))
        return found

    def _restart(self, worker: _Worker, error: _WorkerError) -> None:
        """Start the process anew until its environments are reset, or until the rebuilder gives up."""
        while True:
            where = error.call
            slot = worker.slots.start + where.slot if where and where.slot is not None else None
            failure = Failure(
                self._config.id,
                error.cause,
                slot if slot is not None or worker.several else worker.slots.start,
                where.step if where else 0,
                where.seed if where else None,
            )
            self._count_failure(failure, worker.rebuilder)
            try:
                worker.start(self._draw())
                worker.made(self._making_s)
                worker.map(self._shared.fd, self.num_slots)
                if worker.assignment:
                    worker.tell({"do": "assign", **worker.assignment})
                worker.tell({"do": "reset", "seed": self._draw()})
                answer, _ = worker.answer(self._config.step_timeout_s)
                self._note_failures(worker, answer)
                return
            except _WorkerError as again:
                error = again

    def _note_failures(self, worker: _Worker, answer: dict[str, Any]) -> None:
        """Failures that the process has mended itself."""
        self.restarts_total += int(answer.get("failed", 0))
        for cause, slot, step, seed in answer.get("failures", ()):
            place = slot if slot is None else worker.slots.start + slot
            failure = Failure(self._config.id, cause, place, step, seed)
            self.failures.append(failure)
            _log.warning("%s; its episode is discarded", failure)

    def _draw(self) -> int:
        return int(self._seeds.spawn(1)[0].generate_state(1)[0] >> 1)

    @property
    def _making_s(self) -> float:
        return max(_MAKING_S, self._config.step_timeout_s)


class _WorkerError(Exception):
    """A process ended, or was killed for it did not answer."""

    def __init__(self, cause: str, call: calls.Call | None) -> None:
        super().__init__(cause)
        self.cause = cause
        self.call = call

    @property
    def where(self) -> str:
        """Goes behind the cause."""
        return f" {self.call}" if self.call else " while it is made"


class _Worker:
    """One process, and its end of the line."""

    def __init__(self, task: dict[str, Any], first: int, folder: Path) -> None:
        self.slots = slice(first, first + task["slots"])
        self.rebuilder = Rebuilder()
        self.assignment: dict[str, Any] = {}
        self._task = task
        self._folder = folder
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def several(self) -> bool:
        """Whether it has more than one slot."""
        return self.slots.stop - self.slots.start > 1

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._child is not None
        return self._child.pid

    def start(self, seed: int) -> None:
        """A new process, which is told what to make."""
        # SEQPACKET: a message is whole or absent, and its files come with it, so no framing of our own is
        # needed.
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [
            sys.executable,
            "-P",
            "-m",
            "troupe.common.envs.worker",
            str(theirs.fileno()),
            str(os.getpid()),
        ]
        variables = {**os.environ, calls.VARIABLE: str(self._folder), "OMP_NUM_THREADS": "1"}
        # Our copy of its end is closed at once: otherwise its death would not look like the end of the line.
        with theirs:
            self._child = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=variables
            )
        self.tell({"do": "make", "seed": seed, **self._task})

    def made(self, within_s: float) -> dict[str, Any]:
        """What it says of the environments, when it has made them."""
        return self.answer(within_s)[0]

    def map(self, fd: int, all_slots: int) -> None:
        """Have it map the memory of all slots."""
        message = {"do": "map", "all_slots": all_slots, "first": self.slots.start}
        with contextlib.suppress(OSError):  # what it has died of is told when it should answer
            socket.send_fds(self._link, [json.dumps(message).encode()], [fd])

    def tell(self, message: dict[str, Any]) -> None:
        """Say what to do."""
        with contextlib.suppress(OSError):
            self._link.send(json.dumps(message).encode())

    def answer(self, within_s: float, deadline_s: float | None = None) -> tuple[dict[str, Any], list[int]]:
        """The answer to the last message, and files that came with it.

        Args:
            within_s: what it is given.
            deadline_s: when that is over, on the monotonic clock; None: counted from now.

        Raises:
            _WorkerError: it has ended, or has been ended here, at the deadline.
            TroupeError: it says so.
        """
        left_s = within_s if deadline_s is None else deadline_s - time.monotonic()
        try:
            self._link.settimeout(max(0.001, left_s))  # an answer that lies there is always taken
            message, fds, _, _ = socket.recv_fds(self._link, MAX_MESSAGE, 1)
        except TimeoutError:
            raise self._failed(f"did not return within {within_s:g} s") from None
        except OSError:  # also where it has ended before, in `picture`
            message = b""
        if not message:
            raise self._failed("")
        said: dict[str, Any] = json.loads(message)
        if "error" in said:
            # By name and out of a table: nothing that comes over the line is ever turned into code.
            raise _ERRORS.get(said["error"], EnvError)(said["text"])
        return said, fds

    def picture(self, slot: int, within_s: float) -> np.ndarray:
        """What a slot shows, uint8 `[H, W, 3]`."""
        self.tell({"do": "render", "slot": slot})
        said, fds = self.answer(within_s)
        if "missing" in said:
            raise NoPictureError(said["missing"])
        with os.fdopen(fds[0], "rb") as file:
            file.seek(0)
            return np.frombuffer(file.read(), np.uint8).reshape(said["shape"])

    def _failed(self, cause: str) -> _WorkerError:
        """The process is gone, or goes now: why, and in which call it was."""
        assert self._child is not None
        if cause:
            self._child.send_signal(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(_CLOSING_S)
        if self._child.poll() is None:  # it has closed the line, and lives
            self._child.kill()
            self._child.wait()
        # After its end: until then the record may still change.
        running = calls.calls_of(self._folder, self.pid)
        self._forget()
        cause = cause or f"ended its process ({calls.ending(self._child.returncode)})"
        return _WorkerError(cause, running[0] if running else None)

    def _forget(self) -> None:
        self._link.close()
        for path in self._folder.glob(f"{self.pid}-*"):
            path.unlink(missing_ok=True)

    def hang_up(self) -> None:
        """Tell it that no more requests will come."""
        if self._child is not None:
            self._link.close()

    def end(self, deadline_s: float) -> None:
        """Wait for its end until the deadline, and kill it then."""
        if self._child is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(max(0.0, deadline_s - time.monotonic()))
        if self._child.poll() is None:
            self._child.kill()
        self._child.wait()
