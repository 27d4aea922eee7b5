"""The distribution that this code was installed from, how to install more of it, and modules outside it."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import shlex
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from types import ModuleType

from troupe.common.errors import ConfigError, caught, raised_line, raised_where

DISTRIBUTION = "troupe-rl"
"""On package indices; the command and the import have shorter names."""


def version() -> str:
    """Return the installed version, `unknown` for code that only lies somewhere on the path."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


@functools.cache
def commit() -> str:
    """Return the checkout's commit, with `-dirty` where its files are changed; empty where none is known.

    Of the moment when it is asked for first: a process goes on with the code that it has loaded.
    """
    checkout = Path(__file__).resolve().parents[1]
    if not (checkout / ".git").exists():
        return ""
    # Without tags (`--exclude=*`): a commit is what finds the code again, and a tag may move.
    command = ["git", "-C", str(checkout), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip()


def other_code(code: object) -> str:
    """Name the code that a checkpoint is of, and this one, where they differ; empty where they are the same.

    Args:
        code: what a checkpoint's `troupe` says. It may be anything.
    """
    wrote, here = _named(code), _named({"version": version(), "commit": commit()})
    return "" if wrote == here else f"{wrote}, this is {here}"


def _named(code: object) -> str:
    if not isinstance(code, dict):
        return "an unknown version of Troupe"
    number, revision = (" ".join(str(code.get(key) or "").split())[:60] for key in ("version", "commit"))
    return f"Troupe {number or 'unknown'}{f' ({revision})' if revision else ''}"


def install_command(extra: str) -> str:
    """Return what to type for an extra: from the checkout of this code, with its pins, else from the index.

    A name without a checkout would bring the published version over the one that is being worked on.
    """
    image = Path(sys.prefix) / "troupe-image"
    if image.is_file():  # nothing can be installed there: another image has to be built
        if image.read_text().strip() == "packer":
            return f"build the machine image with packer build -var 'extras=[\"{extra}\"]'"
        return f"build the images with it: TROUPE_EXTRAS={extra} docker compose build"
    checkout = Path(__file__).resolve().parents[1]
    if not (checkout / "pyproject.toml").is_file():
        return f"pip install '{DISTRIBUTION}[{extra}]'"
    folder = Path() if checkout == Path.cwd() else checkout
    pins = shlex.quote(str(folder / "constraints.txt"))
    return f"pip install -c {pins} -e {shlex.quote(f'{folder}[{extra}]')}"


def entry_points(group: str) -> dict[str, str]:
    """Return the modules that installed packages have declared in a group of entry points, by their names."""
    return {point.name: point.module for point in importlib.metadata.entry_points(group=group)}


def entry_point(group: str, name: str) -> str:
    """Return the module that an installed package has declared under a name; empty where none has.

    Raises:
        ConfigError: two packages have, and not the same one.
    """
    found = importlib.metadata.entry_points(group=group, name=name)
    packages = {point.module: point.dist.name if point.dist else point.module for point in found}
    if len(packages) > 1:
        raise ConfigError(
            f"{' and '.join(sorted(packages.values()))} both declare {name} in {group}: uninstall one of them"
        )
    return next(iter(packages), "")


def check_trackers(names: Collection[str]) -> None:
    """Refuse trackers that are not installed; each has the name of its package and extra."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            how = install_command(name)
            raise ConfigError(f"run.trackers has {name}, which is not installed: {how}, or leave it out")


def import_module(module: str, needed_by: str) -> ModuleType:
    """Import a module of somebody else's.

    `needed_by` begins the message: what needs it, such as an environment's id.

    Raises:
        ConfigError: it is not there, or whatever it raised.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{needed_by}{_missing(module, error)}") from error
    except ConfigError:
        raise
    except SystemExit as error:  # a program that runs as it is imported, such as one that reads arguments
        raise ConfigError(
            f"{needed_by}: importing {module} ends the program{raised_where(error)}: put what only a program "
            'does under `if __name__ == "__main__":`'
        ) from error
    except caught() as error:  # a stranger's code may raise anything
        raise ConfigError(f"{needed_by}: importing {module} failed: {raised_line(error)}") from error


def _missing(module: str, error: ImportError) -> str:
    """What to do; never to install something from an index because a module of the user's has its name."""
    missing, where = error.name or module, raised_where(error)
    top = missing.partition(".")[0]
    if not isinstance(error, ModuleNotFoundError):
        return f": importing {module} failed: {' '.join(str(error).split())}{where}"
    # The module is there and something that it imports is not: its name has to be in the advice.
    if top != module.partition(".")[0]:
        return f": the module {module} imports {missing}, which is not installed{where}"
    if missing != top and top in sys.modules:  # found: PYTHONPATH is right, and the name after it is not
        parent, _, name = missing.rpartition(".")
        return f": {parent} has no module {name}{where}"
    if Path(f"{top}.py").exists() or Path(top).is_dir():
        return f": Python does not look for {missing} in this folder; begin the command with PYTHONPATH=."
    return (
        f" needs the module {missing}: install its package or, if it is a file of yours, name its folder "
        "with PYTHONPATH"
    )
