"""The processes of a run on one machine: their command lines, environment and importance."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.config import Config
from services.supervisor import ChildSpec
from services.workspace import has_checkpoint

_NICE = 10  # evaluation and TensorBoard take what training leaves
# On a busy machine the learner may need minutes until it answers; should it end, the launcher ends all.
_JOINING = ["--join-timeout-s", "600"]


def child_specs(config: Config, run_dir: Path, sockets: Path, *, resume: bool) -> list[ChildSpec]:
    """List every process of a run, the learner first.

    Args:
        config: of the run.
        run_dir: of the run, absolute.
        sockets: directory for the `ipc` sockets.
        resume: whether the learner begins with the newest checkpoint.
    """
    control = f"ipc://{sockets}/control"
    builder = _Builder(config, run_dir)

    def learner_words(restarts: int) -> list[str]:
        words = ["--run-dir", str(run_dir), "--control", control, "--announce", f"ipc://{sockets}/announce"]
        words += ["--inference", f"ipc://{sockets}/inference"]
        # One that died before its first checkpoint begins again.
        again = resume or (restarts > 0 and has_checkpoint(run_dir))
        return [*words, "--resume"] if again else words

    # An orphaned learner may still write its checkpoint: it gets SIGTERM, and ends itself if that hangs.
    learner = builder.service(
        "learner", learner_words, threads=config.learner.torch_threads, orphan_signal=signal.SIGTERM
    )
    specs = [learner]
    for index, endpoint in enumerate(replay_endpoints(config, sockets)):
        words = ["--learner", control, "--bind", endpoint, *_JOINING]
        words += ["--data-dir", str(run_dir / "replay" / f"shard-{index}"), "--index", str(index)]
        specs.append(builder.service("replay" if config.replay.shards == 1 else f"replay-{index}", words))
    for index in range(config.actor.processes):
        words = ["--learner", control, "--name", f"actor-{index}", *_JOINING]
        specs.append(builder.service(f"actor-{index}", words, threads=config.actor.torch_threads))
    if config.evaluator.enabled:
        words = ["--learner", control, *_JOINING]
        specs.append(builder.service("evaluator", words, essential=False, nice=_NICE))
    if config.net.tensorboard_port:
        words = ["--logdir", str(run_dir / "tensorboard"), "--port", str(config.net.tensorboard_port)]
        words += ["--reload_multifile=true", "--reload_interval=10"]
        specs.append(builder.module("tensorboard", "tensorboard.main", words, essential=False, nice=_NICE))
    return specs


def replay_endpoints(config: Config, sockets: Path) -> list[str]:
    """List where the shards of a run are bound."""
    return [f"ipc://{sockets}/replay-{index}" for index in range(config.replay.shards)]


class _Builder:
    """Fills in what the processes have in common."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        self._logs = run_dir / "logs"
        self._metrics_port = config.net.metrics_port
        # On ipc nothing is encrypted; but whoever gives keys is told at once if they cannot be used.
        self._keys = ["--keys", config.net.keys_dir] if config.net.keys_dir else []

    def service(self, name: str, words: Any, **options: Any) -> ChildSpec:
        """One of ours; `words` are its arguments, or give them from the number of restarts."""
        more = list(self._keys)
        if self._metrics_port:
            more += ["--metrics-port", str(self._metrics_port)]
            self._metrics_port += 1
        return self.module(name, f"services.{name.split('-')[0]}", words, more, **options)

    def module(
        self,
        name: str,
        module: str,
        words: Any,
        more: Sequence[str] = (),
        *,
        threads: int = 1,
        **options: Any,
    ) -> ChildSpec:
        """Any Python module."""

        def command(restarts: int) -> list[str]:
            own = words(restarts) if callable(words) else words
            return [sys.executable, "-m", module, *own, *more]

        log = self._logs / f"{name}.log"
        return ChildSpec(name, command, log, environment=_environment(threads), **options)


def _environment(threads: int) -> dict[str, str]:
    """One process, as many threads as it was given: numeric libraries take all cores by themselves."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    return {**dict.fromkeys(names, str(threads)), "PYTHONUNBUFFERED": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
