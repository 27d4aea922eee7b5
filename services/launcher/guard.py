"""Replaces itself by a command that cannot outlive its parent.

    python -I -S guard.py PARENT_PID SIGNAL NICE COMMAND [ARGUMENT ...]

The launcher starts every child through this file. The kernel sends SIGNAL to the child when the launcher
dies, however it dies; the setting survives `exec`. It is made here, in the child, rather than between fork
and exec of the launcher, where running Python code is not safe once there are threads. Linux only; elsewhere
a plain `exec`.
"""

import ctypes
import os
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def guarded(command: Sequence[str], number: int, nice: int = 0) -> list[str]:
    """The words that start `command`, and send it signal `number` when this process dies."""
    return [sys.executable, "-I", "-S", __file__, *map(str, (os.getpid(), int(number), nice)), *command]


def main() -> None:
    """Ask for the signal, check that the parent is still there, become the command."""
    parent, number, nice = (int(word) for word in sys.argv[1:4])
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # it died before the request was in force
        sys.exit(0)
    if nice:
        os.nice(nice)
    os.execvp(sys.argv[4], sys.argv[4:])


if __name__ == "__main__":
    main()
