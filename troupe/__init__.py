"""Troupe from Python: train, evaluate, use what was learned, bring algorithms and environments of one's own.

Importing this package is cheap: each name brings what it needs, torch for example, when it is first used.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType

    from troupe.common.agents import Agent
    from troupe.common.config.algorithms import register_algorithm
    from troupe.common.config.fields import AgentConfig, PixelAgentConfig, structural, tunable
    from troupe.common.envs.registration import register_env
    from troupe.common.errors import TroupeError
    from troupe.common.wire.replay.client import ReplayClient
    from troupe.following import Metrics
    from troupe.policy import Policy, load
    from troupe.run import Run
    from troupe.running import evaluate, resume, start, train
    from troupe.writer import NStepWriter, Writer

__all__ = [
    "Agent",
    "AgentConfig",
    "Metrics",
    "NStepWriter",
    "PixelAgentConfig",
    "Policy",
    "ReplayClient",
    "Run",
    "TroupeError",
    "Writer",
    "evaluate",
    "load",
    "register_algorithm",
    "register_env",
    "resume",
    "start",
    "structural",
    "train",
    "tunable",
]

_HOMES = {
    "Agent": "troupe.common.agents:Agent",
    "AgentConfig": "troupe.common.config.fields:AgentConfig",
    "Metrics": "troupe.following:Metrics",
    "NStepWriter": "troupe.writer:NStepWriter",
    "PixelAgentConfig": "troupe.common.config.fields:PixelAgentConfig",
    "Policy": "troupe.policy:Policy",
    "ReplayClient": "troupe.common.wire.replay.client:ReplayClient",
    "Run": "troupe.run:Run",
    "TroupeError": "troupe.common.errors:TroupeError",
    "Writer": "troupe.writer:Writer",
    "evaluate": "troupe.running:evaluate",
    "load": "troupe.policy:load",
    "register_algorithm": "troupe.common.config.algorithms:register_algorithm",
    "register_env": "troupe.common.envs.registration:register_env",
    "resume": "troupe.running:resume",
    "start": "troupe.running:start",
    "structural": "troupe.common.config.fields:structural",
    "train": "troupe.running:train",
    "tunable": "troupe.common.config.fields:tunable",
}


def _standard_library_first() -> None:
    """Move what precedes Python's own modules in `sys.path` behind them, ahead of installed packages.

    PYTHONPATH names a user's folder, and `python -m` adds the current one. Every library would import a file
    `signal.py` or `queue.py` from there instead of Python's own.
    """
    standard = os.path.dirname(os.__file__)
    if standard not in sys.path:
        return
    archive = f"{os.path.dirname(standard)}/python{sys.version_info.major}{sys.version_info.minor}.zip"
    users = [entry for entry in sys.path[: sys.path.index(standard)] if entry != archive]
    others = [entry for entry in sys.path if entry not in users]
    binary = os.path.join(standard, "lib-dynload")
    place = others.index(binary if binary in others else standard) + 1
    sys.path[:] = [*others[:place], *users, *others[place:]]


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Have a process that cannot import its own modules end with a line that says why, like any other."""
    from troupe.common.errors import OWN_ERROR, defect_line

    sys.__excepthook__(kind, error, trace)
    if isinstance(error, Exception):
        print(f"{OWN_ERROR} {defect_line(error)}", file=sys.stderr)


def _is_own_process() -> bool:
    """Whether this is `troupe` or `python -m troupe...`: other programs keep their path and their hook."""
    if sys.argv[:1] == ["-m"]:  # as long as Python looks for the module
        return sys.orig_argv[-len(sys.argv)].removeprefix("-m").partition(".")[0] == "troupe"
    return [os.path.basename(word) for word in sys.argv[:1]] == ["troupe"]


if _is_own_process():
    _standard_library_first()
    sys.excepthook = _tell


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from troupe.common.installation import version

        return version()
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    value = globals()[name] = getattr(importlib.import_module(module), attribute)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, "__version__"})
