"""`troupe eval`: plays full games with a checkpoint, without any other service."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.agents import Agent, make_agent
from common.config import Config, config_from_dict
from common.envs import Episode, make_spec
from common.errors import CheckpointError, ConfigError
from common.runtime.arguments import Parser, integer, real
from common.runtime.checkpoint import Checkpoint, load_checkpoint, load_newest
from common.runtime.files import looking_into
from common.runtime.logging import warnings_shown
from common.runtime.video import Recorder, encode_gif
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
    parser.add_argument("--video", type=Path, metavar="FILE", help="film the first game as a GIF")
    parser.add_argument("--json", action="store_true", help="print one JSON line instead of a table")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Play and print; returns the exit code."""
    arguments = parse(argv)
    with warnings_shown("common.runtime.checkpoint"):
        checkpoint = open_checkpoint(arguments.path)
    config, agent = restore(checkpoint)
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

    result = play(
        agent,
        config.env,
        episodes=arguments.episodes,
        slots=MAX_SLOTS,
        seed=arguments.seed,
        epsilon=epsilon,
        max_episode_frames=config.evaluator.max_episode_frames,
        threads=min(MAX_SLOTS, os.cpu_count() or 1),
        recorder=recorder,
        on_game=on_game,
    )
    assert result is not None  # nobody stops it
    report = summary(result, config, checkpoint, seed=arguments.seed, epsilon=epsilon)
    print(json.dumps(report) if quiet else table(report))
    if recorder is not None:
        _write_video(arguments.video, recorder)
    return 0


def open_checkpoint(path: Path) -> Checkpoint:
    """Load the newest whole checkpoint of a run or of a directory of checkpoints, or the given one.

    Raises:
        ConfigError: there is nothing of the kind at `path`.
        CheckpointError: it is damaged.
    """
    with looking_into(path):
        if not path.is_dir():
            raise ConfigError(f"{path} is not a directory: give a run directory or a checkpoint directory")
        if (path / "checkpoints").is_dir():
            return load_newest(path / "checkpoints")
        if any(path.glob("step-*")):
            return load_newest(path)
        if not (path / "meta.json").exists() and not path.name.startswith("step-"):
            raise ConfigError(f"{path} is neither a run directory nor a checkpoint")
        return load_checkpoint(path)


def restore(checkpoint: Checkpoint) -> tuple[Config, Agent]:
    """Build the agent that a checkpoint holds; it brings its own configuration.

    Raises:
        CheckpointError: it does not say what it is of.
    """
    import torch

    torch.set_num_threads(1)
    try:
        config = config_from_dict(checkpoint.meta["config"], source=f"{checkpoint.path}")
        agent_meta = checkpoint.meta["agent"]
    except KeyError as error:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} has no {error.args[0]!r} in meta.json"
        ) from error
    agent = make_agent(config.agent, make_spec(config.env), seed=config.run.seed, device="cpu")
    arrays = {name: array for name, array in checkpoint.arrays.items() if not name.startswith("rng/")}
    agent.load_state(arrays, agent_meta)
    return config, agent


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
        print(f"no film: this environment draws no pictures, {path} was not written", file=sys.stderr)
        return
    try:
        path.write_bytes(encode_gif(recorder))
    except OSError as error:
        raise ConfigError(f"cannot write the film {path}: {error.strerror}") from error


if __name__ == "__main__":
    from common.runtime.lifecycle import run_main

    sys.exit(run_main(lambda: main(sys.argv[1:])))
