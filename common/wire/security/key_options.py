"""`--keys` and `--insecure`, the same for every service, and what they mean for its sockets."""

from __future__ import annotations

import argparse
import os

from troupe.common.wire.security.keys import load_keys
from troupe.common.wire.sockets import Security

KEYS_VARIABLE = "TROUPE_NET__KEYS_DIR"
INSECURE_VARIABLE = "TROUPE_NET__INSECURE"


def add_key_arguments(parser: argparse.ArgumentParser, *, server: bool = False) -> None:
    """Add `--keys` and, for what binds an address, `--insecure`; environment variables are their defaults."""
    parser.add_argument(
        "--keys",
        metavar="DIR",
        default=os.environ.get(KEYS_VARIABLE, ""),
        help=f"CURVE keys of the run, made by `troupe keys new DIR` (default: ${KEYS_VARIABLE}, or none)",
    )
    if server:
        parser.add_argument(
            "--insecure",
            action="store_true",
            default=_is_true(parser, INSECURE_VARIABLE),
            help="allow addresses other than loopback without keys: anyone who reaches them can take part",
        )


def make_security(keys_dir: str, role: str, *, insecure: bool = False) -> Security:
    """How a service of `role` protects its sockets; an empty directory name means without keys.

    Raises `AuthError` where the keys cannot be used.
    """
    return Security(insecure, load_keys(keys_dir, role) if keys_dir else None)


def _is_true(parser: argparse.ArgumentParser, variable: str) -> bool:
    text = os.environ.get(variable, "false").strip().lower()
    if text not in ("true", "false"):
        parser.error(f"{variable} = {text!r}: should be true or false")
    return text == "true"
