"""`troupe keys`: the CURVE keys of a run."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from troupe.common.wire.security.keys import ALLOWED_FILE, KEY_ROLES, check_set, load_keys, make_keys


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add `new` and `check`."""
    commands = parser.add_subparsers(metavar="new | check", required=True)
    new = commands.add_parser("new", help="make a pair for each role, and the allow-list")
    new.add_argument("directory", metavar="DIR", type=Path, help="made with mode 0700; every file gets 0600")
    new.add_argument(
        "--if-missing", action="store_true", help="where DIR holds a complete set already, only check that"
    )
    new.set_defaults(run=_new)
    check = commands.add_parser("check", help="check what a service of a role would load")
    check.add_argument("directory", metavar="DIR", type=Path, help="a directory of keys")
    check.add_argument("--role", choices=KEY_ROLES, help="default: all of them, and the allow-list")
    check.set_defaults(run=_check)


def run(options: argparse.Namespace) -> int:
    """Do what `options`, from a parser with `add_commands`, say."""
    command: Callable[[argparse.Namespace], None] = options.run
    command(options)
    return 0


def _new(options: argparse.Namespace) -> None:
    if options.if_missing and (options.directory / ALLOWED_FILE).exists():
        check_set(options.directory)
        print(f"{options.directory} holds a complete set already")
        return
    make_keys(options.directory)
    print(f"made keys for {', '.join(KEY_ROLES)} in {options.directory}")
    print(f"services find them by --keys {options.directory} or TROUPE_NET__KEYS_DIR; docs/security.md")


def _check(options: argparse.Namespace) -> None:
    if options.role:
        load_keys(options.directory, options.role)
    else:
        check_set(options.directory)
    print(f"{options.directory}: usable{f' by the {options.role}' if options.role else ''}")
