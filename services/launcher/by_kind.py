"""`troupe train --algo NAME --env ID`: values that suit an algorithm and the kind of environment.

They are those of a preset for such an environment, without what it chose for its own.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from troupe.common.config import Loaded, load_layers
from troupe.common.config.algorithms import agent_model, algorithm_module, outside_names
from troupe.common.config.loading import Layer, flat, merge, upper_layers
from troupe.common.config.presets import read_preset
from troupe.common.errors import ConfigError

if TYPE_CHECKING:
    from troupe.common.envs import EnvSpec

NAMES = {
    "a2c": "policy_gradient",
    "apex": "apex",
    "ddpg": "td3",
    "double_dqn": "apex",
    "dqn": "apex",
    "impala": "impala",
    "iql": "iql",
    "policy_gradient": "policy_gradient",
    "ppo": "policy_gradient",
    "pqn": "pqn",
    "r2d2": "r2d2",
    "rainbow": "apex",
    "sac": "sac",
    "td3": "td3",
    "td3_bc": "td3_bc",
}
"""What `--algo` takes, and the algorithm that it means."""

_DQN = {
    "agent.n_steps": 1,
    "agent.dueling": False,
    "agent.double": False,
    "replay.priority_exponent": 0.0,  # uniform, and then all importance weights are 1
}
_OF_NAME: dict[str, dict[str, Any]] = {
    "dqn": _DQN,
    "double_dqn": {**_DQN, "agent.double": True},
    "ddpg": {"agent.critics": 1, "agent.target_noise": 0.0, "agent.policy_period_updates": 1},
    "rainbow": {
        "agent.n_steps": 3,
        "agent.dueling": True,
        "agent.double": True,
        "agent.noise": 0.5,
        "agent.quantiles": 8,  # IQN's in the place of C51: as many as BTR has, which two cores can compute
        "replay.priority_exponent": 0.5,
    },
    "a2c": {
        "agent.policy_loss": "vpg",
        "agent.advantages": "gae",
        "agent.lambda_": 1.0,  # all rewards to the end of the unroll, then its value
        "agent.normalize_advantages": False,
        "agent.unroll_steps": 5,
        "agent.epochs": 1,
        "agent.minibatch_steps": 0,
        "agent.max_staleness": 0,
        "agent.decoupled": False,
        "agent.value_clip": "none",
        "agent.learning_rate": 7e-4,
        "agent.learning_rate_schedule": "linear",
        "agent.max_grad_norm": 0.5,
        "actor.processes": 1,
        "actor.slots": 16,  # few, and so many updates, for each makes but one step
        "replay.batch_size": 16,
    },
}
"""Values that make of an algorithm the one with this name; they are above those for the kind."""


@dataclass(frozen=True)
class _Start:
    """A preset, and the fields with other values than it has for its own environment."""

    preset: str
    fields: Mapping[str, Any] = field(default_factory=dict)


_LONG = {"run.total_steps": 500_000}
# Where nobody has looked at the size of rewards and observations.
_ANY_SIZE = {"agent.reward_scale": 1.0, "agent.normalize_returns": True, "agent.normalize_vectors": True}
# Without n-step returns and priorities, Ape-X's step size forgets what it has learned.
_ONE_STEP = {**_LONG, "agent.learning_rate": 2.5e-4, "agent.target_update_period_updates": 250}
_SAC = {"run.total_steps": 100_000, "replay.capacity_items": 100_000}
# Those of the papers' locomotion, for data sets of a million steps.
_WIDE = {
    "run.total_steps": 200_000,
    "replay.capacity_items": 100_000,
    "replay.batch_size": 256,
    "agent.mlp_units": [256, 256],
    "agent.learning_rate": 3e-4,
    "agent.tau": 0.005,
    "agent.gamma": 0.99,
}
_TD3 = {
    **_WIDE,
    "run.total_steps": 100_000,
    "replay.min_items": 5_000,
    "replay.samples_per_insert": 256.0,  # an update for each step
}
_IQL, _TD3_BC = {**_WIDE, "agent.expectile": 0.7}, {**_WIDE, "agent.q_weight": 2.5}
_OWN_ENTROPY = {"agent.target_entropy": "none", "agent.entropy_cost": 1.0}
_LOST_SIGHT = {"agent.see_last_step": True, "agent.gamma": 0.99}

_VECTORS = {
    ("policy_gradient", "discrete"): _Start(
        "cartpole-ppo", {**_LONG, **_ANY_SIZE, "agent.entropy_cost": 0.01}
    ),
    ("policy_gradient", "continuous"): _Start("halfcheetah-ppo", _LONG),
    ("impala", "discrete"): _Start("cartpole-impala", {**_LONG, "agent.gamma": 0.99}),
    ("impala", "continuous"): _Start("cartpole-impala", {**_LONG, "agent.gamma": 0.99}),
    ("pqn", "discrete"): _Start("cartpole-pqn", _LONG),
    ("apex", "discrete"): _Start("cartpole-apex", _LONG),
    ("dqn", "discrete"): _Start("cartpole-apex", _ONE_STEP),
    ("double_dqn", "discrete"): _Start("cartpole-apex", _ONE_STEP),
    ("r2d2", "discrete"): _Start("memory-r2d2", {**_LONG, **_LOST_SIGHT}),
    ("sac", "discrete"): _Start("cartpole-sac", {**_SAC, **_OWN_ENTROPY}),
    ("sac", "continuous"): _Start("halfcheetah-sac", _SAC),
    ("iql", "discrete"): _Start("pendulum-iql", _IQL),
    ("iql", "continuous"): _Start("pendulum-iql", _IQL),
    ("td3", "continuous"): _Start("pendulum-td3", _TD3),
    ("td3_bc", "discrete"): _Start("pendulum-td3-bc", _TD3_BC),
    ("td3_bc", "continuous"): _Start("pendulum-td3-bc", _TD3_BC),
}
_PIXELS = {
    "policy_gradient": "pong-ppo",
    "impala": "pong-impala",
    "pqn": "pong-pqn",
    "apex": "pong-apex",
    "r2d2": "pong-r2d2",
}
_ATARI = {**_PIXELS, "policy_gradient": "atari-ppo"}
"""Of the games but Pong, whose own presets need fewer steps for it."""
_GRIDS = {**_PIXELS, "policy_gradient": "minatar-ppo", "impala": "minatar-breakout-impala"}


def load(
    algo: str, sweep: Path | None, overrides: Mapping[str, Any], environ: Mapping[str, str] | None
) -> Loaded:
    """Return what the layers give over the values for an algorithm and the environment that they name.

    Raises:
        ConfigError: there is no such algorithm, none of its presets is for such an environment, or the
            environment cannot be played.
    """
    if algo not in NAMES and not algorithm_module(algo):
        known = sorted({*NAMES, *outside_names()})
        near = difflib.get_close_matches(algo, known, n=1, cutoff=0.6)
        nearest = f"; nearest: {near[0]}" if near else ""
        raise ConfigError(
            f"unknown algorithm '{algo}'{nearest}; --algo takes {', '.join(known)}, or the module of an "
            "algorithm of your own"
        )
    above = upper_layers(overrides, sweep, environ)
    if not any("env.id" in layer.values for layer in above):
        raise ConfigError(f"--algo {algo} needs an environment: --env gym:CartPole-v1, or another")
    values = _values(algo, _spec(above))
    return load_layers(None, sweep, overrides, environ, beneath=values)


def _spec(above: list[Layer]) -> EnvSpec:
    """What the environment shows, found out in a process of its own."""
    from troupe.common.envs import make_spec
    from troupe.services.environment.check import check

    own = [
        replace(layer, values={key: value for key, value in layer.values.items() if key.startswith("env.")})
        for layer in above
    ]
    config = merge(own).config.env
    if not config.check_timeout_s:
        return make_spec(config)
    return check(config, slots=1, steps=1, timeout_s=config.check_timeout_s).spec


def _alike(algo: str, actions: str) -> str:
    """The algorithm here that stores experience in the way of one outside this tree."""
    try:
        table = agent_model(algo).table
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if table.kind == "queue":
        return "policy_gradient"
    return "apex" if actions == "discrete" else "sac"


def _values(algo: str, spec: EnvSpec) -> list[Layer]:
    """The layers of values for this kind of environment, highest first."""
    from troupe.common.agents.network import picture_sides
    from troupe.common.nets.torsos import MIN_SIDE

    actions = "discrete" if spec.actions.count else "continuous"
    is_atari = spec.id.startswith("atari:")
    algorithm, sides = NAMES.get(algo) or _alike(algo, actions), picture_sides(spec)
    if not sides:
        kind, start = "vectors", _VECTORS.get((algo, actions)) or _VECTORS.get((algorithm, actions))
    else:
        kind = "grids" if min(sides) < MIN_SIDE else "pixels"
        presets = _PIXELS if kind == "pixels" else _GRIDS
        if kind == "pixels" and is_atari and spec.id != "atari:pong":
            presets = _ATARI
        base = presets.get(algorithm)
        start = _Start(base) if base else None
    one_choice = actions == "continuous" and not agent_model(NAMES.get(algo, algo)).takes_any_action
    if not start or one_choice:
        other = (
            "--env.action_bins 11 where the action is one number" if one_choice else "a TOML file of your own"
        )
        raise ConfigError(
            f"{algo} has no starting values for {kind} and {actions} actions, which {spec.id} has: "
            f"take --algo ppo, or {other}"
        )
    fields = dict(start.fields)
    values = {
        key: value
        for key, value in flat(read_preset(start.preset), start.preset).items()
        if not key.startswith("env.")
    }
    # A preset names the torso for its own pictures; these may have another size.
    if "agent.torso" in values and not is_atari:
        fields["agent.torso"] = "auto"
    # Clipping to one suits Atari's scores; elsewhere it would hide most of what there is to learn.
    if values.get("agent.reward_clip") == "abs_one" and not is_atari:
        fields["agent.reward_clip"] = "none"
    if (
        algo not in NAMES
    ):  # its own defaults: the fields of the other may mean something else to it, or nothing
        fields, values = (
            {key: value for key, value in each.items() if not key.startswith("agent.")}
            for each in (fields, values)
        )
        fields["agent.algorithm"] = algo
    return [
        *([Layer(f"--algo {algo}", _OF_NAME[algo])] if algo in _OF_NAME else []),
        Layer(f"preset for {kind}, {actions} actions", fields),
        Layer(f"preset {start.preset}", values),
    ]
