"""The typed configuration of a run, its presets, and layered loading."""

from troupe.common.config.compare import (
    Difference,
    changed_structure,
    check_resumable,
    differences,
    structural_fields,
    structural_hash,
    to_toml,
)
from troupe.common.config.env_section import EnvConfig
from troupe.common.config.fields import (
    AgentConfig,
    Section,
    UntypedAgentConfig,
    operational,
    structural,
    tunable,
)
from troupe.common.config.loading import (
    Loaded,
    config_from_dict,
    load_config,
    load_layers,
    read_config,
    with_overrides,
)
from troupe.common.config.presets import preset_names, preset_summary
from troupe.common.config.replay_section import ReplayConfig
from troupe.common.config.schema import (
    ActorConfig,
    Config,
    EvaluatorConfig,
    InferenceConfig,
    LearnerConfig,
    NetConfig,
    RunConfig,
)
from troupe.common.config.validation import section_from_dict

__all__ = [
    "ActorConfig",
    "AgentConfig",
    "Config",
    "Difference",
    "EnvConfig",
    "EvaluatorConfig",
    "InferenceConfig",
    "LearnerConfig",
    "Loaded",
    "NetConfig",
    "ReplayConfig",
    "RunConfig",
    "Section",
    "UntypedAgentConfig",
    "changed_structure",
    "check_resumable",
    "config_from_dict",
    "differences",
    "load_config",
    "load_layers",
    "operational",
    "preset_names",
    "preset_summary",
    "read_config",
    "section_from_dict",
    "structural",
    "structural_fields",
    "structural_hash",
    "to_toml",
    "tunable",
    "with_overrides",
]
