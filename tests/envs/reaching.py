"""A module with an environment, and with functions of others that are none of its own."""

import os
from os import mkdir

from tests.envs.catch import CatchEnv

__all__ = ["Reaching", "mkdir", "os"]


class Reaching(CatchEnv):
    """An environment of this module."""

    def step(self, action):
        return super().step(action)
