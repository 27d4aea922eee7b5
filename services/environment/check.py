"""Tries an environment in a process of its own, so that what hangs or crashes there does no harm here."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from pydantic import TypeAdapter

from troupe.common.envs import calls
from troupe.common.envs.base import EnvSpec
from troupe.common.errors import ConfigError, MissingEngineError, TroupeError
from troupe.common.machine import temporary_prefix
from troupe.services.launcher.guard import guarded

if TYPE_CHECKING:
    from troupe.common.config.env_section import EnvConfig

BRIEF_S = 1.0
"""Of playing, before a training."""
WAY_PAST = "; --env.check_timeout_s 0 trains without this check"
"""What a training may do; somebody who asks for nothing but the check is told the cause alone."""
_POLL_S = 0.02
# Longest calls that all of it may take.
_CALLS_IN_ALL = 5
_MAKING = "while it is made"


class BrokenError(ConfigError):
    """The environment itself fails, hangs or crashes."""


_ERRORS: dict[str, type[TroupeError]] = {
    error.__name__: error for error in (ConfigError, BrokenError, MissingEngineError)
}


@dataclass(frozen=True)
class Findings:
    """What a moment of play has shown.

    Attributes:
        spec: what networks and accumulators need to know.
        steps: played, over all slots.
        frames_per_s: emulator frames a second, of all slots in one thread.
        observation_ranges: smallest and largest number of each part of an observation, as the network gets
            it; one pair where it has no parts.
        reward_range: smallest and largest reward, raw.
        terminated: how often an episode, or a life, ended.
        truncated: how often one was cut short.
        episodes: return and steps of whole games.
        observation_space: in Gymnasium's words, as `action_space`; empty where it was not asked.
        objections: of Gymnasium's own checker, and what `close` raised; None where nobody asked.
        failures: how often it failed and was made anew, as it would be in a training.
        first_failure: names slot, step and cause; empty where there was none.
    """

    spec: EnvSpec
    steps: int
    frames_per_s: float
    observation_ranges: list[tuple[float, float]]
    reward_range: tuple[float, float]
    terminated: int
    truncated: int
    episodes: list[tuple[float, int]] = field(default_factory=list)
    observation_space: str = ""
    action_space: str = ""
    objections: list[str] | None = None
    failures: int = 0
    first_failure: str = ""


def check(
    config: EnvConfig,
    *,
    slots: int = 2,
    steps: int = 100,
    seconds: float = BRIEF_S,
    timeout_s: float = 60.0,
    thorough: bool = False,
) -> Findings:
    """Reset and play at random, in a child process.

    Args:
        config: the environment.
        slots: copies.
        steps: over all copies.
        seconds: of playing, after which fewer steps are enough.
        timeout_s: longest call of the environment; all of it may take five times as long.
        thorough: ask Gymnasium's own checker as well, where it applies.

    Raises:
        ConfigError: the environment hangs, ends the process, or fails too often to be learned from: in every
            reset or first step, always at the same step, or in more than a tenth of all; names it, slot, step
            and cause.
    """
    options = {"slots": slots, "steps": steps, "seconds": seconds, "seed": 1, "thorough": thorough}
    kept = tempfile.TemporaryDirectory(prefix=temporary_prefix("check-"))
    with kept as name, tempfile.TemporaryFile() as said:
        result = Path(name) / "result"
        command = [sys.executable, "-P", "-m", "troupe.services.environment.probe", str(result)]
        child = subprocess.Popen(
            # An environment that hangs must not outlive this process where that is killed.
            guarded(command, signal.SIGKILL),
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=said,
            env={**os.environ, calls.VARIABLE: name, "OMP_NUM_THREADS": "1"},
            process_group=0,  # Ctrl-C is for us
        )
        try:
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError), child.stdin:
                raw = config.model_copy(update={"reward_clip": "none"}).model_dump(mode="json")
                child.stdin.write(json.dumps({"env": raw, "options": options}).encode())
            _watch(child, config.id, Path(name), timeout_s)
            return _findings(_found(result, child, config.id, Path(name), said))
        except BrokenError as error:
            raise ConfigError(f"{error}{'' if thorough else WAY_PAST}") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                # The whole group: an engine may have started processes of its own.
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _watch(child: subprocess.Popen[bytes], env_id: str, directory: Path, timeout_s: float) -> None:
    """Wait for the end; BrokenError where a call does not return in time."""
    began_s = since_s = time.monotonic()
    last: list[calls.Call] = []
    while child.poll() is None:
        time.sleep(_POLL_S)
        now_s, running = time.monotonic(), calls.calls_of(directory, child.pid)
        # A new call is progress, however long all of them together take; the second limit is for those that
        # never end.
        if running != last:
            last, since_s = running, now_s
        if now_s - since_s > timeout_s or now_s - began_s > _CALLS_IN_ALL * timeout_s:
            where = running[0] if running else _MAKING
            raise BrokenError(
                f"{env_id} hangs {where}: no answer for {now_s - since_s:.0f} s; "
                f"to wait longer, set --env.check_timeout_s {2 * timeout_s:.0f}"
            )


def _found(
    result: Path, child: subprocess.Popen[bytes], env_id: str, directory: Path, said: IO[bytes]
) -> dict[str, Any]:
    """What the child wrote. Raises the error that it wrote, or BrokenError where it did not get that far."""
    if result.exists():
        found: dict[str, Any] = json.loads(result.read_text())
        if "error" in found:
            raise _ERRORS.get(found["error"], ConfigError)(found["text"])
        return found
    running = calls.calls_of(directory, child.pid)
    where = running[0] if running else _MAKING
    said.seek(0)
    lines = [line.strip() for line in said.read().decode("utf-8", "replace").splitlines() if line.strip()]
    last = f"; its last words: {lines[-1][:200]}" if lines else ""
    raise BrokenError(f"{env_id} ended the process {where} ({calls.ending(child.returncode)}){last}")


def _findings(found: dict[str, Any]) -> Findings:
    spec = found.pop("spec")
    spec["obs_shape"] = tuple(spec["obs_shape"])
    episodes = [(score, steps) for score, steps in found.pop("episodes")]
    observed = [tuple(each) for each in found.pop("observation_ranges")]
    ranges: dict[str, Any] = {
        "observation_ranges": observed,
        "reward_range": tuple(found.pop("reward_range")),
    }
    return Findings(spec=TypeAdapter(EnvSpec).validate_python(spec), episodes=episodes, **ranges, **found)
