"""Earlier versions that play in training: who acts in which slot, what is learned from, and what counts."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest

from tests.actor.test_rollout import RecordingAccumulator
from tests.envs.crowd import Crowd
from troupe.common.agents import Act, Inputs, make_agent
from troupe.common.agents.apex import ApexConfig
from troupe.common.agents.opponents import Opponents
from troupe.common.config import config_from_dict
from troupe.common.config.env_section import EnvConfig
from troupe.common.config.schema import ActorConfig
from troupe.common.data.schema import SlotStep
from troupe.common.envs import EnvSpec, Episode, Step, make_spec, make_vector
from troupe.common.envs.sides import Sides, score
from troupe.common.errors import ConfigError
from troupe.common.spaces import ActionSpec
from troupe.services.actor.local_inference import Rollout
from troupe.services.actor.timing import TimingReports

CROWD = EnvConfig(id="pettingzoo:tests.envs.crowd:Crowd")


class Recorded(RecordingAccumulator):
    """Keeps where episodes begin and every step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[SlotStep] = []

    def add(self, step: SlotStep) -> list:
        self.steps.append(step)
        return super().add(step)


class Planted:
    """Its action is its version; its memory is 100 times that, and 1 more for each step of an episode."""

    memory_size = 1

    def __init__(self, spec: EnvSpec) -> None:
        self.spec, self.version = spec, 0
        self.accumulators: list[Recorded] = []
        self.epsilons: list[float] = []
        self.misremembered = 0

    def params(self) -> dict[str, np.ndarray]:
        return {"version": np.array(self.version)}

    def load_params(self, params: dict[str, np.ndarray]) -> None:
        self.version = int(params["version"])

    def slot_epsilons(self, indices: list[int], total_slots: int) -> np.ndarray:
        return np.asarray(indices, np.float32) / total_slots

    def act(self, inputs: Inputs, epsilon: np.ndarray, rng: np.random.Generator) -> Act:
        going_on = inputs.memory[~inputs.first, 0]
        self.misremembered += int((going_on // 100 != self.version).sum())
        self.epsilons += epsilon.tolist()
        memory = np.where(inputs.first[:, None], 100 * self.version, inputs.memory) + 1
        return Act(np.full(len(inputs.obs), self.version), {}, memory.astype(np.float32))

    def values(self, inputs: Inputs) -> np.ndarray:
        return np.zeros(len(inputs.obs), np.float32)

    def accumulator(self, chunk_steps: int, phase: float = 0.0) -> Recorded:
        self.accumulators.append(Recorded())
        return self.accumulators[-1]


def crowd(
    copies: int, fail_at: tuple[int, int] | None = None, **fields: Any
) -> tuple[Rollout, Planted, list]:
    """A rollout of planted agents, and the frozen ones that it will have made."""
    env = CROWD.model_copy(update={"kwargs": {} if fail_at is None else {"fail_at": fail_at}})
    spec, made = make_spec(env), []
    Crowd.copies, Crowd.seen = 0, []

    def make() -> Planted:
        made.append(Planted(spec))
        return made[-1]

    vector = make_vector(env, copies * spec.agents, 1)
    Crowd.seen.clear()
    options = {"opponents": "recent", "opponents_share": 0.7, "opponents_period_versions": 1} | fields
    agent, opponents = Planted(spec), Opponents(ActorConfig(**options), spec, make, 3)  # type: ignore[arg-type]
    rollout = Rollout(agent, vector, 10, 5, opponents=opponents)  # type: ignore[arg-type]
    rollout.explore(list(range(vector.num_slots)), vector.num_slots)
    return rollout, agent, made


@pytest.mark.parametrize("fail_at", [None, (1, 2)])
def test_earlier_versions_act_in_their_slots_and_nothing_of_these_is_stored(fail_at: Any) -> None:
    rollout, agent, made = crowd(4, fail_at)
    expected: list[tuple[Any, ...]] = []
    steps = 0
    for t in range(90):
        agent.version = t // 30  # 0, 1, 2: each is kept, and plays later
        seen = len(Crowd.seen)
        rollout.step(agent.version)
        now = Crowd.seen[seen:]
        # The game alone says who did what; a row begins with copy, game, step and agent.
        others = [row for row in now if row[1] != agent.version]
        frozen = {(row[0][0], row[0][3]) for row in others}
        # Those whose versions are the newest cannot be told from it by their actions.
        assert len(frozen) == len(others)
        expected += others
        steps += len(now)
    assert {row[1] for row in expected} == {0, 1}
    stored = [step for accumulator in agent.accumulators for step in accumulator.steps]
    # Whatever is stored was chosen by the version that is said to have chosen it.
    assert all(step.action == step.version for step in stored)
    assert len(stored) == rollout.timing.steps < steps
    assert {step.version for step in stored} == {0, 1, 2}
    rows = Counter((row[3], row[2]) for row in Crowd.seen)  # next observation and reward tell all steps apart
    assert set(rows.values()) == {1}
    own = {(tuple(step.next_obs.tolist()), step.reward) for step in stored}
    assert len(own) == len(stored)
    assert own <= rows.keys()
    assert own.isdisjoint((row[3], row[2]) for row in expected)
    # Each player has only its own memory, and explores as its slot does.
    assert sum(each.misremembered for each in made) == 0
    assert {round(12 * epsilon) for each in made for epsilon in each.epsilons} == set(range(12))


def test_a_game_has_one_side_that_learns_and_one_version_against_it() -> None:
    """And the sides take turns: in the `Crowd`, the two agents `a` against `b`."""
    rollout, agent, _ = crowd(3, opponents_share=1.0)
    for t in range(120):
        agent.version = min(t, 2)
        rollout.step(agent.version)
    learned = {
        (int(step.next_obs[0]), int(step.next_obs[1]), int(step.next_obs[3]))
        for accumulator in agent.accumulators
        for step in accumulator.steps
    }
    versions, homes = defaultdict(set), defaultdict(set)
    for row in Crowd.seen:
        copy, game, _, place = map(int, row[0][:4])
        (homes if (copy, game, place) in learned else versions)[copy, game].add(
            place == 2 if (copy, game, place) in learned else row[1]
        )
    whole = [key for key in homes if key[1] > 3]
    assert len(whole) > 20
    assert all(len(versions[key]) == 1 for key in whole)
    assert all(len(homes[key]) == 1 for key in whole)
    for copy, game in whole:
        if (copy, game - 1) in whole:
            assert homes[copy, game] != homes[copy, game - 1]
    assert {version for key in whole for version in versions[key]} == {0, 1, 2}


def test_without_a_share_and_without_opponents_acting_is_the_same() -> None:
    env = make_vector(CROWD, 6, 1)
    agents = [make_agent(ApexConfig(mlp_units=(8,), hidden_units=8), env.spec, seed=2) for _ in range(2)]
    config = ActorConfig(opponents="recent", opponents_share=0.0)
    opponents = Opponents(config, env.spec, lambda: agents[1], 3)
    runs = []
    for each in (None, opponents):
        Crowd.copies = 0
        rollout = Rollout(agents[0], make_vector(CROWD, 6, 1), 10, 5, opponents=each)
        rollout.explore(list(range(6)), 6)
        runs.append([chunk for _ in range(40) for chunk in rollout.step(3)] + rollout.flush())
    assert len(runs[0]) == len(runs[1]) > 5
    for one, other in zip(*runs, strict=True):
        for name, array in one.fields.items():
            np.testing.assert_array_equal(array, other.fields[name])


def test_networks_of_earlier_versions_act_with_their_own_weights() -> None:
    env = make_vector(CROWD, 6, 1)
    config = ApexConfig(mlp_units=(8,), hidden_units=8)
    agent, frozen = make_agent(config, env.spec, seed=2), []

    def make() -> Any:
        frozen.append(make_agent(config, env.spec, seed=9))
        return frozen[-1]

    opponents = Opponents(ActorConfig(opponents="recent", opponents_share=1.0), env.spec, make, 3)
    rollout = Rollout(agent, env, 10, 5, opponents=opponents)
    rollout.step(0)
    before = {name: array.copy() for name, array in agent.params().items()}
    agent.load_params({name: array + 1 for name, array in before.items()})
    rollout.step(1)
    assert len(frozen) == 1
    for name, array in frozen[0].params().items():
        np.testing.assert_array_equal(array, before[name])


def test_versions_are_kept_at_the_period_and_the_oldest_goes() -> None:
    rollout, agent, made = crowd(1, opponents_period_versions=10, opponents_kept=2)
    kept = []
    # The last one is of a learner that was restarted from a checkpoint.
    for version in (0, 3, 12, 13, 21, 22, 40, 15):
        agent.version = version
        rollout.step(version)
        told = rollout.timing.opponents()
        kept.append(
            [told[f"actor/opponent_version/{n}"] for n in (1, 2) if f"actor/opponent_version/{n}" in told]
        )
    assert kept == [[0], [0], [12, 0], [12, 0], [12, 0], [22, 12], [40, 22], [15]]
    assert [each.version for each in made] == [0, 12, 22, 40, 15]


def test_outcomes_are_told_and_decide_who_is_drawn() -> None:
    """The returns are planted: version 0 always loses, and version 1 always wins."""
    spec = EnvSpec("test:duel", (1,), "float32", ActionSpec.discrete(4), 0, 1, False, agents=2, sides=(0, 1))
    config = ActorConfig(opponents="win_rate", opponents_share=1.0, opponents_period_versions=1)
    opponents, agent = Opponents(config, spec, lambda: Planted(spec), 3), Planted(spec)  # type: ignore[arg-type, return-value]
    opponents.begin(20)
    inputs, drawn = Inputs.start(np.zeros((20, 1), np.float32), 1, spec.actions), []
    for t in range(200):
        agent.version = min(t, 1)
        act = Act(np.full(20, 3), {}, np.zeros((20, 1), np.float32))
        done = opponents.act(act, inputs, np.zeros(20, np.float32), agent, agent.version)  # type: ignore[arg-type]
        ends, returns = np.ones(20, bool), done.action.tolist()
        if t == 50:
            opponents.metrics()
        drawn += [value for value in returns if value != 3] if t >= 50 else []
        # Against version 0 the one that learns (3) gets more, against 1 less; it is never zero-sum.
        episodes = []
        for copy in range(10):
            pair = returns[2 * copy : 2 * copy + 2]
            episodes += [
                Episode(2 * copy + agent, 5.0 if own == 0 else 7.0 if own == 1 else 6.0, 1, 1)
                for agent, own in enumerate(pair)
            ]
        opponents.take(
            Step(
                np.zeros((20, 1), np.float32),
                np.zeros(20, np.float32),
                ends,
                np.zeros(20, bool),
                {},
                episodes,
            )
        )
    # By the weights, a draw of 40,000 is against version 0.
    assert Counter(drawn)[1] > 1490
    told = opponents.metrics()
    assert told["actor/opponent_games"] == 1500
    assert told["actor/opponent_win_rate"] == pytest.approx((1500 - Counter(drawn)[1]) / 1500)
    # Games count 0.99 times as much with each further one, which makes 100; and there is a drawn one.
    assert told["actor/opponent_win_rate/1"] == pytest.approx(0.5 / 101, rel=0.01)
    assert told["actor/opponent_win_rate/2"] > 0.9  # it has had few games
    assert "actor/opponent_win_rate" not in opponents.metrics()


def test_metrics_and_episodes_are_those_of_the_policy_that_learns() -> None:
    rollout, agent, _ = crowd(4, opponents_share=1.0)
    for t in range(60):
        agent.version = min(t, 1)
        rollout.step(agent.version)
    ended = sum(bool(step.terminated or step.truncated) for each in agent.accumulators for step in each.steps)
    assert len(rollout.episodes) == ended > 10
    metrics, fields = TimingReports().report(rollout.timing, 0)
    assert len(fields.episodes) == ended
    assert metrics["actor/opponent_games"] > 10
    assert 0 <= metrics["actor/opponent_win_rate"] <= 1


@pytest.mark.parametrize(
    ("returns", "home", "expected"),
    [
        ([2.0, 1.0], 0, 1.0),
        ([2.0, 1.0], 1, 0.0),
        ([-3.0, -3.0], 0, 0.5),
        ([0.1 + 0.2, 0.3], 0, 0.5),
        ([1.0, 0.0, 1.0, 2.0], 0, 0.5),  # a win, a draw and a loss
        ([1.0, None, 0.0], 0, 1.0),
        ([None, 1.0], 0, None),
        ([1.0, None], 0, None),
    ],
)
def test_score(returns: list[float | None], home: int, expected: float | None) -> None:
    assert score(returns, home) == expected


def test_sides_sum_the_returns_of_their_agents_and_a_failed_game_has_none() -> None:
    spec = make_spec(CROWD)
    assert spec.sides == (0, 0, 1)
    sides = Sides(spec, 6)
    assert (sides.away(1, home=0), sides.away(1, home=1)) == ([5], [3, 4])

    def step(ends: list[int], episodes: list[Episode], **lists: list[int]) -> Step:
        over = np.isin(np.arange(6), ends)
        return Step(np.zeros((6, 6)), np.zeros(6), over, np.zeros(6, bool), {}, episodes, **lists)

    assert sides.take(step([0], [Episode(0, 4.0, 1, 1)])) == {}
    assert sides.take(step([1, 2], [Episode(1, -1.0, 1, 1), Episode(2, 9.0, 1, 1)], idle=[0])) == {
        0: [3.0, 9.0]
    }
    assert sides.take(step([0, 2], [Episode(0, 5.0, 1, 1), Episode(2, 1.0, 1, 1)], idle=[1])) == {
        0: [5.0, 1.0]
    }
    assert sides.take(step([3], [Episode(3, 4.0, 1, 1)])) == {}
    assert sides.take(step([], [], discarded=[3, 4, 5])) == {1: None}
    assert sides.take(step([3, 4], [Episode(4, 1.0, 1, 1)], idle=[5])) == {1: [1.0, None]}


def test_what_has_no_sides_or_acts_elsewhere_is_refused_in_one_line() -> None:
    one = {"env": {"id": "gym:CartPole-v1"}, "actor": {"opponents": "recent"}}
    config = config_from_dict(one)
    with pytest.raises(
        ConfigError, match=r"actor.opponents needs an environment of several agents.*CartPole"
    ):
        Opponents.of(config, make_spec(config.env), 0)
    with pytest.raises(ConfigError, match=r"set inference.mode to local"):
        config_from_dict(one | {"inference": {"mode": "central"}})
    assert Opponents.of(config_from_dict({"env": {"id": CROWD.id}}), make_spec(CROWD), 0) is None
