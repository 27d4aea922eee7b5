"""Whole training beside other frameworks: CleanRL's PPO and SAC, Sample Factory's APPO, Troupe, alternating.

`python -m benchmarks.system_peers DIR --install` gives each framework a virtual environment in DIR, once
`python -m benchmarks.system_peers DIR --json [--seconds S] [--only ppo cleanrl]` measures

All play Pong (84x84, stacks of four, four frames a step) and learn from it, but for `sac` and `cleanrl_sac`,
which learn HalfCheetah with an update for each step. CleanRL's network and passes are fixed, so
`ppo_as_cleanrl` is Troupe with those; Sample Factory is told to do what `pong-appo` does. `ppo`, `appo`,
`impala` and `sac` are Troupe's presets. Nobody evaluates. A framework that is not there is left out.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from benchmarks.common import parser, report
from benchmarks.system import SETTLE_S, START_LIMIT_S

Count = Callable[[str, float], float | None]
"""Takes a line that a training printed and the steps so far; the steps now, or None where it tells none."""

CLEANRL_SOURCE = "https://github.com/vwxyzjn/cleanrl"
CLEANRL_COMMIT = "fe8d8a03c41a7ef5b523e2e354bd01c363e786bb"
CLEANRL_BATCH = 8 * 128
FRAMES_PER_STEP = 4


def cleanrl_steps(line: str, before: float) -> float | None:
    """CleanRL prints `SPS: 273` after each batch. That is the mean since its start, so lines are counted."""
    return before + CLEANRL_BATCH if re.match(r"SPS: \d+$", line) else None


def cleanrl_sac_steps(line: str, before: float) -> float | None:
    """Its SAC prints `SPS: 60` after each 100 steps of its one environment, once it learns."""
    return before + 100 if re.match(r"SPS: \d+$", line) else None


def sample_factory_steps(line: str, before: float) -> float | None:
    """Sample Factory tells `Fps is (...). Total num frames: 4096.`: frames it learned from, four a step."""
    found = re.search(r"Total num frames: (\d+)\.", line)
    return int(found[1]) / FRAMES_PER_STEP if found else None


@dataclass(frozen=True)
class Peer:
    """Another framework's training.

    Attributes:
        venv: folder of its virtual environment, which several may share.
        words: of its command line, after `python`; `{venv}` is that folder.
        count: how its lines tell steps.
    """

    venv: str
    words: tuple[str, ...]
    count: Count


PACKAGES = {
    "cleanrl": (
        "gym==0.23.1",
        "envpool==0.8.4",
        "opencv-python-headless==4.10.0.84",
        "mujoco==3.17.0",
        "tyro",
        "tensorboard",
    ),
    "sample-factory": ("sample-factory==2.1.1",),
}
"""Of each virtual environment, in addition to `SHARED`."""
SHARED = ("gymnasium==0.29.1", "ale-py==0.10.1", "numpy==1.26.4")

PEERS = {
    "cleanrl": Peer(
        "cleanrl",
        ("{venv}/source/cleanrl/ppo_atari.py", "--env-id", "PongNoFrameskip-v4", "--no-cuda"),
        cleanrl_steps,
    ),
    "cleanrl_envpool": Peer(
        "cleanrl",
        ("{venv}/source/cleanrl/ppo_atari_envpool.py", "--env-id", "Pong-v5", "--no-cuda"),
        cleanrl_steps,
    ),
    "cleanrl_sac": Peer(
        "cleanrl",
        ("{venv}/source/cleanrl/sac_continuous_action.py", "--env-id", "HalfCheetah-v4", "--no-cuda"),
        cleanrl_sac_steps,
    ),
    # As configs/pong-appo.toml: its network, 32 slots, unrolls of 32, batches of 768 steps, two passes.
    "sample_factory": Peer(
        "sample-factory",
        (
            *("-m", "sf_examples.atari.train_atari", "--env=atari_pong", "--algo=APPO", "--experiment=pong"),
            *("--train_dir=.", "--device=cpu", "--async_rl=True", "--num_workers=2"),
            *("--num_envs_per_worker=16", "--worker_num_splits=2", "--rollout=32", "--recurrence=32"),
            *("--batch_size=768", "--num_batches_per_epoch=1", "--num_epochs=2", "--with_vtrace=False"),
            *("--normalize_returns=False", "--nonlinearity=elu"),
            *("--encoder_conv_architecture=convnet_impala", "--encoder_conv_mlp_layers", "256"),
        ),
        sample_factory_steps,
    ),
}

AS_CLEANRL = (
    *("--agent.torso", "nature", "--agent.hidden_units", "512", "--agent.activation", "relu"),
    *("--actor.slots", "8", "--agent.unroll_steps", "128", "--replay.batch_size", "8"),
    *("--agent.epochs", "4", "--agent.minibatch_steps", "256", "--agent.normalize_pixels", "false"),
)
TROUPE = {
    "ppo": ("--agent", "ppo"),
    "ppo_as_cleanrl": ("--agent", "ppo", *AS_CLEANRL),
    "appo": ("--agent", "appo"),
    "impala": ("--agent", "impala"),
    "sac": ("--preset", "halfcheetah-sac"),
}

TURNS = (
    *("ppo", "cleanrl", "ppo_as_cleanrl", "cleanrl_envpool", "appo", "sample_factory", "impala"),
    *("sac", "cleanrl_sac"),
)
PAIRS = (
    ("ppo_as_cleanrl", "cleanrl"),
    ("ppo_as_cleanrl", "cleanrl_envpool"),
    ("appo", "sample_factory"),
    ("sac", "cleanrl_sac"),
)
"""Who does the same work."""


class LeftOutError(Exception):
    """A training that could not be measured: the line that says why."""


def run(command: list[str], hint: str = "") -> None:
    """Run a step of an installation."""
    try:
        subprocess.run(command, check=True)
    except (OSError, subprocess.CalledProcessError):
        raise SystemExit(f"not installed: {' '.join(command)} failed{hint}") from None


def packages(venv: str) -> list[str]:
    """What goes into a virtual environment: torch as it is here, so that all compute with the same one."""
    return [f"torch=={version('torch').partition('+')[0]}", *SHARED, *PACKAGES[venv]]


def install(venv: str, folder: Path, cleanrl: str) -> None:
    """Make a virtual environment unless it is there. Its `.pth` file comes last and says that it is whole."""
    home = folder.absolute() / venv
    if starts_with(home).exists():
        return
    run([sys.executable, "-m", "venv", "--clear", str(home)])
    run([str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", *packages(venv)])
    lines = [
        "import ale_py"
    ]  # registers its games in each process, as the versions did that both were written for
    if venv == "cleanrl":
        source = str(home / "source")
        hint = f"; give a clone of {CLEANRL_SOURCE} on this machine by --cleanrl"
        run(["git", "clone", "--quiet", cleanrl, source], hint)
        run(["git", "-C", source, "checkout", "--quiet", CLEANRL_COMMIT])
        lines.append(source)
    starts_with(home).write_text("\n".join(lines) + "\n")


def starts_with(home: Path) -> Path:
    """The file that every Python of a virtual environment heeds when it starts."""
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return home / "lib" / python / "site-packages" / "peer.pth"


def rate(
    lines: Iterable[str],
    count: Count,
    seconds: float,
    settle_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> float | None:
    """Steps per second of a training that goes on; None where it ends too early.

    The window begins `settle_s` after the first steps that were learned from. It begins and ends with a line
    that tells new steps, since between such lines nobody knows.
    """
    steps = 0.0
    learning_since: float | None = None
    first: tuple[float, float] | None = None
    for line in lines:
        told = count(line, steps)
        if told is None or told <= steps:
            continue
        now, steps = clock(), told
        if learning_since is None:
            learning_since = now
        if first is None:
            first = (now, steps) if now - learning_since >= settle_s else None
        elif now - first[0] >= seconds:
            return (steps - first[1]) / (now - first[0])
    return None


def kill(process: subprocess.Popen[str]) -> None:
    """End a training and its processes; it has nothing that is worth saving."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def peer_rate(name: str, folder: Path, seconds: float) -> float:
    """Steps per second of another framework."""
    peer = PEERS[name]
    home = folder.absolute() / peer.venv
    if not starts_with(home).exists():
        raise LeftOutError(
            f"no {folder / peer.venv}; python -m benchmarks.system_peers {folder} --install makes it"
        )
    command = [str(home / "bin" / "python"), *(word.format(venv=home) for word in peer.words)]
    # Each framework chooses its threads itself, and imports nothing of Troupe's.
    environ = {
        key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS", "PYTHONPATH")
    }
    environ["PYTHONUNBUFFERED"] = "1"
    last: deque[str] = deque(maxlen=20)

    def lines(process: subprocess.Popen[str]) -> Iterator[str]:
        assert process.stdout is not None
        for line in process.stdout:
            last.append(line)
            yield line

    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work,
        subprocess.Popen(
            command,
            cwd=work,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            process_group=0,  # to be ended together; its session stays, by which Linux shares out the cores
        ) as process,
    ):
        limit = threading.Timer(START_LIMIT_S + SETTLE_S + 2 * seconds, kill, (process,))
        limit.start()
        try:
            found = rate(lines(process), peer.count, seconds, SETTLE_S)
        finally:
            limit.cancel()
            kill(process)
    if found is None:
        print("".join(last), end="", file=sys.stderr)
        raise LeftOutError("it ended, or told no steps in time; its last lines are above")
    return found


def troupe_rates(name: str, seconds: float) -> dict[str, float]:
    """Steps per second of Troupe, and the share of the bare emulators' rate."""
    command = [sys.executable, "-m", "benchmarks.system", "--json", "--seconds", str(seconds), *TROUPE[name]]
    command += ["--evaluator.enabled", "false"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        try:
            said, _ = process.communicate()
        except BaseException:  # its training is a process of its own
            kill(process)
            raise
    if process.returncode:
        raise LeftOutError("benchmarks.system failed")
    figures = json.loads(said.splitlines()[-1])
    found = {f"{name}_steps_per_s": figures["train_steps_per_s"]}
    if "vs_raw_emulator" in figures:  # of Atari
        found[f"{name}_vs_raw_emulator"] = figures["vs_raw_emulator"]
    return found


def ratios(figures: dict[str, float]) -> dict[str, float]:
    """How many times as fast Troupe is as those who do the same work."""
    rates = {name: figures.get(f"{name}_steps_per_s") for name in TURNS}
    return {
        f"{ours}_vs_{theirs}": round(mine / other, 2)
        for ours, theirs in PAIRS
        if (mine := rates[ours]) and (other := rates[theirs])
    }


def main() -> None:
    """The command line."""
    args = parser(__doc__, seconds=60.0)
    args.add_argument("dir", type=Path, help="folder of the virtual environments")
    args.add_argument(
        "--install", action="store_true", help="make those that are missing, and measure nothing"
    )
    args.add_argument("--cleanrl", default=CLEANRL_SOURCE, help="what git clones CleanRL from")
    args.add_argument("--only", nargs="+", choices=TURNS, default=TURNS, help="whom to measure")
    options = args.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no training outlives this
    if options.install:
        for venv in PACKAGES:
            install(venv, options.dir, options.cleanrl)
        return
    figures: dict[str, float] = {}
    for name in TURNS:
        if name not in options.only:
            continue
        try:
            if name in TROUPE:
                figures |= troupe_rates(name, options.seconds)
            else:
                figures[f"{name}_steps_per_s"] = round(peer_rate(name, options.dir, options.seconds), 1)
        except LeftOutError as error:
            print(f"{name}: left out: {error}", file=sys.stderr)
    report("system_peers", {**figures, **ratios(figures), "seconds": options.seconds})


if __name__ == "__main__":
    main()
