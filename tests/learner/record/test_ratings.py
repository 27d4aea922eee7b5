"""Elo over a run: whom a version plays, what is remembered, and how a run goes on with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from troupe.common.runtime.checkpoint import load_newest, save_checkpoint
from troupe.common.stats.ratings import OPPONENT_GAMES, OPPONENT_VERSION, OPPONENT_WIN_RATE
from troupe.common.wire.control.params import Published, decode_params, encode_params
from troupe.services.learner.record.gathered import OF_A_MATCH
from troupe.services.learner.record.ratings import MAX_KEPT, MAX_MATCHES, Ratings


def params(version: int) -> dict[str, np.ndarray]:
    return {"w": np.full((2, 3), version, np.float32), "b": np.arange(3, dtype=np.float32)}


class Run:
    """A learner as `Ratings` knows it; version v is `strength(v)` Elo strong, and its games come out so."""

    def __init__(self, folder: Path, known: int = -1) -> None:
        self.offered: list[int] = []
        self.opponent: Published | None = None
        self.ratings = Ratings(folder, known, self.offer)

    def offer(self, opponent: Published | None) -> None:
        self.opponent = opponent
        if opponent is not None:
            self.offered.append(opponent.version)

    def evaluate(self, version: int, **changes: float) -> dict[str, float]:
        metrics = {"eval/episode_return": 1.0}
        if self.opponent is not None:
            ahead = strength(version) - strength(self.opponent.version)
            # So that with the drawn game more, the share of the points is exactly that of Elo.
            points = 1001 / (1 + 10 ** (-ahead / 400)) - 0.5
            metrics |= {
                OPPONENT_VERSION: self.opponent.version,
                OPPONENT_GAMES: 1000.0,
                OPPONENT_WIN_RATE: points / 1000,
            }
        played = Published(version, *encode_params(params(version)), 100 * version, version, 0.0)
        return self.ratings.evaluated(played, metrics | changes)


def strength(version: int) -> float:
    return 3.0 * (version - 10)


def test_ratings_follow_strength_and_what_is_kept_spreads_over_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path)
    told = [run.evaluate(version) for version in range(10, 110)]
    assert [each["eval/elo"] for each in told] == pytest.approx(
        [strength(v) for v in range(10, 110)], abs=1e-4
    )
    assert told[0]["eval/elo_error"] == 0
    assert 5 < told[-1]["eval/elo_error"] < 60
    kept = [each.version for each in run.ratings._kept]
    assert len(kept) <= MAX_KEPT
    assert kept[0] == 10
    assert set(np.diff(kept)) == {16}
    assert len({*run.offered[-4:]}) == 4  # the newest four in turn
    assert len(run.ratings._matches) < 60


def test_an_evaluation_that_began_before_the_last_one_ended_is_rated_too(tmp_path: Path) -> None:
    """Its opponent was chosen before, and may have been let go since."""
    run, before = Run(tmp_path), None
    for version in range(10, 110):
        now = run.opponent
        run.opponent = before or now
        assert run.evaluate(version)["eval/elo"] == pytest.approx(strength(version), abs=1e-4)
        before = now


def test_a_resumed_run_goes_on_and_what_was_lost_is_forgotten(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for version in range(10, 30):
        run.evaluate(version)
        run.ratings.wait(60)
    kept = [each.version for each in run.ratings._kept]
    later = Run(tmp_path, known=29)
    assert [each.version for each in later.ratings._kept] == kept
    assert later.opponent is not None
    decoded = decode_params(later.opponent.manifest, later.opponent.blob)
    for name, array in params(later.opponent.version).items():
        np.testing.assert_array_equal(decoded[name], array)
    assert later.evaluate(30)["eval/elo"] == pytest.approx(strength(30), abs=1e-4)
    # A checkpoint of version 17: weights that come later have the same numbers, and are others.
    earlier = Run(tmp_path, known=17)
    assert max(each.version for each in earlier.ratings._kept) <= 17
    assert earlier.evaluate(18)["eval/elo"] == pytest.approx(strength(18), abs=1e-4)
    assert Run(tmp_path).opponent is None  # a new run in the same place


def test_what_cannot_be_believed_is_not_counted(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert run.evaluate(10) == {"eval/elo": 0.0, "eval/elo_error": 0.0}
    lies: list[dict[str, Any]] = [
        {OPPONENT_VERSION: 9.0},
        {OPPONENT_VERSION: -1.0},
        {OPPONENT_GAMES: 0.0},
        {OPPONENT_GAMES: 1e30},
        {OPPONENT_WIN_RATE: 1.5},
        {OPPONENT_WIN_RATE: -0.5},
        *({name: number} for name in OF_A_MATCH for number in (float("nan"), float("inf"), float("-inf"))),
    ]
    for lie in lies:
        assert run.evaluate(11, **lie) == {}
    assert run.evaluate(12)["eval/elo"] == pytest.approx(6.0, abs=1e-6)


@pytest.mark.parametrize("spoilt", ["meta.json", "arrays.safetensors"])
def test_damaged_files_begin_again_at_0(tmp_path: Path, spoilt: str) -> None:
    run = Run(tmp_path)
    run.evaluate(10)
    run.ratings.wait(60)
    (file,) = tmp_path.glob(f"rated/step-*/{spoilt}")
    file.write_bytes(b"{}")
    again = Run(tmp_path, known=50)
    assert again.opponent is None
    assert again.evaluate(20) == {"eval/elo": 0.0, "eval/elo_error": 0.0}


APART = "not all versions are connected"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"matches": [[11, 10, 20, 15], [12, 10, 20, 15], [40, 30, 20, 5]]}, APART),
        ({"matches": [[12, 10, 20, 15]]}, APART),  # 11 has played nobody, and was kept
        ({"kept": []}, APART),
        ({"matches": [[10, 12, 20, 15], [12, 10, 20, 15]]}, "version 10 cannot have 15.0 points"),
        ({"matches": [[11, 10, 20, 25], [12, 11, 20, 15]]}, "cannot have 25.0 points of 20.0 games"),
        ({"matches": [[11, 10, 1e300, 5]]}, "cannot have 5.0 points of 1e+300 games"),
        ({"matches": [[11, 10, 20, 15]] * (MAX_MATCHES + 1)}, "length <= 1024"),
        ({"evaluations": 10**400}, "evaluations"),
        ({"evaluations": "many"}, "evaluations"),
        ({"spacing": 0}, "spacing"),
    ],
)
def test_odd_files_begin_again_at_0(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], told: str
) -> None:
    run, folder = Run(tmp_path), tmp_path / "rated"
    for version in (10, 11, 12):
        run.evaluate(version)
        run.ratings.wait(60)
    arrays, meta, _ = load_newest(folder)
    save_checkpoint(folder, arrays, meta)
    assert [each.version for each in Run(tmp_path, known=50).ratings._kept] == [10, 11, 12]
    save_checkpoint(folder, arrays, meta | changes, keep=1)
    again = Run(tmp_path, known=50)
    assert "ratings start again at 0: " in caplog.text
    assert told in caplog.text
    assert again.evaluate(51) == {"eval/elo": 0.0, "eval/elo_error": 0.0}
    assert again.evaluate(52)["eval/elo"] == pytest.approx(3.0, abs=1e-4)
    again.ratings.wait(60)
