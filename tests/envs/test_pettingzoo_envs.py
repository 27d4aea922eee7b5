"""Several agents: every transition against what the game itself saw, and PettingZoo's own environments."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest

from tests.agents.in_process import evaluate, learn_through_a_queue
from tests.envs.crowd import Crowd
from troupe.common.agents import make_agent
from troupe.common.agents.apex import ApexConfig
from troupe.common.agents.impala import ImpalaConfig
from troupe.common.agents.policy_gradient import PolicyGradientConfig
from troupe.common.agents.r2d2 import R2d2Config
from troupe.common.config.env_section import EnvConfig
from troupe.common.data.accumulators.sequences import BETWEEN
from troupe.common.data.schema import Chunk
from troupe.common.envs import copy_slots, environment_module, make_spec, make_vector
from troupe.common.errors import ConfigError, MissingEngineError
from troupe.services.actor.local_inference import Rollout
from troupe.services.evaluator.games import play

SMALL: dict[str, Any] = {"mlp_units": (8,), "hidden_units": 8}
MEMORY: dict[str, Any] = {**SMALL, "lstm_units": 4, "head_units": 8}
GAMMA = 0.5
COPIES, STEPS = 2, 80


def config(name: str = "tests.envs.crowd:Crowd", **fields: Any) -> EnvConfig:
    return EnvConfig(id=f"pettingzoo:{name}", **fields)


def rollout_of(agent_config: Any, env: EnvConfig) -> tuple[Rollout, list[Chunk]]:
    """What acting in all slots made, and what it acted in; the games tell `Crowd.seen`."""
    spec = make_spec(env)
    Crowd.copies, Crowd.seen = -1, []  # one is made for the spaces alone
    vector = make_vector(env, COPIES * spec.agents, 1)
    rollout = Rollout(make_agent(agent_config, spec), vector, 10, 5)
    rollout.explore(list(range(vector.num_slots)), vector.num_slots)
    chunks = [chunk for _ in range(STEPS) for chunk in rollout.step(3)] + rollout.flush()
    vector.close()
    return rollout, chunks


def of_transitions(chunks: list[Chunk]) -> list[tuple[Any, ...]]:
    """As the game tells them; whether it was terminated or truncated is not in an item of one step."""
    found = []
    for chunk in chunks:
        fields = chunk.fields
        for at in chunk.offsets.tolist():
            bootstrap = at + int(fields["bootstrap_steps"][at])
            row = (fields["obs"][at], fields["obs"][bootstrap])
            obs, after = (tuple(each.tolist()) for each in row)
            terminated = float(fields["discount"][at]) == 0
            found.append((obs, int(fields["action"][at]), float(fields["reward"][at]), after, terminated))
    return found


def of_unrolls(chunks: list[Chunk]) -> list[tuple[Any, ...]]:
    """Without what a step that ended led to, which an unroll does not show."""
    found = []
    for chunk in chunks:
        fields = chunk.fields
        for t in range(chunk.steps):
            ended = int(fields["ended"][t + 1])
            after = () if ended else tuple(fields["obs"][t + 1].tolist())
            step = int(fields["action"][t + 1]), float(fields["reward"][t + 1])
            found.append((tuple(fields["obs"][t].tolist()), *step, after, ended == 1, ended == 2))
    return found


def of_sequences(chunks: list[Chunk]) -> list[tuple[Any, ...]]:
    """Of steps, which overlapping sequences hold once in a chunk."""
    found = set()
    for chunk in chunks:
        fields = chunk.fields
        for t in range(chunk.steps):
            ended = int(fields["ended"][t + 1])
            if ended == BETWEEN:
                continue
            rows = (tuple(fields["obs"][place].tolist()) for place in (t, t + 1))
            obs, after = rows
            step = int(fields["action"][t + 1]), float(fields["reward"][t + 1])
            found.add((obs, *step, after, ended == 1, ended == 2))
    return sorted(found)


def without_end(row: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*row[:3], () if row[4] or row[5] else row[3], *row[4:])


def check_all_but_open(got: list[tuple[Any, ...]], expected: list[tuple[Any, ...]], max_open: int) -> None:
    """Each step once, none that did not happen, and only a few newest of each agent missing."""
    got_count, expected_count = Counter(got), Counter(expected)
    assert not got_count - expected_count, "experience that nobody had"
    missing = list((expected_count - got_count).elements())
    assert len(missing) <= COPIES * 3 * max_open
    newest: dict[tuple[float, float], list[tuple[Any, ...]]] = {}
    for row in expected:
        newest.setdefault((row[0][0], row[0][3]), []).append(row)
    for rows in newest.values():
        lost = [row in missing for row in rows]
        assert lost == sorted(lost), "steps are missing that are not the newest"


def test_every_transition_is_that_of_the_game() -> None:
    rollout, chunks = rollout_of(ApexConfig(**SMALL, n_steps=1, gamma=GAMMA), config())
    expected = [(*row[:4], row[4]) for row in Crowd.seen]
    check_all_but_open(of_transitions(chunks), expected, max_open=1)
    assert rollout.timing.steps == len(Crowd.seen) < STEPS * 6, "slots that stand idle make no steps"


def test_windows_of_several_steps_end_with_the_agent() -> None:
    _, chunks = rollout_of(ApexConfig(**SMALL, n_steps=3, gamma=GAMMA), config())
    after = {row[0]: row for row in Crowd.seen}
    items = of_transitions(chunks)
    assert len(items) > 100
    for obs, action, reward, last, terminated in items:
        row, total, steps = after[obs], 0.0, 0
        assert row[1] == action
        while True:
            total, steps = total + GAMMA**steps * row[2], steps + 1
            if row[4] or row[5] or steps == 3:
                break
            row = after[row[3]]
        assert (total, row[3], row[4]) == (pytest.approx(reward), last, terminated)


@pytest.mark.parametrize("lstm", [0, 4])
def test_every_unroll_is_of_steps_of_the_game(lstm: int) -> None:
    _, chunks = rollout_of(ImpalaConfig(**SMALL, unroll_steps=7, lstm_units=lstm), config())
    # A slot skips up to a whole unroll at first, so that they do not all end at once: not compared.
    got = of_unrolls(chunks)
    first = {}
    for row in got:
        first.setdefault((row[0][0], row[0][3]), row)
    expected: list[tuple[Any, ...]] = []
    begun = set()
    for row in map(without_end, Crowd.seen):
        key = row[0][0], row[0][3]
        if row == first.get(key):
            begun.add(key)
        if key in begun:
            expected.append(row)
    check_all_but_open(got, expected, max_open=7)
    assert len(got) > 150


@pytest.mark.parametrize("across", [False, True])
def test_every_sequence_is_of_steps_of_the_game(across: bool) -> None:
    sizes = {"sequence_steps": 6, "sequence_period_steps": 3, "burn_in_steps": 2}
    agent = R2d2Config(**MEMORY, **sizes, across_episodes=across)
    _, chunks = rollout_of(agent, config())
    check_all_but_open(of_sequences(chunks), sorted(Crowd.seen), max_open=9)


def test_a_failed_copy_is_discarded_and_the_others_are_not() -> None:
    env = config(kwargs={"fail_at": (1, 2)})
    rollout, chunks = rollout_of(ApexConfig(**SMALL, n_steps=1, gamma=GAMMA), env)
    vector = rollout.env
    assert vector.restarts_total == 1
    assert "raised RuntimeError: the game crashed (crowd.py:" in str(vector.failures[0])
    got, expected = Counter(of_transitions(chunks)), Counter((*row[:4], row[4]) for row in Crowd.seen)
    assert not got - expected
    lost = [row[0][:3] for row in (expected - got).elements() if row[0][:2] == (0, 1)]
    assert lost == [(0, 1, 1)] * 3, "of the failed game, only the step whose value was not known"


def test_episodes_are_those_of_agents() -> None:
    rollout, _ = rollout_of(ApexConfig(**SMALL, n_steps=1), config())
    games: dict[tuple[float, ...], list[tuple[Any, ...]]] = {}
    for row in Crowd.seen:
        games.setdefault((row[0][0], row[0][3], row[0][1]), []).append(row)
    over = {key: rows for key, rows in games.items() if rows[-1][4] or rows[-1][5]}
    told = Counter(
        (3 * key[0] + key[1], sum(row[2] for row in rows), len(rows), "b" if key[1] == 2 else "a")
        for key, rows in over.items()
    )
    assert Counter((each.slot, each.return_raw, each.steps, each.task) for each in rollout.episodes) == told
    assert all(each.told["left_at"] >= each.steps for each in rollout.episodes)


def test_the_limit_of_a_game_truncates_whoever_is_in_it() -> None:
    rollout, chunks = rollout_of(ApexConfig(**SMALL, n_steps=1, gamma=GAMMA), config(max_episode_frames=3))
    assert max(each.steps for each in rollout.episodes) == 3
    got = of_transitions(chunks)
    assert {row[0][2] for row in got} == {0, 1, 2}
    assert sum(row[0][2] == 2 and not row[4] for row in got) > 50


def test_processes_step_whole_copies_and_tell_the_same() -> None:
    one = make_vector(config(), 9, 4)
    two = make_vector(config(processes=2), 9, 4)
    try:
        own, other = one.reset(), two.reset()
        rng = np.random.default_rng(0)
        for _ in range(30):
            # Copies are numbered in their process, so the first number of an observation is not compared.
            np.testing.assert_array_equal(own[:, 1:], other[:, 1:])
            actions = rng.integers(4, size=9)
            a, b = one.step(actions), two.step(actions)
            for name in ("reward", "terminated", "truncated"):
                np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
            assert (a.idle, sorted(a.final_obs)) == (b.idle, sorted(b.final_obs))
            assert [each[:5] for each in a.episodes] == [each[:5] for each in b.episodes]
            own, other = a.obs, b.obs
    finally:
        one.close()
        two.close()


@pytest.mark.parametrize(("names", "roles"), [
    (["a_0", "a-1", "b2"], ("a", "b")),
    (["red", "blue", "red_10"], ("red", "blue")),
    ([0, 1, 2], ()),
])  # fmt: skip
def test_agents_that_are_only_numbered_play_one_role(names: list[Any], roles: tuple[str, ...]) -> None:
    assert make_spec(config(f"{__name__}:Named", kwargs={"names": names})).tasks == roles


class Named(Crowd):
    """Has agents of these names."""

    def __init__(self, names: list[Any]) -> None:
        super().__init__()
        self.possible_agents = names


def test_a_shorter_view_is_filled_up_with_zeros() -> None:
    env = config(kwargs={"short": 1})
    assert make_spec(env).obs_shape == (6,)
    vector = make_vector(env, 3, 1)
    Crowd.seen.clear()
    vector.reset()
    for _ in range(10):
        vector.step(np.arange(3))
    assert {len(row[0]) for row in Crowd.seen} == {5, 6}


def test_slots_have_to_be_whole_copies() -> None:
    assert copy_slots(config()) == 3
    with pytest.raises(ConfigError, match=r"has 3 agents.*4 slots.*actor\.slots to a multiple of 3"):
        make_vector(config(), 4, 1)


@pytest.mark.parametrize(("wrong", "says"), [
    ({"rewards": None}, "left a_0 out of what it returned"),
    ({"leaves": True}, "took a_0 out of the game without"),
    ({"stranger": True}, "agents that are not in possible_agents: x_9"),
    ({"nan": True}, "returned an observation with nan"),
])  # fmt: skip
def test_what_must_not_be_returned_counts_as_a_failure(wrong: dict[str, Any], says: str) -> None:
    vector = make_vector(config("tests.envs.test_pettingzoo_envs:Wrong", kwargs=wrong), 3, 1)
    vector.reset()
    step = vector.step(np.zeros(3, np.int64))
    assert step.discarded == [0, 1, 2]
    assert says in str(vector.failures[0])


class Wrong(Crowd):
    """Returns what it must not, once."""

    def __init__(self, **wrong: Any) -> None:
        super().__init__()
        self._wrong = wrong

    def step(self, actions: dict[str, int]) -> tuple[dict, dict, dict, dict, dict]:
        told = super().step(actions)
        if "rewards" in self._wrong:
            told[1].pop("a_0")
        if "leaves" in self._wrong:
            self.agents.remove("a_0")
        if "stranger" in self._wrong:
            self.agents.append("x_9")
        if "nan" in self._wrong:
            told[0]["a_0"] = told[0]["a_0"] * np.nan
        return told


class Turns:
    """Has agents that take turns."""

    possible_agents = ("a",)

    def agent_iter(self) -> None: ...

    def close(self) -> None: ...


class Unlike(Crowd):
    """One agent chooses of more."""

    def action_space(self, agent: str) -> Any:
        import gymnasium

        return gymnasium.spaces.Discrete(5 if agent == "b_0" else 4)


@pytest.mark.parametrize(("name", "says"), [
    (f"{__name__}:Turns", "take turns .AEC.: wrap it with .*aec_to_parallel"),
    (f"{__name__}:Unlike", r"unlike action spaces.*Discrete\(4\) for a_0, Discrete\(5\) for b_0"),
    ("tests.envs.crowd", "the module tests.envs.crowd defines no parallel_env to call"),
    ("tests.envs.crowd:Nobody", "defines no Nobody to call"),
])  # fmt: skip
def test_what_cannot_be_shared_is_refused_in_one_line(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        make_spec(config(name))
    assert "\n" not in str(refused.value)


def test_only_strangers_modules_need_permission() -> None:
    assert environment_module("pettingzoo:classic/rps-v2") == ""
    assert environment_module("pettingzoo:my.games:Tag") == "my.games"


def test_without_the_package_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pettingzoo", None)  # as if it were not installed
    with pytest.raises(MissingEngineError, match=r"needs the module pettingzoo.*\[pettingzoo\]"):
        make_spec(config("classic/rps-v2"))


def test_two_agents_learn_to_answer_each_other() -> None:
    agent = PolicyGradientConfig(
        mlp_units=(32,), unroll_steps=8, learning_rate=5e-3, gamma=0.5, epochs=4, minibatch_steps=64
    )
    env = config("tests.envs.crowd:Pair")
    learner, history = learn_through_a_queue(agent, env, slots=16, batch=16, steps=4_000, seed=1)
    assert all(1 <= game.steps <= (4 if game.slot % 2 else 6) for game in history)
    early = [game.return_raw / game.steps for game in history[:100]]
    assert np.mean(early) < 0.75, "half of the answers are right by chance"
    result = play(learner, env, episodes=40, slots=8, seed=9, epsilon=0.0, max_episode_frames=100)
    assert result is not None
    np.testing.assert_array_equal(result.returns, result.steps)
    assert set(result.tasks) == {"first", "second"}
    assert evaluate(learner, env, epsilon=0.0) > 3


# ------------------------------------------------------------------------------- PettingZoo's own


@pytest.mark.parametrize("name", ["classic/rps-v2", "pettingzoo.classic.rps.rps"])
def test_rock_paper_scissors_is_the_packages_own(name: str) -> None:
    zoo = pytest.importorskip("pettingzoo", reason="needs the extra pettingzoo")
    env, twin = make_vector(config(name), 2, seed=3), zoo.make("parallel", "classic/rps-v2")
    agents = twin.possible_agents
    seen, _ = twin.reset()
    obs, rng = env.reset(), np.random.default_rng(0)
    for _ in range(100):
        np.testing.assert_array_equal(obs.view(np.int64).ravel(), [seen[agent] for agent in agents])
        actions = rng.integers(3, size=2)
        step = env.step(actions)
        seen, rewards, ended, cut, _ = twin.step(dict(zip(agents, actions.tolist(), strict=True)))
        assert step.reward.tolist() == [rewards[agent] for agent in agents]
        assert step.terminated.tolist() == [ended[agent] for agent in agents]
        assert step.truncated.tolist() == [cut[agent] for agent in agents]
        if not twin.agents:
            assert sorted(step.final_obs) == [0, 1]
            seen, _ = twin.reset()
        obs = step.obs
