"""Which games count, and that the same seed plays the same games."""

from typing import ClassVar

import pytest

from tests.evaluator.fakes import FakeAgent, FakeVector, run
from troupe.common.agents import make_agent
from troupe.common.config import EnvConfig, load_config
from troupe.common.envs import make_spec
from troupe.common.envs.base import EnvError
from troupe.services.evaluator import games
from troupe.services.evaluator.games import Result, play
from troupe.services.evaluator.video import Recorder


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(games, "make_vector", FakeVector)
    return FakeAgent()


def test_every_slot_plays_its_share_so_long_games_count_as_much_as_short_ones(fake):
    assert run(fake).returns == [3.0, 6.0, 3.0, 6.0]
    assert run(fake, episodes=5).returns == [3.0, 6.0, 3.0, 6.0, 3.0]
    assert run(fake, episodes=1).returns == [3.0]
    assert FakeVector.last.num_slots == 1
    assert FakeVector.last.closed


def test_slots_that_are_done_cost_no_forward_pass(fake):
    run(fake)
    assert fake.batches == [2] * 6 + [1] * 6


def test_steady_slots_are_asked_to_the_end(fake):
    assert run(fake, steady=True).returns == [3.0, 6.0, 3.0, 6.0]
    assert fake.batches == [2] * 12
    assert run(fake, steady=True, episodes=1).returns == [3.0]
    assert FakeVector.last.num_slots == 2


@pytest.mark.parametrize("epsilon", [0.0, 0.5])
def test_the_first_games_are_the_same_for_any_number(epsilon):
    """Whatever other slots still play, and whatever they draw."""
    config = load_config("cartpole-ppo", None, {}, {})
    agent = make_agent(config.agent, make_spec(config.env), seed=3)

    def lengths(episodes):
        options = {"slots": 3, "max_episode_frames": 1000, "steady": True}
        return play(agent, config.env, episodes=episodes, seed=1, epsilon=epsilon, **options).steps

    many = lengths(11)
    assert len(set(many)) >= 3
    for few in (1, 2, 4, 7):
        assert lengths(few) == many[:few]


def test_every_slot_keeps_its_own_memory(fake):
    run(fake)
    # Slot 0 plays two games of 3 steps, slot 1 two of 6: after 6 steps only slot 1 is asked.
    assert [i.memory[:, 0].tolist() for i in fake.inputs[:7]] == [
        [0, 0], [1, 1], [2, 2], [3, 3], [1, 4], [2, 5], [6]
    ]  # fmt: skip
    assert [i.first.tolist() for i in fake.inputs[2:5]] == [[False, False], [True, False], [False, False]]
    assert fake.inputs[6].first.tolist() == [True]
    assert fake.inputs[6].last_reward.tolist() == [1.0], "training clips rewards to their sign"
    assert fake.inputs[6].last_action.tolist() == [1]


def test_stops_when_told(fake):
    assert run(fake, should_stop=lambda: len(fake.batches) >= 3) is None
    assert len(fake.batches) == 3
    assert FakeVector.last.closed


def test_films_the_first_game_only(fake):
    recorder = Recorder()
    run(fake, recorder=recorder)
    assert [int(frame[0, 0, 0]) for frame in recorder] == [0, 1, 2]


def test_on_game_sees_what_counts(fake):
    seen = []
    run(fake, on_game=seen.append)
    assert [game.slot for game in seen] == [0, 0, 1, 1]


def test_the_same_seed_gives_the_same_games():
    config = load_config("cartpole-apex", None, {}, {})
    agent = make_agent(config.agent, make_spec(config.env), seed=3)

    def returns(seed):
        options = {"episodes": 6, "slots": 3, "max_episode_frames": 1000}
        return play(agent, config.env, seed=seed, epsilon=0.5, **options).returns

    assert returns(1) == returns(1)
    assert returns(1) != returns(2)


def test_tasks_are_scored_each_by_its_own_human_and_capped():
    """Random and human scores are 0.073 and 10 of one level, 7.66 and 267.5 of the other."""
    tasks = ["rooms_collect_good_objects_train", "explore_goal_locations_small"]
    result = Result([5.0, 400.0, 6.0, 300.0], [1, 1, 1, 1], tasks * 2)
    assert result.by_task() == {tasks[0]: 5.5, tasks[1]: 350.0}
    low, high = (5.5 - 0.073) / (10 - 0.073), (350 - 7.66) / (267.5 - 7.66)
    assert high > 1
    scores = result.human_normalized("dmlab:dmlab30")
    assert scores == pytest.approx(
        {"human_normalized": (low + high) / 2, "human_normalized_capped": (low + 1) / 2}
    )
    assert Result([14.6], [1]).human_normalized("atari:pong") == {"human_normalized": 1.0}
    assert Result([14.6], [1]).human_normalized("minatar:breakout") == {}


def test_the_longest_game_is_not_that_of_training():
    training = EnvConfig(id="gym:CartPole-v1", max_episode_frames=3)
    agent = FakeAgent()  # always pushes the same way, and so falls after eight to eleven steps
    assert min(play_lengths(agent, training, 100)) > 3
    assert play_lengths(agent, training.model_copy(update={"max_episode_frames": 100}), 5) == [5, 5]


def play_lengths(agent, env, max_episode_frames):
    result = play(agent, env, episodes=2, slots=2, seed=1, epsilon=0.0, max_episode_frames=max_episode_frames)
    return result.steps


def broken(agent, episodes=2, slots=2, **kwargs):
    env = EnvConfig(id="tests.envs.broken:Broken-v0", kwargs={"how": "raise", **kwargs})
    return play(agent, env, episodes=episodes, slots=slots, seed=0, epsilon=0.0, max_episode_frames=10_000)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("slots", [1, 4])
def test_games_that_all_fail_are_given_up_with_the_line_that_fails(slots):
    with pytest.raises(EnvError) as told:
        broken(FakeAgent(), slots=slots, episodes=slots, at=5)
    failures = 8 if slots == 1 else 3 * slots
    assert str(told.value).startswith(
        f"no episode of tests.envs.broken:Broken-v0 can be finished: {failures} failures, the last: "
        "tests.envs.broken:Broken-v0 raised RuntimeError: the physics exploded (broken.py:"
    )
    assert "at step 5, slot" in str(told.value)


@pytest.mark.timeout(60)
def test_one_copy_that_always_fails_ends_them_too(monkeypatch):
    monkeypatch.setattr(games, "make_vector", OneFails)
    with pytest.raises(
        EnvError, match=r"can be finished in one of its copies: 20 failures, the last: slot 1 at step 7"
    ):
        run(FakeAgent())


class OneFails(FakeVector):
    """Slot 1 fails in step 5 of each of its games, of 6 steps, and slot 0 goes on."""

    failures: ClassVar = ["slot 1 at step 7"]

    def step(self, actions):
        step = super().step(actions)
        if self.time[1] % 6 == 5:
            self.time[1] += 1
            step.discarded.append(1)
            self.restarts_total += 1
        return step


def test_games_some_of_which_fail_are_played():
    assert broken(FakeAgent(), episodes=6, slots=3, chance=0.03).returns == [20.0] * 6
