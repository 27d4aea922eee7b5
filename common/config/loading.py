"""Layered loading: which value wins, and which layer it came from.

Precedence per field, highest first: command line, sweep file, environment variables
(`TROUPE_SECTION__FIELD`), configuration of the resumed run, preset, defaults.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from troupe.common.config.algorithms import ALGORITHMS, DEFAULT_ALGORITHM, agent_model
from troupe.common.config.compare import not_resumable
from troupe.common.config.fields import UntypedAgentConfig, role_of
from troupe.common.config.names import canonical, resolve
from troupe.common.config.presets import preset_id, read_bases, read_toml
from troupe.common.config.schema import SECTIONS, Config
from troupe.common.config.text import parse_value
from troupe.common.config.validation import validated, validated_with
from troupe.common.errors import ConfigError
from troupe.common.families import FAMILIES

ENV_PREFIX = "TROUPE_"


@dataclass(frozen=True)
class Layer:
    """Values from one place: `values` maps `section.field` to a value; `is_text`: text is to be parsed."""

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    is_text: bool = False


@dataclass(frozen=True)
class Loaded:
    """A configuration, and for each `section.field` the name of the layer that set it."""

    config: Config
    origins: dict[str, str]

    def chosen(self, section: str) -> list[str]:
        """Fields of `section` that somebody chose for this run.

        On the command line and in variables that is every field; in files, which may be complete, those with
        another value than the default; in a preset, only while its `env.id` has not been replaced: it chose
        for that one. What a resumed run has was looked at when it began.
        """
        values = getattr(self.config, section)
        names = []
        for name, info in type(values).model_fields.items():
            origin = self.origins[f"{section}.{name}"]
            changed = getattr(values, name) != info.default
            own_preset = origin.startswith("preset ") and origin == self.origins["env.id"]
            # A value at its default in a file proves nothing: `config.toml` and `troupe config show` write
            # every field.
            if origin in ("command line", "environment") or (
                changed and (own_preset or origin.startswith("file "))
            ):
                names.append(name)
        return names


def load_config(
    preset: str | None = None,
    file: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    run_config: Path | None = None,
) -> Config:
    """Return the configuration that the layers give; see `load_layers`."""
    return load_layers(preset, file, overrides, environ, run_config=run_config).config


def load_layers(
    preset: str | None = None,
    file: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    run_config: Path | None = None,
    beneath: Iterable[Layer] = (),
) -> Loaded:
    """Return the configuration and the origin of every value.

    Args:
        preset: name of a preset, or path of a TOML file; None means that of the resumed run, if any.
        file: TOML in the form of a preset: a sweep file, or the complete `config.toml` of a run.
        overrides: command line, `{"section.field": "text"}`; dashes for underscores and short names are fine.
          From Python, values that are no text are taken as they are.
        environ: environment variables; those that begin with `TROUPE_` and hold `__` are read.
        run_config: `config.toml` of a run that is resumed; its operational fields are ignored.
        beneath: layers under all of these, over the defaults.
    """
    layers = upper_layers(overrides, file, environ)
    if run_config is not None:
        resumed = read_config(run_config)
        # Below what is said now, above the preset: the preset may have changed since, and the run has not.
        _check_same_algorithm(layers, resumed.agent.algorithm)
        layers.append(Layer(f"run {run_config.parent}", _resumable(resumed)))
        preset = preset or _still_there(resumed.run.preset)
    if preset is not None:
        layers += _preset_layers(preset)
    layers += beneath
    loaded = merge(layers)
    # After merging, since what is unused depends on `replay.tables`, which any layer may have set.
    _check_unused(loaded)
    return _without_preset_table(loaded)


def upper_layers(
    overrides: Mapping[str, Any] | None, file: Path | None, environ: Mapping[str, str] | None
) -> list[Layer]:
    """Return the layers above run and preset, highest first; see `load_layers`."""
    layers = []
    if overrides:
        layers.append(Layer("command line", {canonical(key): text for key, text in overrides.items()}, True))
    if file is not None:
        layers.append(Layer(f"file {file}", flat(read_toml(file), str(file))))
    if environ:
        layers.append(_environment(environ))
    return layers


def merge(layers: Iterable[Layer]) -> Loaded:
    """Return the configuration that `layers`, highest first, give over the defaults."""
    layers = _without_others_kwargs(list(layers))
    # The algorithm comes first: whether `agent.NAME` exists, and what its text means, depends on it.
    agent = _agent_model(layers)
    _check_presets_agent(layers, agent)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    # From the lowest up, so that a dictionary such as `env.kwargs` can be laid over the one beneath key by
    # key.
    for layer in reversed(layers):
        for key, value in layer.values.items():
            path, inner, annotation = resolve(key, agent, layer.name)
            if layer.is_text and isinstance(value, str):
                value = parse_value(value, Any if inner else annotation)
            if inner:
                value = _nested(inner, value)
            if (
                value and isinstance(value, dict) and isinstance(values.get(path), dict)
            ):  # an empty one clears
                value = _merged(values[path], value)
            values[path] = value
            origins[path] = layer.name
    config = validated(values, origins)
    for section, model in (*SECTIONS.items(), ("agent", type(config.agent))):
        for name in model.model_fields:
            origins.setdefault(f"{section}.{name}", "default")
    return Loaded(config, origins)


def _without_others_kwargs(layers: list[Layer]) -> list[Layer]:
    """Leave out the `env.kwargs` that a layer, such as a preset, chose for another environment of its own."""
    chosen = next((layer.values["env.id"] for layer in layers if "env.id" in layer.values), None)

    def serves(layer: Layer) -> bool:
        own = layer.values.get("env.id", chosen)
        name = str(own).partition(":")[0]
        # Games of one such family take the same options, so another game keeps them.
        alike = name in FAMILIES and FAMILIES[name].same_options and str(chosen).startswith(f"{name}:")
        return own == chosen or alike

    return [
        layer
        if serves(layer)
        else replace(
            layer,
            values={
                key: value
                for key, value in layer.values.items()
                if key != "env.kwargs" and not key.startswith("env.kwargs.")
            },
        )
        for layer in layers
    ]


def _check_unused(loaded: Loaded) -> None:
    """Refuse what somebody chose in `[replay]` that means nothing to the tables of the run.

    What a preset chose for its own tables goes with them, see `_without_preset_table`.
    """
    unused, origin_of_tables = loaded.config.replay.unused(), loaded.origins["replay.tables"]
    for name in loaded.chosen("replay"):
        origin = loaded.origins[f"replay.{name}"]
        if name in unused and (origin == origin_of_tables or not origin.startswith("preset ")):
            key = "capacity" if name == "capacity_items" else name
            remedy = "a queue has no importance weights"
            if not name.startswith("importance_"):
                remedy = f"the run has the tables of replay.tables, each with its own {key}"
            raise ConfigError(f"replay.{name} ({origin}) would have no effect: {remedy}")


def _without_preset_table(loaded: Loaded) -> Loaded:
    """What a preset chose for its own table is at its default again, where another layer brings tables.

    A run's `config.toml` then says nothing that means nothing, as its services would refuse.
    """
    replay, origins = loaded.config.replay, loaded.origins
    gone = {
        name
        for name in replay.unused()
        if origins[f"replay.{name}"].startswith("preset ")
        and origins[f"replay.{name}"] != origins["replay.tables"]
    }
    if not gone:
        return loaded
    fields = type(replay).model_fields
    replay = replay.model_copy(update={name: fields[name].default for name in gone})
    config = loaded.config.model_copy(update={"replay": replay})
    return Loaded(config, {**origins, **{f"replay.{name}": "default" for name in gone}})


def _preset_layers(preset: str) -> list[Layer]:
    """Return the layers of a preset; those of a file that begins from another are laid over that one."""
    *files, (name, tables) = read_bases(preset)
    layers = [Layer(f"file {file}", flat(values, file)) for file, values in files]
    layers.append(Layer(f"preset {name}", flat(tables, name)))
    layers[0].values["run.preset"] = preset_id(preset)
    return layers


def read_config(path: Path, *, typed_agent: bool = True) -> Config:
    """Return a complete configuration from a file that `to_toml` wrote.

    Raises ConfigError for one that lacks a section: it is cut, and defaults would make another run of it.
    """
    values = read_toml(path)
    if missing := [section for section in (*SECTIONS, "agent") if section not in values]:
        raise ConfigError(f"{path} is damaged: it has no section [{missing[0]}]; restore it from a copy")
    return config_from_dict(values, source=str(path), typed_agent=typed_agent)


def with_overrides(config: Config, overrides: Mapping[str, str]) -> Loaded:
    """Return `config` with fields over its own that were given as text, as on a command line."""
    words = Layer("command line", {canonical(key): text for key, text in overrides.items()}, True)
    return merge([words, Layer("configuration", flat(config.to_dict(), "configuration"))])


def config_from_dict(
    values: Mapping[str, Any], *, source: str = "configuration", typed_agent: bool = True
) -> Config:
    """Return a configuration from nested plain values, such as a peer's WELCOME carries.

    With `typed_agent=False` the agent section stays unchecked and no algorithm (and no torch) is imported.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{source} is not a configuration: it has no sections")
    if not typed_agent:
        origins = dict.fromkeys(flat(values, source), source)
        return validated_with(UntypedAgentConfig, values, origins)
    return merge([Layer(source, flat(values, source))]).config


def _still_there(preset: str) -> str | None:
    """Return the preset of an earlier run, or None if it is gone: the run has all but the addresses."""
    try:
        read_bases(preset)
    except ConfigError:
        return None
    return preset


def _environment(environ: Mapping[str, str]) -> Layer:
    values: dict[str, Any] = {}
    for name, text in environ.items():
        if name.startswith(ENV_PREFIX) and "__" in name:
            values[name.removeprefix(ENV_PREFIX).lower().replace("__", ".")] = text
        elif name.startswith(ENV_PREFIX):
            _check_variable(name)
    return Layer("environment", values, True)


def _check_variable(name: str) -> None:
    """Refuse `TROUPE_SECTION_FIELD`, which nobody would read; other programs' variables are left alone."""
    section, _, field = name.removeprefix(ENV_PREFIX).lower().partition("_")
    models: list[type[BaseModel]] = [SECTIONS[section]] if section in SECTIONS else []
    if section == "agent":
        # The algorithm is not known yet at this point, so a field of any of them counts.
        models = [agent_model(algorithm) for algorithm in ALGORITHMS]
    fields = [field for model in models for field in model.model_fields]
    # Strict, because the prefix is not ours alone: TROUPE_MODULES and variables of other programs of that
    # name must not stop a training.
    near = difflib.get_close_matches(field, fields, n=1, cutoff=0.9)
    if near:
        meant = f"{ENV_PREFIX}{section}__{near[0]}".upper()
        raise ConfigError(f"the environment variable {name} sets no field: did you mean {meant}?")


def _resumable(config: Config) -> dict[str, Any]:
    """Return the fields that a resumed run takes over: all but the operational ones."""
    values: dict[str, Any] = {}
    for section, fields in config.to_dict().items():
        model = type(getattr(config, section))
        for name, value in fields.items():
            if name not in model.model_fields or role_of(model, name) != "operational":
                values[f"{section}.{name}"] = value
    return values


def flat(tables: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return tables as `{"section.field": value}`. Raises ConfigError for what stands outside a section."""
    if "sweep" in tables:
        remedy = f": `troupe sweep {source}`" if source.endswith(".toml") else ""
        raise ConfigError(f"{source} has a section [sweep], for several runs{remedy}")
    values: dict[str, Any] = {}
    for section, fields in tables.items():
        if section == "preset" and isinstance(fields, str):
            raise ConfigError(
                f"{source} begins from the preset {fields}: train from it with `troupe train {source}`"
            )
        if not isinstance(fields, Mapping):
            raise ConfigError(
                f"{source}: {section!r} is outside any section; write it under [run], [env], ..."
            )
        # A section without fields leaves no trace in flat values.
        if not fields and section not in (*SECTIONS, "agent"):
            values[f"{section}."] = None  # so that an empty unknown section is still reported
        values.update({f"{section}.{name}": value for name, value in fields.items()})
    return values


def _check_same_algorithm(layers: list[Layer], algorithm: str) -> None:
    """Refuse another algorithm than that of the run that is resumed.

    Here, for its fields would be checked as those of the other one, and refused for what they are not.
    """
    for layer in layers:
        chosen = layer.values.get("agent.algorithm", algorithm)
        if chosen != algorithm:
            raise not_resumable([f"agent.algorithm: {algorithm} -> {chosen} ({layer.name})"])


def _agent_model(layers: list[Layer]) -> type[BaseModel]:
    for layer in layers:
        if "agent.algorithm" in layer.values:
            try:
                return agent_model(layer.values["agent.algorithm"])
            except ValueError as error:
                raise ConfigError(f"agent.algorithm ({layer.name}): {error}") from None
    return agent_model(DEFAULT_ALGORITHM)


def _check_presets_agent(layers: list[Layer], agent: type[BaseModel]) -> None:
    """Refuse another algorithm over a preset whose `[agent]` has fields that this algorithm lacks."""
    if agent is UntypedAgentConfig:
        return
    naming = [layer for layer in layers if "agent.algorithm" in layer.values]
    for layer in naming[1:]:
        names = [key.removeprefix("agent.") for key in layer.values if key.startswith("agent.")]
        foreign = [name for name in names if name not in agent.model_fields]
        if layer.name.startswith("preset ") and foreign:
            chosen, own = naming[0].values["agent.algorithm"], layer.values["agent.algorithm"]
            raise ConfigError(
                f"agent.algorithm {chosen!r} ({naming[0].name}) does not match the {layer.name}, whose "
                f"[agent] is that of {own} and sets {foreign[0]}: begin from a preset of {chosen} "
                "(`troupe presets` lists them), or from none"
            )


def _nested(names: list[str], value: Any) -> Any:
    for name in reversed(names):
        value = {name: value}
    return value


def _merged(low: dict[str, Any], high: dict[str, Any]) -> dict[str, Any]:
    result = dict(low)
    for key, value in high.items():
        old = result.get(key)
        result[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result
