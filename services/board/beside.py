"""`python -m troupe.services.board.beside RUN PORT`: the board of one run, beside its training."""

from __future__ import annotations

import sys
from pathlib import Path

from troupe.common.runtime.lifecycle import run_main
from troupe.services.board.command import listen, serve
from troupe.services.board.library import Library


def main(run: str, port: str) -> None:
    """Serve at this port and no other: its address has been printed."""
    host = "127.0.0.1"
    serve(Library([Path(run)]), host, listen(host, int(port), 0), is_logged=True)


if __name__ == "__main__":
    sys.exit(run_main(lambda: main(*sys.argv[1:3])))
