from __future__ import annotations

import doctest

import numpy as np
import pytest

from troupe.common.stats import scores
from troupe.common.stats.intervals import bootstrap, ci95
from troupe.common.stats.scores import RANDOM_AND_HUMAN, atari_game, human_normalized


def test_table_is_complete_and_ordered() -> None:
    assert len(RANDOM_AND_HUMAN) == 57
    assert all(human > random for random, human in RANDOM_AND_HUMAN.values())


def test_every_game_exists_in_the_emulator() -> None:
    roms = pytest.importorskip("ale_py.roms")
    assert set(RANDOM_AND_HUMAN) <= set(roms.get_all_rom_ids())


@pytest.mark.parametrize(
    ("env_id", "game"),
    [
        ("atari:pong", "pong"),
        ("atari:MsPacman", "ms_pacman"),
        ("gym:ALE/UpNDown-v5", "up_n_down"),
        ("gym:PongNoFrameskip-v4", "pong"),
        ("ale_py:ALE/Hero-v5", "hero"),
        ("envpool:Pong-v5", "pong"),
        ("vector:ALE/Pong-v5", "pong"),
        ("gym:CartPole-v1", None),
        ("minatar:breakout", None),
        ("gym:MinAtar/Breakout-v0", None),
        ("my_games:Tennis", None),
    ],
)
def test_spellings(env_id: str, game: str | None) -> None:
    assert atari_game(env_id) == game


def test_normalisation() -> None:
    assert human_normalized("atari:pong", -20.7) == 0
    assert human_normalized("atari:pong", 21) == pytest.approx((21 + 20.7) / (14.6 + 20.7))
    assert human_normalized("atari:skiing", -4336.9) == 1
    assert human_normalized("gym:CartPole-v1", 500) is None


def test_bootstrap() -> None:
    values = np.random.default_rng(1).normal(3.0, 1.0, 400)
    interval = bootstrap([values.tolist()], resamples=10_000)
    assert interval.low < interval.value < interval.high
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.1)
    assert ci95(values.tolist()) == (interval.low, interval.high)
    assert ci95([21.0]) == (21.0, 21.0)


@pytest.mark.parametrize("values", [[], [1.0, float("nan")]])
def test_bootstrap_refuses(values: list[float]) -> None:
    with pytest.raises(ValueError, match="at least one value"):
        ci95(values)


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(scores).failed == 0
