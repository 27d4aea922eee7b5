"""MuJoCo: `mujoco:HalfCheetah-v5` and Gymnasium's other tasks, with the engine's warnings where they belong.

Gymnasium has no vectoriser for them. The engine lets go of Python's lock while it computes, so
`actor.env_threads` use several cores.
"""

from __future__ import annotations

import difflib
import importlib
import logging
import os
from typing import Any

from troupe.common.errors import ConfigError, MissingEngineError
from troupe.common.installation import install_command

_log = logging.getLogger(__name__)
_told: set[str] = set()

PREFIX = "mujoco:"


def registered(name: str) -> str:
    """Gymnasium's id of a task. Raises ConfigError where there is none of this name, or MuJoCo is missing."""
    # Gymnasium's tasks import what draws them, whether somebody looks or not.
    load(f"{PREFIX}{name}", "mujoco", "gymnasium.envs.mujoco.mujoco_rendering")
    tasks = _tasks()
    if name not in tasks:
        newest = [task for task in tasks if task.partition("-")[0].lower() == name.partition("-")[0].lower()]
        near = newest[-1:] or difflib.get_close_matches(name, tasks, n=1, cutoff=0.0)
        raise ConfigError(f"unknown MuJoCo task {name!r}: did you mean {PREFIX}{near[0]}?")
    return name


def load(env_id: str, extra: str, *modules: str) -> None:
    """Import MuJoCo, and `modules`, for an environment.

    Raises:
        MissingEngineError: one of them, or what it imports, is missing; names the `extra` that brings it.
    """
    os.environ.setdefault("MUJOCO_GL", "egl")  # films are drawn without a window system
    try:
        import mujoco

        for module in modules:
            importlib.import_module(module)
    except ImportError as error:
        raise MissingEngineError(
            f"{env_id} needs the module {error.name or 'mujoco'}: {install_command(extra)}"
        ) from error
    # By default it appends to a file in the current folder, and prints.
    mujoco.set_mju_user_warning(_warn)


def _tasks() -> list[str]:
    """Those of Gymnasium that need nothing older than the bindings of today, in order of name and version."""
    import gymnasium

    def made_of(spec: Any) -> str:
        return spec.entry_point if isinstance(spec.entry_point, str) else ""

    return sorted(
        name
        for name, spec in gymnasium.registry.items()
        if made_of(spec).startswith("gymnasium.envs.mujoco.") and name.endswith(("-v4", "-v5"))
    )


def _warn(text: str) -> None:
    """Say it in the log, once; that a model is written in an older style needs no action."""
    if text not in _told and len(_told) < 100:
        _told.add(text)
        _log.log(logging.DEBUG if "deprecated" in text else logging.WARNING, "MuJoCo: %s", text)
