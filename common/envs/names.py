"""Names of environments that other programs use, and what they are called here."""

from __future__ import annotations

import re

_VERSIONED = re.compile(r"[\w/.-]+-v\d+")
_ATARI = re.compile(r"(?:ALE/)?([A-Z][A-Za-z0-9]*?)(?:-ram)?(?:NoFrameskip|Deterministic)?-v\d+")


def own_name(name: str) -> str:
    """Return the id here of what Gymnasium calls `name` (`CartPole-v1`); empty where it is no such name.

    >>> own_name("PongNoFrameskip-v4"), own_name("ALE/Breakout-v5"), own_name("CartPole-v1")
    ('atari:pong', 'atari:breakout', 'gym:CartPole-v1')
    """
    name = name.removeprefix("gym:")
    if not _VERSIONED.fullmatch(name):
        return ""
    atari = _ATARI.fullmatch(name)
    if atari and (name.startswith("ALE/") or atari[1] + "-v" not in name):
        return "atari:" + re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", atari[1]).lower()
    return f"gym:{name}"
