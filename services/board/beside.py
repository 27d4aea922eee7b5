"""`python -m troupe.services.board.beside RUN PORT`: the board of one run, beside its training."""

from __future__ import annotations

import sys
from pathlib import Path

from troupe.common.errors import ConfigError, TroupeError
from troupe.common.runtime.lifecycle import run_main
from troupe.services.board.command import Address, listen, serve
from troupe.services.board.library import Library


def main(run: str, port: str) -> None:
    """Serve at this port and no other: its address has been printed.

    Raises:
        TroupeError: another program took the port first. The launcher chooses another one and starts this
          again, as it would not after a ConfigError.
    """
    address = Address("127.0.0.1", int(port))
    try:
        listener = listen(address.host, address.port, tried=0)
    except ConfigError as error:
        raise TroupeError(f"port {port} was taken by another program") from error
    serve(Library([Path(run)]), address, listener, is_logged=True)


if __name__ == "__main__":
    sys.exit(run_main(lambda: main(*sys.argv[1:3])))
