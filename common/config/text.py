"""Values as text: what a command line or environment variable says, and the TOML of a run directory."""

from __future__ import annotations

import json
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from typing import Any

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def accepts_text(annotation: Any) -> bool:
    """Return whether a field's type takes the text as it stands (str, and Literal of strings)."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return any(accepts_text(option) for option in typing.get_args(annotation))
    if origin is typing.Literal:
        return any(isinstance(option, str) for option in typing.get_args(annotation))
    if origin is typing.Annotated:
        return accepts_text(typing.get_args(annotation)[0])
    return annotation is str


def accepts_none(annotation: Any) -> bool:
    """Return whether a field's type takes None."""
    return annotation is type(None) or any(accepts_none(option) for option in typing.get_args(annotation))


def parse_value(text: str, annotation: Any = Any) -> Any:
    """Return the value that `text` means for a field of type `annotation`.

    Text fields take the text itself; every other field takes a TOML value (`5`, `1e-4`, `true`, `[256, 256]`,
    `{a = 1}`), and an optional one also `none`. Text that is no TOML value comes back unchanged, for the
    model to refuse with the name of the field.
    """
    if accepts_none(annotation) and text.lower() in ("none", "null", ""):
        return None
    if accepts_text(annotation):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"] if "\n" not in text else text
    except tomllib.TOMLDecodeError:
        lowered = text.strip().lower()
        # Python spells booleans with a capital; people type what they know.
        return lowered == "true" if lowered in ("true", "false") else text


def format_value(value: Any) -> str:
    """Return a value as TOML, on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        inner = ", ".join(
            f"{_key(key)} = {format_value(item)}" for key, item in value.items() if item is not None
        )
        return "{" + inner + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(format_value(item) for item in value) + "]"
    raise TypeError(f"no TOML form for {type(value).__name__}")


def format_toml(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Return two levels of tables as TOML text; None, which TOML cannot say, is left out."""
    parts = []
    for name, fields in sections.items():
        lines = [f"{_key(key)} = {format_value(value)}" for key, value in fields.items() if value is not None]
        parts.append("\n".join([f"[{name}]", *lines]) + "\n")
    return "\n".join(parts)


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else format_value(key)
