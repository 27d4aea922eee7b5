import pytest

from troupe.common.agents import make_agent
from troupe.common.agents.pace import Pace
from troupe.common.agents.policy_gradient import PolicyGradientConfig
from troupe.common.agents.pqn import PqnConfig
from troupe.common.config import load_config
from troupe.common.config.env_section import EnvConfig
from troupe.common.envs import make_vector
from troupe.services.actor.local_inference import Rollout

SLOTS = 4


def acted(pace, version, rounds, steps=3):
    """Acts rounds of unrolls with one version for as long as it may; how many steps were made."""
    made = 0
    while made < rounds * steps and not pace.holds(version):
        if pace.stepped(version):
            pace.completed(SLOTS)
        made += 1
    return made


def test_on_policy_every_round_wants_a_version_of_its_own():
    pace = Pace(SLOTS, 3, 0)
    assert [acted(pace, version, 5) for version in (7, 7, 8, 9, 9)] == [3, 0, 3, 3, 0]


def test_with_staleness_so_many_more_rounds_may_begin():
    pace = Pace(SLOTS, 3, 2)
    assert [acted(pace, version, 9) for version in (0, 0, 1, 2, 2, 5)] == [9, 0, 3, 3, 0, 9]


def test_a_round_goes_on_whatever_comes_meanwhile():
    pace = Pace(SLOTS, 3, 0)
    assert not pace.stepped(0)
    assert not pace.holds(0)
    pace.stepped(1)
    assert pace.stepped(1)
    pace.completed(SLOTS)
    assert pace.holds(0)
    assert not pace.holds(1)  # newer than what began the round


def test_released_it_lets_one_more_round_begin():
    pace = Pace(SLOTS, 3, 0)
    acted(pace, 0, 1)
    pace.release()
    assert [acted(pace, 0, 5), acted(pace, 0, 5)] == [3, 0]


def test_a_round_that_lacks_unrolls_is_followed_by_another_for_the_same_batch():
    pace, rounds = Pace(SLOTS, 1, 0), []
    version, queued = 0, 0
    for lost in (0, 1, 2, 0, 0, 4, 0, 1, 0, 0):
        assert not pace.holds(version)
        assert pace.stepped(version)
        pace.completed(SLOTS - lost)
        queued += SLOTS - lost
        rounds.append(queued)
        if queued >= SLOTS:
            queued, version = queued - SLOTS, version + 1
            assert pace.holds(version - 1)
    assert version == (10 * SLOTS - 8) // SLOTS
    assert max(rounds) < 2 * SLOTS  # nothing piles up either


@pytest.mark.parametrize(("slots", "batch", "rounds"), [(4, 4, 1), (4, 32, 8), (5, 32, 7), (8, 4, 1)])
def test_with_fewer_slots_than_unrolls_of_a_batch_several_rounds_make_it(slots, batch, rounds):
    """Else the actor waited 20 s for a version after every round but the last."""
    config = load_config(
        "cartpole-ppo", overrides={"actor.slots": str(slots), "replay.batch_size": str(batch)}
    )
    pace = Pace.of(config, slots)
    for version in range(3):
        made = 0
        while not pace.holds(version):
            ends = pace.stepped(version)
            if ends:
                pace.completed(slots)
            made += ends
        assert made in (rounds, rounds - 1)  # fewer where unrolls are left over
        assert version or made == rounds


@pytest.mark.parametrize("at", [5, 11, 30])
@pytest.mark.parametrize("config", [PolicyGradientConfig, PqnConfig])
def test_environments_that_raise_leave_no_batch_unfilled(config, at):
    """Slots that wait for the learner have given it a whole batch."""
    broken = EnvConfig(
        id="tests.envs.broken:Broken-v0", kwargs={"how": "raise", "at": at, "length": 40, "copy": None}
    )
    agent_config = config(unroll_steps=16, mlp_units=(8,), hidden_units=8, lstm_units=0)
    env = make_vector(broken, SLOTS, 1)
    agent = make_agent(agent_config, env.spec, seed=1)
    pace = Pace(SLOTS, 16, agent_config.allowed_staleness)
    rollout = Rollout(agent, env, 16, 1, pace=pace)
    rollout.explore(list(range(SLOTS)), SLOTS)
    version = queued = 0
    for _ in range(600):
        if pace.holds(version):
            assert queued >= SLOTS, f"version {version} waits for {SLOTS - queued} unrolls that nobody makes"
            queued, version = queued - SLOTS, version + 1
        queued += len(rollout.step(version))
    assert queued <= 2 * SLOTS
    env.close()
