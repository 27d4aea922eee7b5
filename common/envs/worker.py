"""`python -m troupe.common.envs.worker FD PARENT_PID`: steps some environments for its parent.

What to do comes over the Unix socket FD, from `troupe.common.envs.workers`, in messages of JSON; every one
but `map` and `assign` is answered. Arrays are in shared memory (`troupe.common.envs.shared`). It ends with
its parent, also in the midst of a call that hangs.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import logging
import os
import signal
import socket
import sys
from typing import Any

import numpy as np

from troupe.common.config.env_section import EnvConfig
from troupe.common.envs import make_vector
from troupe.common.envs.base import Seed, VectorEnv
from troupe.common.envs.shared import MAX_MESSAGE, SharedStep
from troupe.common.envs.spectator import NoPictureError
from troupe.common.errors import TroupeError

_PR_SET_PDEATHSIG = 1


class _Worker:
    """The environments, and where their steps go."""

    def __init__(self, config: dict[str, Any], slots: int, seed: int, threads: int, evaluation: bool) -> None:
        # Here are the processes; what they make has none.
        own = EnvConfig.model_validate(config).model_copy(update={"processes": 0})
        self.vector: VectorEnv = make_vector(own, slots, seed, threads, evaluation=evaluation)

    def map(self, fd: int, all_slots: int, first: int) -> None:
        """The slots from `first` on are this process's."""
        self._shared = SharedStep(self.vector.spec, all_slots, fd)
        self._part = slice(first, first + self.vector.num_slots)

    def reset(self, seed: Seed) -> dict[str, Any]:
        """New episodes."""
        self._shared.obs[self._part] = self.vector.reset(seed)
        return self._failures()

    def step(self) -> dict[str, Any]:
        """One step, with the actions that are there."""
        shared, part = self._shared, self._part
        # A copy, since some engines keep the array.
        step = self.vector.step(shared.actions[part].copy())
        shared.obs[part], shared.reward[part] = step.obs, step.reward
        shared.terminated[part], shared.truncated[part] = step.terminated, step.truncated
        for slot, obs in step.final_obs.items():
            shared.final_obs[part.start + slot] = obs
        told: dict[str, Any] = {}
        if step.final_obs:
            told["final"] = list(step.final_obs)
        if step.discarded:
            told["discarded"] = step.discarded
        if step.idle:
            told["idle"] = step.idle
        if step.episodes:
            told["episodes"] = step.episodes
        return told | self._failures()

    def render(self, slot: int) -> tuple[dict[str, Any], int | None]:
        """The size of a picture, and the file that holds it; or why there is none."""
        try:
            picture = np.ascontiguousarray(self.vector.render_frame(slot))
        except NoPictureError as error:
            return {"missing": str(error)}, None
        # Through a file, since a picture is larger than a message of the socket may be.
        fd = os.memfd_create("troupe-picture", os.MFD_CLOEXEC)
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(picture.tobytes())
        return {"shape": list(picture.shape)}, fd

    def _failures(self) -> dict[str, Any]:
        found = []
        while self.vector.failures:
            failure = self.vector.failures.popleft()
            found.append([failure.cause[:1000], failure.slot, failure.step, failure.seed])
        return {"failures": found[-20:], "failed": len(found)} if found else {}


def main() -> None:
    """Do as it is told until the other end closes."""
    end_with(int(sys.argv[2]))
    # The parent says it, with the slot's number there.
    logging.getLogger("troupe.common.envs.base").setLevel(logging.ERROR)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which closes the socket
    link = socket.socket(fileno=int(sys.argv[1]))
    worker: _Worker | None = None
    while True:
        message, fds = b"", list[int]()
        # The parent may close with answers unread, as at Ctrl-C in a step: the same end.
        with contextlib.suppress(ConnectionError):
            message, fds, _, _ = socket.recv_fds(link, MAX_MESSAGE, 1)
        if not message:
            return
        task = json.loads(message)
        do, fd = task.pop("do"), None
        try:
            if do == "make":
                worker = _Worker(**task)
                spec = dataclasses.asdict(worker.vector.spec)
                said: dict[str, Any] = {"spec": spec, "steps_per_s": worker.vector.steps_per_s}
            else:
                assert worker is not None
                if do == "map":
                    worker.map(fds[0], **task)
                    continue
                if do == "assign":
                    worker.vector.assign(**task)
                    continue
                if do == "render":
                    said, fd = worker.render(**task)
                else:
                    said = worker.step() if do == "step" else worker.reset(**task)
        except TroupeError as error:
            # Only errors that name a cause; anything else ends the process, and its traceback is in the log.
            said = {"error": type(error).__name__, "text": str(error)[:4000]}
        with contextlib.suppress(ConnectionError):
            socket.send_fds(link, [json.dumps(said).encode()], [] if fd is None else [fd])
        if fd is not None:
            os.close(fd)


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the request was in force
        os._exit(0)


if __name__ == "__main__":
    main()
