"""DeepMind Lab and Google Research Football against stand-ins that do what their documents say."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from tests.agents.in_process import stacked_fields
from tests.envs.engines import EPISODE_STEPS, FakeFootball, FakeLab
from troupe.common.agents import make_agent
from troupe.common.agents.base import Batch
from troupe.common.config import load_config
from troupe.common.data.instructions import word_ids
from troupe.common.envs import check_settings, make_spec, make_vector
from troupe.common.envs.dmlab import ACTIONS, DMLAB30, LevelCache, levels_of, turns
from troupe.common.errors import ConfigError, MissingEngineError
from troupe.services.actor.acting import Place
from troupe.services.actor.central_inference import CentralActing
from troupe.services.actor.local_inference import LocalActing, Rollout
from troupe.services.actor.timing import Timing, TimingReports

pytestmark = pytest.mark.usefixtures("engines")


def config_of(preset, **overrides):
    return load_config(preset, overrides={name.replace("__", "."): str(v) for name, v in overrides.items()})


# ------------------------------------------------------------------- DMLab


def test_a_lab_observation_is_the_picture_and_the_instruction():
    env = make_vector(config_of("dmlab-impala-paper").env, 2, 1)
    assert env.spec.obs_shape == (3, 73, 96)
    assert (env.spec.actions.count, env.spec.frames_per_step, env.spec.instruction_words) == (9, 4, 16)
    obs = env.reset()
    assert obs.shape == (2, 3, 73, 96)
    assert obs[0, :, 5, 7].tolist() == [1, 2, 1]
    np.testing.assert_array_equal(obs[0, 0, 72, :32].view("<i2"), word_ids("find number 1"))
    assert env.render_frame(0).shape == (72, 96, 3)


def test_lab_episodes_end_where_the_engine_stops_and_begin_again():
    env = make_vector(config_of("dmlab-impala-paper", env__id="dmlab:rooms_watermaze").env, 1, 1)
    env.reset()
    for number in range(2, EPISODE_STEPS + 1):
        step = env.step(np.array([0]))
        assert not step.terminated[0]
        assert step.obs[0, 2, 0, 0] == number
    step = env.step(np.array([5]))
    lab = FakeLab.made[0]
    assert lab.last_action == ACTIONS[5].tolist() == [20, 0, 0, 0, 0, 0, 0]
    assert step.terminated.tolist() == [True]
    assert step.truncated.tolist() == [False]
    assert step.final_obs[0][2, 0, 0] == EPISODE_STEPS  # the engine shows no last one
    assert step.obs[0, 2, 0, 0] == EPISODE_STEPS + 1
    assert (step.episodes[0].return_raw, step.episodes[0].frames) == (
        4 * 0.5 * EPISODE_STEPS,
        4 * EPISODE_STEPS,
    )
    assert len(set(lab.seeds)) == 2
    env.close()
    assert lab.closed


def test_all_levels_are_played_and_evaluation_plays_held_out_ones():
    make_vector(config_of("dmlab-impala-paper").env, 30, 7)
    assert sorted(lab.level for lab in FakeLab.made) == sorted(f"contributed/dmlab30/{n}" for n in DMLAB30)
    assert not any("mixerSeed" in lab.config for lab in FakeLab.made)
    FakeLab.made.clear()
    make_vector(config_of("dmlab-impala-paper").env, 30, 7, evaluation=True)
    levels = {lab.level.rpartition("/")[2] for lab in FakeLab.made}
    assert levels - set(DMLAB30) == {"rooms_collect_good_objects_test", "rooms_exploit_deferred_effects_test"}
    assert {lab.config["mixerSeed"] for lab in FakeLab.made} == {str(0x600D5EED)}
    assert levels_of("dmlab:tests/demo_map", evaluation=False) == ["tests/demo_map"]


@pytest.mark.parametrize("total", [1, 4, 7, 10, 29, 30, 45, 150])
def test_the_slots_of_a_run_share_all_levels(total):
    shares = [turns(slot, total, DMLAB30) for slot in range(total)]
    assert {level for share in shares for level in share} == set(DMLAB30)
    if total < 30:  # game r of slot s is level s + r * total, so the first thirty games are all levels
        games = [share[r] for r in range(30) for share in shares if r < len(share)]
        assert games == list(DMLAB30)
    else:
        assert all(len(share) == 1 for share in shares)
        assert [share[0] for share in shares[:30]] == list(DMLAB30)


def playing():
    """Levels of the engines that run, in the order of their slots' last resets."""
    return [lab.level.rpartition("/")[2] for lab in FakeLab.made if not lab.closed]


def test_a_process_plays_the_levels_of_its_slots():
    env = make_vector(config_of("dmlab-impala-paper").env, 10, 1)
    env.assign(range(10, 20), 30)
    env.reset()
    assert sorted(playing()) == sorted(DMLAB30[10:20])
    made = len(FakeLab.made)
    env.assign([*range(45, 50), *range(40, 45)], 60)  # the same levels in other places
    env.reset()
    assert len(FakeLab.made) == made
    for _ in range(EPISODE_STEPS):
        step = env.step(np.zeros(10, np.int64))
    assert [game.task for game in step.episodes] == [*DMLAB30[15:20], *DMLAB30[10:15]]
    env.assign([10, *range(20, 29)], 60)
    env.reset()
    assert sorted(playing()) == sorted([DMLAB30[10], *DMLAB30[20:29]])


@pytest.mark.parametrize("acting_of", [LocalActing, CentralActing])
def test_who_joins_again_in_other_slots_plays_their_levels(context, acting_of):
    acting = acting_of(config_of("dmlab-impala-paper"), Place(context, "tcp://127.0.0.1:1", "actor-0"))

    def welcome(slots):
        more = {"inference": "tcp://127.0.0.1:1", "liveness_s": 9.0}
        return SimpleNamespace(slots=slots, total_slots=30, seed=lambda incarnation, *place: place[0], **more)

    acting.prepare(4)
    try:
        acting.begin(SimpleNamespace(incarnation=1), welcome([0, 1, 2, 3]))
        acting.rejoin(welcome([12, 13, 14, 15]), [0, 1, 2, 3])
        assert sorted(playing()) == sorted(DMLAB30[12:16])
    finally:
        acting.close()


def test_few_slots_play_all_levels_in_turn_and_evaluation_scores_them_by_name():
    env = make_vector(config_of("dmlab-impala-paper").env, 4, 1, evaluation=True)
    env.reset()
    tasks = []
    for _ in range(8 * EPISODE_STEPS):
        tasks += [game.task for game in env.step(np.zeros(4, np.int64)).episodes]
    assert tasks[:30:1] == [*DMLAB30[:28], "explore_object_rewards_few", "explore_object_rewards_many"]
    assert any(lab.level.endswith("rooms_collect_good_objects_test") for lab in FakeLab.made)
    alone = make_vector(config_of("dmlab-impala-paper", env__id="dmlab:rooms_watermaze").env, 1, 1)
    alone.reset()
    for _ in range(EPISODE_STEPS):
        step = alone.step(np.array([0]))
    assert step.episodes[0].task == ""


def test_lab_options_are_checked():
    env = config_of("dmlab-impala-paper").env
    with pytest.raises(ConfigError, match=r"no option 'widht'.*nearest: width"):
        make_spec(env.model_copy(update={"kwargs": {"widht": 3}}))
    with pytest.raises(ConfigError, match="should be a int, not '3'"):
        make_spec(env.model_copy(update={"kwargs": {"width": "3"}}))
    with pytest.raises(ConfigError, match="at least 32"):
        make_spec(env.model_copy(update={"kwargs": {"width": 16}}))
    plain = env.model_copy(update={"kwargs": {"instructions": False}})
    assert make_spec(plain).obs_shape == (3, 72, 96)
    assert make_spec(plain).instruction_words == 0


def test_compiled_maps_are_kept(tmp_path):
    cache, source, target = LevelCache(tmp_path / "cache"), tmp_path / "a.pk3", tmp_path / "b.pk3"
    assert cache.fetch("map_aas_0123", str(target)) is False
    source.write_bytes(b"map")
    cache.write("map_aas_0123", str(source))
    assert LevelCache(tmp_path / "cache").fetch("map_aas_0123", str(target)) is True
    assert target.read_bytes() == b"map"
    assert cache.fetch("../../etc/passwd", str(target)) is False


# ---------------------------------------------------------------- football


def test_football_planes_are_stacked_from_zeros():
    config = config_of("football-vtrace")
    env = make_vector(config.env, 2, 1)
    assert (env.spec.obs_shape, env.spec.seen_shape) == ((4, 4, 72, 12), (4, 4, 72, 96))
    assert FakeFootball.made[0].arguments["env_name"] == "11_vs_11_hard_stochastic"
    assert FakeFootball.made[0].arguments["rewards"] == "scoring,checkpoints"
    obs = env.reset()
    assert obs[0, :, 0, 0, 0].tolist() == [0, 0, 0, 0x80]
    assert obs[0, 3, :, 0, 0].tolist() == [0x80, 0x40, 0x20, 0x10]
    for _ in range(EPISODE_STEPS):
        step = env.step(np.array([18, 0]))
    assert [step.final_obs[1][k, 0, 0].nonzero()[0].tolist() for k in range(4)] == [[2], [3], [4], [5]]
    assert step.obs[1][:, 0, 0, 0].tolist() == [0, 0, 0, 0x80]
    frame = env.render_frame(0)
    assert frame.shape == (72, 96, 3)
    assert [np.unique(frame[..., colour].nonzero()[1]).tolist() for colour in range(3)] == [[0], [1], [2, 3]]
    make_vector(config.env, 1, 1, evaluation=True)
    assert FakeFootball.made[-1].arguments["rewards"] == "scoring"


def test_a_football_game_is_over_by_a_goal_and_cut_by_the_clock():
    env = make_vector(config_of("football-vtrace").env, 2, 1)
    env.reset()
    for _ in range(EPISODE_STEPS - 1):
        assert not env.step(np.array([18, 0])).episodes
    step = env.step(np.array([12, 0]))
    assert (step.terminated.tolist(), step.truncated.tolist()) == ([True, False], [False, True])
    assert [(game.return_raw, game.score) for game in step.episodes] == [
        (0.25 * EPISODE_STEPS + 1, 1.0),
        (0.25 * EPISODE_STEPS, 0.0),
    ]
    reports, timing = TimingReports(), Timing(episodes=step.episodes)
    assert [game.score for game in reports.report(timing, 0)[1].episodes] == [1.0, 0.0]
    for _ in range(2):
        step = env.step(np.array([12, 12]))
    assert [game.score for game in step.episodes] == [1.0, 1.0]  # of the game that it is, not of all


def test_football_games_are_seeded():
    config = config_of("football-vtrace").env
    seeds = []
    for seed, threads in ((1, 1), (1, 2), (2, 1)):
        FakeFootball.made.clear()
        env = make_vector(config, 2, seed, threads)
        env.reset()
        env.step(np.array([12, 12]))
        seeds.append([game.seeds for game in FakeFootball.made])
    assert seeds[0] == seeds[1]
    assert len({seed for games in (seeds[0], seeds[2]) for of_slot in games for seed in of_slot}) == 8
    env.reset(7)
    env.reset(7)
    assert all(game.seeds[-1] == game.seeds[-2] for game in FakeFootball.made)
    assert all(game._config["episode_number"] == 0 for game in FakeFootball.made)


def test_football_options_are_checked():
    env = config_of("football-vtrace").env
    with pytest.raises(ConfigError, match=r"no scenario '5_vs_6': did you mean football:5_vs_5\?"):
        make_spec(env.model_copy(update={"id": "football:5_vs_6"}))
    with pytest.raises(ConfigError, match="width in eights"):
        make_spec(env.model_copy(update={"kwargs": {"width": 36}}))
    with pytest.raises(ConfigError, match=r"env\.frame_skip would have no effect"):
        check_settings(env, make_spec(env), ["kwargs", "frame_stack", "frame_skip"])
    with pytest.raises(ConfigError, match="should be scoring or scoring,checkpoints"):
        make_spec(env.model_copy(update={"kwargs": {"rewards": "goals"}}))


# ------------------------------------------------------------------- both


@pytest.mark.parametrize("torso", ["shallow", "preset"])
@pytest.mark.parametrize("preset", ["dmlab-impala-paper", "football-vtrace"])
def test_the_preset_acts_and_learns(preset, torso):
    config = config_of(preset, agent__unroll_steps=7)
    update = {} if torso == "preset" else {"torso": torso}
    small = config.env.model_copy(
        update={"kwargs": {"width": 48, "height": 24}}
    )  # the paper's takes a minute
    env = make_vector(small, 2, 1)
    agent = make_agent(config.agent.model_copy(update=update), env.spec, seed=1)
    rollout, chunks = Rollout(agent, env, 0, 1), []
    rollout.explore([0, 1], 2)
    while len(chunks) < 2:
        chunks += rollout.step(0)
    before = {name: array.copy() for name, array in agent.params().items()}
    metrics = agent.update(Batch(stacked_fields(chunks), np.ones(2, np.float32))).metrics
    assert np.isfinite(metrics["learner/loss"])
    # With the same weights the learner's policy is the one that acted, instructions and all.
    assert metrics["learner/behaviour_kl"] == pytest.approx(0.0, abs=1e-4)
    changed = {name for name, array in agent.params().items() if not np.array_equal(array, before[name])}
    assert any(name.startswith("instructions.") for name in changed) == (preset == "dmlab-impala-paper")
    env.close()


def test_instructions_change_what_the_network_says():
    config = config_of("dmlab-impala-paper")
    spec = make_spec(config.env)
    agent = make_agent(config.agent.model_copy(update={"torso": "shallow"}), spec, seed=1)
    from troupe.common.agents import Inputs

    obs = np.full((3, *spec.obs_shape), 7, np.uint8)
    for slot, text in enumerate(("go left", "go right", "go left")):
        obs[slot, 0, -1, :32] = word_ids(text).view(np.uint8)
    values = agent.values(Inputs.start(obs, agent.memory_size, spec.actions))
    assert values[0] == pytest.approx(values[2])
    assert values[0] != pytest.approx(values[1])


def test_an_agent_that_cannot_read_says_so():
    spec = make_spec(config_of("dmlab-impala-paper").env)
    with pytest.raises(ConfigError, match="apex does not read the instructions"):
        make_agent(config_of("pong-apex").agent, spec)


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepmind_lab", None)
    monkeypatch.setitem(sys.modules, "gfootball", None)
    with pytest.raises(MissingEngineError, match="needs the module deepmind_lab"):
        make_spec(config_of("dmlab-impala-paper").env)
    with pytest.raises(MissingEngineError, match="needs the module gfootball"):
        make_spec(config_of("football-vtrace").env)
