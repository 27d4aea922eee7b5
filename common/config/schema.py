"""The typed configuration of a run: sections, fields, defaults and the checks that involve several fields."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, field_validator, model_validator

from troupe.common import timing
from troupe.common.config.algorithms import agent_section
from troupe.common.config.env_section import EnvConfig
from troupe.common.config.fields import (
    MAX_PROCESSES,
    MAX_SLOTS,
    MAX_STEPS,
    MAX_THREADS,
    Section,
    Threads,
    UntypedAgentConfig,
    operational,
    structural,
    tunable,
)
from troupe.common.config.replay_section import ReplayConfig
from troupe.common.config.sampled_tables import check_sampled_tables

# libzmq would accept more, and fail at bind or connect with an errno that names neither address nor field.
_ENDPOINT = re.compile(r"(tcp://[^:/\s]+:\d{1,5}|tcp://\[[0-9a-fA-F:]+\]:\d{1,5}|ipc://\S+|inproc://\S+)")

MAX_PART_GAMES = 500
"""Games of one report of an evaluator: with the names of their levels they fit in the header of a message."""


def _endpoint(value: str) -> str:
    if not _ENDPOINT.fullmatch(value):
        raise ValueError("should be an address such as tcp://127.0.0.1:5550 or ipc:///tmp/troupe/control")
    if value.startswith("tcp://") and not 0 < int(value.rsplit(":", 1)[1]) < 65536:
        raise ValueError("should have a port between 1 and 65535")
    return value


def _device(value: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", value):
        raise ValueError("should be cpu, cuda or cuda:N")
    return value


Device = Annotated[str, AfterValidator(_device)]
Endpoint = Annotated[str, AfterValidator(_endpoint)]


class RunConfig(Section):
    """The run as a whole."""

    name: str = tunable("", "Name shown in logs and TensorBoard; empty = name of the run directory.")
    preset: str = tunable("", "Preset the run started with; set by the loader, read by `resume`.")
    seed: int = tunable(
        1,
        "Seed of initial weights, environments and sampling; a restarted process uses other random numbers.",
        ge=0,
        lt=2**31,
    )
    total_steps: int = tunable(
        10_000_000, "Total environment steps of the run, over all slots; with offline, updates.", ge=1
    )
    offline: str = structural(
        "",
        "Minari data set to learn from, by ID or folder: no actors start, and a step of the run is an "
        "update. Empty = learn from actors.",
    )
    log_every_s: float = tunable(
        10.0,
        "Seconds between two rows of every metric, and the fewest between two plain log lines, which come "
        "less often as the run goes on: every minute after ten. With --serial, rows of the learner come "
        "every 20 updates, and with --deterministic the others come ten times between two checkpoints.",
        gt=0,
    )
    hang_s: float = operational(
        timing.HANG_S,
        "Seconds after which a service whose main loop hangs exits, to be restarted. Start-up, the first "
        "update and videos may take six times as long. 0 = never.",
        ge=0,
    )
    trackers: tuple[Literal["wandb", "mlflow", "trackio"], ...] = tunable(
        (),
        "Trackers that also receive all metrics. Each needs the extra of the same name, and takes its "
        "server and key from its own environment variables.",
    )


class ActorConfig(Section):
    """The actors: processes that step environments."""

    processes: int = tunable(
        1, "Actor processes that the launcher starts on this machine.", ge=0, le=MAX_PROCESSES
    )
    slots: int = tunable(32, "Environment copies per actor process, stepped together.", ge=1, le=MAX_SLOTS)
    total_slots: int = tunable(
        0,
        "Slots of the whole run, the N of the exploration ladder; 0 = processes x slots. If there are "
        "more than the actors have, the slots in use are spread evenly over the ladder.",
        ge=0,
        le=MAX_SLOTS * MAX_PROCESSES,
    )
    max_slots_per_key: int = tunable(
        0,
        "Maximum number of slots for all actors with one key together, if actors have different keys; 0 = "
        "no limit.",
        ge=0,
        le=MAX_SLOTS * MAX_PROCESSES,
    )
    env_threads: int = tunable(
        1, "Threads that step the environment copies of one process.", ge=1, le=MAX_THREADS
    )
    chunk_steps: int = structural(50, "Steps of one slot that are sent together.", ge=1, le=MAX_STEPS)
    hindsight_copies: int = structural(
        0,
        "Hindsight (HER): additional copies of each transition, relabelled with goals that its episode "
        "reached later, for environments with goals; 0 = none.",
        ge=0,
        le=64,
    )
    hindsight_window_steps: int = structural(
        1000, "Maximum length of the part of an episode from which these goals are taken.", ge=1, le=MAX_STEPS
    )
    params_period_steps: int = tunable(
        400, "Local inference: steps per slot between two checks for newer parameters.", ge=1
    )
    env_stall_s: float = tunable(
        10.0,
        "Seconds after which a call to an environment is reported as hanging; after six times as long the "
        "actor exits, to be restarted.",
        gt=0,
    )
    torch_threads: Threads = tunable(
        1,
        "Threads of the forward pass, up to 1024; auto: all cores, shared by this machine's actors, if "
        "acting and learning wait for each other (agent.max_staleness is a number), otherwise 1.",
    )
    compute_dtype: Literal["auto", "float32", "bfloat16"] = tunable(
        "float32",
        "Local inference: number format for the convolutions of the acting network and the layer on top of "
        "them; weights are float32. auto: bfloat16 on processors that support it natively, if a trial at "
        "start-up finds it faster.",
    )
    groups: int = tunable(
        2,
        "Central inference: groups into which a process's slots are split; while the learner chooses "
        "actions for one, another is stepped.",
        ge=1,
        le=64,
    )
    opponents: Literal["none", "recent", "win_rate"] = tunable(
        "none",
        "Several agents: earlier versions of the policy that play against it in some games. `recent`: "
        "sampled uniformly from the kept ones; `win_rate`: with weight (1 - win rate)^opponents_exponent.",
    )
    opponents_share: float = tunable(
        0.5,
        "Share of games in which one side learns and an earlier version plays all others; in the rest, "
        "every side learns.",
        ge=0,
        le=1,
    )
    opponents_kept: int = tunable(
        5, "Earlier versions that an actor process keeps, each as a network.", ge=1, le=64
    )
    opponents_period_versions: int = tunable(
        100, "Versions between kept ones; the first is always kept.", ge=1
    )
    opponents_exponent: float = tunable(
        2.0, "With `win_rate`: how strongly hard opponents are preferred; 0 = not at all.", ge=0, le=100
    )
    max_outstanding_inserts: int = tunable(
        64, "Maximum number of unacknowledged chunks per actor process.", ge=1, le=1 << 16
    )


class LearnerConfig(Section):
    """The learner: updates, publication of parameters, checkpoints."""

    prefetch: int = tunable(16, "Sampled batches requested or ready ahead of the update.", ge=1, le=1024)
    publish_period_updates: int = tunable(25, "Updates between two published parameter versions.", ge=1)
    publish_dtype: Literal["float32", "bfloat16"] = tunable(
        "float32",
        "Weights on the wire: bfloat16 halves the bytes. All processes still compute in float32.",
    )
    checkpoint_period_s: float = tunable(300.0, "Seconds between two checkpoints.", gt=0)
    checkpoint_period_steps: int = structural(
        10_000,
        "With --deterministic, instead of checkpoint_period_s: steps of each slot between two "
        "checkpoints. All episodes restart there, so use several times the length of an episode.",
        ge=1,
    )
    certificate_period_updates: int = tunable(
        100, "With --deterministic: updates between two lines of hashes in certificate.json.", ge=1
    )
    keep_checkpoints: int = tunable(3, "Newest checkpoints kept.", ge=1)
    archive_period_s: float = tunable(
        0.0, "Seconds between two checkpoints that are kept forever, in checkpoints/archive; 0 = none.", ge=0
    )
    keep_best: bool = tunable(True, "Keep the network with the best evaluation so far in checkpoints/best.")
    init_from: str = tunable(
        "",
        "Run or checkpoint whose network a new run starts with; empty = random weights. A run that "
        "already has checkpoints continues from those.",
    )
    init_optimizer: bool = tunable(
        False, "With init_from: also its optimiser's moments, target network and count of updates."
    )
    histogram_period_updates: int = tunable(
        0,
        "Updates between two sets of histograms in TensorBoard: weights, gradients and their norms, actions; "
        "0 = none.",
        ge=0,
    )
    gradient_dtype: Literal["float32", "bfloat16"] = tunable(
        "float32",
        "Number format in which several learners exchange and sum gradients: bfloat16 halves the bytes.",
    )
    processes: int = operational(
        1,
        "Learners that the launcher starts on this machine. They share each batch of replay.batch_size "
        "rows. More learners can always join (`troupe learner --join`).",
        ge=1,
        le=MAX_PROCESSES,
    )
    torch_threads: Threads = tunable(
        1,
        "Threads of an update on the CPU, up to 1024; auto: all cores if acting and learning wait for each "
        "other (agent.max_staleness is a number), otherwise 1.",
    )
    device: Device = tunable("cpu", "Where updates run: `cpu`, `cuda` or `cuda:N`.")
    cuda_graph: bool = tunable(
        True,
        "On a GPU, run each update as one CUDA graph, where the algorithm allows it; false: kernel by "
        "kernel.",
    )


class EvaluatorConfig(Section):
    """The evaluator: full episodes with fresh parameters, unclipped."""

    enabled: bool = tunable(True, "Start evaluators.")
    processes: int = tunable(
        1,
        "Evaluators that the launcher starts on this machine; they share the episodes of an evaluation.",
        ge=1,
        le=MAX_PROCESSES,
    )
    episodes: int = tunable(
        5,
        "Episodes per evaluation. If the environment has more levels than that, some are left out.",
        ge=1,
        le=1 << 16,
    )
    period_s: float = tunable(60.0, "Minimum seconds between the starts of two evaluations.", ge=0)
    timeout_s: float = tunable(
        3600.0, "Seconds after which an evaluation ends with the episodes received so far.", gt=0
    )
    slots: int = tunable(
        4,
        "Environment copies stepped together, and so the number of episodes that an evaluator requests at "
        "a time.",
        ge=1,
        le=MAX_SLOTS,
    )
    max_episode_frames: int = tunable(
        108_000,
        "Emulator frames after which an evaluation episode is truncated, independent of the limit in "
        "training.",
        ge=1,
    )
    elo_games: int = tunable(
        0,
        "Several agents: games of each evaluation against an earlier version, for `eval/elo`; 0 = none.",
        ge=0,
        le=1 << 16,
    )
    video: bool = tunable(
        True, "Record a video of the first episode of an evaluation, every five minutes and at the end."
    )
    video_max_steps: int = tunable(2000, "Steps after which a recording stops.", ge=1, le=100_000)

    @property
    def part_games(self) -> int:
        """Games of a part of an evaluation: what is stepped together, if their report fits into a message."""
        return min(self.slots, MAX_PART_GAMES)

    def division(self) -> tuple[int, int, float, float]:
        """Arguments of `troupe.services.learner.control.evaluations.Evaluations`."""
        return self.episodes, self.part_games, self.period_s, self.timeout_s


class InferenceConfig(Section):
    """Where actions are chosen."""

    mode: Literal["local", "central"] = tunable(
        "local",
        "`local`: every actor runs the network itself. `central`: the learner does it for all actors.",
    )
    min_batch: int = tunable(
        1,
        "Central: number of waiting slots at which a forward pass starts at once; while one runs, the "
        "next batch accumulates.",
        ge=1,
    )
    max_batch: int = tunable(
        1024,
        "Central: maximum number of slots in a forward pass, and so in a group of an actor's slots.",
        ge=1,
        le=1 << 16,
    )
    timeout_ms: float = tunable(
        5.0, "Central: longest wait for `min_batch`; then a forward pass starts with fewer slots.", ge=0
    )


class NetConfig(Section):
    """Addresses, ports and timeouts."""

    control: Endpoint = operational(
        "tcp://127.0.0.1:5550",
        "Learner's ROUTER: rendezvous, parameters, telemetry. `troupe train` has private sockets and refuses "
        "this and the next three addresses.",
    )
    announce: Endpoint = operational(
        "tcp://127.0.0.1:5551", "Learner's PUB: one message per parameter version."
    )
    inference: Endpoint = operational(
        "tcp://127.0.0.1:5552", "Learner's ROUTER of central inference: observations in, actions out."
    )
    replay: Endpoint = operational(
        "tcp://127.0.0.1:5560", "ROUTER of replay shard 0; shard i takes port + i."
    )
    learner_network: str = operational(
        "",
        "Private network (such as 10.0.0.0/16) in which learners on several machines exchange gradients, "
        "unencrypted; empty = learners on one machine only.",
    )
    keys_dir: str = operational(
        "", "Directory of CURVE keys (`troupe keys new DIR`); empty = no keys, loopback and ipc only."
    )
    insecure: bool = operational(False, "Allow addresses other than loopback without keys.")
    metrics_port: int = operational(
        0, "First HTTP port of /metrics, /healthz and /readyz; 0 = none.", ge=0, lt=65536
    )
    tensorboard_port: int = operational(
        6006,
        "Port of TensorBoard on this machine, or the next free one; 0 = do not start it.",
        ge=0,
        lt=65536,
    )
    board_port: int | None = operational(
        None,
        "Port of the run's board on this machine, or the next free one; 0 = do not start it. none = 6007, "
        "if the extra `board` is installed and TensorBoard is started.",
        ge=0,
        lt=65536,
    )
    connect_timeout_s: float = operational(
        60.0, "Seconds to wait for a peer at start.", gt=0, le=timing.MAX_PATIENCE_S
    )
    heartbeat_s: float = operational(
        1.0,
        "Seconds between heartbeats; beyond 32 actors, each actor sends them less often.",
        ge=timing.HEARTBEAT_S[0],
        le=timing.HEARTBEAT_S[1],
    )
    liveness_s: float = operational(
        15.0,
        "Seconds of silence after which a peer's lease ends.",
        # The bounds are the protocol's, since a learner's values reach clients that others have written.
        ge=timing.LIVENESS_S[0],
        le=timing.LIVENESS_S[1],
    )

    @field_validator("learner_network")
    @classmethod
    def _is_private(cls, network: str) -> str:
        if network:
            found = ipaddress.ip_network(network)
            if found.is_global:
                raise ValueError(
                    f"{network} is a public network, and gradients are not encrypted: take a private one"
                )
        return network

    @model_validator(mode="after")
    # Otherwise one heartbeat that is a little late ends a lease, and the slots change hands for nothing.
    def _leases_outlive_heartbeats(self) -> NetConfig:
        if self.liveness_s < 2 * self.heartbeat_s:
            raise ValueError("liveness_s should be at least twice heartbeat_s")
        return self


class Config(Section):
    """A whole run. Immutable; `model_copy(update=...)` or the loader make changed ones."""

    run: RunConfig = RunConfig()
    env: EnvConfig = EnvConfig()
    # The algorithm's own model, chosen by `agent.algorithm`; Any, for only the algorithm knows its fields.
    agent: Any = Field(default_factory=dict)
    replay: ReplayConfig = ReplayConfig()
    actor: ActorConfig = ActorConfig()
    learner: LearnerConfig = LearnerConfig()
    evaluator: EvaluatorConfig = EvaluatorConfig()
    inference: InferenceConfig = InferenceConfig()
    net: NetConfig = NetConfig()

    @field_validator("agent", mode="before")
    @classmethod
    # Before validation: the field is Any, so that pydantic would keep the dictionary as it is.
    def _typed_agent(cls, value: Any) -> Any:
        if isinstance(value, BaseModel):
            return value
        if not isinstance(value, Mapping):
            raise ValueError("should be a table of fields")
        return agent_section(value)

    @model_validator(mode="after")
    def _fields_fit_each_other(self) -> Config:
        if not self.replay.tables and self.replay.min_items > self.replay.capacity_items:
            raise ValueError(
                f"replay.min_items ({self.replay.min_items}) should not exceed "
                f"replay.capacity_items ({self.replay.capacity_items})"
            )
        # The limiter lets the ratio move by the error to either side. A batch that is larger than the whole
        # band can neither be sampled nor waited for: samplers and writers would both stand still.
        error, batch = self.replay.samples_per_insert_error, self.replay.batch_size
        if self.replay.samples_per_insert > 0 and error is not None and 2 * error < batch:
            raise ValueError(
                f"replay.samples_per_insert_error ({error:g}) should be at least half of "
                f"replay.batch_size ({batch}), or both sides would wait forever"
            )
        if self.inference.min_batch > self.inference.max_batch:
            raise ValueError(
                f"inference.min_batch ({self.inference.min_batch}) should not exceed "
                f"inference.max_batch ({self.inference.max_batch})"
            )
        if self.actor.opponents != "none" and self.inference.mode == "central":
            raise ValueError(
                "actor.opponents needs actors that run the network themselves: set inference.mode to local"
            )
        ports = (
            self.learner.processes
            + self.replay.shards
            + self.actor.processes
            + self.evaluator.enabled * self.evaluator.processes
        )
        # Found here, not when the last of the services fails to bind.
        if self.net.metrics_port and self.net.metrics_port + ports > 65536:
            raise ValueError(
                f"net.metrics_port ({self.net.metrics_port}) should leave room below 65536 for a port of "
                f"each of the {ports} services: at most {65536 - ports}"
            )
        # Replay without torch does not know what the algorithm needs; the launcher and the learner have
        # checked it.
        if not isinstance(self.agent, UntypedAgentConfig):
            check_sampled_tables(self.agent, self.replay)
            self._check_learners()
        return self

    def _check_learners(self) -> None:
        count = self.learner.processes
        if count > 1 and (reason := self.agent.one_learner_because):
            raise ValueError(f"learner.processes is {count}, but {reason}: set it to 1")
        if count > self.replay.batch_size:
            raise ValueError(
                f"learner.processes is {count}, but a batch has {self.replay.batch_size} rows "
                "(replay.batch_size) to divide"
            )

    @property
    def total_slots(self) -> int:
        """Return the number of exploration slots of the whole run."""
        # Zero processes is a run whose actors are started by hand, elsewhere.
        return self.actor.total_slots or max(1, self.actor.processes * self.actor.slots)

    def torch_threads(self, role: Literal["actor", "learner"], cores: int) -> int:
        """Return the threads of torch in a process of this role on a machine with `cores` cores.

        `auto` goes by who is at work: with limited staleness the faster of acting and learning waits for the
        other, so each may have every core. Otherwise both work all the time, and so do environments.
        """
        wanted = self.actor.torch_threads if role == "actor" else self.learner.torch_threads
        if wanted != "auto":
            return wanted
        if self.agent.allowed_staleness is None:
            return 1
        return max(1, cores // max(1, self.actor.processes)) if role == "actor" else cores

    def to_dict(self) -> dict[str, Any]:
        """Return nested plain values (str, int, float, bool, list, dict, None), fit for msgpack and JSON."""
        return self.model_dump(mode="json")


# Sections whose model is fixed; `agent` is looked up by algorithm.
SECTIONS: dict[str, type[BaseModel]] = {
    name: info.annotation
    for name, info in Config.model_fields.items()
    if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)
}
