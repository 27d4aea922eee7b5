"""The configuration in words: every field with its type, default, role and meaning."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import textwrap
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from troupe.common.config.algorithms import (
    ALGORITHMS,
    DEFAULT_ALGORITHM,
    agent_model,
    algorithm_module,
    outside_names,
)
from troupe.common.config.fields import Role, UntypedAgentConfig, role_of
from troupe.common.config.loading import Loaded
from troupe.common.config.names import nearest_field
from troupe.common.config.schema import SECTIONS
from troupe.common.config.text import format_tables, format_value, is_array_of_tables
from troupe.common.data.table_config import QUEUE, TableConfig, table_meanings
from troupe.common.errors import ConfigError


@dataclass(frozen=True)
class FieldText:
    """One field, ready to print; `parts` are the fields of each entry of an array of tables."""

    path: str
    type: str
    default: str
    role: Role
    description: str
    algorithm: str = ""
    parts: tuple[FieldText, ...] = ()


@dataclass(frozen=True)
class SectionText:
    """One section, ready to print."""

    name: str
    summary: str
    fields: list[FieldText]


def sections(algorithms: Collection[str] = tuple(ALGORITHMS)) -> Iterator[SectionText]:
    """Yield every section in the schema's order; `agent` once per algorithm that can be imported."""
    for name, model in SECTIONS.items():
        yield _section(name, model)
        # Algorithms stand where `Config` has its `agent`, after the environment.
        if name == "env":
            for algorithm in algorithms:
                agent = agent_model(algorithm)
                if agent is not UntypedAgentConfig:
                    yield _section("agent", agent, algorithm)


def explain(path: str) -> str:
    """Return what is to be known about `section.field`, or about all fields of a section or an algorithm.

    Algorithms outside this tree are looked at where one is named, or a field of `[agent]`.
    """
    path = path.removeprefix("--").replace("-", "_")
    # Importing a module of somebody else's takes time and may fail, so only where the question is about
    # `[agent]`.
    outside = outside_names() if path.partition(".")[0] == "agent" else []
    if path.partition(".")[0] not in ("agent", *SECTIONS) and algorithm_module(path):
        outside = [path]
    try:
        described = list(sections([*ALGORITHMS, *outside]))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    blocks = [
        _block(field)
        for section in described
        for field in section.fields
        if path and path in (section.name, field.path, field.algorithm)
    ]
    if not blocks:
        near = difflib.get_close_matches(path, [*SECTIONS, "agent", *ALGORITHMS], n=1, cutoff=0.8)
        raise ConfigError(f"unknown field {path!r}; {f'nearest: {near[0]}' if near else nearest_field(path)}")
    return "\n\n".join(blocks)


def overview() -> str:
    """Return all fields, a line or two each."""
    lines = []
    for section in sections():
        lines.append(f"\n[{section.name}] {section.summary}")
        for field in section.fields:
            lines.append(f"  --{field.path} {field.type.upper() if field.type.isalpha() else field.type}")
            parts = f" Fields of each: {', '.join(part.path for part in field.parts)}." if field.parts else ""
            lines.append(f"        {field.description}{parts} [default: {field.default}]")
    return "\n".join(_wrapped(line) for line in lines).strip()


def _wrapped(line: str) -> str:
    """The line, its continuations indented as it is; a newline before it stays."""
    indent = " " * (len(line) - len(line.lstrip(" ")))
    text = textwrap.fill(line.lstrip("\n"), 110, subsequent_indent=indent)
    return f"\n{text}" if line.startswith("\n") else text


def show_toml(loaded: Loaded, *, changed_only: bool = False) -> str:
    """Return the configuration as TOML in which a comment after each value names the layer that set it.

    `changed_only` leaves out what is at its default.
    """
    models = {**SECTIONS, "agent": type(loaded.config.agent)}
    defaults = {section: model().model_dump(mode="json") for section, model in models.items()}
    defaults["agent"]["algorithm"] = DEFAULT_ALGORITHM
    parts = []
    for section, values in loaded.config.to_dict().items():
        lines, blocks = [], []
        for name, value in values.items():
            origin = loaded.origins.get(f"{section}.{name}", "default")
            # By value, not by layer: a preset may set a field to what it would have been anyway.
            if changed_only and name in defaults[section] and defaults[section][name] == value:
                continue
            if is_array_of_tables(value):
                if changed_only:
                    value = [_changed_of(entry) for entry in value]
                heading, *rest = "\n\n".join(format_tables(f"{section}.{name}", value)).split("\n")
                blocks.append("\n".join([f"{heading:<44}  # {origin}", *rest]))
                continue
            line = f"# {name} = none" if value is None else f"{name} = {format_value(value)}"
            lines.append(f"{line:<44}  # {origin}")
        if lines:
            parts.append("\n".join([f"[{section}]", *lines]))
        parts += blocks
    return "\n\n".join(parts)


def _changed_of(table: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a replay table that are not at their defaults, and its name."""
    defaults = {each.name: each.default for each in dataclasses.fields(TableConfig)}
    if table["limiter"] == "queue":
        defaults |= QUEUE
    return {key: value for key, value in table.items() if key == "name" or value != defaults[key]}


def _section(name: str, model: type[BaseModel], algorithm: str = "") -> SectionText:
    fields = [
        FieldText(
            path=f"{name}.{field}",
            type=_type(info.annotation, info),
            default=_default(info),
            role=role_of(model, field),
            description=info.description or "",
            algorithm=algorithm,
            parts=_parts(info.annotation),
        )
        for field, info in model.model_fields.items()
    ]
    summary = f"Algorithm `{algorithm}`." if algorithm else (inspect.getdoc(model) or "").split("\n")[0]
    return SectionText(name, summary, fields)


def _parts(annotation: Any) -> tuple[FieldText, ...]:
    """The fields of each entry, where a field is an array of tables."""
    if _entry(annotation) is not TableConfig:
        return ()
    # With `from __future__ import annotations` the dataclass holds its types as text.
    hints = typing.get_type_hints(TableConfig)
    return tuple(
        FieldText(
            name,
            _type_name(hints[name]),
            "none" if default is None else format_value(default),
            "structural",
            meaning,
        )
        for name, (default, meaning) in table_meanings().items()
    )


def _entry(annotation: Any) -> Any:
    """The type of what a list or an annotation holds."""
    while typing.get_origin(annotation) in (list, tuple, typing.Annotated):
        annotation = typing.get_args(annotation)[0]
    return annotation


def _default(info: FieldInfo) -> str:
    value = info.get_default(call_default_factory=True)
    return "none" if value is None else format_value(value)


def _type(annotation: Any, info: FieldInfo) -> str:
    """Return a type as a user writes it, with the bounds of a number."""
    bounds = [
        f"{sign} {getattr(constraint, name)}"
        for constraint in info.metadata
        for name, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
        if getattr(constraint, name, None) is not None
    ]
    return " ".join([_type_name(annotation), ", ".join(bounds)]).strip()


def _type_name(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " or ".join(f"`{option}`" for option in arguments)
    if origin in (typing.Union, types.UnionType):
        # Unions print as a person says them; pydantic's own schema would say `anyOf`.
        return " or ".join("none" if option is type(None) else _type_name(option) for option in arguments)
    if origin is typing.Annotated:
        return _type_name(arguments[0])
    if origin in (list, tuple):
        return f"list of {_type_name(arguments[0])}"
    if origin is dict or dataclasses.is_dataclass(annotation):
        return "table"
    return {"str": "text", "int": "integer", "float": "number", "bool": "boolean"}.get(
        annotation.__name__, annotation.__name__
    )


def _block(field: FieldText) -> str:
    of = f"  (algorithm {field.algorithm})" if field.algorithm else ""
    section, _, name = field.path.partition(".")
    where = f"as [[{field.path}]]" if field.parts else f"or {name} under [{section}]"
    text = (
        f"{field.path}{of}\n  {field.description}\n  type: {field.type}\n  default: {field.default}\n"
        f"  role: {field.role} ({_ROLE_TEXT[field.role]})\n"
        f"  set by: --{field.path} VALUE, TROUPE_{field.path.replace('.', '__').upper()}=VALUE, "
        f"{where} in a preset"
    )
    if field.parts:
        text += "\n  fields of each:" + "".join(
            f"\n    {part.path} ({part.type}, default: {part.default})\n      {part.description}"
            for part in field.parts
        )
    return text


_ROLE_TEXT: dict[Role, str] = {
    "structural": "fixed once a run has begun",
    "tunable": "may change when a run is resumed",
    "operational": "never taken from a checkpoint",
}
