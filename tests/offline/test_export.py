"""What replay holds of a training becomes a data set: the episodes that were played, and no others."""

import itertools
import shutil

import minari
import numpy as np
import pytest

from tests.offline.test_import import items_of, played
from troupe.common.agents import make_agent
from troupe.common.config import load_config
from troupe.common.data.schema import stored_as
from troupe.common.data.table_config import TableConfig
from troupe.common.datasets import Dataset
from troupe.common.envs import make_spec, make_vector
from troupe.common.errors import ConfigError, DatasetError
from troupe.common.runtime import StopSignal
from troupe.common.wire.replay.codec import decode_insert, encode_insert
from troupe.lockstep import LockstepTraining
from troupe.serial import SerialTraining
from troupe.services.actor.local_inference import Rollout
from troupe.services.offline.exporting import replay_export
from troupe.services.offline.importing import replay_import
from troupe.services.replay.storage.replay import Replay
from troupe.services.replay.storage.snapshot import Snapshot

SLOTS = 3
CHUNK_STEPS = 5
PRESETS = {
    # Cut off by the limit, after a whole number of chunks.
    "pendulum": '[env]\nid = "gym:Pendulum-v1"\nmax_episode_frames = 20\nreward_clip = "none"\n',
    # Ended by the environment, after any number of steps.
    "cartpole": '[env]\nid = "gym:CartPole-v1"\nreward_clip = "none"\n',
}


def preset_of(tmp_path, name, *more):
    file = tmp_path / f"{name}.toml"
    agent = '[agent]\nalgorithm = "sac"\nmlp_units = [8]\n'
    rest = f"[actor]\nslots = {SLOTS}\nchunk_steps = {CHUNK_STEPS}\n"
    file.write_text(PRESETS[name] + agent + rest + "".join(more))
    return str(file)


class Told:
    """An environment that notes the episodes of each slot as they are played."""

    def __init__(self, env):
        self._env, self.episodes = env, []

    def __getattr__(self, name):
        return getattr(self._env, name)

    def reset(self, seed):
        obs = self._env.reset(seed)
        self._running = [([each.copy()], [], []) for each in obs]
        return obs

    def step(self, action):
        step = self._env.step(action)
        for slot, (obs, actions, rewards) in enumerate(self._running):
            ended = step.terminated[slot] or step.truncated[slot]
            obs.append((step.final_obs[slot] if ended else step.obs[slot]).copy())
            actions.append(action[slot].copy())
            rewards.append(step.reward[slot])
            if ended:
                self.episodes.append((obs, actions, rewards, bool(step.terminated[slot])))
                self._running[slot] = ([step.obs[slot].copy()], [], [])
        return step


def acted(preset, folder, steps, *, capacity=100_000, shards=1, seed=0, late=0):
    """Shards filled by an actor's loop; returns what was played. The first lacks its last `late` chunks."""
    config = load_config(preset, None, {}, {})
    agent = make_agent(config.agent, make_spec(config.env), seed=seed)
    env = Told(make_vector(config.env, SLOTS, seed))
    rollout = Rollout(agent, env, CHUNK_STEPS, seed)
    rollout.explore(list(range(SLOTS)), SLOTS)
    fields = stored_as("lz4", agent.fields)
    replays = [
        Replay(folder / f"shard-{i}", [TableConfig(capacity=capacity, min_items=1)], budget_bytes=1 << 30)
        for i in range(shards)
    ]
    chunks = itertools.chain.from_iterable(rollout.step(0) for _ in range(steps))
    for number, chunk in enumerate(made := [*chunks, *rollout.flush()]):
        if number % shards == 0 and number >= len(made) - shards * late:
            continue
        message = encode_insert(chunk, fields, "default", incarnation=1_000_000 + seed)
        assert replays[number % shards].insert(decode_insert(message, 1 + number // shards))
    for replay in replays:
        replay.close()
    return env.episodes


def as_bytes(obs, actions, rewards, terminated):
    """An episode, in what replay stores."""
    arrays = np.asarray(obs), np.asarray(actions), np.asarray(rewards, np.float32)
    return *(each.astype(np.float32).tobytes() for each in arrays), terminated


def read(name, preset):
    spec = make_spec(load_config(preset, None, {}, {}).env)
    found = Dataset(name).trajectories(spec)
    return [as_bytes(each.obs, each.actions, each.rewards, each.terminated) for each in found]


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("name", PRESETS)
def test_the_episodes_are_those_that_were_played(name, shards, tmp_path, capsys):
    preset, folder = preset_of(tmp_path, name), tmp_path / "replay"
    truth = [as_bytes(*each) for each in acted(preset, folder, 300, shards=shards)]
    assert replay_export([str(folder), "--minari", "my/all-v0", "--preset", preset]) == 0
    found = read("my/all-v0", preset)
    assert set(found) <= set(truth)
    assert len(set(found)) == len(found)
    # Of those that a limit ended it is not certain for the last few, that they were at their end.
    certain = len(truth) if name == "cartpole" else len(truth) - shards * 4 * SLOTS
    assert certain <= len(found)
    steps = sum(len(each[2]) for each in found) // 4
    left = 300 * SLOTS - steps
    said = capsys.readouterr().out.strip()
    assert f"{len(found)} episodes, {steps} steps" in said
    # What each slot had of an episode at the end; of a step, not all is known.
    assert int(said.split("left out: ")[1].split()[4]) in range(left - SLOTS, left + 1)
    theirs = minari.load_dataset("my/all-v0")
    assert (theirs.total_episodes, theirs.total_steps) == (len(found), steps)


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_on_its_way_to_a_shard_makes_no_episode_of_the_rest(name, tmp_path):
    """As where a run goes on, and one shard is slow, or was read before the other."""
    preset, folder = preset_of(tmp_path, name), tmp_path / "replay"
    truth = [as_bytes(*each) for each in acted(preset, folder, 400, shards=2, late=30)]
    replay_export([str(folder), "--minari", "my/late-v0", "--preset", preset])
    found = read("my/late-v0", preset)
    assert set(found) <= set(truth)
    assert len(found) > 10


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("kind", [SerialTraining, LockstepTraining])
def test_of_a_run_in_one_process_no_piece_is_written_as_an_episode(kind, name, tmp_path):
    """All slots step together there, though several actors are configured; and a span ends what is open."""

    class Training(kind):
        def make_env(self, seed):
            made.append(Told(super().make_env(seed)))
            return made[-1]

    preset, made = preset_of(tmp_path, name, "processes = 4\n[replay]\nshards = 2\nmin_items = 9000\n"), []
    fields = {"evaluator.enabled": "false", "learner.checkpoint_period_steps": "113"}
    training = Training(load_config(preset, None, fields, {}), tmp_path / "run", StopSignal())
    try:
        for _ in range(300):
            training.round()
            training.record()
        replay_export([str(tmp_path / "run"), "--minari", "my/serial-v0"])
    finally:
        training.close()
    truth = [as_bytes(*each) for env in made for each in env.episodes]
    assert len(made) == (1 if kind is SerialTraining else 3)
    found = read("my/serial-v0", preset)
    assert set(found) <= set(truth)
    assert len(found) > len(truth) // 2


@pytest.mark.parametrize("name", PRESETS)
def test_a_part_of_the_shards_is_refused(name, tmp_path):
    preset, folder = preset_of(tmp_path, name, "[replay]\nshards = 2\n"), tmp_path / "replay"
    acted(preset, folder, 100, shards=2)
    refused(DatasetError, "has 1 of 2 shards", str(folder / "shard-0"), "--preset", preset)
    shutil.rmtree(folder / "shard-1")
    refused(DatasetError, "has 1 of 2 shards", str(folder), "--preset", preset)


@pytest.mark.parametrize("name", PRESETS)
def test_what_has_left_replay_makes_no_episode_of_the_rest(name, tmp_path):
    preset, folder = preset_of(tmp_path, name), tmp_path / "replay"
    truth = [as_bytes(*each) for each in acted(preset, folder, 400, capacity=500)]
    replay_export([str(folder), "--minari", "my/rest-v0", "--preset", preset])
    found = read("my/rest-v0", preset)
    assert set(found) <= set(truth)
    held = sum(len(each[2]) for each in found) // 4
    # At both ends of what is left, some episodes were cut, and of others it is not certain.
    between = (SLOTS - 1) * (2 * CHUNK_STEPS + 1)
    assert 500 - 2 * (between + 100 * SLOTS) < held <= 500
    assert len(found) > 5


def test_damaged_chunks_and_other_slots_make_no_episode_of_the_rest(tmp_path):
    preset, folder = preset_of(tmp_path, "pendulum"), tmp_path / "replay"
    truth = [as_bytes(*each) for each in acted(preset, folder, 300)]
    words = ["--preset", preset, "--minari"]
    replay_export([str(folder), *words, "my/whole-v0"])
    with (folder / "shard-0" / "obs.raw").open("r+b") as file:
        file.seek(3 * 4 * 6 * 80)  # in the middle
        file.write(b"\x01\x02\x03")
    replay_export([str(folder), *words, "my/damaged-v0"])
    whole, damaged = read("my/whole-v0", preset), read("my/damaged-v0", preset)
    assert set(damaged) < set(whole) <= set(truth)
    assert len(damaged) > len(whole) // 2
    with pytest.raises(DatasetError, match=r"no whole episode.*only \d+ pieces"):
        replay_export([str(folder), *words, "my/none-v0", "--slots", "200"])


def test_what_was_imported_is_exported_byte_for_byte(tmp_path, datasets, capsys):
    preset = preset_of(tmp_path, "cartpole", "[replay]\nshards = 2\n").replace("sac", "iql")
    played("my/cartpole-v0", "cartpole-ppo", "--sampled")
    source = read("my/cartpole-v0", preset)
    folder = tmp_path / "first"
    replay_import([preset, "--minari", "my/cartpole-v0", "--data-dir", str(folder)])
    again = str(datasets / "elsewhere" / "again-v0")
    replay_export([str(folder), "--minari", again, "--preset", preset])
    assert "3 episodes" in capsys.readouterr().out.splitlines()[-1]
    assert read(again, preset) == source
    replay_import([preset, "--minari", again, "--data-dir", str(tmp_path / "second")])
    first, second = items_of(folder, 2), items_of(tmp_path / "second", 2)
    assert {name: each.tobytes() for name, each in first.items()} == {
        name: each.tobytes() for name, each in second.items()
    }
    # Where nobody says that the other half is missing, the observations do.
    preset = preset_of(tmp_path, "cartpole")
    for half in ("shard-0", "shard-1"):
        refused(DatasetError, "no whole episode", str(tmp_path / "second" / half), "--preset", preset)


def test_a_snapshot_is_exported_as_its_shard_is(tmp_path, monkeypatch):
    preset, folder = preset_of(tmp_path, "cartpole"), tmp_path / "replay"
    acted(preset, folder, 200)
    tables = [TableConfig(capacity=100_000, min_items=1)]
    replay = Replay(folder / "shard-0", tables, budget_bytes=1 << 30)
    snapshot = Snapshot(replay, str(tmp_path / "snapshot"))
    snapshot.start()
    snapshot.join(60)
    assert snapshot.progress.state == "done"
    # Of a shard that is in use, as well.
    monkeypatch.chdir(tmp_path)
    for path, name in (("replay", "my/shard-v0"), ("snapshot", "my/snapshot-v0")):
        replay_export([path, "--minari", name, "--preset", preset])
    replay.close()
    assert read("my/shard-v0", preset) == read("my/snapshot-v0", preset)


def test_what_no_episode_can_be_made_of_is_refused_in_a_line(tmp_path, datasets):
    preset, folder = preset_of(tmp_path, "cartpole"), tmp_path / "replay"
    acted(preset, folder, 30)
    text, other = (tmp_path / "cartpole.toml").read_text(), tmp_path / "other.toml"
    for old, new, match in (
        ('"none"', '"sign"', "rewards that were clipped"),
        ("mlp", "gamma = 0.0\nmlp", "gamma = 0"),
        ("slots", "hindsight_copies = 2\nslots", "hindsight"),
    ):
        other.write_text(text.replace(old, new))
        refused(DatasetError, match, str(folder), "--preset", str(other))
    other.write_text(text.replace("mlp", "n_steps = 3\nmlp"))
    acted(str(other), tmp_path / "sums", 30)
    refused(DatasetError, "sums of 3 rewards", str(tmp_path / "sums"), "--preset", str(other))
    acted("cartpole-impala", tmp_path / "unrolls", 50)
    refused(DatasetError, "last observation", str(tmp_path / "unrolls"), "--preset", "cartpole-impala")
    refused(DatasetError, "not those of sac", str(folder), "--preset", "pendulum-sac")
    refused(ConfigError, "in no run directory", str(folder))
    refused(ConfigError, "holds no items", str(datasets.parent / "absent"), "--preset", preset)
    assert not (datasets / "my").exists()


def refused(error, match, *words):
    with pytest.raises(error, match=match) as found:
        replay_export([*words, "--minari", "my/refused-v0"])
    assert "\n" not in str(found.value)
