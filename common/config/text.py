"""Values as text: what a command line or environment variable says, and the TOML of a run directory."""

from __future__ import annotations

import json
import re
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")

_PART = r"""(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')"""
# A key of more parts than anything here has: tomllib's time grows with the square of their number.
_LONG_KEY = re.compile(rf"(?<![A-Za-z0-9_.-]){_PART}(?:[ \t]*\.[ \t]*{_PART}){{64}}")


def load_toml(text: str) -> dict[str, Any]:
    """Return the tables of a TOML document.

    Raises TOMLDecodeError, also for what is nested absurdly deep, and for integers of hundreds of digits.
    """
    # The text may come from a peer or an uploaded file, so it must not be able to take minutes.
    if _LONG_KEY.search(text):
        raise tomllib.TOMLDecodeError("a key of more than 64 parts")
    try:
        tables = tomllib.loads(text.removeprefix("\ufeff"))  # editors of Windows write it first
        # Such an integer becomes no float (OverflowError), and beyond 4,300 digits Python refuses to print
        # it: either would raise far from here, in a bound's comparison or in the middle of an error message.
        if _has_long_integer(tables):
            raise tomllib.TOMLDecodeError(_LONG_INTEGER)
        return tables
    except RecursionError:
        raise tomllib.TOMLDecodeError("it is nested too deep") from None
    # It is a ValueError itself, so it has to pass before the next clause.
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:  # of Python's own, where an integer has thousands of digits
        raise tomllib.TOMLDecodeError(_LONG_INTEGER) from None


_LONG_INTEGER = "an integer of hundreds of digits"


def _has_long_integer(value: Any) -> bool:
    if isinstance(value, int):
        return value.bit_length() > 1024
    if isinstance(value, Mapping):
        return any(map(_has_long_integer, value.values()))
    return isinstance(value, list) and any(map(_has_long_integer, value))


def accepts_text(annotation: Any) -> bool:
    """Return whether a field's type takes text as it stands (str, Literal of strings, or these and None)."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        options = [option for option in typing.get_args(annotation) if option is not type(None)]
        return all(accepts_text(option) for option in options)
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
        # A line break would let the text set keys of its own.
        return load_toml(f"value = {text}")["value"] if "\n" not in text else text
    except tomllib.TOMLDecodeError:
        lowered = text.strip().lower()
        # Python spells booleans with a capital; people type what they know.
        return lowered == "true" if lowered in ("true", "false") else text


def format_value(value: Any) -> str:
    """Return a value as TOML, on one line."""
    # Before int: True is an int, and would become `True`, which is not TOML.
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        # JSON's escapes are a subset of TOML's. DEL is the exception: JSON leaves it as it is, TOML forbids
        # it.
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
        lines = [
            f"{_key(key)} = {format_value(value)}"
            for key, value in fields.items()
            if value is not None and not is_array_of_tables(value)
        ]
        parts.append("\n".join([f"[{_key(name)}]", *lines]) + "\n")
        # Headed blocks come after the plain fields: what follows `[[a.b]]` belongs to that block, up to the
        # next header.
        for key, value in fields.items():
            if is_array_of_tables(value):
                parts += [text + "\n" for text in format_tables(f"{_key(name)}.{_key(key)}", value)]
    return "\n".join(parts)


def is_array_of_tables(value: Any) -> bool:
    """Return whether TOML writes this list as one headed block for each entry."""
    return (
        isinstance(value, list | tuple) and bool(value) and all(isinstance(each, Mapping) for each in value)
    )


def format_tables(path: str, entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return `[[path]]` and the fields of each entry, as TOML text."""
    return [
        "\n".join(
            [f"[[{path}]]", *(f"{_key(k)} = {format_value(v)}" for k, v in entry.items() if v is not None)]
        )
        for entry in entries
    ]


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else format_value(key)
