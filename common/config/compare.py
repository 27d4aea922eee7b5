"""Comparing configurations: the structural hash that services exchange, and differences by role."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from troupe.common.config.fields import Role, UntypedAgentConfig, role_of
from troupe.common.config.schema import Config
from troupe.common.config.text import format_toml, format_value
from troupe.common.errors import ConfigError


@dataclass(frozen=True)
class Difference:
    """One field that two configurations disagree on."""

    path: str
    role: Role
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.path}: {_shown(self.old)} -> {_shown(self.new)}"


def to_toml(config: Config) -> str:
    """Return the whole configuration as TOML; `read_config` gives the same configuration back."""
    sections = config.to_dict()
    for name, values in sections.items():
        fields = type(getattr(config, name)).model_fields
        for key, value in values.items():
            if value is None and key in fields and fields[key].default is not None:
                # TOML has no null. Left out, the field would be at its default when the file is read again,
                # and that is another value.
                values[key] = "none"
    return format_toml(sections)


def structural_fields(config: Config) -> dict[str, Any]:
    """Return `{"section.field": value}` of what all services and checkpoints of a run must share."""
    if isinstance(config.agent, UntypedAgentConfig):
        raise ValueError("the agent section is untyped here (no torch): its structural fields are not known")
    return {path: value for path, (value, role) in _fields(config).items() if role == "structural"}


def structural_hash(config: Config) -> str:
    """Return a short hash of the structural fields."""
    # Sorted and ASCII, so that clients in other languages can compute the same bytes.
    text = json.dumps(structural_fields(config), sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def changed_structure(written: Any, config: Config) -> list[str]:
    """Return which structural fields of `config` are otherwise in `written`, in words.

    Args:
        written: a `Config.to_dict()` of this or an earlier version. What it lacks is newer, and counts as the
            default.
        config: with a typed agent section.
    """
    if not isinstance(written, dict):
        return ["no configuration"]
    structural, sections, strange = structural_fields(config), {}, []
    for name in type(config).model_fields:
        model, values = type(getattr(config, name)), written.get(name, {})
        try:
            sections[name] = model.model_validate(
                # Unknown keys are left out, for the section would refuse them: they are from a later version,
                # or of an algorithm that has dropped them since.
                {key: values[key] for key in model.model_fields if key in values}
            )
        except (ValidationError, TypeError):
            strange.append(f"a section [{name}] that is none here")
    found = differences(config.model_copy(update=sections), config)
    return strange + [
        f"{each.path} = {_shown(each.old)} instead of {_shown(each.new)}"
        for each in found
        if each.path in structural
    ]


def differences(old: Config, new: Config) -> list[Difference]:
    """Return the fields whose values differ, in the schema's order."""
    before, after = _fields(old), _fields(new)
    found = []
    for path in [*before, *(path for path in after if path not in before)]:
        old_value, role = before.get(path, (None, None))
        new_value, new_role = after.get(path, (None, None))
        if old_value != new_value or (role is None) != (new_role is None):
            # The role that it has now decides: a field may have become tunable since the run began.
            found.append(Difference(path, new_role or role or "structural", old_value, new_value))
    return found


def not_resumable(changes: Sequence[str]) -> ConfigError:
    """What a resumed run is refused with that has other structural fields, each in words."""
    return ConfigError(
        f"cannot resume with {'; '.join(changes)}: structural fields stay as they were when the run began; "
        "leave out what sets them"
    )


def check_resumable(old: Config, new: Config) -> list[Difference]:
    """Return the tunable fields that a resumed run changes; raise ConfigError if a structural one changes."""
    changed = differences(old, new)
    refused = [str(difference) for difference in changed if difference.role == "structural"]
    if refused:
        raise not_resumable(refused)
    return [difference for difference in changed if difference.role == "tunable"]


def _fields(config: Config) -> dict[str, tuple[Any, Role]]:
    result: dict[str, tuple[Any, Role]] = {}
    for section, values in config.to_dict().items():
        model = type(getattr(config, section))
        for name, value in values.items():
            # Only an untyped agent section has fields that its model does not name.
            role = role_of(model, name) if name in model.model_fields else "structural"
            result[f"{section}.{name}"] = (value, role)
    return result


def _shown(value: Any) -> str:
    return "none" if value is None else format_value(value)
