"""The errors that a user may see: one line each, each with the exit code of the process that it ends."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import sysconfig
import traceback
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

OWN_ERROR = "troupe: error:"
"""How the line begins in which a program of ours says why it ends: those that started it look for it."""
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""What the system says where the disk, or what one may use of it, is full."""
_PYTHONS_OWN = (sysconfig.get_path("stdlib"), "<frozen ")
"""Where the files of Python's library are, and how those begin that have none."""
_DEFECT = re.compile(r"(\w+)(?:: .*)?( \([^()]+:\d+\))")
"""What `defect_line` says of an error in a user's own code."""


class TroupeError(Exception):
    """Base of every expected error. `str(error)` is one line and says what to do."""

    exit_code = 70


class ConfigError(TroupeError):
    """A preset, field, value, environment or directory that cannot be used."""

    exit_code = 2


class DatasetError(ConfigError):
    """A data set that is absent, damaged, or of another environment."""


class MissingEngineError(ConfigError):
    """The configuration is right, but its environment is not installed on this machine."""


class PeerError(TroupeError):
    """A peer could not be reached, or went away, before a deadline."""

    exit_code = 3


class AuthError(TroupeError):
    """A peer, or this process, was turned away by a key check."""

    exit_code = 4


class RefusedError(TroupeError):
    """What a peer asked for, or said, and what cannot be served. `kind` is a word to branch on.

    `extra` has further fields of the ERROR that answers it.
    """

    def __init__(self, kind: str, detail: str, **extra: object) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail
        self.extra = extra


class CheckpointError(TroupeError):
    """A checkpoint is absent, damaged, or does not match the run."""

    exit_code = 5


OF_EXIT_CODE: dict[int, type[TroupeError]] = {
    error.exit_code: error for error in (ConfigError, PeerError, AuthError, CheckpointError)
}
"""What a process of ours that ended with this code has died of; of others nothing is known."""


class MisfitError(CheckpointError):
    """A checkpoint is of the same algorithm, but of another network."""


class SyncFailedError(TroupeError):
    """What was written could not be forced to the disk. It is not tried again.

    The system reports such a failure once: the next try may say that all is well, and have lost pages.
    """


def caught() -> tuple[type[BaseException], ...]:
    """What somebody else's code may raise without ending the process: it may also call `exit()`.

    KeyboardInterrupt as well, unless Ctrl-C raises it here: services turn the signal into a flag, and
    commands, see `run_main`, have Python's own handler from the first Ctrl-C on.
    """
    own = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return (Exception, SystemExit) if own else (Exception, SystemExit, KeyboardInterrupt)


def raised_where(error: BaseException) -> str:
    """` (FILE:LINE)`: the innermost line that is neither Troupe's nor of a library, or nothing."""
    if isinstance(error, SyntaxError) and error.filename:  # no line has run
        return f" ({Path(error.filename).name}:{error.lineno})"
    where = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        names, path = frame.f_globals, frame.f_code.co_filename
        # `__main__` of a service has its package only.
        ours = f"{names.get('__package__') or names.get('__name__', '')}.".startswith("troupe.")
        if not ours and "-packages" not in path and not path.startswith(_PYTHONS_OWN):
            where = f" ({Path(path).name}:{line})"
    return where


def _hidden(error: BaseException) -> str:
    """`; FILE hides the package NAME: rename it`, where an import or a name of a module failed for that."""
    name = error.name if isinstance(error, ImportError) else None
    if isinstance(error, AttributeError) and isinstance(error.obj, ModuleType):
        name = error.obj.__name__
    top = (name or "").partition(".")[0]
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    installed = [sysconfig.get_path(kind) for kind in ("purelib", "platlib")]
    spec = PathFinder.find_spec(top, installed) if file else None
    # PYTHONPATH may name the folder of the packages itself, and through a link.
    if spec is None or os.path.realpath(spec.origin or "") == os.path.realpath(file):
        return ""
    return f"; {file} hides the package {top}: rename it"


def raised_line(error: BaseException) -> str:
    """`TYPE: text (FILE:LINE)`, see `raised_where`: what somebody else's code raised, in one line."""
    text = error.msg if isinstance(error, SyntaxError) and error.filename else error
    words = f"{type(error).__name__}: {text}".split()
    return " ".join(words).rstrip(":") + _hidden(error) + raised_where(error)


def defect_line(error: BaseException) -> str:
    """`TYPE: text (FILE:LINE)`, as `raised_line`; without such a line, `internal error, TYPE: text`."""
    return f"{'' if raised_where(error) else 'internal error, '}{raised_line(error)}"


def sameness(line: str) -> object:
    """Equal for two lines that tell of the same error: type and place of a `defect_line`, else every word."""
    found = _DEFECT.fullmatch(line)
    return found.groups() if found else line


class TornStateError(Exception):
    """A change failed in its midst, which only a defect can cause: memory no longer says what the files do.

    Nothing may be served after this. The files are those of a process that was killed at this instruction, so
    the next one starts from them with nothing half done.
    """
