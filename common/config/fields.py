"""What every configuration section is made of: frozen models whose fields carry a description and a role.

The role says what may happen to a field after a run has begun:

* `structural`: shapes the stored data or the network; all services and checkpoints of a run must agree;
* `tunable`: may be changed when a run is resumed; the change is logged;
* `operational`: belongs to the machine, not to the experiment (addresses, ports); never comes
  from a checkpoint.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from troupe.common.config.text import accepts_none, accepts_text

Role = Literal["structural", "tunable", "operational"]
# At run time `Literal` is only text to a type checker, so the roles are listed once more for `role_of`.
ROLES: tuple[Role, ...] = ("structural", "tunable", "operational")

MAX_UNITS = 1 << 16
MAX_LAYERS = 64
MAX_STEPS = 1 << 14
"""Bounds of what networks and unrolls are made of: far above what has been trained, below overflow."""
MAX_BATCH = 1 << 20
"""Items of a batch: what the protocol allows in one SAMPLE."""
MAX_PROCESSES = 1024
MAX_SLOTS = 1024
MAX_THREADS = 1024
"""Of one machine, and of one process: beyond what has been built. All who join obey a peer's configuration,
so a count without a bound would take all of their memory."""
MAX_COUNT = 2**53
"""Bound of every number without one of its own: larger integers are not exact as float64."""

Units = Annotated[int, Field(ge=1, le=MAX_UNITS)]
"""Width of a layer."""
UnitsOrNone = Annotated[int, Field(ge=0, le=MAX_UNITS)]
"""Width of a layer that 0 leaves out."""
Widths = Annotated[tuple[Units, ...], Field(max_length=MAX_LAYERS)]
"""Widths of layers, from the input on."""
Layers = Annotated[int, Field(ge=1, le=MAX_LAYERS)]
"""Number of layers."""
StepCount = Annotated[int, Field(ge=1, le=MAX_STEPS)]
"""Steps of one slot that are stored or learned from together."""


def _threads(value: Any) -> Any:
    if value != "auto" and not (isinstance(value, int) and 1 <= value <= MAX_THREADS):
        raise ValueError(f"should be auto, or a number from 1 to {MAX_THREADS}")
    return value


Threads = Annotated[int | Literal["auto"], BeforeValidator(_threads)]
"""A number of threads, or `auto`: see `Config.torch_threads`."""


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

    # Unknown fields are refused because a misspelt one would train silently with the default. Frozen, since
    # one configuration is shared by threads. TOML can write `inf`, which would pass every lower bound.
    # Defaults are validated too: a subclass may give a field another default, and the bound that it breaks is
    # found at once.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    # Both validators run before pydantic's own, on every field: afterwards `true` would already be 1.
    def _none_can_be_said(cls, value: Any, info: ValidationInfo) -> Any:
        # TOML has no word for it, and leaving a field out means its default.
        if value == "none" and info.field_name is not None:
            annotation = cls.model_fields[info.field_name].annotation
            if typing.get_origin(annotation) is dict:
                return {}
            # One that takes text keeps the word, which may be among its options.
            if accepts_none(annotation) and not accepts_text(annotation):
                return None
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _numbers_are_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        # Python's bool is an int, so `batch_size = true` would otherwise silently mean 1.
        if isinstance(value, bool) and info.field_name is not None:
            # As text, since the number may stand anywhere in it: `float | None`, a tuple of widths, an
            # Annotated.
            annotation = str(cls.model_fields[info.field_name].annotation)
            if "int" in annotation or "float" in annotation:
                raise ValueError("should be a number, not true or false")
        if isinstance(value, int) and abs(value) > MAX_COUNT:
            raise ValueError("should be within -2^53 and 2^53")
        return value


@dataclass(frozen=True, slots=True)
class TableNeeds:
    """What kind of replay table an algorithm learns from.

    Batches may come from several tables: any number of the prioritized kind, one of the queue's.
    """

    kind: Literal["prioritized", "queue"] = "prioritized"
    """`prioritized`: items stay and are drawn again and again, by priority or not. `queue`: passed on in
    the order of arrival."""
    max_times_sampled: int = 0
    """An item is removed after this many samples; 0: it stays."""
    replays: bool = False
    """Beside its queue it also learns from tables that give an item more than once. `Agent.update` is then
    told which rows of a batch are from these."""


class AgentConfig(Section):
    """Base of every algorithm's own section; subclasses live beside their algorithm in `common/agents/`.

    A subclass says here what must be known of its algorithm before an agent can be made.
    """

    # Class variables, not fields: they are what the code can do, so no user may set them, and they are known
    # before an agent is made, so that a run that cannot work is refused while its configuration is checked.
    table: ClassVar[TableNeeds] = TableNeeds()
    """Where its chunks go."""
    reads_instructions: ClassVar[bool] = False
    """Whether its networks understand `EnvSpec.instruction_words`."""

    takes_any_action: ClassVar[bool] = False
    """Whether an action may be other than one choice of several, see `troupe.common.spaces.ActionSpec`."""
    draws_actions: ClassVar[bool] = False
    """Whether it has a policy: its epsilon is then the chance that an action is drawn from it instead of
    being its best one, and no chance of an action at random."""

    several_learners: ClassVar[bool] = False
    """Whether several learners can share each batch, see `troupe.common.agents.learners.reduction`."""

    # Every subclass narrows this to a `Literal` of its own name, which is what the registry looks up.
    algorithm: str = structural("apex", "Name of the algorithm, a key of the registry.")

    @property
    def allowed_staleness(self) -> int | None:
        """Versions by which the policy that acts may be older than the newest; None: no limit.

        With a limit, the agent has `unroll_steps`: actors wait between two unrolls.
        """
        return None

    @property
    def one_learner_because(self) -> str:
        """Why several learners cannot share a batch; empty where they can."""
        if self.several_learners:
            return ""
        return f"{self.algorithm} does not say how the shares of its batches become one update"

    @property
    def of_replayed_rows(self) -> list[str]:
        """Fields that are set, and mean something only where batches mix replayed rows with fresh ones."""
        return []


Torso = Literal[
    "auto", "shallow", "nature", "small", "wide", "minatar", "hadamax", "deep", "football", "btr", "mlp"
]
"""Of `troupe.common.nets.torsos`."""
NORMALIZE_REWARDS = (
    "Divide rewards by the root mean square of discounted returns, estimated from the rewards learned from."
)
POLICY_GAIN = "Factor on the initial weights of the policy's last layer."


class PixelAgentConfig(AgentConfig):
    """Base of the algorithms whose networks see pixels: how, and what these begin with."""

    pixel_torso: ClassVar[str] = "nature"
    """What `torso = "auto"` takes for pixels."""

    torso: Torso = structural(
        "auto",
        "First part of the network: convolutions for pixels (`nature`, `wide`, `small` or `shallow`), "
        "multiplied (`hadamax`), residual (`deep`, `football`, `btr`), `minatar` for grids under 20 x 20, "
        "`mlp` for vectors. `auto` depends on the observation; for pixels it is `shallow` in IMPALA and PPO, "
        "`nature` in others.",
    )
    initializer: Literal[
        "auto",
        "orthogonal",
        "lecun_normal",
        "lecun_uniform",
        "glorot_normal",
        "glorot_uniform",
        "he_normal",
        "he_uniform",
    ] = structural(
        "auto",
        "Initial weights of all layers except LSTMs; `auto`: orthogonal, in residual pixel torsos "
        "`lecun_normal`.",
    )
    value_gain: float = structural(
        1.0, "Factor on the initial weights of the last layers of value heads.", ge=0, le=100
    )

    normalize_pixels: bool = structural(
        True,
        "Normalise each pixel by its running mean and standard deviation (by position, clipped at 5); "
        "false: divide by 255.",
    )
    normalize_pixels_frames: int = tunable(
        2_000_000, "Frames learned from after which these statistics are frozen.", ge=1
    )
    eval_epsilon: float = tunable(0.0, "Exploration (epsilon) of the evaluator.", ge=0, le=1)


class RecurrentAgentConfig(PixelAgentConfig):
    """Base of the algorithms whose network is a torso, possibly an LSTM, and heads."""

    hidden_units: Units = structural(256, "Width of the layer after a pixel torso.")
    mlp_units: Widths = structural((64, 64), "Widths of the mlp torso's layers.")
    lstm_units: UnitsOrNone = structural(0, "Width of the LSTM; 0 = no LSTM.")
    lstm_layers: Layers = structural(1, "Layers of the LSTM.")
    see_last_step: bool = structural(True, "Feed the last action and the clipped last reward to the network.")


class QLearningConfig(PixelAgentConfig):
    """Base of the algorithms that learn Q values against a target network; defaults as of Ape-X and R2D2."""

    max_grad_norm: float = tunable(40.0, "Maximum global norm of the gradient; 0 = no clipping.", ge=0)
    normalize_rewards: bool = structural(False, NORMALIZE_REWARDS)
    target_update_period_updates: int = tunable(2500, "Updates between copies to the target network.", ge=1)
    epsilon_base: float = tunable(
        0.4, "Exploration of slot i of N is base^(1 + alpha i / (N - 1)).", ge=0, le=1
    )
    epsilon_alpha: float = tunable(7.0, "Spread of exploration over the slots.", ge=0)
    # Nearly greedy, not greedy: in a deterministic game one losing cycle could go on to the limit of frames.
    eval_epsilon: float = tunable(0.001, "Exploration (epsilon) of the evaluator.", ge=0, le=1)


class SequenceAgentConfig(RecurrentAgentConfig):
    """Base of the algorithms that learn from replayed sequences: which; defaults are R2D2's (table 2)."""

    sequence_steps: StepCount = structural(80, "Maximum number of steps of a sequence to learn from.")
    burn_in_steps: int = structural(
        40, "Burn-in: steps before these that only update the stored recurrent state.", ge=0, le=MAX_STEPS
    )
    sequence_period_steps: StepCount = structural(
        40, "Steps between the beginnings of two sequences; at most sequence_steps."
    )
    across_episodes: bool = structural(
        False,
        "Cut sequences of equal length from the continuous stream of a slot's episodes; false: no "
        "sequence crosses the end of an episode, and the last one of an episode is shorter.",
    )
    priority_eta: float = tunable(
        0.9,
        "Weight of the largest error in a sequence's priority; the rest is the weight of the mean.",
        ge=0,
        le=1,
    )

    @model_validator(mode="after")
    # Overlap is how R2D2 cuts (80 steps every 40); a gap is an oversight, for those steps are never learned
    # from.
    def _sequences_leave_no_gap(self) -> Self:
        if self.sequence_period_steps > self.sequence_steps:
            raise ValueError(
                f"sequence_period_steps ({self.sequence_period_steps}) should not exceed sequence_steps "
                f"({self.sequence_steps}), or steps between two sequences would not be learned from"
            )
        return self


class PolicyConfig(RecurrentAgentConfig):
    """Base of the algorithms that learn a policy: how it draws the real numbers of an action."""

    takes_any_action = True
    draws_actions = True

    action_distribution: Literal["normal", "tanh_normal", "tanh"] = structural(
        "normal",
        "Distribution of continuous actions: a normal, clipped to the bounds by the environment; a normal "
        "squashed into the bounds; or squashed and deterministic, for cloning.",
    )
    deviation: Literal["softplus", "exp"] = structural(
        "softplus", "Function from a parameter to a standard deviation; exp gives at most 10,000."
    )
    deviation_floor: float = structural(
        1e-3, "Smallest standard deviation, in halves of the action's range.", gt=0, lt=1
    )
    deviation_start: float = structural(
        1.0, "Initial standard deviation, in halves of the action's range.", ge=0.01, le=100
    )
    policy_gain: float = structural(0.01, POLICY_GAIN, ge=0, le=100)
    normalize_returns: bool = structural(
        False,
        "The baseline predicts returns minus their running mean, divided by their standard "
        "deviation, and advantages are divided by it too (PopArt).",
    )
    returns_window: int | None = tunable(
        None,
        "Window of these statistics, in returns: older ones decay; none = average of all.",
        ge=1,
    )
    deviation_of_input: bool = structural(
        False, "Standard deviations depend on the observation; false: each is a separate parameter."
    )
    eval_epsilon: float = tunable(
        1.0,
        "Probability that the evaluator samples from the policy instead of taking the greedy action.",
        ge=0,
        le=1,
    )

    @model_validator(mode="after")
    # The floor is added to what the layer gives, so the bias that gives `deviation_start` would need the
    # logarithm of a number that is not positive.
    def _starts_above_the_floor(self) -> Self:
        if self.deviation_start <= self.deviation_floor:
            raise ValueError("deviation_start should be more than deviation_floor")
        return self


class UntypedAgentConfig(AgentConfig):
    """The agent section where the algorithm cannot be imported (no torch): values are kept, not checked."""

    # Replay runs where torch, and so the algorithm, is not installed. It hands these values on in the files
    # that it writes, so they have to survive unchanged.
    model_config = ConfigDict(extra="allow", frozen=True)


def role_of(model: type[BaseModel], name: str) -> Role:
    """Return the role of a field; an unmarked field is structural, the careful choice."""
    extra = model.model_fields[name].json_schema_extra
    role = extra.get("role") if isinstance(extra, dict) else None
    return role if role in ROLES else "structural"
