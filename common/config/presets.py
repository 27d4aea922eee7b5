"""The presets: TOML files of the `configs` package, or any TOML file by its path."""

from __future__ import annotations

import difflib
import importlib.resources
import re
import tomllib
from pathlib import Path
from typing import Any

from troupe.common.config.text import load_toml
from troupe.common.errors import ConfigError


def preset_names() -> list[str]:
    """Return the names of the presets that come with the package, sorted."""
    files = importlib.resources.files("troupe.configs").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def is_path(preset: str) -> bool:
    """Return whether a preset is given as the path of a file, not by its name."""
    return preset.endswith(".toml") or "/" in preset


def preset_id(preset: str) -> str:
    """Return what finds a preset again from another directory: its name, or its absolute path."""
    return str(Path(preset).resolve()) if is_path(preset) else preset


def read_preset(name: str) -> dict[str, Any]:
    """Return a preset's tables. `name` is a preset's name or the path of a TOML file."""
    if is_path(name):
        return read_toml(Path(name))
    if name not in preset_names():
        # `atari:pong` and `CartPole-v1` are what people type first who know other libraries.
        if re.fullmatch(r"[\w/]+:.+|.+-v\d+", name):
            raise ConfigError(
                f"{name!r} is an environment, not a preset: use `troupe train --algo NAME --env {name}`, "
                f"such as --algo ppo, or `troupe train PRESET --env {name}`"
            )
        if Path(name).is_file():
            raise ConfigError(
                f"{name} is not TOML: a configuration is a file NAME.toml, as `troupe config show` prints"
            )
        near = difflib.get_close_matches(name, preset_names(), n=1)
        hint = f"; nearest: {near[0]}" if near else ""
        raise ConfigError(f"unknown preset {name!r}{hint} (`troupe presets` lists all)")
    return _tables(
        (importlib.resources.files("troupe.configs") / f"{name}.toml").read_text("utf-8"), f"preset {name}"
    )


def read_bases(name: str) -> list[tuple[str, dict[str, Any]]]:
    """Return a preset's name and tables, then those of the preset that it begins from, and so on.

    A TOML file names it in its first lines, `preset = "NAME"`; a path there is relative to the file.
    """
    found: list[tuple[str, dict[str, Any]]] = []
    seen = {preset_id(name)}
    while True:
        tables = dict(read_preset(name))
        base = tables.pop("preset", None)
        found.append((name, tables))
        if base is None:
            return found
        if not isinstance(base, str) or not base:
            raise ConfigError(f'{name}: preset should be the name of a preset or a path, preset = "NAME"')
        # Relative to the file, not to the working directory: a folder of configurations can then be moved as
        # a whole.
        name = str(Path(name).parent / base) if is_path(base) else base
        # By absolute path: `../a/b.toml` and `b.toml` may be the same file, and the circle would never end.
        if preset_id(name) in seen:
            raise ConfigError(f"{found[-1][0]}: preset = {base!r} leads back to itself")
        seen.add(preset_id(name))


def preset_summary(name: str) -> str:
    """Return what a preset is for: the comment on the first line of its file."""
    text = (importlib.resources.files("troupe.configs") / f"{name}.toml").read_text("utf-8")
    first = text.partition("\n")[0]
    return first.lstrip("# ").strip() if first.startswith("#") else ""


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "not a text file"
        raise ConfigError(f"cannot read {path}: {reason}") from None
    return _tables(text, str(path))


def _tables(text: str, source: str) -> dict[str, Any]:
    try:
        return load_toml(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not valid TOML: {error}") from None
