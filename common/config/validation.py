"""Checked values: a configuration of plain ones, or one line about the first that is wrong."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from troupe.common.config.algorithms import DEFAULT_ALGORITHM, agent_model
from troupe.common.config.names import nearest_field
from troupe.common.config.schema import SECTIONS, Config
from troupe.common.config.text import format_value
from troupe.common.errors import ConfigError

# What pydantic would call a valid tuple or dictionary.
_FORMS = {
    "tuple_type": "should be a list as in TOML, such as [256, 256]",
    "dict_type": "should be a table as in TOML, such as {a = 1}",
    "int_parsing": "should be an integer",
    "int_type": "should be an integer",
    "int_from_float": "should be an integer",
    "float_parsing": "should be a number",
    "float_type": "should be a number",
    "bool_parsing": "should be true or false",
    "bool_type": "should be true or false",
}


def validated(values: Mapping[str, Any], origins: Mapping[str, str]) -> Config:
    """Return the configuration of values by `section.field`, whose `origins` an error names.

    Raises ConfigError for the first that is wrong.
    """
    tables: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        section, _, name = path.partition(".")
        tables.setdefault(section, {})[name] = value
    algorithm = tables.get("agent", {}).get("algorithm", DEFAULT_ALGORITHM)
    return validated_with(agent_model(algorithm), tables, origins)


def validated_with(model: type[BaseModel], tables: Mapping[str, Any], origins: Mapping[str, str]) -> Config:
    """Return the configuration of nested values, with `model` as that of the agent; see `validated`."""
    try:
        # On its own, for an error that names the field: inside Config the section is opaque.
        agent = model.model_validate(tables.get("agent", {}))
    except ValidationError as error:
        raise ConfigError(_explain(error, origins, "agent")) from None
    try:
        return Config.model_validate({**tables, "agent": agent})
    except ValidationError as error:
        raise ConfigError(_explain(error, origins)) from None


def section_from_dict(name: str, values: Any, *, source: str = "configuration") -> Any:
    """Return one section of a configuration from plain values, such as a peer's WELCOME carries.

    Args:
        name: of the section.
        values: by field.
        source: who says so, for the error.

    Raises ConfigError where they are not valid.
    """
    try:
        return SECTIONS[name].model_validate(values)
    except ValidationError as error:
        fields = values if isinstance(values, Mapping) else {}
        origins = {f"{name}.{field}": source for field in fields}
        raise ConfigError(_explain(error, origins, name)) from None


def _explain(error: ValidationError, origins: Mapping[str, str], *prefix: str) -> str:
    """Return the first problem on one line: field, value, where it came from, what it should be."""
    problem = error.errors(include_url=False)[0]
    # pydantic's location of a union goes on with the branch that failed; only section and field mean anything
    # to a user.
    location = [*prefix, *(str(part) for part in problem["loc"])]
    path, value = ".".join(location[:2]), problem["input"]
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
    message, advice = _FORMS.get(problem["type"], message), ""
    if problem["type"] == "extra_forbidden" and len(location) == 2:
        return f"unknown field {path} ({origins.get(path, 'configuration')}); {nearest_field(path)}"
    if problem["type"] == "literal_error":
        options = [
            option.strip(" '") for option in problem["ctx"]["expected"].replace(" or ", ", ").split(", ")
        ]
        near = difflib.get_close_matches(str(value), options, n=1, cutoff=0.5)
        advice = f"; nearest: {near[0]}" if near else ""
    # A table would be printed whole, which is the part of the message nobody reads.
    if isinstance(value, str | int | float | bool | list):
        shown = format_value(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        # People put a list of values to try where the value stands; the field's own error would not help
        # them.
        if isinstance(value, list) and origins.get(path, "").startswith("file "):
            advice += (
                "; this file is laid over the preset, with one value for each field; several to "
                "try stand under [sweep.grid], for `troupe sweep`"
            )
        return f"{'.'.join(location)} = {shown} ({origins.get(path, 'default')}): {message}{advice}".replace(
            "\n", " "
        )
    origin = f" ({origins[path]})" if path in origins else ""
    return f"{'.'.join(location) + origin + ': ' if location else ''}{message}{advice}".replace("\n", " ")
