"""Trainings and evaluations, started from Python."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from troupe.common.config.text import format_value
from troupe.common.errors import ConfigError
from troupe.common.runtime import StopSignal
from troupe.common.runtime.checkpoint import is_deterministic, open_checkpoint
from troupe.common.runtime.files import hold_run_dir, readable, run_config
from troupe.environments import Brought, bring, check_caller
from troupe.following import Follower, OnCheckpoint, OnMetrics
from troupe.run import Run
from troupe.services.launcher.workspace import dated_directory, run_name

if TYPE_CHECKING:
    from troupe.common.config import Config
    from troupe.policy import Policy

Callbacks = tuple[OnMetrics | None, OnCheckpoint | None, OnMetrics | None]


def train(
    preset: str | Path | None = None,
    run_dir: str | Path | None = None,
    fields: Mapping[str, Any] | None = None,
    *,
    env: str | Callable[..., Any] | None = None,
    algo: str = "",
    steps: int | None = None,
    seed: int | None = None,
    progress: bool | None = None,
    serial: bool = False,
    on_evaluation: OnMetrics | None = None,
    on_checkpoint: OnCheckpoint | None = None,
    on_metrics: OnMetrics | None = None,
) -> Path:
    """Train on this machine, as `troupe train` does, until the run is complete; returns the run directory.

    The services are processes of their own, which import the environment. A class or function of a module
    goes by the module's name, and one of the program that runs by the program's file, which is imported once
    more: what starts the training has to be under `if __name__ == "__main__":`. One of a notebook is written
    into a module in the run directory, with what it uses of the notebook. With `serial` it may be anything.

    Args:
        preset: name of a preset, or path of a TOML file; None: what suits `algo` and `env`.
        run_dir: new directory; None: `runs/PRESET-DATE-TIME`, or `runs/ALGO-ENVIRONMENT-DATE-TIME`.
        fields: of the configuration, `{"agent.learning_rate": 1e-3, "actor.processes": 1}`.
        env: id of an environment, or a class or function that makes one, which gets `env.kwargs`.
        algo: instead of a preset, with `env`, as `--algo`; "": `ppo`.
        steps: `run.total_steps`.
        seed: `run.seed`.
        progress: live panel (True) or lines (False); None: the panel where there is a terminal. With
            callbacks there are lines.
        serial: act, store and learn in this process, as with `--serial`: slower, and good for debugging.
        on_evaluation: called with the `Metrics` of each evaluation. A callback that returns False ends the
            run; what one raises ends it too, and is raised here.
        on_checkpoint: called with the directory of each new checkpoint.
        on_metrics: called with all `Metrics`.

    Raises:
        TroupeError: says what is wrong.
        KeyboardInterrupt: it was stopped by Ctrl-C or a signal, after the checkpoint was written.
    """
    order = _Order.of(preset, run_dir, fields, env, algo, steps, seed, here=serial)
    callbacks = on_evaluation, on_checkpoint, on_metrics
    if not serial and any(callbacks):
        run = order.start(Follower(order.run_dir, *callbacks))
        run.show_until_end()
        return order.run_dir
    from troupe.services.launcher import training

    def train_until(stop: StopSignal) -> Path:
        instead = partial(_train_here, stop, callbacks) if serial else None
        return training.train(
            order.preset,
            order.run_dir,
            algo=order.algo,
            overrides=order.fields,
            progress=progress,
            stop=stop,
            instead=instead,
        )

    with order.brought.kept_if_begun(order.run_dir), order.brought.findable():
        return _until_stopped(train_until)


def start(
    preset: str | Path | None = None,
    run_dir: str | Path | None = None,
    fields: Mapping[str, Any] | None = None,
    *,
    env: str | Callable[..., Any] | None = None,
    algo: str = "",
    steps: int | None = None,
    seed: int | None = None,
    on_evaluation: OnMetrics | None = None,
    on_checkpoint: OnCheckpoint | None = None,
    on_metrics: OnMetrics | None = None,
) -> Run:
    """Train in the background; returns as soon as the run has begun. See `train` for the arguments.

    Callbacks are called from a thread. What one raises ends the run, and `Run.wait` raises it.

    Raises:
        TroupeError: says what is wrong.
    """
    order = _Order.of(preset, run_dir, fields, env, algo, steps, seed, here=False)
    run = order.start(Follower(order.run_dir, on_evaluation, on_checkpoint, on_metrics))
    run.watch()
    return run


def resume(
    run_dir: str | Path,
    fields: Mapping[str, Any] | None = None,
    *,
    env: Callable[..., Any] | None = None,
    progress: bool | None = None,
) -> Path:
    """Continue a run from its newest whole checkpoint, as `troupe resume` does; see `train`.

    `env` is what the run was begun with, where that was a class or function: services import it anew.
    """
    from troupe.services.launcher import training

    check_caller()
    path = Path(run_dir).expanduser()
    run_config(path)  # before anything is written there
    brought = Brought("") if env is None else bring(env).reachable_from(path)
    fields = {**(fields or {}), **({} if env is None else {"env.id": brought.id})}

    def resumed(stop: StopSignal) -> Path:
        instead = None
        with readable(path):
            if is_deterministic(path):
                from troupe import lockstep

                instead = partial(lockstep.train, stop=stop, resume=True)
        return training.resume(path, overrides=fields, progress=progress, stop=stop, instead=instead)

    with brought.findable():
        return _until_stopped(resumed)


def evaluate(
    policy: str | Path | Run | Policy,
    env: str | Callable[..., Any] | None = None,
    *,
    episodes: int = 20,
    seed: int = 0,
    epsilon: float | None = None,
    modules: Collection[str] = (),
) -> dict[str, Any]:
    """Play full games with a checkpoint, as `troupe eval` does; returns what that prints with `--json`.

    Args:
        policy: a run, its directory, a directory of checkpoints, a checkpoint, or what `troupe.load` gave.
        env: id of an environment, or a class or function that makes one, as in `train`, instead of the
            training's; it has to show and take the same. The games are played in this process.
        episodes: games.
        seed: of the games; the same seed replays the same games, and fewer episodes are a prefix.
        epsilon: exploration; None: that of the policy, or `agent.eval_epsilon`.
        modules: that environment and algorithm may be from, beside Troupe's own: importing one runs it. The
            module of `env` needs no permission.

    Raises:
        TroupeError: says what is wrong.
    """
    from troupe.common.permits import NotPermittedError
    from troupe.common.policies import restore, with_environment
    from troupe.policy import Policy
    from troupe.services.evaluator import evaluate as playing

    if episodes < 1:
        raise ConfigError(f"episodes should be at least 1, not {episodes}")
    brought = None if env is None else bring(env, here=True)
    if isinstance(policy, Policy):
        checkpoint, config, agent = policy.checkpoint, policy.config, policy.agent
        epsilon = policy.epsilon if epsilon is None else epsilon
        if brought is not None:
            config = with_environment(config, policy.spec, brought.id)
    else:
        checkpoint = open_checkpoint(Path(policy))
        try:
            config, agent = restore(checkpoint, modules, None if brought is None else {"env.id": brought.id})
        except NotPermittedError as error:
            if brought is not None:
                raise
            raise NotPermittedError(
                f"{error}, or give the class of the environment: evaluate(run, Class)"
            ) from None
    epsilon = agent.eval_epsilon if epsilon is None else epsilon
    return playing.evaluate(checkpoint, config, agent, episodes=episodes, seed=seed, epsilon=epsilon)


@dataclass(frozen=True)
class _Order:
    """A training that was asked for: what `troupe train` would be told."""

    preset: str | None
    algo: str
    run_dir: Path
    fields: dict[str, Any]
    brought: Brought

    @classmethod
    def of(
        cls,
        preset: str | Path | None,
        run_dir: str | Path | None,
        fields: Mapping[str, Any] | None,
        env: str | Callable[..., Any] | None,
        algo: str,
        steps: int | None,
        seed: int | None,
        *,
        here: bool,
    ) -> _Order:
        """Check and put together the arguments of `train`."""
        from troupe.services.launcher.training import check_unused

        check_caller()
        if preset and algo:
            raise ConfigError(f"algo {algo!r} replaces a preset: leave out {preset} or algo")
        if not preset and env is None and not {"env", "env.id"} & set(fields or {}):
            raise ConfigError(
                'give a preset (`troupe presets` lists them), or env=..., such as env="gym:Acrobot-v1"'
            )
        algo = algo or ("" if preset else "ppo")
        given = dict(fields or {})
        brought = Brought("")
        if env is not None:
            brought = bring(env, here=here)
            given["env.id"] = brought.id
            if here and not isinstance(env, str):
                given.setdefault("env.check_timeout_s", 0)  # the check is a process of its own
        given |= {} if steps is None else {"run.total_steps": steps}
        given |= {} if seed is None else {"run.seed": seed}
        name = run_name(preset or None, algo, str(given.get("env.id") or given.get("env")))
        path = _new_directory(name) if run_dir is None else Path(run_dir).expanduser()
        check_unused(path)  # before anything is written there, or a callback is told of a run that is there
        brought = brought.reachable_from(path)
        return cls(None if preset is None else str(preset), algo, path, given, brought)

    def start(self, told: Follower) -> Run:
        """Start it as a process, and return when there is a run."""
        words = [self.preset] if self.preset else ["--algo", self.algo]
        words += ["--run-dir", str(self.run_dir), "--no-progress"]
        for name, value in self.fields.items():
            words.append(f"--{name}={_text(name, value)}")
        command = [sys.executable, "-P", "-m", "troupe", "train", *words]
        with self.brought.kept_if_begun(self.run_dir):
            run = Run(command, self.run_dir, self.brought.variables(), told)
            run.begin()
        return run


def _text(name: str, value: Any) -> str:
    """A value as `troupe train` takes it."""
    if value is None:
        return "none"
    if isinstance(value, str):
        return value
    try:
        return format_value(value)
    except TypeError:
        raise ConfigError(
            f"{name} should be a value of a configuration, not a {type(value).__name__}"
        ) from None


def _new_directory(name: str) -> Path:
    """One below `runs` that is not there yet."""
    base = dated_directory(name)
    tried, number = base, 1
    while tried.exists():  # two runs may begin in one second
        number += 1
        tried = base.with_name(f"{base.name}-{number}")
    return tried


def _train_here(stop: StopSignal, callbacks: Callbacks, config: Config, run_dir: Path) -> None:
    """Train in this process, and call back after each row of metrics."""
    from troupe.serial import SerialTraining

    follower = Follower(run_dir, *callbacks)

    class Followed(SerialTraining):
        def write(self, source: str, metrics: dict[str, float]) -> None:
            super().write(source, metrics)
            if not follower.look():
                self.stop.set()

    with hold_run_dir(run_dir):
        # Where the program has no handler, Python would print the log of failures, which are told anyway.
        quiet = logging.NullHandler()
        logging.getLogger("troupe").addHandler(quiet)
        training = Followed(config, run_dir, stop)
        try:
            training.run()
        except BaseException:
            training.close()  # the program goes on, and keeps no file open
            raise
        finally:
            logging.getLogger("troupe").removeHandler(quiet)
    follower.look()


def _until_stopped(training: Callable[[StopSignal], Path]) -> Path:
    stop = StopSignal(force_after_s=None).install()
    try:
        run_dir = training(stop)
    finally:
        stop.uninstall()
    if stop.signals:
        raise KeyboardInterrupt
    return run_dir
