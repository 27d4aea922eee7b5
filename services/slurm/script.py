"""The text of job scripts, from the files beside this one; and handing them to Slurm."""

from __future__ import annotations

import importlib.resources
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from troupe.common.errors import ConfigError
from troupe.common.runtime.files import atomic_write, make_directory

FOLDER = "slurm"
"""Of a run or a sweep: its script, what its jobs print, the keys of a run."""
MAX_SHARDS = 16
"""A job has 20 ports."""
_IN_COMMENTS = {"name", "file", "run_dir", "folder", "output"}
_ANSWER_S = 120.0  # a busy slurmctld takes its time


@dataclass(frozen=True)
class Resources:
    """What every part of a job asks of Slurm.

    Attributes:
        partition: empty for the cluster's default.
        time: limit, in the form of `sbatch --time`; empty for the partition's.
        more: further options of `sbatch`.
    """

    partition: str = ""
    time: str = ""
    more: Sequence[str] = ()

    def lines(self, *own: str) -> list[str]:
        """The `#SBATCH` lines of a part, its own options last."""
        named = {"partition": self.partition, "time": self.time}
        common = [f"--{name}={shlex.quote(value)}" for name, value in named.items() if value]
        return [f"#SBATCH {_one_line(option)}" for option in (*common, *self.more, *own)]


@dataclass(frozen=True)
class RunJob:
    """A run as a heterogeneous job.

    Attributes:
        run_dir: absolute, on a file system that all nodes share.
        config: file with the whole configuration.
        fields: of the command line, `section.field` to text: they hold, too, where a run goes on.
        keys_dir: keys of the run.
        modules: outside Troupe, that environment and algorithm are from.
        shards: replay processes, on the learner's node.
        actor_nodes: nodes that have actors.
        actors_per_node: actor processes on each of them.
        evaluators: evaluator processes; 0 for a job of two parts.
        learner_cpus: cores for learner and replay.
        gpu: whether the learner has one.
        resources: what is asked for every part.
    """

    run_dir: Path
    config: Path
    fields: Mapping[str, str]
    keys_dir: Path
    modules: Sequence[str]
    shards: int
    actor_nodes: int
    actors_per_node: int
    evaluators: int
    learner_cpus: int
    gpu: bool
    resources: Resources

    @property
    def file(self) -> Path:
        """Where the script belongs."""
        return self.run_dir / FOLDER / "job.sh"


def run_script(job: RunJob, program: str) -> str:
    """Return the script of a run; `program` is the path of `troupe`."""
    ask = job.resources.lines
    gpu = ["--gpus-per-node=1"] if job.gpu else []
    actors = f"--nodes={job.actor_nodes} --ntasks-per-node={job.actors_per_node} --cpus-per-task=1"
    parts = ["# Learner and replay:", *ask(f"--nodes=1 --ntasks=1 --cpus-per-task={job.learner_cpus}", *gpu)]
    parts += ["#SBATCH hetjob", "# Actors: a node of theirs may fail, and the others go on", *ask(actors)]
    parts += ["#SBATCH --no-kill"]
    members = ['"$SLURM_JOB_ID_HET_GROUP_1"']
    if job.evaluators:
        evaluators = f"--nodes=1 --ntasks={job.evaluators} --cpus-per-task=1"
        parts += ["#SBATCH hetjob", "# Evaluators:", *ask(evaluators)]
        members += ['"$SLURM_JOB_ID_HET_GROUP_2"']
    return _filled(
        "run.sh",
        name=job.config.stem,
        job_name=shlex.quote(f"troupe-{job.config.stem}"),
        file=shlex.quote(str(job.file)),
        parts="\n".join(parts),
        keep=_keep("0|2|4|5", "0 (complete), 2 (configuration), 4 (keys) or 5 (checkpoint)"),
        members=" ".join(members),
        config=shlex.quote(str(job.config)),
        fields="".join(f" \\\n  {word}" for word in field_words(job.fields)),
        shards=str(job.shards),
        evaluators=_text("evaluators.sh").rstrip() if job.evaluators else "",
        **_common(job, program),
    )


@dataclass(frozen=True)
class Joining:
    """More actors for a run that a job has begun.

    Attributes:
        run_dir: of the run, absolute.
        keys_dir: its keys.
        modules: see `RunJob`.
        nodes: how many, each by a job of its own.
        actors_per_node: actor processes on each of them.
        resources: what is asked for each.
    """

    run_dir: Path
    keys_dir: Path
    modules: Sequence[str]
    nodes: int
    actors_per_node: int
    resources: Resources

    @property
    def file(self) -> Path:
        """Where the script belongs."""
        return self.run_dir / FOLDER / "actors.sh"


def join_script(job: Joining, program: str) -> str:
    """Return the script of further actors; `program` is the path of `troupe`."""
    own = f"--nodes=1 --ntasks={job.actors_per_node} --cpus-per-task=1"
    return _filled(
        "join.sh",
        nodes=str(job.nodes),
        parts="\n".join(job.resources.lines(own)),
        keep=_keep(
            "0|2|3|4|5", "0 (complete), 2 (configuration), 3 (no learner), 4 (keys) or 5 (checkpoint)"
        ),
        **_common(job, program),
    )


@dataclass(frozen=True)
class SweepJob:
    """Runs of a sweep as a job array.

    Attributes:
        folder: of the sweep, absolute, on a file system that all nodes share.
        preset: what all runs begin from.
        names: of the runs that are left, whose files are in `values/`.
        fields: of every run, from the command line.
        parallel: runs at a time.
        cpus: cores of each run.
        gpu: whether each has one.
        resources: what is asked for each.
        options: of `troupe train`, for each.
    """

    folder: Path
    preset: str
    names: Sequence[str]
    fields: Mapping[str, str]
    parallel: int
    cpus: int
    gpu: bool
    resources: Resources
    options: Sequence[str]

    @property
    def file(self) -> Path:
        """Where the script belongs."""
        return self.folder / FOLDER / "job.sh"


def sweep_script(job: SweepJob, program: str) -> str:
    """Return the script of a sweep; `program` is the path of `troupe`."""
    own = [f"--nodes=1 --ntasks=1 --cpus-per-task={job.cpus}", *(["--gpus-per-node=1"] if job.gpu else [])]
    return _filled(
        "sweep.sh",
        name=job.folder.name,
        job_name=shlex.quote(f"troupe-{job.folder.name}"),
        file=shlex.quote(str(job.file)),
        folder=shlex.quote(str(job.folder)),
        output=_pattern(job.folder),
        last=str(len(job.names) - 1),
        parallel=str(job.parallel),
        parts="\n".join(job.resources.lines(*own)),
        names="\n  ".join(shlex.quote(name) for name in job.names),
        preset=shlex.join([job.preset, *job.options]),
        program=shlex.quote(program),
        fields="".join(f" \\\n  {word}" for word in field_words(job.fields)),
    )


def _common(job: RunJob | Joining, program: str) -> dict[str, str]:
    modules = f"\nexport TROUPE_MODULES={shlex.quote(','.join(job.modules))}" if job.modules else ""
    paths = {"program": program, "run_dir": job.run_dir, "keys_dir": job.keys_dir}
    quoted = {name: shlex.quote(str(path)) for name, path in paths.items()}
    return {"modules": modules, "output": _pattern(job.run_dir), **quoted}


def _pattern(folder: Path) -> str:
    """A folder in a pattern of file names, where Slurm puts something in the place of `%j` and its like."""
    return shlex.quote(str(folder).replace("%", "%%"))


def _keep(final: str, words: str) -> str:
    return _text("keep.sh").rstrip().replace("@final@", final).replace("@final_words@", words)


def field_words(fields: Mapping[str, str]) -> list[str]:
    """Fields as words of a shell's command line."""
    return [shlex.quote(f"--{name}={text}") for name, text in fields.items()]


def _filled(template: str, **values: str) -> str:
    for name in _IN_COMMENTS & values.keys():
        _one_line(values[name])
    # All at once: what is filled in may look like a name that is to be.
    return re.sub("@([a-z_]+)@", lambda found: values[found[1]], _text(template))


def _one_line(text: str) -> str:
    if not text.isprintable():  # the rest of a comment, or of a `#SBATCH` line, would be a command
        raise ConfigError(
            f"{text!r} cannot be used in a job script: it contains a line break or "
            "another unprintable character"
        )
    return text


def _text(name: str) -> str:
    return (importlib.resources.files("troupe.services.slurm") / name).read_text("utf-8")


def program_path() -> str:
    """The `troupe` of this very installation, which the nodes have to find at the same place."""
    beside = Path(sys.executable).parent / "troupe"
    return str(beside) if beside.is_file() else "troupe"


def write(file: Path, text: str) -> None:
    """Write a job script."""
    make_directory(file.parent, "folder of the job script")
    atomic_write(file, text.encode())


def check_installed() -> None:
    """Refuse, before anything is written, a machine that cannot submit jobs.

    Raises:
        ConfigError: says where to go instead.
    """
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "this machine has no sbatch: run the same command on a login node of the cluster, or add "
            "--dry-run to write the job script only"
        )


def submit(file: Path) -> str:
    """Hand a script to Slurm; returns the number of the job.

    Raises:
        ConfigError: there is no Slurm here, or it refuses, with its own words.
    """
    words = ["sbatch", "--parsable", str(file)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_ANSWER_S)
    except FileNotFoundError:
        raise ConfigError(
            "this machine has no sbatch: on a login node of the cluster, run `sbatch "
            f"{shlex.quote(str(file))}`"
        ) from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"sbatch gave no answer in {_ANSWER_S:.0f} s: try again") from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ConfigError(f"Slurm refuses {file}: {said.removeprefix('sbatch: error: ')}")
    return done.stdout.strip().partition(";")[0]
