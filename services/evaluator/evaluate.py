"""`troupe eval`: plays full games with a checkpoint, without any other service."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, redirect_stdout
from functools import partial
from pathlib import Path

import torch

from troupe.common.agents import Agent
from troupe.common.agents.tensors import check_device
from troupe.common.config import Config
from troupe.common.datasets.writing import DatasetWriter
from troupe.common.envs import Episode
from troupe.common.errors import OWN_ERROR, CheckpointError, ConfigError, TroupeError
from troupe.common.installation import install_command
from troupe.common.policies import restore
from troupe.common.runtime.checkpoint import (
    ARCHIVE,
    Checkpoint,
    check,
    newest_first,
    open_checkpoint,
    steps_of,
)
from troupe.common.runtime.files import readable, write_output, write_trouble
from troupe.common.runtime.logging import warnings_shown
from troupe.services.evaluator.games import play
from troupe.services.evaluator.options import SLOTS, parse
from troupe.services.evaluator.report import FORMATS, Report, env_fields, markdown, summary, table
from troupe.services.evaluator.tape import Tape
from troupe.services.evaluator.video import ENCODERS, Recorder
from troupe.services.evaluator.window import Window


def main(argv: Sequence[str]) -> int:
    """Play and print; returns the exit code."""
    options, fields = parse(argv)
    paths = [path for given in options.path for path in (every_checkpoint(given) if options.all else [given])]
    _check_outputs(options, paths)
    # Many small forward passes: threads of torch would wait for each other longer than they compute, and the
    # games' threads have the cores.
    torch.set_num_threads(1)
    reports: list[Report] = []
    # One for all checkpoints: only one can be filmed, see `_check_outputs`.
    recorder = Recorder() if options.video else None
    ended_by: BaseException | None = None
    dataset: DatasetWriter | None = None
    title = f"troupe eval {' '.join(map(str, options.path))}"
    with closing(Window(title)) if options.render else nullcontext() as window:
        try:
            for path in paths:
                with warnings_shown("troupe.common.runtime.checkpoint"):
                    checkpoint = open_checkpoint(path)
                with _silent_stdout() if options.json else nullcontext():
                    config, agent = restore(checkpoint, options.modules, fields, options.device)
                    dataset = _dataset_of(dataset, config, agent, options)
                    report = _played(checkpoint, config, agent, options, recorder, window, dataset)
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
    outputs = [partial(_write_report, path, reports) for path in options.output]
    if dataset is not None and ended_by is None:
        outputs.append(partial(_finish, dataset))
    if recorder is not None:
        outputs.append(partial(_write_video, options.video, recorder))
    for output in outputs:
        try:
            written = output()
        except TroupeError as error:  # the others are written nevertheless
            if ended_by is not None:
                print(f"{OWN_ERROR} {error}", file=sys.stderr)
            ended_by = ended_by or error
        else:
            if written and not options.json:
                print(written)
    if ended_by is not None:
        # Last: what has been played by then is printed and written, and the exit code still says that it was
        # cut short.
        raise ended_by
    return 0


@contextmanager
def _silent_stdout() -> Iterator[None]:
    """Send what an environment prints, in Python or in C, to stderr: a program reads stdout."""
    sys.stdout.flush()
    former = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(former, 1)
        os.close(former)


def _dataset_of(
    dataset: DatasetWriter | None, config: Config, agent: Agent, options: argparse.Namespace
) -> DatasetWriter | None:
    """Where the episodes go, if they are wanted: those of all policies together."""
    if not options.minari:
        return None
    if dataset is not None:
        if dataset.spec != agent.spec:
            raise ConfigError(f"--minari: one data set cannot hold {dataset.spec.id} and {agent.spec.id}")
        return dataset
    which = "every checkpoint of" if options.all else "each of"
    told = f"{options.episodes} episodes of {which} {len(options.path)} PATH, seed {options.seed}"
    return DatasetWriter(
        options.minari,
        agent.spec,
        recoverable=not (config.env.kwargs or config.env.wrappers),
        algorithm_name=config.agent.algorithm,
        description=f"Played by Troupe: {told}; {_manner(config, _epsilon(config, agent, options))}.",
    )


def _check_outputs(options: argparse.Namespace, paths: Sequence[Path]) -> None:
    """Refuse, before the games, what could not be written after them."""
    if options.video:
        # A film of each would need a name for each.
        if len(paths) > 1:
            raise ConfigError(f"--video records the first episode of one checkpoint: there are {len(paths)}")
        _check_file(options.video, "video", ENCODERS)
    for path in options.output:
        _check_file(path, "report", FORMATS)
    check_device(options.device, "--device")


def _check_file(path: Path, what: str, endings: Collection[str]) -> None:
    if path.suffix.lower() not in endings:
        raise ConfigError(f"cannot write the {what} {path}: its name should end in {', '.join(endings)}")
    if why := write_trouble(path.parent):
        raise ConfigError(f"cannot write the {what} {path}: {why}")
    if path.is_dir():
        raise ConfigError(f"cannot write the {what} {path}: it is a directory")


def _played(
    checkpoint: Checkpoint,
    config: Config,
    agent: Agent,
    options: argparse.Namespace,
    recorder: Recorder | None,
    window: Window | None,
    dataset: DatasetWriter | None,
) -> Report:
    """Play with one checkpoint, and print each game unless a program reads."""
    epsilon = _epsilon(config, agent, options)
    if not options.json:
        fields = [f"{name} {value}" for name, value in env_fields(config, checkpoint).items()]
        seed = f"seed {options.seed}, {options.slots} at a time"
        how = ", ".join([config.env.id, *fields, "full episodes", _manner(config, epsilon), seed])
        print(f"checkpoint  {checkpoint.path}\nenvironment {how}")
    played: list[Episode] = []

    def on_game(game: Episode) -> None:
        played.append(game)
        if not options.json:
            counted = f"{len(played):3d} of {options.episodes}"
            print(f"  episode {counted}: return {game.return_raw:g}, {game.steps} steps", flush=True)

    try:
        report = evaluate(
            checkpoint,
            config,
            agent,
            episodes=options.episodes,
            seed=options.seed,
            epsilon=epsilon,
            slots=options.slots,
            recorder=recorder,
            window=window,
            tape=Tape(dataset.add) if dataset is not None else None,
            on_game=on_game,
        )
    except KeyboardInterrupt:
        # No mean: the games that end first are the short ones.
        of = f"{len(played)} of {options.episodes} episodes"
        print(f"{checkpoint.path.name}: stopped after {of}: no result", file=sys.stderr)
        raise
    if not options.json and (failed := report["failed_episodes"]):
        more = "episode" if failed == 1 else "episodes"
        print(f"  {failed} more {more} failed and do not count; the first: {report['first_failure']}")
    return report


def _epsilon(config: Config, agent: Agent, options: argparse.Namespace) -> float:
    """The chance of exploring that the options ask for."""
    if options.sampled:
        if not config.agent.draws_actions:
            raise ConfigError(
                f"--sampled: {config.agent.algorithm} has no policy to sample from; --epsilon sets "
                "the share of random actions"
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
                print(f"troupe: left out: {error}", file=sys.stderr)
            else:
                found.append(each)
    if not found:
        raise ConfigError(f"{path} has no whole checkpoint: give a run directory, or leave --all out")
    return found


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
    tape: Tape | None = None,
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
        # Slots that have played their share go on: only then are the first games the same however many there
        # are.
        steady=True,
        seed=seed,
        epsilon=epsilon,
        max_episode_frames=config.evaluator.max_episode_frames,
        threads=min(slots, os.cpu_count() or 1),
        recorder=recorder,
        window=window,
        tape=tape,
        on_game=on_game,
    )
    assert result is not None  # nobody stops it
    return summary(result, config, checkpoint, seed=seed, epsilon=epsilon, slots=slots)


def _write_report(path: Path, reports: Sequence[Report]) -> str:
    write_output(path, FORMATS[path.suffix.lower()](reports).encode())
    return str(path)


def _write_video(path: Path, recorder: Recorder) -> str:
    if not len(recorder):
        print(f"{path} was not written: {recorder.missing}", file=sys.stderr)
        return ""
    try:
        film = ENCODERS[path.suffix.lower()](recorder, recorder.frames_per_s)
    except ImportError as error:
        raise ConfigError(f"videos need the package {error.name}: {install_command('evaluator')}") from error
    write_output(path, film)
    return str(path)


def _finish(dataset: DatasetWriter) -> str:
    dataset.finish()
    held = f"{dataset.episodes:,} episodes, {dataset.steps:,} steps"
    return f"data set {dataset.name}: {held}, in {dataset.folder}"


if __name__ == "__main__":
    from troupe.common.runtime.lifecycle import run_main

    sys.exit(run_main(lambda: main(sys.argv[1:])))
