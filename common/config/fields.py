"""What every configuration section is made of: frozen models whose fields carry a description and a role.

The role says what may happen to a field after a run has begun:

* ``structural``: shapes the stored data or the network; all services and checkpoints of a run must agree;
* ``tunable``: may be changed when a run is resumed; the change is logged;
* ``operational``: belongs to the machine, not to the experiment (addresses, ports); never comes
  from a checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

Role = Literal["structural", "tunable", "operational"]
ROLES: tuple[Role, ...] = ("structural", "tunable", "operational")


def _field(role: Role, default: Any, description: str, constraints: dict[str, Any]) -> Any:
    return Field(default, description=description, json_schema_extra={"role": role}, **constraints)


def structural(default: Any, description: str, **constraints: Any) -> Any:
    """Return a field that must be the same in every service and checkpoint of a run."""
    return _field("structural", default, description, constraints)


def tunable(default: Any, description: str, **constraints: Any) -> Any:
    """Return a field that may change when a run is resumed."""
    return _field("tunable", default, description, constraints)


def operational(default: Any, description: str, **constraints: Any) -> Any:
    """Return a field that belongs to the machine and never comes from a checkpoint."""
    return _field("operational", default, description, constraints)


class Section(BaseModel):
    """Base of every section: immutable, no unknown fields, no NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def _numbers_are_not_booleans(cls, value: Any, info: ValidationInfo) -> Any:
        # Python's bool is an int, so `batch_size = true` would otherwise silently mean 1.
        if isinstance(value, bool) and info.field_name is not None:
            annotation = str(cls.model_fields[info.field_name].annotation)
            if "int" in annotation or "float" in annotation:
                raise ValueError("should be a number, not true or false")
        return value


@dataclass(frozen=True, slots=True)
class TableNeeds:
    """What kind of replay table an algorithm learns from."""

    kind: Literal["prioritized", "queue"] = "prioritized"
    """`prioritized`: items stay and are drawn by priority. `queue`: passed on in the order of arrival."""
    max_times_sampled: int = 0
    """An item goes after so many samples; 0: it stays."""


class AgentConfig(Section):
    """Base of every algorithm's own section; subclasses live beside their algorithm in `common/agents/`.

    A subclass says here what must be known of its algorithm before an agent can be made.
    """

    table: ClassVar[TableNeeds] = TableNeeds()
    """Where its chunks go."""
    reads_instructions: ClassVar[bool] = False
    """Whether its networks understand `EnvSpec.instruction_words`."""

    algorithm: str = structural("apex", "Name of the algorithm, a key of the registry.")


class UntypedAgentConfig(AgentConfig):
    """The agent section where the algorithm cannot be imported (no torch): values are kept, not checked."""

    model_config = ConfigDict(extra="allow", frozen=True)


def role_of(model: type[BaseModel], name: str) -> Role:
    """Return the role of a field; an unmarked field is structural, the careful choice."""
    extra = model.model_fields[name].json_schema_extra
    role = extra.get("role") if isinstance(extra, dict) else None
    return role if role in ROLES else "structural"
