"""What passes between a process that acts and those that step its environments, in memory that both map."""

from __future__ import annotations

import mmap
import os

import numpy as np

from troupe.common.envs.base import EnvSpec

MAX_MESSAGE = 1 << 20
"""Limit in bytes on a message between the two."""
_ALIGNMENT = 64


class SharedStep:
    """The arrays of one step of `S` slots, in a file without a name.

    Attributes:
        fd: the file, for a process that is to map it as well.
        actions: `[S, *actions.shape]`, what to do.
        obs: `[S, *obs_shape]`, see `troupe.common.envs.base.Step`; so are the others.
        final_obs: `[S, *obs_shape]`, only of slots whose episode ended.
        reward: float32 `[S]`.
        terminated: bool `[S]`.
        truncated: bool `[S]`.
    """

    def __init__(self, spec: EnvSpec, slots: int, fd: int | None = None) -> None:
        """Make the file, or map the one of another process."""
        kinds = {
            "actions": (spec.actions.shape, spec.actions.dtype),
            "obs": (spec.obs_shape, np.dtype(spec.obs_dtype)),
            "final_obs": (spec.obs_shape, np.dtype(spec.obs_dtype)),
            "reward": ((), np.dtype(np.float32)),
            "terminated": ((), np.dtype(bool)),
            "truncated": ((), np.dtype(bool)),
        }
        places, size = {}, 0
        for name, (shape, dtype) in kinds.items():
            places[name] = size, (slots, *shape), dtype
            # A cache line apart, so that processes that write to neighbouring arrays do not share one.
            size += -(-slots * int(np.prod(shape)) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        if fd is None:
            # Without a name: a killed process leaves nothing, and /dev/shm, which containers limit
            # to 64 MiB, has no part in it.
            fd = os.memfd_create("troupe-envs", os.MFD_CLOEXEC)
            os.truncate(fd, size)
        self.fd = fd
        memory = mmap.mmap(fd, size)

        def array(name: str) -> np.ndarray:
            begin, shape, dtype = places[name]
            return np.frombuffer(memory, dtype, int(np.prod(shape)), begin).reshape(shape)

        self.actions, self.obs, self.final_obs = array("actions"), array("obs"), array("final_obs")
        self.reward, self.terminated = array("reward"), array("terminated")
        self.truncated = array("truncated")

    def close(self) -> None:
        """Close the file; the memory goes when nobody maps it."""
        os.close(self.fd)
