"""Names of fields: which one a key means, and what is advised where it means none."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from troupe.common.config.algorithms import ALGORITHMS, agent_model
from troupe.common.config.fields import AgentConfig, UntypedAgentConfig
from troupe.common.config.schema import SECTIONS
from troupe.common.errors import ConfigError

# The fields that people set most, on the command line and in Python. Help and docs/configuration.md list
# them.
SHORT_NAMES = {
    "env": "env.id",
    "seed": "run.seed",
    "total_steps": "run.total_steps",
    "keys": "net.keys_dir",
    "init_from": "learner.init_from",
    "offline": "run.offline",
}
# What other programs call a field: no likeness of letters leads from one to the other.
_SYNONYMS = {
    **dict.fromkeys(("lr", "learning_rate", "step_size"), "agent.learning_rate"),
    **dict.fromkeys(("device", "cuda", "gpu"), "learner.device"),
    **dict.fromkeys(("env", "env_id", "env_name", "game"), "env.id"),
    **dict.fromkeys(("num_envs", "n_envs", "envs"), "actor.slots"),
    **dict.fromkeys(("workers", "num_workers", "num_actors", "actors"), "actor.processes"),
    **dict.fromkeys(("buffer_size", "replay_size", "memory_size", "capacity"), "replay.capacity_items"),
    **dict.fromkeys(("learning_starts", "warmup"), "replay.min_items"),
    **dict.fromkeys(("steps", "timesteps", "total_timesteps", "num_steps"), "run.total_steps"),
    **dict.fromkeys(("discount", "discount_factor"), "agent.gamma"),
}


def canonical(key: str) -> str:
    """The `section.field` that `key` names: dashes are underscores, and some fields have short names."""
    key = key.replace("-", "_")
    return SHORT_NAMES.get(key, key)


def resolve(key: str, agent: type[BaseModel], source: str) -> tuple[str, list[str], Any]:
    """Return (`section.field`, names inside a dictionary field, the field's type)."""
    models = {**SECTIONS, "agent": agent}
    section, *names = key.split(".")
    if not names:
        raise ConfigError(f"unknown field {key!r} ({source}); {_near(key, models)}")
    if section not in models:
        raise ConfigError(f"unknown section {section!r} ({source}); {_near_section(section, key, models)}")
    name, *inner = names
    model = models[section]
    if name not in model.model_fields:
        # Nobody here knows the algorithm's fields, so none can be refused; the learner checks them.
        if model is UntypedAgentConfig:
            return f"{section}.{name}", inner, Any
        raise ConfigError(
            f"unknown field {section}.{name} ({source}); {_of_others(name, model, key, models)}"
        )
    annotation = model.model_fields[name].annotation
    if inner and "dict" not in str(annotation):
        raise ConfigError(f"{section}.{name} has no fields of its own ({source}): {key}")
    return f"{section}.{name}", inner, annotation


def _near_section(section: str, key: str, models: Mapping[str, type[BaseModel]]) -> str:
    """Return advice: the section that `section` resembles, with the field if it has that; else as `_near`."""
    near = difflib.get_close_matches(section, models, n=1, cutoff=0.7)
    name = key.split(".")[1]
    if not near or name in _SYNONYMS:
        return _near(key, models)
    return f"nearest: {near[0]}" + (f".{name}" if name in models[near[0]].model_fields else "")


def _of_others(name: str, model: type[BaseModel], key: str, models: Mapping[str, type[BaseModel]]) -> str:
    """Return whose field `name` is, where it is one of other algorithms; else the nearest field."""
    if issubclass(model, AgentConfig):
        owners = [algorithm for algorithm in ALGORITHMS if name in agent_model(algorithm).model_fields]
        if owners:
            return f"it is a field of {', '.join(owners)}, not of {model.model_fields['algorithm'].default}"
    return _near(key, models)


def nearest_field(path: str) -> str:
    """Return advice that names the valid field nearest to `path`, over all sections and algorithms."""
    agents = [{"agent": agent_model(algorithm)} for algorithm in ALGORITHMS]
    return _near(path, SECTIONS, *agents)


def _near(key: str, *models: Mapping[str, type[BaseModel]]) -> str:
    """Return advice: the valid name closest to `key`, by its last part first, then as a whole."""
    section, _, name = key.partition(".")
    # Unless it names a field that exists: `replay.capacity` means replay, whatever others call it.
    if (name or section) in _SYNONYMS and not (name and section in SECTIONS):
        return f"nearest: {_SYNONYMS[name or section]}"
    sections = [section for several in models for section in several.items()]
    paths = {f"{part}.{field}": field for part, model in sections for field in model.model_fields}
    within = [path for path in paths if path.startswith(f"{section}.")]
    near = difflib.get_close_matches(key, within, n=1, cutoff=0.7)
    if not near:
        wanted = name or section
        # The name is compared alone as well as with its section: `train.batch_size` should lead to
        # `replay.batch_size`, which has little in common with it as a whole.
        ranked = sorted(
            paths,
            key=lambda path: max(
                difflib.SequenceMatcher(None, wanted, paths[path]).ratio(),
                difflib.SequenceMatcher(None, key, path).ratio(),
            ),
        )
        near = ranked[-1:]
    return f"nearest: {near[0]}"
