"""A training on this machine, begun or resumed: what is checked before it is launched."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from troupe.common.config import Loaded, changed_structure, check_resumable, load_layers, read_config
from troupe.common.errors import ConfigError
from troupe.common.installation import check_trackers, other_code
from troupe.common.runtime.checkpoint import begin_from, newest_meta
from troupe.common.runtime.files import CONFIG_FILE, SOURCE_FOLDER, check_writable, readable, run_config
from troupe.common.runtime.lifecycle import INTERRUPTED
from troupe.services.launcher.workspace import dated_directory, in_the_way, run_name

if TYPE_CHECKING:
    from troupe.common.config import Config
    from troupe.common.envs import EnvSpec
    from troupe.common.runtime import StopSignal


def train(
    preset: str | None,
    run_dir: Path | None = None,
    *,
    algo: str = "",
    sweep: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    progress: bool | None = None,
    stop: StopSignal | None = None,
    instead: Callable[[Config, Path], None] | None = None,
) -> Path:
    """Train from a preset until the run is complete or a stop is asked for.

    Args:
        preset: name of a preset, or path of a TOML file; None with `algo`.
        algo: instead of a preset, one of `by_kind.NAMES`; the environment is among the overrides.
        run_dir: new directory; None: `runs/PRESET-DATE-TIME`.
        sweep: TOML file over preset and environment variables.
        overrides: fields over all of these.
        progress: see `troupe.services.launcher.launcher.run`.
        stop: see `troupe.services.launcher.launcher.run`.
        instead: is called with configuration and run directory in the place of the services' launcher.

    Returns:
        The run directory.

    Raises:
        TroupeError: says what is wrong; a configuration that cannot run leaves no directory.
        KeyboardInterrupt: it was stopped before there was anything to keep.
    """
    if preset is None:
        from troupe.services.launcher import by_kind

        loaded = by_kind.load(algo, sweep, overrides or {}, os.environ)
    else:
        loaded = load_layers(preset, sweep, overrides, os.environ)
    if instead is not None:
        check_one_process(loaded.config)
    spec = check_runnable(loaded, play=True)
    config = _with_beginning(_with_dataset(loaded.config, spec), spec)
    run_dir = (run_dir or dated_directory(run_name(preset, algo, config.env.id))).expanduser()
    check_unused(run_dir)
    check_writable(run_dir, "run directory")
    check_room(config, spec, run_dir)
    if instead is not None:
        instead(config, run_dir)
    else:
        _launch(config, run_dir, False, progress, stop)
    return run_dir


def resume(
    run_dir: Path,
    *,
    sweep: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    progress: bool | None = None,
    stop: StopSignal | None = None,
    instead: Callable[[Config, Path], None] | None = None,
) -> Path:
    """Continue a run from its newest whole checkpoint; see `train`."""
    file = run_config(run_dir)
    loaded = load_layers(None, sweep, overrides, os.environ, run_config=file)
    if instead is not None:
        check_one_process(loaded.config)
    _check_addresses(loaded)
    _check_device(loaded)
    for difference in check_resumable(read_config(file), loaded.config):
        print(f"troupe: resuming with {difference}", file=sys.stderr)
    _check_outside(loaded.config)
    check_environment(loaded, play=True)
    meta = newest_meta(run_dir / "checkpoints")
    if meta and (other := other_code(meta.get("troupe"))):
        print(f"troupe: warning: the run was written by {other}; results may differ", file=sys.stderr)
    if instead is not None:
        instead(loaded.config, run_dir)
    else:
        _launch(loaded.config, run_dir, True, progress, stop)
    return run_dir


def _launch(
    config: Config, run_dir: Path, resume: bool, progress: bool | None, stop: StopSignal | None
) -> None:
    if not config.actor.processes and not config.run.offline:
        # Possible: actors of one's own may join through the sockets in the run directory.
        print(
            "troupe: warning: actor.processes is 0: this run waits until an actor joins it from elsewhere",
            file=sys.stderr,
        )
    from troupe.services.launcher import launcher  # takes a while, and what is wrong is told before

    if launcher.run(config, run_dir, resume=resume, progress=progress, stop=stop) == INTERRUPTED:
        raise KeyboardInterrupt


def check_runnable(loaded: Loaded, *, play: bool) -> EnvSpec:
    """Refuse what cannot be trained here; without `play`, all but what only playing the environment shows."""
    if loaded.origins["env.id"] == "default":  # a file that was to change a preset, and does not name it
        raise ConfigError(
            f'{loaded.config.run.preset} says nothing of what to play: begin it with preset = "NAME", write '
            "an id under [env], or add --env ID"
        )
    _check_addresses(loaded)
    _check_device(loaded)
    _check_outside(loaded.config)
    return check_environment(loaded, play=play)


def check_environment(loaded: Loaded, *, play: bool) -> EnvSpec:
    """Refuse an environment that cannot be learned from, before any directory or process is.

    With `play`, and unless `env.check_timeout_s` is 0, it is played for a moment.
    """
    from troupe.common.agents import make_agent
    from troupe.common.agents.hindsight import hindsight_of
    from troupe.common.envs import check_settings, make_spec
    from troupe.common.envs.base import check_copies
    from troupe.common.envs.sides import check_opponents
    from troupe.services.environment.check import check

    config = loaded.config
    if play and config.env.check_timeout_s:
        # Its packages may take seconds to import. A file gets errors alone, which are one line.
        if sys.stderr.isatty():
            print(f"checking {config.env.id}", file=sys.stderr)
        found = check(config.env, timeout_s=config.env.check_timeout_s)
        if found.failures:
            from troupe.services.environment.command import failures_of

            print(f"troupe: warning: {failures_of(found)}; such episodes are discarded", file=sys.stderr)
        spec = found.spec
    else:
        spec = make_spec(config.env)
    check_settings(config.env, spec, loaded.chosen("env"))
    for slots in (config.actor.slots, config.total_slots):
        check_copies(spec, slots)
    check_opponents(config, spec)
    # Made and thrown away: a torso that does not suit, or a goal that is not shown, is refused here and not
    # by a service.
    agent, hindsight = make_agent(config.agent, spec), hindsight_of(config, spec)
    if hindsight is not None:
        hindsight.around(agent.accumulator(config.actor.chunk_steps), config.actor.chunk_steps)
    return spec


def _with_beginning(config: Config, spec: EnvSpec) -> Config:
    """Refuse a network to begin with that is none for this run, and write its path in full."""
    learner = config.learner
    if not learner.init_from:
        return config
    from troupe.common.agents import make_agent

    path = Path(learner.init_from).expanduser().resolve()
    agent = make_agent(config.agent, spec)
    begin_from(agent, path, partial(changed_structure, config=config), optimizer=learner.init_optimizer)
    # In full, since a resumed run may be started from another folder.
    changed = learner.model_copy(update={"init_from": str(path)})
    return config.model_copy(update={"learner": changed})


def _with_dataset(config: Config, spec: EnvSpec) -> Config:
    """Refuse a data set that this run cannot learn from, and give replay the room for it."""
    if not config.run.offline:
        return config
    from troupe.common.agents import make_agent
    from troupe.common.datasets import Dataset
    from troupe.common.datasets.fitting import fitted

    return fitted(config, make_agent(config.agent, spec), Dataset(config.run.offline).steps)


def check_one_process(config: Config) -> None:
    """Refuse what only the services do."""
    if config.run.offline:
        raise ConfigError(
            "nothing acts when training from a data set: leave out --serial and --deterministic, or --offline"
        )
    if config.run.trackers:
        raise ConfigError(
            f"runs with --serial and --deterministic send nothing to {', '.join(config.run.trackers)}: add "
            "--run.trackers '[]', or leave out --serial and --deterministic"
        )
    if config.evaluator.elo_games:
        raise ConfigError(
            "evaluator.elo_games needs an evaluator process: set it to 0, or leave out --serial and "
            "--deterministic"
        )


def check_repeatable(config: Config) -> None:
    """Refuse what does not repeat itself to the last bit."""
    if config.learner.device != "cpu":
        raise ConfigError(
            f"--deterministic computes on the CPU: set learner.device to cpu, not {config.learner.device}"
        )


def check_unused(run_dir: Path) -> None:
    """Refuse a directory that holds something; what a start that failed at once leaves behind is nothing."""
    with readable(run_dir):
        has_run = (run_dir / CONFIG_FILE).exists()
        has_files = run_dir.is_dir() and any(
            path.is_file() and not _is_of_a_start(path, run_dir) for path in run_dir.rglob("*")
        )
    if has_run:
        raise ConfigError(in_the_way(run_dir))
    if has_files:
        raise ConfigError(f"run directory {run_dir} is not empty and holds no run; choose another --run-dir")


def _is_of_a_start(path: Path, run_dir: Path) -> bool:
    """Whether a file comes before a run: lock, log, a notebook's module, and what Python makes of that."""
    source = run_dir / SOURCE_FOLDER
    return (
        path.name in (".lock", "launcher.log")
        or (path.parent == source and path.name.startswith("notebook_"))
        or path.parent == source / "__pycache__"
    )


def _check_addresses(loaded: Loaded) -> None:
    """Refuse addresses that somebody chose and that nothing would be bound to."""
    addresses = ("control", "announce", "inference", "replay")
    chosen = [f"net.{name}" for name in loaded.chosen("net") if name in addresses]
    if chosen:
        raise ConfigError(
            f"{', '.join(chosen)} ({loaded.origins[chosen[0]]}) would have no effect: a run on one "
            "machine has "
            "private sockets; leave out its addresses, or start the services one by one (docs/services.md)"
        )


def _check_device(loaded: Loaded) -> None:
    """Refuse a GPU that is not there, before any directory or process is."""
    if loaded.config.learner.device != "cpu":  # else there is nothing that needs torch
        from troupe.common.agents.tensors import check_device

        check_device(loaded.config.learner.device)


def _check_outside(config: Config) -> None:
    """Refuse trackers and keys that the services would miss, before any directory or process is."""
    check_trackers(config.run.trackers)
    if config.net.keys_dir:
        from troupe.common.wire.security.keys import check_set

        check_set(config.net.keys_dir)


def check_room(config: Config, spec: EnvSpec, run_dir: Path, copies: int = 0) -> None:
    """Refuse a replay that this machine could not hold, with `copies` on the disk, when it is full."""
    import numpy as np

    from troupe.common.data import plan

    if config.replay.max_bytes is None:
        size = math.prod(spec.obs_shape) * np.dtype(spec.obs_dtype).itemsize
        plan.check_room(run_dir, config.replay.sampled_tables(), 0 if spec.pixels else size, copies)
