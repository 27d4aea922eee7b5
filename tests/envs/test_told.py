"""What an environment says of its episodes in `info` becomes metrics."""

from typing import Any

import gymnasium
import numpy as np
import pytest

from troupe.common.config import EnvConfig
from troupe.common.envs import make_vector, means_told
from troupe.common.envs.base import MAX_TOLD, told_in
from troupe.services.actor.timing import Timing, TimingReports


class TellingEnv(gymnasium.Env[np.ndarray, int]):
    """Two steps; every other episode succeeds."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, **more: Any) -> None:
        self._episodes = self._steps = 0

    def reset(self, **more: Any) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin another."""
        self._episodes, self._steps = self._episodes + 1, 0
        return np.zeros(1, np.float32), {"is_success": True}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """One step."""
        self._steps += 1
        over = self._steps == 2
        info = {"is_success": self._episodes % 2 == 0, "distance": np.float32(self._steps), "table": {"a": 1}}
        return np.zeros(1, np.float32), 1.0, over, False, info


if "Telling-v0" not in gymnasium.registry:
    gymnasium.register("Telling-v0", entry_point=f"{__name__}:TellingEnv")


@pytest.mark.parametrize("processes", [0, 1])
def test_the_numbers_of_the_last_step_are_those_of_the_episode(processes: int) -> None:
    config = EnvConfig(id="tests.envs.test_told:Telling-v0", processes=processes)
    env = make_vector(config, 2, seed=1)
    try:
        env.reset()
        episodes = [game for _ in range(8) for game in env.step(np.zeros(2, np.int64)).episodes]
    finally:
        env.close()
    assert len(episodes) == 8
    assert [game.told for game in episodes[:4]] == [{"is_success": s, "distance": 2.0} for s in (0, 0, 1, 1)]
    assert means_told(episodes) == {"is_success": 0.5, "distance": 2.0}
    timing = Timing(episodes=episodes)
    reports = TimingReports()
    metrics, _ = reports.report(timing, 0)
    assert (metrics["env/is_success"], metrics["env/distance"]) == (0.5, 2.0)
    assert not any(name.startswith("env/") for name in reports.report(timing, 0)[0])


def test_what_is_no_number_is_left_out() -> None:
    info = {"a b": 1, "nan": float("nan"), "huge": 1e300, "text": "1", 3: 1, "x" * 49: 1, "none": None}
    info |= {"complex": np.complex64(1), "ok": np.bool_(True), "also": 3}
    assert told_in(info) == {"also": 3.0, "ok": 1.0}
    assert told_in(None) == told_in("text") == {}
    assert len(told_in({f"n{i}": i for i in range(100)})) == MAX_TOLD
