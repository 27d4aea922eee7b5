"""`troupe eval`: plays full games with a checkpoint, without any other service."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError

from troupe.common.agents import Agent, make_agent
from troupe.common.agents.tensors import check_device
from troupe.common.config import Config, with_overrides
from troupe.common.config.field_options import parse_with_fields
from troupe.common.config.fields import MAX_SLOTS
from troupe.common.envs import EnvSpec, Episode, check_settings, make_spec
from troupe.common.errors import CheckpointError, ConfigError, TroupeError
from troupe.common.installation import install_command
from troupe.common.permits import add_module_argument, permitted_config
from troupe.common.runtime.checkpoint import (
    ARCHIVE,
    Checkpoint,
    check,
    newest_first,
    open_checkpoint,
    steps_of,
)
from troupe.common.runtime.files import readable
from troupe.common.runtime.logging import warnings_shown
from troupe.common.runtime.parser import Parser, integer, real
from troupe.common.runtime.video import ENCODERS, Recorder, check_film_path
from troupe.services.evaluator.games import play
from troupe.services.evaluator.report import Report, check_output, env_fields, markdown, summary, table, write
from troupe.services.evaluator.window import Window

SLOTS = 8
"""Games side by side, unless somebody wants others."""


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, dict[str, str]]:
    """Read the command line: options, and fields of `[env]` as text."""
    parser = Parser(
        fields="only fields of [env] may be other than in training",
        prog="troupe eval",
        usage="troupe eval PATH ... [OPTION ...] [--env.FIELD VALUE ...]",
        description="Play full games with a run's newest, or given, checkpoints.\n\n"
        "Fields of [env] are options too, such as --env.sticky_actions 0.25 or --env.id: the network plays\n"
        "in another environment than in its training, as long as what it sees and does has the same shape.",
    )
    add = parser.add_argument
    add("path", type=Path, nargs="+", metavar="PATH", help="run directory, or checkpoint")
    add("--all", action="store_true", help="every whole checkpoint of the run, from the oldest on: a curve")
    add("--episodes", type=integer(1), default=20, metavar="N", help="games (default: 20)")
    add(
        "--seed",
        type=integer(0),
        default=0,
        metavar="S",
        help="seed of the games: the same seed and --slots replay the same games, and fewer episodes are a "
        "prefix of them (default: 0)",
    )
    add(
        "--slots",
        type=integer(1, MAX_SLOTS),
        default=SLOTS,
        metavar="N",
        help="games side by side (default: 8)",
    )
    add(
        "--device", default="cpu", metavar="DEVICE", help="of the network: cpu, cuda or cuda:N (default: cpu)"
    )
    explore = parser.add_mutually_exclusive_group()
    explore.add_argument(
        "--epsilon",
        type=real(0, 1),
        metavar="E",
        help="chance of an action at random; of a policy, of one that is drawn instead of its best "
        "(default: agent.eval_epsilon)",
    )
    explore.add_argument("--greedy", action="store_true", help="always the best action: --epsilon 0")
    explore.add_argument(
        "--sampled", action="store_true", help="actions drawn from the policy, for algorithms that have one"
    )
    add("--video", type=Path, metavar="FILE", help="film the first game: .mp4 or .gif")
    add("--render", action="store_true", help="a window shows the first slot's games, at their own speed")
    add("--output", type=Path, action="append", default=[], metavar="FILE", help="report: .json, .csv or .md")
    add_module_argument(parser)
    add("--json", action="store_true", help="print one JSON line for each checkpoint instead of a table")
    options, fields = parse_with_fields(parser, argv)
    for name in fields:
        if not name.startswith("env."):
            parser.error(f"unrecognized arguments: --{name}")
    return options, fields


def main(argv: Sequence[str]) -> int:
    """Play and print; returns the exit code."""
    options, fields = parse(argv)
    paths = [path for given in options.path for path in (every_checkpoint(given) if options.all else [given])]
    _check_outputs(options, paths)
    torch.set_num_threads(1)
    reports: list[Report] = []
    recorder = Recorder() if options.video else None
    ended_by: BaseException | None = None
    title = f"troupe eval {' '.join(map(str, options.path))}"
    with closing(Window(title)) if options.render else nullcontext() as window:
        try:
            for path in paths:
                with warnings_shown("troupe.common.runtime.checkpoint"):
                    checkpoint = open_checkpoint(path)
                config, agent = restore(checkpoint, options.modules, fields, options.device)
                report = _played(checkpoint, config, agent, options, recorder, window)
                reports.append(report)
                if options.json:
                    print(json.dumps(report), flush=True)
                elif len(paths) == 1:
                    print(table(report))
        except (KeyboardInterrupt, TroupeError) as error:
            if not reports:
                raise
            ended_by = error  # told below: what the checkpoints before have shown is kept
        if window is not None and window.missing and not window.shown:
            print(f"nothing was shown: {window.missing}", file=sys.stderr)
    if len(paths) > 1 and not options.json:
        print(markdown(reports), end="")
    for path in options.output:
        write(path, reports)
        _say_written(path, options)
    if recorder is not None and _write_video(options.video, recorder):
        _say_written(options.video, options)
    if ended_by is not None:
        raise ended_by
    return 0


def _say_written(path: Path, options: argparse.Namespace) -> None:
    """One line, unless a program reads."""
    if not options.json:
        print(path)


def _check_outputs(options: argparse.Namespace, paths: Sequence[Path]) -> None:
    """Refuse, before the games, what could not be written after them."""
    if options.video:
        if len(paths) > 1:
            raise ConfigError(f"--video films the first game of one checkpoint: there are {len(paths)}")
        check_film_path(options.video)
    for path in options.output:
        check_output(path)
    check_device(options.device, "--device")


def _played(
    checkpoint: Checkpoint,
    config: Config,
    agent: Agent,
    options: argparse.Namespace,
    recorder: Recorder | None,
    window: Window | None,
) -> Report:
    """Play with one checkpoint, and print each game unless a program reads."""
    epsilon = _epsilon(config, agent, options)
    if not options.json:
        fields = [f"{name} {value}" for name, value in env_fields(config, checkpoint).items()]
        seed = f"seed {options.seed}, {options.slots} side by side"
        how = ", ".join([config.env.id, *fields, "full games", _manner(config, epsilon), seed])
        print(f"checkpoint  {checkpoint.path}\nenvironment {how}")
    played: list[Episode] = []

    def on_game(game: Episode) -> None:
        played.append(game)
        if not options.json:
            counted = f"{len(played):3d} of {options.episodes}"
            print(f"  game {counted}: return {game.return_raw:g}, {game.steps} steps", flush=True)

    try:
        return evaluate(
            checkpoint,
            config,
            agent,
            episodes=options.episodes,
            seed=options.seed,
            epsilon=epsilon,
            slots=options.slots,
            recorder=recorder,
            window=window,
            on_game=on_game,
        )
    except KeyboardInterrupt:
        # No mean: the games that end first are the short ones.
        of = f"{len(played)} of {options.episodes} games"
        print(f"{checkpoint.path.name}: stopped after {of}: no result", file=sys.stderr)
        raise


def _epsilon(config: Config, agent: Agent, options: argparse.Namespace) -> float:
    """The chance of exploring that the options ask for."""
    if options.sampled:
        if not config.agent.draws_actions:
            raise ConfigError(
                f"--sampled: {config.agent.algorithm} has no policy to draw from; --epsilon is its chance of "
                "an action at random"
            )
        return 1.0
    if options.greedy:
        return 0.0
    return float(agent.eval_epsilon if options.epsilon is None else options.epsilon)


def _manner(config: Config, epsilon: float) -> str:
    """How actions are chosen: where there is a policy, its epsilon is no chance of acting at random."""
    if not config.agent.draws_actions:
        return f"epsilon {epsilon:g}"
    if epsilon == 0:
        return "best actions of the policy"
    return "actions drawn from the policy" + (
        f" with chance {epsilon:g}, else the best" if epsilon < 1 else ""
    )


def every_checkpoint(path: Path) -> list[Path]:
    """The checkpoints of a run, or of a directory of them, from the oldest on; damaged ones are left out.

    Raises:
        ConfigError: there is none.
    """
    with readable(path):
        folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        # One that is kept for good may be among the newest too, by the same name.
        by_name = {each.name: each for place in (ARCHIVE, ".") for each in newest_first(folder / place)}
        found = []
        for each in sorted(by_name.values(), key=lambda each: (steps_of(each), each.name)):
            try:
                check(each)
            except CheckpointError as error:
                print(f"troupe: {error}: left out", file=sys.stderr)
            else:
                found.append(each)
    if not found:
        raise ConfigError(f"{path} has no whole checkpoint: give a run directory, or leave --all out")
    return found


def restore(
    checkpoint: Checkpoint,
    modules: Collection[str] = (),
    fields: Mapping[str, str] | None = None,
    device: str = "cpu",
) -> tuple[Config, Agent]:
    """Build the agent that a checkpoint holds, to play; it brings its own configuration.

    Environment and algorithm may be from Troupe itself or from `modules`: importing a module runs it.
    `fields` of `[env]`, as on a command line, take the place of those of the training; an environment that
    they name needs no permission, and gets none of the training's `env.kwargs` and `env.wrappers`.

    Raises:
        CheckpointError: it does not say what it is of.
        ConfigError: the environment that `fields` make shows or takes something else than the training's.
    """
    own_id = not fields or "env.id" not in fields
    config = config_of(checkpoint, modules, plays=own_id)
    if not fields:
        return config, agent_of(checkpoint, config, make_spec(config.env), device)
    if not own_id:
        config = config.model_copy(
            update={"env": config.env.model_copy(update={"kwargs": {}, "wrappers": ()})}
        )
    loaded = with_overrides(config, fields)
    spec = make_spec(loaded.config.env)
    check_settings(loaded.config.env, spec, loaded.chosen("env"))
    if "spec" in checkpoint.meta:
        _check_fits(spec, spec_of(checkpoint))
    return loaded.config, agent_of(checkpoint, loaded.config, spec, device)


def _check_fits(spec: EnvSpec, trained: EnvSpec) -> None:
    """Refuse an environment that another network would be for."""
    shown = ("obs_shape", "obs_dtype", "obs_leaves", "stack", "instruction_words", "packed_bits")
    for name in (*shown, "actions"):
        now, before = getattr(spec, name), getattr(trained, name)
        if now != before:
            what = {"actions": "actions", "stack": "frames in a stack"}.get(name, "observations")
            raise ConfigError(
                f"the network does not fit {spec.id}: it was trained with other {what} "
                f"({name} {_shown(before)}) than these ({_shown(now)})"
            )


def _shown(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


def config_of(checkpoint: Checkpoint, modules: Collection[str], *, plays: bool = True) -> Config:
    """The configuration of the run that a checkpoint is of; see `troupe.common.permits.permitted_config`."""
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
    slots: int = SLOTS,
    recorder: Recorder | None = None,
    window: Window | None = None,
    on_game: Callable[[Episode], None] = lambda game: None,
) -> Report:
    """Play full games with the agent of a checkpoint; returns what `--json` prints.

    With as many `slots` and the same `seed`, the first games are the same, however many `episodes` there are.
    """
    result = play(
        agent,
        config.env,
        episodes=episodes,
        slots=slots,
        steady=True,
        seed=seed,
        epsilon=epsilon,
        max_episode_frames=config.evaluator.max_episode_frames,
        threads=min(slots, os.cpu_count() or 1),
        recorder=recorder,
        window=window,
        on_game=on_game,
    )
    assert result is not None  # nobody stops it
    return summary(result, config, checkpoint, seed=seed, epsilon=epsilon, slots=slots)


def _write_video(path: Path, recorder: Recorder) -> bool:
    """Whether there was anything to write."""
    if not len(recorder):
        print(f"{path} was not written: {recorder.missing}", file=sys.stderr)
        return False
    try:
        path.write_bytes(ENCODERS[path.suffix.lower()](recorder, recorder.frames_per_s))
    except ImportError as error:
        raise ConfigError(f"films need the package {error.name}: {install_command('evaluator')}") from error
    except OSError as error:
        raise ConfigError(f"cannot write the film {path}: {error.strerror}") from error
    return True


if __name__ == "__main__":
    from troupe.common.runtime.lifecycle import run_main

    sys.exit(run_main(lambda: main(sys.argv[1:])))
