"""The limit of open files of a process, in which each of its connections counts as one."""

from __future__ import annotations

import contextlib
import resource

MAX_OPEN_FILES = 1 << 17
"""As far as the limit is raised: more than a service ever needs, and some programs go through all numbers."""
PER_MEMBER = 3
"""Connections that a member has to a learner at most: control, announcements, central inference."""
OWN = 256
"""Files that a service has beside those connections."""


def raise_limit() -> int:
    """Raise the limit as far as this user may, and return it: by default it is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft not in (resource.RLIM_INFINITY, wanted) and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # some sandboxes forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return limit()


def limit() -> int:
    """How many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft


def too_few_for(members: int) -> str:
    """Why the limit is too low for a learner with so many members, and what to do; empty where it is not."""
    needed = OWN + PER_MEMBER * members
    if limit() >= needed:
        return ""
    have = f"this process may have {limit():,} files open"
    return f"{have}, and {members:,} members take up to {needed:,}: {advice(needed)}"


def advice(needed: int) -> str:
    """How to raise the limit to so many files."""
    return f"raise the hard limit (`ulimit -Hn {needed}`, LimitNOFILE of systemd, --ulimit nofile of Docker)"
