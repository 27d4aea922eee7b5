"""Trainings and evaluations, started from Python."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from troupe.common.errors import ConfigError
from troupe.common.runtime import StopSignal
from troupe.common.runtime.checkpoint import open_checkpoint
from troupe.common.runtime.files import CERTIFICATE_FILE, readable


def train(
    preset: str | Path,
    run_dir: str | Path | None = None,
    fields: Mapping[str, Any] | None = None,
    *,
    progress: bool | None = None,
) -> Path:
    """Train on this machine, as `troupe train` does, until the run is complete; returns the run directory.

    The services are processes of their own: an algorithm or environment of yours has to be in a module that
    Python finds (`PYTHONPATH`), not in the program that calls this.

    Args:
        preset: name of a preset, or path of a TOML file.
        run_dir: new directory; None: `runs/PRESET-DATE-TIME`.
        fields: of the configuration, `{"run.total_steps": 50_000, "agent.learning_rate": 1e-3}`.
        progress: live panel (True) or lines (False); None: the panel where there is a terminal.

    Raises:
        TroupeError: says what is wrong.
        KeyboardInterrupt: it was stopped by Ctrl-C or a signal, after the checkpoint was written.
    """
    from troupe.services.launcher import training

    directory = None if run_dir is None else Path(run_dir)
    return _until_stopped(
        lambda stop: training.train(str(preset), directory, overrides=fields, progress=progress, stop=stop)
    )


def resume(
    run_dir: str | Path, fields: Mapping[str, Any] | None = None, *, progress: bool | None = None
) -> Path:
    """Continue a run from its newest whole checkpoint, as `troupe resume` does; see `train`."""
    from troupe.services.launcher import training

    def resumed(stop: StopSignal) -> Path:
        instead = None
        with readable(Path(run_dir)):
            if (Path(run_dir) / CERTIFICATE_FILE).is_file():
                from troupe import lockstep

                instead = partial(lockstep.train, stop=stop, resume=True)
        return training.resume(Path(run_dir), overrides=fields, progress=progress, stop=stop, instead=instead)

    return _until_stopped(resumed)


def evaluate(
    path: str | Path,
    episodes: int = 20,
    *,
    seed: int = 0,
    epsilon: float | None = None,
    modules: Collection[str] = (),
) -> dict[str, Any]:
    """Play full games with a checkpoint, as `troupe eval` does; returns what that prints with `--json`.

    Args:
        path: run directory, directory of checkpoints, or checkpoint.
        episodes: games.
        seed: of the games; the same seed replays the same games, and fewer episodes are a prefix.
        epsilon: exploration; None: `agent.eval_epsilon`.
        modules: that environment and algorithm may be from, beside Troupe's own: importing one runs it.

    Raises:
        TroupeError: says what is wrong.
    """
    from troupe.common.policies import restore
    from troupe.services.evaluator import evaluate as playing

    if episodes < 1:
        raise ConfigError(f"episodes should be at least 1, not {episodes}")
    checkpoint = open_checkpoint(Path(path))
    config, agent = restore(checkpoint, modules)
    epsilon = agent.eval_epsilon if epsilon is None else epsilon
    return playing.evaluate(checkpoint, config, agent, episodes=episodes, seed=seed, epsilon=epsilon)


def _until_stopped(training: Callable[[StopSignal], Path]) -> Path:
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("a training has to be started from the main thread, which gets the signals")
    stop = StopSignal(force_after_s=None).install()
    try:
        run_dir = training(stop)
    finally:
        stop.uninstall()
    if stop:
        raise KeyboardInterrupt
    return run_dir
