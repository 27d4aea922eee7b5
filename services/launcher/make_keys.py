"""`troupe keys`: the CURVE keys of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from troupe.common.errors import ConfigError
from troupe.common.runtime.parser import Parser
from troupe.common.wire.security.keys import ALLOWED_FILE, KEY_ROLES, check_set, load_keys, make_keys


def new_parser() -> Parser:
    """Return the parser of `troupe keys new`."""
    parser = Parser(prog="troupe keys new", description="Make keys for each role, and the allow-list.")
    parser.add_argument(
        "directory", metavar="DIR", type=Path, help="made with mode 0700; every file gets 0600"
    )
    parser.add_argument(
        "--if-missing", action="store_true", help="if DIR already holds a complete set, only check it"
    )
    return parser


def check_parser() -> Parser:
    """Return the parser of `troupe keys check`."""
    parser = Parser(prog="troupe keys check", description="Check what a service of a role would load.")
    parser.add_argument("directory", metavar="DIR", type=Path, help="a directory of keys")
    parser.add_argument("--role", choices=KEY_ROLES, help="default: all of them, and the allow-list")
    return parser


def new(words: Sequence[str]) -> int:
    """Make keys."""
    options = new_parser().parse_args(words)
    try:
        make_keys(options.directory)
    except ConfigError:
        if not (options.if_missing and (options.directory / ALLOWED_FILE).exists()):
            raise
        check_set(options.directory)
        print(f"{options.directory} holds a complete set already")
        return 0
    print(f"made keys for {', '.join(KEY_ROLES)} in {options.directory}")
    print(
        f"give them to services with --keys {options.directory} or TROUPE_NET__KEYS_DIR; see docs/security.md"
    )
    return 0


def check(words: Sequence[str]) -> int:
    """Check keys."""
    options = check_parser().parse_args(words)
    if options.role:
        load_keys(options.directory, options.role)
    else:
        check_set(options.directory)
    print(f"{options.directory}: usable{f' by the {options.role}' if options.role else ''}")
    return 0
