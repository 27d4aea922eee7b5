"""Games of one policy against another: who plays which side, and what comes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.envs.coins import Coins
from troupe.common.agents import Act, Inputs
from troupe.common.config import load_config
from troupe.common.config.env_section import EnvConfig
from troupe.common.runtime import StopSignal
from troupe.common.wire.control.client import Games, Params
from troupe.services.evaluator.matches import play_match
from troupe.services.evaluator.service import Evaluator

COINS = EnvConfig(id="pettingzoo:tests.envs.coins:Coins")
CROWD = EnvConfig(id="pettingzoo:tests.envs.crowd:Crowd")


class Hunter:
    """Goes to the coin, or (`lazy`) stays where it is; remembers the steps of its episode."""

    memory_size = 1
    eval_epsilon = 0.25

    def __init__(self, lazy: bool = False, mark: int = 1) -> None:
        self.lazy, self.mark, self.rows, self.epsilons = lazy, mark, [], set()
        self.alien_memory = 0

    def act(self, inputs: Inputs, epsilon: np.ndarray, rng: np.random.Generator) -> Act:
        self.rows.append(len(inputs.obs))
        self.epsilons |= set(epsilon.tolist())
        self.alien_memory += int((inputs.memory[~inputs.first, 0] % 10 != self.mark).sum())
        memory = np.where(inputs.first[:, None], self.mark, inputs.memory + 10).astype(np.float32)
        moves = np.zeros(len(inputs.obs), int) if self.lazy else np.sign(inputs.obs[:, 0]).astype(int)
        return Act(moves + 1, {}, memory)


def match(one: Any, other: Any, env: EnvConfig = COINS, **options: Any) -> list[float] | None:
    settings = {"games": 12, "slots": 4, "seed": 3, "epsilon": 0.25, "max_episode_frames": 1000}
    return play_match(one, other, env, **(settings | options))


def test_the_better_one_wins_on_either_side() -> None:
    one, other = Hunter(mark=1), Hunter(lazy=True, mark=2)
    assert match(one, other) == [1.0] * 12
    assert other.alien_memory == 0
    assert other.epsilons == {0.25}
    assert set(other.rows) == {2}  # one of the two slots of each copy
    assert match(other, one) == [0.0] * 12
    drawn = match(one, Hunter(mark=2))
    assert drawn is not None
    assert 0.2 < np.mean(drawn) < 0.8


def test_a_side_that_always_wins_helps_nobody() -> None:
    """Sides are swapped: an uneven number of games is rounded up to as many on each."""
    env = COINS.model_copy(update={"kwargs": {"first_wins": True}})
    for slots in (2, 4, 10):
        scores = match(Hunter(), Hunter(lazy=True), env, games=11, slots=slots)
        assert scores is not None
        assert (len(scores), np.mean(scores)) == (12, 0.5)


def test_games_are_the_same_again_and_stop_when_asked() -> None:
    assert match(Hunter(), Hunter(), seed=5) == match(Hunter(), Hunter(), seed=5)
    assert match(Hunter(), Hunter(), seed=5) != match(Hunter(), Hunter(), seed=6)
    steps = iter(range(100))
    assert match(Hunter(), Hunter(), should_stop=lambda: next(steps) > 20) is None


def test_a_game_that_fails_is_played_again(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, calls = Coins.step, iter(range(10**6))

    def fails(self: Coins, actions: dict[str, int]) -> Any:
        if next(calls) == 40:
            raise RuntimeError("no")
        return whole(self, actions)

    monkeypatch.setattr(Coins, "step", fails)
    assert match(Hunter(), Hunter(lazy=True), slots=2) == [1.0] * 12


class Client:
    """Takes what an evaluator reports."""

    state = type("State", (), {"stopping": False, "version": 0})()

    def send_telemetry(self, metrics: Any, blobs: Any = None, fields: Any = None) -> None:
        if "eval/version" in metrics:
            self.metrics, self.fields = metrics, fields


@pytest.mark.parametrize("opponent", [True, False])
def test_the_evaluator_reports_its_match(opponent: bool) -> None:
    fields = {"env.id": COINS.id, "evaluator.elo_games": "6", "evaluator.episodes": "4"}
    config, client = load_config("cartpole-ppo", None, fields | {"evaluator.video": "false"}, {}), Client()
    evaluator = Evaluator(config, client, StopSignal())  # type: ignore[arg-type]
    weights = {name: array.copy() for name, array in evaluator._agent.params().items()}
    other = {name: array + 1 for name, array in weights.items()}
    evaluator._evaluate(Games(0, Params(7, weights), Params(3, other) if opponent else None))
    assert len(client.fields.episodes) == 4
    told = {name: value for name, value in client.metrics.items() if name.startswith("eval/opponent")}
    if not opponent:
        assert told == {}
        return
    assert (told["eval/opponent_version"], told["eval/opponent_games"]) == (3, 6)
    assert 0 <= told["eval/opponent_win_rate"] <= 1
    assert evaluator._other is not None
    for name, array in evaluator._other.params().items():
        np.testing.assert_array_equal(array, other[name])
    for name, array in evaluator._agent.params().items():
        np.testing.assert_array_equal(array, weights[name])
