"""The checkpoints in `release/` play what they learned."""

import json
from pathlib import Path

import pytest

from troupe.common.errors import ConfigError
from troupe.common.policies import restore
from troupe.common.runtime.checkpoint import open_checkpoint
from troupe.services.evaluator.evaluate import evaluate, main
from troupe.services.export import command as export

RELEASE = Path(__file__).parents[2] / "release"
LEAST = {
    "cartpole-ppo": 475.0,
    "minatar-ppo": 12.0,  # 0.4 at random
    "pendulum-sac": -400.0,  # -1,200 at random
}
"""Mean returns that random play does not come near."""


def test_each_is_tested_and_all_are_small():
    assert {path.name for path in RELEASE.iterdir()} == set(LEAST)
    assert sum(path.stat().st_size for path in RELEASE.rglob("*") if path.is_file()) < 2e6


@pytest.mark.parametrize("name", LEAST)
def test_it_plays(name):
    if name.startswith("minatar"):
        pytest.importorskip("minatar")
    checkpoint = open_checkpoint(RELEASE / name)
    assert not [array for array in checkpoint.arrays if not array.startswith("net/")]
    config, agent = restore(checkpoint)
    report = evaluate(checkpoint, config, agent, episodes=4, slots=4, seed=0, epsilon=agent.eval_epsilon)
    assert report["mean_return"] >= LEAST[name]


@pytest.mark.parametrize("name", ["cartpole-ppo", "pendulum-sac"])
def test_whoever_has_a_policy_draws_from_it(name, capsys):
    # SAC was refused as one that has none.
    assert main([str(RELEASE / name), "--sampled", "--episodes", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["epsilon"] == 1.0


def test_an_exported_checkpoint_is_the_same_and_takes_no_place_of_another(tmp_path):
    out = tmp_path / "again"
    words = [str(RELEASE / "cartpole-ppo"), "--format", "checkpoint", "--out", str(out), "--json"]
    assert export.main(words) == 0
    before, after = open_checkpoint(RELEASE / "cartpole-ppo"), open_checkpoint(out)
    assert {name: array.tobytes() for name, array in after.arrays.items()} == {
        name: array.tobytes() for name, array in before.arrays.items()
    }
    assert after.meta["steps"] == before.meta["steps"]
    assert restore(after)[0] == restore(before)[0]
    with pytest.raises(ConfigError, match="already exists"):
        export.main(words)
