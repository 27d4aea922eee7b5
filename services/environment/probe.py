"""`python -m troupe.services.environment.probe RESULT`: plays an environment for a moment; may hang or crash.

What to do comes as JSON on stdin, from `troupe.services.environment.check`, which watches; what was found
goes into the file RESULT, for the environment may print on stdout.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from troupe.common.config.env_section import EnvConfig
from troupe.common.envs import base, inspect, make_spec, make_vector
from troupe.common.envs.calls import CHECKER, Calls
from troupe.common.errors import TroupeError, caught, defect_line
from troupe.common.spaces import unpacked
from troupe.services.environment.check import BrokenError

MAX_FAILURES = 0.1
"""Of the steps played; a training in which more fail learns from little."""


def main() -> None:
    """Do as it is told, and write what it found."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent: see `caught`
    task, result = json.load(sys.stdin), Path(sys.argv[1])
    # As patient as a training, but there is nothing to wait for between two failures.
    base.BACKOFF_MAX_S = 0.0
    logging.getLogger(base.__name__).setLevel(
        logging.ERROR
    )  # the last words of a crash are to be the environment's own
    try:
        found = probe(EnvConfig.model_validate(task["env"]), **task["options"])
    except TroupeError as error:
        found = {"error": type(error).__name__, "text": str(error)}
    except caught() as error:
        found = {
            "error": "BrokenError",
            "text": f"{task['env']['id']} cannot be played: {defect_line(error)}",
        }
    result.write_text(json.dumps(found))


def probe(
    config: EnvConfig, slots: int, steps: int, seconds: float, seed: int, thorough: bool
) -> dict[str, Any]:
    """Random actions for `steps` steps over all slots, but no longer than about `seconds`.

    Raises BrokenError where a training would not get past the environment's failures.
    """
    spec = make_spec(config)
    vector = make_vector(config, -(-slots // spec.agents) * spec.agents, seed)
    try:
        found = _play(vector, steps, seconds, seed)
    except base.EnvError:
        raise BrokenError(str(vector.failures[-1])) from None
    finally:
        vector.close()
    if thorough:
        calls = Calls(1, whole=True)
        calls.enter(0, CHECKER)
        found |= inspect(config)
        calls.close()
    return {"spec": dataclasses.asdict(spec), **found}


def _play(vector: base.VectorEnv, steps: int, seconds: float, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    obs = vector.reset()
    played, began_s = 0, time.perf_counter()
    rewards, seen = [], _ranges(vector.spec, obs)
    terminated = truncated = 0
    games: list[base.Episode] = []
    while played < steps and time.perf_counter() - began_s < seconds:
        step = vector.step(vector.spec.actions.random(rng, vector.num_slots))
        played += vector.num_slots - len(step.idle)
        rewards.append(step.reward)
        now = _ranges(vector.spec, step.obs)
        seen = np.stack([np.minimum(seen[:, 0], now[:, 0]), np.maximum(seen[:, 1], now[:, 1])], axis=1)
        terminated, truncated = terminated + step.terminated.sum(), truncated + step.truncated.sum()
        games += step.episodes
    lasted_s = time.perf_counter() - began_s
    _check_failures(vector, played)
    reward = np.concatenate(rewards) if rewards else np.zeros(1)
    return {
        "steps": played,
        "frames_per_s": played * vector.spec.frames_per_step / max(lasted_s, 1e-9),
        "observation_ranges": seen.tolist(),
        "reward_range": [float(reward.min()), float(reward.max())],
        "terminated": int(terminated),
        "truncated": int(truncated),
        "episodes": [[game.return_raw, game.steps] for game in games],
        "failures": vector.restarts_total,
        "first_failure": str(vector.failures[0]) if vector.failures else "",
    }


def _ranges(spec: base.EnvSpec, obs: np.ndarray) -> np.ndarray:
    """Smallest and largest number `[parts, 2]` of observations `[S, *obs_shape]`; one row without parts."""
    if not spec.obs_leaves:
        return np.array([[obs.min(), obs.max()]], float)
    of_slots = np.array([[(a.min(), a.max()) for a in unpacked(spec.obs_leaves, row)] for row in obs], float)
    return np.stack([of_slots[..., 0].min(axis=0), of_slots[..., 1].max(axis=0)], axis=1)


def _check_failures(vector: base.VectorEnv, steps: int) -> None:
    """Refuse what fails again and again; what fails now and then is trained with, as it would be later."""
    if vector.restarts_total < 2:
        return
    # Always at one step is a defect of the environment, and no accident that a training survives.
    at = {failure.step for failure in vector.failures}
    if len(at) == 1 or vector.restarts_total > MAX_FAILURES * steps:
        times = f" ({vector.restarts_total} failures in {steps} steps)"
        raise BrokenError(f"{vector.failures[0]}{times}")


if __name__ == "__main__":
    main()
