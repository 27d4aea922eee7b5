"""Same host: a shard lets its peers map its files, and a peer proves that it can.

The shard writes a random token in its folder and tells every client where the folder is, but not the token. A
peer whose kernel has the same boot id opens the folder, and sends the token with its requests: so it has the
very same files, not others by the same name in another container or on another machine. A shard that has
been restarted has another token, for its files may be others; then windows are sent until the peer has mapped
them anew.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import re
import stat
from pathlib import Path
from typing import Any

from troupe.common import system
from troupe.common.data.arena import Arena
from troupe.common.errors import ConfigError
from troupe.common.machine import boot_id

TOKEN_FILE = "token"

_log = logging.getLogger(__name__)


class SharedFiles:
    """The shard's side.

    Attributes:
        offer: what the shard tells its peers; empty where its files cannot be shared.
    """

    def __init__(self, folder: Path) -> None:
        """Write a new token in `folder`."""
        self._token = system.random.randbytes(16).hex()
        self.offer: dict[str, str] = {}
        host = boot_id()
        if not host:
            return
        path = folder / TOKEN_FILE
        try:
            # A whole token or none: a peer may read at any moment.
            path.with_suffix(".tmp").write_text(self._token)
            os.replace(path.with_suffix(".tmp"), path)
        except OSError as error:
            _log.warning("cannot share the files in %s: %s", folder, error.strerror)
            return
        self.offer = {"folder": str(folder.resolve()), "host": host}

    def is_same_host(self, token: str) -> bool:
        """Whether a peer that says `token` has these very files."""
        return bool(self.offer) and hmac.compare_digest(token.encode(), self._token.encode())


class PeerFiles:
    """The peer's side: the files of one shard, once and as long as they can be mapped.

    Attributes:
        arena: the files; None while they are not mapped.
        token: to be sent with requests; empty while they are not mapped.
    """

    def __init__(self) -> None:
        self.arena: Arena | None = None
        self.token = ""
        self._offer: dict[str, Any] = {}

    def offered(self, offer: dict[str, Any]) -> None:
        """The shard says where its files are, or nothing if it does not share them."""
        self.arena, self.token = None, ""
        self._offer = offer if offer.get("host") == boot_id() else {}

    def map(self) -> None:
        """Map what was offered, if it can be done, once something is stored. Tries every offer once."""
        offer, self._offer = self._offer, {}
        if self.arena is not None or not offer:
            return
        try:
            folder = Path(str(offer["folder"]))
            # The token first: should the files be replaced meanwhile, it is the token that is too old.
            token = _read_token(folder / TOKEN_FILE)
            self.arena, self.token = Arena(folder), token
            _log.info("reading replay's files in %s", folder)
        except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
            _log.info(
                "replay's files are not accessible here (%s): items are sent over the connection", error
            )


def _read_token(path: Path) -> str:
    """The token in `path`, which may be anything at all."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise ValueError("the token is no file")
        text = os.read(file, 64).decode("ascii", "replace")
    finally:
        with contextlib.suppress(OSError):
            os.close(file)
    if not re.fullmatch(r"[0-9a-f]{32}", text):
        raise ValueError("no token")
    return text
