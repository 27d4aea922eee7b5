"""MinAtar's games, stepped for real, beside the package's own environment."""

import sys

import numpy as np
import pytest

from troupe.common.config import load_config
from troupe.common.config.env_section import EnvConfig
from troupe.common.envs import make_spec, make_vector
from troupe.common.envs.base import slot_seeds
from troupe.common.envs.minatar import GAMES
from troupe.common.errors import ConfigError, MissingEngineError

minatar = pytest.importorskip("minatar")


def config(game="breakout", **fields):
    return EnvConfig(id=f"minatar:{game}", reward_clip="none", **fields)


@pytest.mark.parametrize("game", GAMES)
@pytest.mark.parametrize("full", [False, True])
def test_games_are_the_packages_own(game, full):
    """Same seed, same actions: every plane, reward and ending, across the ends of episodes."""
    cfg = config(game, sticky_actions=0.1, full_action_space=full)
    env, seed = make_vector(cfg, 2, seed=3), slot_seeds(3, 2).tolist()
    twins = [minatar.Environment(game, sticky_action_prob=0.1) for _ in seed]
    for twin, each in zip(twins, seed, strict=True):
        twin.seed(each)
        twin.reset()
    allowed = list(range(6)) if full else twins[0].minimal_action_set()
    assert env.spec.actions.count == len(allowed)
    obs, rng, games = env.reset(), np.random.default_rng(0), 0
    for _ in range(300):
        planes = np.stack([twin.state().transpose(2, 0, 1) for twin in twins])
        np.testing.assert_array_equal(obs, 255 * planes.astype(np.uint8))
        chosen = env.spec.actions.random(rng, 2)
        step = env.step(chosen)
        for slot, twin in enumerate(twins):
            reward, over = twin.act(allowed[chosen[slot]])
            assert (step.reward[slot], step.terminated[slot]) == (reward, over)
            if over:
                last = 255 * twin.state().transpose(2, 0, 1).astype(np.uint8)
                np.testing.assert_array_equal(step.final_obs[slot], last)
                twin.reset()
                games += 1
        obs = step.obs
    assert games or game == "freeway"  # whose games take 2,500 steps


def test_a_seed_determines_a_game():
    def play(seed):
        env = make_vector(config("asterix", sticky_actions=0.5), 2, seed=1)
        env.reset()
        env.step(np.array([1, 2]))
        first = [env.reset(seed=seed)]
        return np.stack(first + [env.step(np.array([t % 5, 4])).obs for t in range(40)])

    np.testing.assert_array_equal(play(5), play(5))
    assert not np.array_equal(play(5), play(6))


def test_a_spectator_sees_every_object():
    env = make_vector(config("seaquest"), 1, seed=1)
    obs = env.reset()
    frame = env.render_frame(0)
    assert frame.shape == (160, 160, 3)
    np.testing.assert_array_equal(frame[8::16, 8::16].any(-1), obs[0].any(0))


def test_what_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="did you mean minatar:breakout"):
        make_spec(config("braekout"))
    with pytest.raises(ConfigError, match="nearest: difficulty_ramping"):
        make_spec(config(kwargs={"ramping": False}))


def test_without_the_package_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "minatar", None)  # as if it were not installed
    with pytest.raises(MissingEngineError, match=r"minatar:breakout needs the module minatar.*\[minatar\]"):
        make_spec(config())


def test_the_preset_has_the_papers_network():
    from troupe.common.agents import make_agent

    loaded = load_config("minatar-breakout-impala")
    spec = make_spec(loaded.env)
    assert spec.obs_shape == (4, 10, 10)
    weights = make_agent(loaded.agent, spec).params()
    shapes = {array.shape for name, array in weights.items() if name.endswith("weight")}
    assert shapes == {(16, 4, 3, 3), (128, 1024), (3, 128), (1, 128)}
