"""`troupe slurm`: a run over several nodes of a cluster."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from troupe.common.config import Config, Loaded, check_resumable, load_layers, read_config, to_toml
from troupe.common.config.field_options import field_parser, parse_with_fields
from troupe.common.config.loading import upper_layers
from troupe.common.config.text import format_value
from troupe.common.errors import ConfigError
from troupe.common.installation import check_trackers
from troupe.common.permits import VARIABLE, modules_of
from troupe.common.runtime.files import CONFIG_FILE, atomic_write, check_writable, readable, run_config
from troupe.common.runtime.parser import integer
from troupe.common.wire.security.keys import ALLOWED_FILE, check_set, make_keys
from troupe.services.launcher.workspace import own_command, shell_path
from troupe.services.slurm import script
from troupe.services.slurm.resources import add_resources, resources

# The script says them itself.
_ITS_OWN = ("net.control", "net.announce", "net.inference", "net.keys_dir")


def slurm_parser() -> argparse.ArgumentParser:
    """Return the parser of `troupe slurm`."""
    parser = field_parser(
        "slurm",
        "PRESET | --join RUN [OPTION ...]",
        "Train on several nodes of a Slurm cluster: write a job script and submit it. The same command\n"
        "with the --run-dir of a run continues that run. docs/clusters.md has the details.",
    )
    parser.add_argument(
        "preset", metavar="PRESET", nargs="?", help="a name from `troupe presets`, or a TOML file"
    )
    parser.add_argument(
        "--join",
        metavar="RUN",
        type=Path,
        help="instead of a preset: more actors for the run of such a job, on --nodes nodes that may be "
        "preempted one by one; actor.total_slots of the run must leave room for them",
    )
    parser.add_argument(
        "--nodes",
        type=integer(1),
        default=3,
        metavar="N",
        help="nodes of the whole job: one for learner and replay, one for evaluators, the others for actors "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--actors-per-node",
        type=integer(1),
        metavar="K",
        help="actor processes, and cores, of each node (default: as many as actor.processes takes)",
    )
    parser.add_argument(
        "--learner-cpus",
        type=integer(1),
        default=4,
        metavar="C",
        help="cores for learner and replay (default: %(default)s)",
    )
    add_resources(parser)
    parser.add_argument(
        "--run-dir",
        metavar="DIR",
        type=Path,
        help="directory on a file system that all nodes share (default: runs/PRESET-DATE-TIME)",
    )
    parser.add_argument("--dry-run", action="store_true", help="write script and keys, but submit nothing")
    return parser


def slurm(words: Sequence[str]) -> int:
    """Write the job script of a run, and submit it."""
    options, overrides = parse_with_fields(slurm_parser(), words)
    if (options.preset is None) == (options.join is None):
        raise ConfigError("name a preset (`troupe presets` lists them), or a run with --join RUN")
    if not options.dry_run:
        script.check_installed()
    if options.join is not None:
        if overrides:
            raise ConfigError(f"--{next(iter(overrides))} is for the learner of the run: leave it out here")
        return _join(options)
    name = Path(options.preset).stem
    run_dir = (options.run_dir or Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    with readable(run_dir):
        begun = run_dir / CONFIG_FILE
        begun = begun if begun.exists() else None
    loaded = load_layers(options.preset, options.sweep, overrides, os.environ, run_config=begun)
    if begun:
        check_resumable(read_config(begun), loaded.config)
    job = _job(options, loaded, run_dir, _fields(overrides, options.sweep))
    check_writable(run_dir, "run directory")
    script.write(job.file, script.run_script(job, script.program_path()))
    atomic_write(job.config, to_toml(loaded.config).encode())
    if not loaded.config.net.keys_dir and not (job.keys_dir / ALLOWED_FILE).exists():
        make_keys(job.keys_dir)
    check_set(job.keys_dir)
    try:
        number = _submitted(job.file, options.dry_run)
    except ConfigError as error:
        again = f"the same command with --run-dir {shell_path(run_dir)} uses its folder again"
        raise ConfigError(f"{error}; {again}") from None
    if not number:
        return 0
    log = shell_path(job.file.parent / f"{number}.log")
    print(f"submitted as job {number}: `squeue --job {number}`, `tail -f {log}`")
    print(f"watch the run: {own_command('tensorboard')} --logdir {shell_path(run_dir / 'tensorboard')}")
    print(f"stop it with a checkpoint: scancel {number}; continue: sbatch {shell_path(job.file)}")
    return 0


def _submitted(file: Path, dry_run: bool) -> str:
    """Submit a script, unless this is a dry run; returns the number of the job, or nothing."""
    print(f"script: {shell_path(file)}")
    if dry_run:
        print(f"submit it: sbatch {shell_path(file)}")
        return ""
    return script.submit(file)


def _join(options: argparse.Namespace) -> int:
    """Write and submit the script of further actors."""
    run_dir = options.join.absolute()
    with readable(run_dir):
        if not run_dir.is_dir():
            raise ConfigError(f"there is no run directory {options.join}")
        if not (run_dir / script.FOLDER / "address").exists():
            raise ConfigError(
                f"{options.join} has no {script.FOLDER}/address: no job of `troupe slurm` has started there"
            )
    config = read_config(run_config(run_dir), typed_agent=False)
    if config.total_slots - config.actor.processes * config.actor.slots < config.actor.slots:
        raise ConfigError(
            f"actor.total_slots = {config.total_slots} leaves no room for more actors: submit the run again "
            f"with --run-dir {options.join} --actor.total_slots 1024"
        )
    job = script.Joining(
        run_dir=run_dir,
        keys_dir=_keys_dir(config, run_dir),
        modules=_modules(config),
        nodes=options.nodes,
        actors_per_node=options.actors_per_node or max(1, config.actor.processes),
        resources=resources(options),
    )
    script.write(job.file, script.join_script(job, script.program_path()))
    if number := _submitted(job.file, options.dry_run):
        print(f"submitted as jobs {number}_1 to {number}_{options.nodes}: `squeue --job {number}`")
    return 0


def _keys_dir(config: Config, run_dir: Path) -> Path:
    own = config.net.keys_dir
    return Path(own).absolute() if own else run_dir / script.FOLDER / "keys"


def _modules(config: Config) -> list[str]:
    return list(filter(None, [*modules_of(config), os.environ.get(VARIABLE, "")]))


def _job(options: argparse.Namespace, loaded: Loaded, run_dir: Path, fields: dict[str, str]) -> script.RunJob:
    """Check what would fail after hours in the queue; return the job."""
    from troupe.services.launcher.training import check_environment

    config = loaded.config
    evaluators = config.evaluator.processes if config.evaluator.enabled else 0
    actor_nodes = options.nodes - (2 if evaluators else 1)
    if actor_nodes < 1:
        raise ConfigError(
            f"--nodes {options.nodes} leaves none for actors: one is for learner and replay, one for "
            "evaluators; use --nodes 3 or more, or --evaluator.enabled false"
        )
    if config.learner.processes > 1:
        raise ConfigError(
            f"learner.processes = {config.learner.processes}: a job has one learner; set it to 1"
        )
    if config.replay.shards > script.MAX_SHARDS:
        raise ConfigError(
            f"replay.shards = {config.replay.shards}: a job has at most {script.MAX_SHARDS}, on one node"
        )
    per_node = options.actors_per_node or -(-max(1, config.actor.processes) // actor_nodes)
    if options.actors_per_node or config.actor.processes != per_node * actor_nodes:
        fields["actor.processes"] = str(per_node * actor_nodes)
    check_trackers(config.run.trackers)
    # Without a look at learner.device: the machine that jobs are submitted from may have no GPU.
    check_environment(loaded, play=False)
    folder = run_dir / script.FOLDER
    return script.RunJob(
        run_dir=run_dir,
        config=folder / f"{Path(options.preset).stem}.toml",
        fields=fields,
        keys_dir=_keys_dir(config, run_dir),
        modules=_modules(config),
        shards=config.replay.shards,
        actor_nodes=actor_nodes,
        actors_per_node=per_node,
        evaluators=evaluators,
        learner_cpus=options.learner_cpus,
        gpu=config.learner.device != "cpu",
        resources=resources(options),
    )


def _fields(overrides: Mapping[str, Any], sweep: Path | None) -> dict[str, str]:
    """What is laid over the preset, as text; with the variables that hold now, not when the job begins."""
    fields: dict[str, str] = {}
    for layer in reversed(upper_layers(overrides, sweep, os.environ)):
        for name, value in layer.values.items():
            fields[name] = (
                value if isinstance(value, str) else "none" if value is None else format_value(value)
            )
    return {name: text for name, text in fields.items() if name not in _ITS_OWN}
