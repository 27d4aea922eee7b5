"""Which machines a run gets: the variables of deploy/terraform that cost money."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from troupe.common.config import Config
from troupe.common.errors import ConfigError
from troupe.services.cloud.prices import TERRAFORM

_LARGE = ["c7i.large", "c6i.large", "c6a.large", "m6i.large"]
# The command says them itself.
_ITS_OWN = (
    *("run", "preset", "run_file", "overrides", "modules", "keys_dir", "max_actor_machines"),
    *("running", "stop_at", "stop_when_complete", "destroy_artifacts"),
)
_Names = Annotated[list[str], Field(min_length=1)]


class Layout(BaseModel):
    """Variables of the Terraform configuration that its price follows from, with the same defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    learner_instance_type: str = "g6.2xlarge"
    learner_device: str = "cuda"
    learner_disk_gb: int = 100
    learners: int = Field(1, ge=1, le=64)
    learner_peer_spot: bool = True
    replay_instance_type: str = "r6i.xlarge"
    replay_shards: int = Field(1, ge=1, le=64)
    replay_disk_gb: int = 40
    replay_volume_gb: int = Field(0, ge=0)
    actors: int = Field(12, ge=0, le=4000)
    actors_per_machine: int = Field(4, ge=1, le=128)
    slots_per_actor: int = Field(30, ge=1, le=1024)
    actor_instance_types: _Names = [
        "c7i.xlarge",
        "c6i.xlarge",
        "c6a.xlarge",
        "c5.xlarge",
        "m6i.xlarge",
        "m5.xlarge",
    ]
    actor_disk_gb: int = 16
    actor_spot: bool = True
    evaluator: bool = True
    evaluator_instance_types: _Names = _LARGE
    evaluator_spot: bool = True
    availability_zones: list[str] = []
    nat_gateway: bool = True
    tensorboard_cidrs: list[str] = []
    hourly_prices_usd: dict[str, float] = {}
    spot_price_share: float = Field(0.4, gt=0, le=1)

    @property
    def actor_machines(self) -> int:
        """Machines that the actors take."""
        return -(-self.actors // self.actors_per_machine)

    @property
    def counts(self) -> dict[str, int]:
        """Machines of each role."""
        return {
            "learner": 1,
            "learner-peer": self.learners - 1,
            "replay": self.replay_shards,
            "actor": self.actor_machines,
            "evaluator": int(self.evaluator),
        }


def layout_of(config: Config, variables: Mapping[str, Any]) -> Layout:
    """The machines for a configuration, with `variables` over what follows from it.

    Raises:
        ConfigError: a variable has a wrong value.
    """
    actors = max(1, -(-config.total_slots // config.actor.slots))
    chosen: dict[str, Any] = {
        "actors": actors,
        "actors_per_machine": min(4, actors),
        "slots_per_actor": config.actor.slots,
        "learners": config.learner.processes,
        "replay_shards": config.replay.shards,
        "evaluator": config.evaluator.enabled,
    }
    if actors <= 2:
        chosen["actor_instance_types"] = _LARGE
    if config.learner.device == "cpu":  # four threads, which are the two cores that these presets are for
        chosen |= {"learner_device": "cpu", "learner_instance_type": "c6i.xlarge", "learner_disk_gb": 20}
    if all(table.is_queue for table in config.replay.sampled_tables()):  # which holds a batch or two
        chosen |= {"replay_instance_type": "t3.medium", "replay_disk_gb": 20}
    own = {name: value for name, value in variables.items() if name in Layout.model_fields}
    try:
        return Layout.model_validate(chosen | own)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"--var {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def parse_variables(words: Iterable[str]) -> dict[str, Any]:
    """Return `NAME=VALUE` by name; a value is JSON, or text as it stands.

    Raises:
        ConfigError: no variable of the Terraform configuration has the name, or the command sets it itself.
    """
    known = re.findall(r'^variable "(\w+)"', (TERRAFORM / "variables.tf").read_text("utf-8"), re.MULTILINE)
    found: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"--var {word}: should be NAME=VALUE")
        if name in _ITS_OWN:
            raise ConfigError(f"--var {name}: the command sets it itself")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"--var {name}: Terraform has no such variable{hint}")
        field = Layout.model_fields.get(name)
        try:
            found[name] = text if field is not None and field.annotation is str else json.loads(text)
        except ValueError:
            found[name] = text
    return found
