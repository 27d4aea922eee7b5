"""A run's configuration as one short file for machines that have the presets."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from troupe.common.config import Config, differences, load_config
from troupe.common.config.presets import is_path, read_bases
from troupe.common.config.text import format_toml, format_value
from troupe.common.errors import ConfigError

MAX_LETTERS = 4096
"""The machines read it from the parameter store, which takes no more."""
# Sockets and keys are the machines' own; the others Terraform says.
_NOT_OURS = ("net.", "run.preset", "run.name")


def run_file(config: Config, preset: str) -> str:
    """Return TOML for machines to get this configuration from: a packaged preset, and what differs from it.

    Args:
        config: what all layers on this computer came to.
        preset: a packaged preset, or a file, which the machines do not have.

    Raises:
        ConfigError: it is too long, or cannot be said so.
    """
    base = next((name for name, _ in read_bases(preset) if not is_path(name)), None)
    sections: dict[str, dict[str, Any]] = {}
    for each in _differences(load_config(base), config):
        section, _, name = each.path.partition(".")
        sections.setdefault(section, {})[name] = "none" if each.new is None else each.new
    text = f"preset = {format_value(base)}\n\n" if base else ""
    text += format_toml(sections)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.toml"
        file.write_text(text, "utf-8")
        for each in _differences(load_config(str(file)), config):
            raise ConfigError(f"machines get the preset {base} and cannot be given {each}")
    if len(text.encode()) > MAX_LETTERS:
        raise ConfigError(
            f"what differs from the preset {base} has {len(text):,} letters; machines take {MAX_LETTERS:,}"
        )
    return text


def _differences(old: Config, new: Config) -> list[Any]:
    return [each for each in differences(old, new) if not each.path.startswith(_NOT_OURS)]
