import numpy as np
import pytest

from troupe.common.config.env_section import EnvConfig
from troupe.common.envs import make_vector

KWARGS = {"cues": 3, "delay": 2, "questions": 4}


def returns_of(policy, seed=0, steps=200):
    """Returns of episodes in which `policy(cue, obs)` answers."""
    config = EnvConfig(id="troupe.common.envs.recall:Recall-v0", reward_clip="none", kwargs=KWARGS)
    env, games = make_vector(config, 4, seed), []
    obs = env.reset()
    assert env.spec.obs_shape == (4,)
    assert env.spec.actions.count == 3
    cues = obs[:, :3].argmax(axis=1)
    seen = [[row] for row in obs]
    for _ in range(steps):
        step = env.step(np.array([policy(c, row) for c, row in zip(cues, obs, strict=True)]))
        assert not step.truncated.any()
        for slot, row in enumerate(step.obs):
            if step.terminated[slot]:
                shown = np.array(seen[slot])
                assert len(shown) == 1 + 4 * 3  # the cue, and four times two blanks and a question
                np.testing.assert_array_equal(shown[:, 3], [0] + [0, 0, 1] * 4)
                assert shown[0, :3].sum() == 1
                assert shown[1:, :3].sum() == 0
                seen[slot], cues[slot] = [], row[:3].argmax()
            seen[slot].append(row)
        obs = step.obs
        games += [episode.return_raw for episode in step.episodes]
    env.close()
    return games


def test_who_remembers_earns_one():
    games = returns_of(lambda cue, obs: int(cue))
    assert len(games) > 50
    assert games == pytest.approx([1.0] * len(games))


def test_who_does_not_earns_one_over_the_number_of_cues():
    games = returns_of(lambda cue, obs: 0, steps=2000)
    assert set(games) == {0.0, 1.0}
    assert np.mean(games) == pytest.approx(1 / 3, abs=0.07)


def test_what_makes_no_sense_is_refused():
    from troupe.common.envs.recall import RecallEnv

    with pytest.raises(ValueError, match="at least 1"):
        RecallEnv(cues=0)
