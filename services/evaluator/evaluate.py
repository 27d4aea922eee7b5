"""`troupe eval`: plays full games with a checkpoint, without any other service."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError

from common.agents import Agent, make_agent
from common.config import Config
from common.envs import EnvSpec, Episode, make_spec
from common.errors import CheckpointError, ConfigError
from common.installation import install_command
from common.permits import add_module_argument, permitted_config
from common.runtime.checkpoint import Checkpoint, open_checkpoint
from common.runtime.logging import warnings_shown
from common.runtime.parser import Parser, integer, real
from common.runtime.video import ENCODERS, Recorder, check_film_path
from common.stats import ci95, human_normalized
from services.evaluator.games import Result, play

MAX_SLOTS = 8


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(
        prog="troupe eval", description="Play full games with a run's newest, or a given, checkpoint."
    )
    parser.add_argument("path", type=Path, metavar="RUN_DIR_OR_CHECKPOINT", help="where the parameters are")
    parser.add_argument("--episodes", type=integer(1), default=20, metavar="N", help="games (default: 20)")
    parser.add_argument(
        "--seed",
        type=integer(0),
        default=0,
        metavar="S",
        help="seed of the games: with as many of them, the same (default: 0)",
    )
    parser.add_argument(
        "--epsilon", type=real(0, 1), metavar="E", help="exploration (default: agent.eval_epsilon)"
    )
    parser.add_argument("--video", type=Path, metavar="FILE", help="film the first game: .mp4 or .gif")
    add_module_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON line instead of a table")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Play and print; returns the exit code."""
    arguments = parse(argv)
    if arguments.video:
        check_film_path(arguments.video)
    with warnings_shown("common.runtime.checkpoint"):
        checkpoint = open_checkpoint(arguments.path)
    torch.set_num_threads(1)
    config, agent = restore(checkpoint, arguments.modules)
    epsilon = agent.eval_epsilon if arguments.epsilon is None else arguments.epsilon
    recorder = Recorder() if arguments.video else None
    quiet = arguments.json
    if not quiet:
        print(f"checkpoint  {checkpoint.path}\nenvironment {config.env.id}, full games, epsilon {epsilon:g}")
    played: list[Episode] = []

    def on_game(game: Episode) -> None:
        played.append(game)
        if not quiet:
            counted = f"{len(played):3d} of {arguments.episodes}"
            print(f"  game {counted}: return {game.return_raw:g}, {game.steps} steps", flush=True)

    report = evaluate(
        checkpoint,
        config,
        agent,
        episodes=arguments.episodes,
        seed=arguments.seed,
        epsilon=epsilon,
        recorder=recorder,
        on_game=on_game,
    )
    print(json.dumps(report) if quiet else table(report))
    if recorder is not None:
        _write_video(arguments.video, recorder)
    return 0


def restore(checkpoint: Checkpoint, modules: Collection[str] = ()) -> tuple[Config, Agent]:
    """Build the agent that a checkpoint holds, to play; it brings its own configuration.

    Environment and algorithm may be from Troupe itself or from `modules`: importing a module runs it.

    Raises:
        CheckpointError: it does not say what it is of.
    """
    config = config_of(checkpoint, modules)
    return config, agent_of(checkpoint, config, make_spec(config.env))


def config_of(checkpoint: Checkpoint, modules: Collection[str], *, plays: bool = True) -> Config:
    """The configuration of the run that a checkpoint is of; see `common.permits.permitted_config`."""
    values = _part(checkpoint, "config")
    return permitted_config(values, modules, f"checkpoint {checkpoint.path}", plays=plays)


def spec_of(checkpoint: Checkpoint) -> EnvSpec:
    """What the run's environment showed, without making it."""
    values = _part(checkpoint, "spec")
    try:
        return TypeAdapter(EnvSpec).validate_python(values)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(map(str, ("spec", *problem["loc"])))
        raise CheckpointError(
            f"checkpoint {checkpoint.path}: {where} in meta.json: {problem['msg']}"
        ) from None


def agent_of(checkpoint: Checkpoint, config: Config, spec: EnvSpec, device: str = "cpu") -> Agent:
    """The agent of a checkpoint, ready to act.

    Raises:
        CheckpointError: its arrays are not those of the network, or not finite.
    """
    agent = make_agent(config.agent, spec, seed=config.run.seed, device=device)
    agent.load_state(checkpoint.arrays, _part(checkpoint, "agent"), to_learn=False)
    for name, array in agent.params().items():
        if not np.isfinite(array).all():  # it would play, at random
            raise CheckpointError(
                f"checkpoint {checkpoint.path}: the array {name} is not finite: training had diverged; "
                "give an earlier checkpoint"
            )
    return agent


def _part(checkpoint: Checkpoint, name: str) -> Any:
    try:
        return checkpoint.meta[name]
    except KeyError:
        raise CheckpointError(f"checkpoint {checkpoint.path} has no {name!r} in meta.json") from None


def evaluate(
    checkpoint: Checkpoint,
    config: Config,
    agent: Agent,
    *,
    episodes: int,
    seed: int,
    epsilon: float,
    recorder: Recorder | None = None,
    on_game: Callable[[Episode], None] = lambda game: None,
) -> dict[str, Any]:
    """Play full games with the agent of a checkpoint; returns what `--json` prints."""
    result = play(
        agent,
        config.env,
        episodes=episodes,
        slots=MAX_SLOTS,
        seed=seed,
        epsilon=epsilon,
        max_episode_frames=config.evaluator.max_episode_frames,
        threads=min(MAX_SLOTS, os.cpu_count() or 1),
        recorder=recorder,
        on_game=on_game,
    )
    assert result is not None  # nobody stops it
    return summary(result, config, checkpoint, seed=seed, epsilon=epsilon)


def summary(
    result: Result, config: Config, checkpoint: Checkpoint, *, seed: int, epsilon: float
) -> dict[str, Any]:
    """Return what `--json` prints."""
    low, high = ci95(result.returns)
    return {
        "mean_return": result.mean_return,
        "ci95": [low, high],
        "human_normalized": human_normalized(config.env.id, result.mean_return),
        "returns": result.returns,
        "mean_length": result.mean_steps,
        "episodes": len(result.returns),
        "env": config.env.id,
        "steps": int(checkpoint.meta.get("steps", 0)),
        "updates": int(checkpoint.meta.get("updates", 0)),
        "checkpoint": str(checkpoint.path),
        "seed": seed,
        "epsilon": epsilon,
    }


def table(report: dict[str, Any]) -> str:
    """Write a summary for people."""
    low, high = report["ci95"]
    normalised = report["human_normalized"]
    rows = [
        ("trained for", f"{report['steps']:,} steps, {report['updates']:,} updates"),
        ("mean return", f"{report['mean_return']:.2f}  (95 % interval {low:.2f} to {high:.2f})"),
        ("human-normalised", "unknown for this environment" if normalised is None else f"{normalised:.3f}"),
        ("best, worst", f"{max(report['returns']):g}, {min(report['returns']):g}"),
        ("mean length", f"{report['mean_length']:.0f} steps"),
    ]
    return "\n".join(f"{label:<17} {value}" for label, value in rows)


def _write_video(path: Path, recorder: Recorder) -> None:
    if not len(recorder):
        print(f"{path} was not written: {recorder.missing}", file=sys.stderr)
        return
    try:
        path.write_bytes(ENCODERS[path.suffix.lower()](recorder, recorder.frames_per_s))
    except ImportError as error:
        raise ConfigError(f"films need the package {error.name}: {install_command('evaluator')}") from error
    except OSError as error:
        raise ConfigError(f"cannot write the film {path}: {error.strerror}") from error


if __name__ == "__main__":
    from common.runtime.lifecycle import run_main

    sys.exit(run_main(lambda: main(sys.argv[1:])))
