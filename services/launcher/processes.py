"""The processes of a run on one machine: their command lines, environment and importance."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from troupe.common.config import Config
from troupe.common.envs import calls
from troupe.common.machine import usable_cores
from troupe.common.permits import VARIABLE, modules_of
from troupe.common.runtime.checkpoint import newest_meta
from troupe.common.runtime.files import read_status
from troupe.services.launcher.supervisor import ChildSpec
from troupe.services.launcher.workspace import BoardPort, TensorBoardPort, has_checkpoint, named_events

_NICE = 10  # evaluation and TensorBoard take what training leaves
# On a busy machine the learner may need minutes until it answers; should it end, the launcher ends all.
_JOINING = ["--join-timeout-s", "600"]


def child_specs(
    config: Config,
    run_dir: Path,
    sockets: Path,
    tensorboard: TensorBoardPort,
    board: BoardPort | None = None,
    *,
    resume: bool,
) -> list[ChildSpec]:
    """List every process of a run, the learner first.

    Args:
        config: of the run.
        run_dir: of the run, absolute.
        sockets: directory for the `ipc` sockets.
        tensorboard: its port; without one there is no TensorBoard.
        board: the same of the board.
        resume: whether the learner begins with the newest checkpoint.
    """
    control = f"ipc://{sockets}/control"
    builder = _Builder(config, run_dir, sockets)

    def learner_words(restarts: int) -> list[str]:
        words = ["--run-dir", str(run_dir), "--control", control, "--announce", f"ipc://{sockets}/announce"]
        words += ["--inference", f"ipc://{sockets}/inference"]
        # One that died before its first checkpoint begins again.
        again = resume or (restarts > 0 and has_checkpoint(run_dir))
        return [*words, "--resume"] if again else words

    # An orphaned learner may still write its checkpoint: it gets SIGTERM, and ends itself if that hangs.
    # First in the list: it is the one that all others wait for, and is stopped first.
    learner = builder.service(
        "learner",
        learner_words,
        threads=config.torch_threads("learner", usable_cores()),
        orphan_signal=signal.SIGTERM,
        # Not the updates made: what came after the newest checkpoint is lost with the learner.
        progress=lambda: newest_meta(run_dir / "checkpoints").get("updates"),
    )
    specs = [learner]
    for index in range(1, config.learner.processes):
        name = f"learner-{index}"
        words = ["--join", control, "--name", name, *_JOINING]
        threads = config.torch_threads("learner", usable_cores())
        specs.append(builder.service(name, words, essential=False, threads=threads))
    for index, endpoint in enumerate(replay_endpoints(config, sockets)):
        words = ["serve", "--learner", control, "--bind", endpoint, *_JOINING]
        words += ["--data-dir", str(run_dir / "replay" / f"shard-{index}"), "--index", str(index)]
        if config.run.offline:  # filled before there was a learner that gives runs their names
            words.append("--adopt")
        specs.append(builder.service("replay" if config.replay.shards == 1 else f"replay-{index}", words))
    # Who plays leaves a record of its environments' calls, which outlives a crash.
    plays = {
        "variables": {calls.VARIABLE: str(sockets)},
        "last_words": lambda pid, code: calls.last_words(sockets, pid, code, config.env.id),
    }

    def steps() -> object:
        # Of all actors: one that always dies while others play must not end the run.
        return read_status(run_dir).get("steps")

    for index in range(config.actor.processes):
        words = ["--learner", control, "--name", f"actor-{index}", *_JOINING]
        if config.inference.mode == "local":
            words.append("--preload")
        threads = config.torch_threads("actor", usable_cores())
        specs.append(builder.service(f"actor-{index}", words, threads=threads, progress=steps, **plays))
    if config.evaluator.enabled:
        count = config.evaluator.processes
        for name in ["evaluator"] if count == 1 else [f"evaluator-{index}" for index in range(count)]:
            words = ["--learner", control, "--name", name, *_JOINING]
            specs.append(builder.service(name, words, essential=False, nice=_NICE, **plays))
    return specs + _pages(builder, run_dir, sockets, tensorboard, board)


def _pages(
    builder: _Builder, run_dir: Path, sockets: Path, tensorboard: TensorBoardPort, board: BoardPort | None
) -> list[ChildSpec]:
    """Those that only show the run, see `child_specs`."""
    specs = []
    if tensorboard.number:
        logdir = str(named_events(run_dir, sockets))

        def tensorboard_words(restarts: int) -> list[str]:
            words = ["--logdir", logdir, "--port", str(tensorboard.of_start(restarts))]
            # A resumed run has several event files, of which TensorBoard otherwise reads the newest only.
            return [*words, "--reload_multifile=true", "--reload_interval=10"]

        module = "troupe.services.launcher.tensorboard"
        specs.append(builder.module("tensorboard", module, tensorboard_words, essential=False, nice=_NICE))
    if board is not None and board.number:
        board_words = functools.partial(_board_words, run_dir, board)
        module = "troupe.services.board.beside"
        specs.append(builder.module("board", module, board_words, essential=False, nice=_NICE))
    return specs


def replay_endpoints(config: Config, sockets: Path) -> list[str]:
    """List where the shards of a run are bound."""
    return [f"ipc://{sockets}/replay-{index}" for index in range(config.replay.shards)]


def _board_words(run_dir: Path, board: BoardPort, restarts: int) -> list[str]:
    return [str(run_dir), str(board.of_start(restarts))]


class _Builder:
    """Fills in what the processes have in common."""

    def __init__(self, config: Config, run_dir: Path, sockets: Path) -> None:
        self._sockets, self._hang_s = sockets, config.run.hang_s
        self._logs = run_dir / "logs"
        self._metrics_port = config.net.metrics_port
        # Who names environment and algorithm here is who starts them all.
        modules = [*modules_of(config), os.environ.get(VARIABLE, "")]
        self._permits = {VARIABLE: ",".join(filter(None, modules))}
        # On ipc nothing is encrypted; but a user who gives keys is told at once if they cannot be used.
        self._keys = ["--keys", config.net.keys_dir] if config.net.keys_dir else []

    def service(self, name: str, words: Any, **options: Any) -> ChildSpec:
        """One of ours; `words` are its arguments, or give them from the number of restarts."""
        more = list(self._keys)
        if self._metrics_port:
            more += ["--metrics-port", str(self._metrics_port)]
            self._metrics_port += 1
        options |= {"signs_path": self._sockets / f"signs-{name}", "hang_s": self._hang_s}
        return self.module(name, f"troupe.services.{name.split('-')[0]}", words, more, **options)

    def module(
        self,
        name: str,
        module: str,
        words: Any,
        more: Sequence[str] = (),
        *,
        threads: int = 1,
        variables: dict[str, str] | None = None,
        **options: Any,
    ) -> ChildSpec:
        """Any Python module."""

        def command(restarts: int) -> list[str]:
            own = words(restarts) if callable(words) else words
            # -P: what lies in the user's folder is not imported instead of Python's own; PYTHONPATH still is.
            return [sys.executable, "-P", "-m", module, *own, *more]

        log = self._logs / f"{name}.log"
        own_variables = _environment(threads) | self._permits | (variables or {})
        return ChildSpec(name, command, log, environment=own_variables, **options)


def _environment(threads: int) -> dict[str, str]:
    """One process, as many threads as it was given: numeric libraries take all cores by themselves.

    Threads that have nothing to do sleep: spinning, they would take the cores from the other services.
    """
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    passive = {"OMP_WAIT_POLICY": "PASSIVE"}
    return {
        **dict.fromkeys(names, str(threads)),
        **passive,
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
