"""What a replay shard refuses, as errors."""

from __future__ import annotations

from troupe.common.errors import AuthError, ConfigError, TroupeError
from troupe.common.wire import messages


class ReplayRefusedError(TroupeError):
    """The server will never serve this request. ``kind`` is a word to branch on."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"replay refused: {detail} ({kind})")
        self.kind = kind


# Kinds that the user's settings are the cause of, and the only cure.
_USERS_OWN = {
    "signature": ConfigError,
    "plan": ConfigError,
    "snapshot": ConfigError,
    messages.REFUSED_KEY: AuthError,
}


def refusal(endpoint: str, kind: str, detail: str) -> TroupeError:
    """The error that an ERROR of this kind from ``endpoint`` is."""
    error = _USERS_OWN.get(kind)
    return error(f"replay at {endpoint} refused: {detail}") if error else ReplayRefusedError(kind, detail)
