"""What a policy plays becomes a data set, and this the items of replay: they are what was played."""

import os
from pathlib import Path

import h5py
import numpy as np
import pytest

from troupe.common.config import load_config
from troupe.common.data.format import load_signature
from troupe.common.data.table_config import TableConfig
from troupe.common.datasets import Dataset
from troupe.common.envs import make_spec
from troupe.common.errors import ConfigError, DatasetError
from troupe.services.evaluator import evaluate
from troupe.services.offline.importing import replay_import
from troupe.services.replay.storage.replay import Replay

RELEASE = Path(__file__).resolve().parents[2] / "release"


@pytest.fixture
def preset(tmp_path):
    file = tmp_path / "cartpole-iql.toml"
    file.write_text(
        '[env]\nid = "gym:CartPole-v1"\nreward_clip = "none"\n[agent]\nalgorithm = "iql"\nmlp_units = [8]\n'
    )
    return str(file)


def played(name, policy="cartpole-ppo", *words):
    assert evaluate.main([str(RELEASE / policy), "--episodes", "3", "--minari", name, *words]) == 0


def items_of(folder, shards):
    """All items of the shards' folders, by field: arrays `[N, window, ...]`."""
    found = []
    for index in range(shards):
        place = folder / f"shard-{index}"
        capacity = load_signature(place)[1]["tables"]["default"]
        replay = Replay(place, [TableConfig(capacity=capacity, min_items=1)], budget_bytes=1 << 30)
        (table,) = replay.tables.values()
        rows = np.flatnonzero(replay.store.commits)
        rows = rows[np.argsort(replay.store.commits[rows])]
        steps = replay.store.steps[rows]
        assert table.size == steps.sum()
        places = np.concatenate([np.arange(count) for count in steps])
        ones = np.ones(len(places), np.int64)
        found.append(replay.store.gather(np.repeat(rows, steps), places, ones))
        replay.close()
    return {name: np.concatenate([each[name] for each in found]) for name in found[0]}


@pytest.mark.parametrize("shards", [1, 2])
def test_the_items_of_a_data_set_are_the_steps_that_were_played(preset, tmp_path, capsys, shards):
    played("my/cartpole-v0", "cartpole-ppo", "--sampled")
    folder = tmp_path / "replay"
    words = [preset, "--minari", "my/cartpole-v0", "--data-dir", str(folder), "--replay.shards", str(shards)]
    assert replay_import(words) == 0
    assert "3 episodes" in capsys.readouterr().out
    config = load_config(preset, None, {}, {})
    dataset = Dataset("my/cartpole-v0")
    items = items_of(folder, shards)
    trajectories = list(dataset.trajectories(make_spec(config.env)))
    assert len(items["obs"]) == dataset.steps == sum(each.steps for each in trajectories)

    wanted = {name: [] for name in items}
    for each in trajectories:
        wanted["obs"].append(np.stack([each.obs[:-1], each.obs[1:]], axis=1))
        wanted["action"].append(each.actions[:, None])
        wanted["reward"].append(np.ones((each.steps, 1)))
        discount = np.full((each.steps, 1), config.agent.gamma)
        discount[-1] *= not each.terminated
        wanted["discount"].append(discount)
        wanted["bootstrap_steps"].append(np.ones((each.steps, 1)))
    wanted = {name: np.concatenate(parts) for name, parts in wanted.items()}
    # Shards got the chunks in turn: as rows, in any order.
    rows, rows_wanted = (
        np.concatenate(
            [each[name].reshape(len(each["obs"]), -1).astype(np.float32) for name in sorted(items)], axis=1
        )
        for each in (items, wanted)
    )
    order, order_wanted = np.lexsort(rows.T), np.lexsort(rows_wanted.T)
    np.testing.assert_array_equal(rows[order], rows_wanted[order_wanted])
    with pytest.raises(ConfigError, match="is a file, or not empty"):
        replay_import(words)
    words[words.index(str(folder))] = str(next(folder.glob("*/chunks.records")))
    with pytest.raises(ConfigError, match="is a file, or not empty"):
        replay_import(words)


def test_what_cannot_be_learned_from_is_refused_in_a_line(preset, tmp_path, datasets, monkeypatch):
    played("my/cartpole-v0")
    target = ["--data-dir", str(tmp_path / "replay")]
    for words, error, match in (
        ([preset, *target], ConfigError, "--minari is required"),
        ([preset, "--minari", "my/other-v0", *target], DatasetError, "there is no data set my/other-v0"),
        (
            ["pendulum-td3-bc", "--minari", "my/cartpole-v0", *target],
            DatasetError,
            "does not fit gym:Pendulum-v1",
        ),
        (["cartpole-ppo", "--minari", "my/cartpole-v0", *target], ConfigError, "take --algo iql"),
        (["memory-r2d2", "--minari", "my/cartpole-v0", *target], ConfigError, "with memory"),
    ):
        with pytest.raises(error, match=match) as refused:
            replay_import(words)
        assert "\n" not in str(refused.value)
        assert not list((tmp_path / "replay").glob("*/chunks.records")) or error is DatasetError
    with h5py.File(datasets / "my/cartpole-v0/data/main_data.hdf5", "a") as file:
        file["episode_1/rewards"][3] = np.inf
    with pytest.raises(DatasetError, match="episode 1: rewards that are not finite"):
        replay_import([preset, "--minari", "my/cartpole-v0", "--data-dir", str(tmp_path / "another")])
    assert not list(tmp_path.glob("another*")), "a part of a data set is none"
    # Before anything is read: a rename would fail at the end.
    mounted = (tmp_path / "mounted").resolve()
    monkeypatch.setattr(os.path, "ismount", lambda path: path == mounted)
    with pytest.raises(ConfigError, match="is a mount point"):
        replay_import([preset, "--minari", "my/cartpole-v0", "--data-dir", str(mounted)])


def test_a_data_set_that_was_cut_short_is_not_left_behind(datasets, monkeypatch):
    class StoppedError(KeyboardInterrupt):
        pass

    written = evaluate.DatasetWriter.add

    def add(self, trajectory):
        written(self, trajectory)
        raise StoppedError

    monkeypatch.setattr(evaluate.DatasetWriter, "add", add)
    with pytest.raises(StoppedError):
        played("my/cartpole-v0")
    assert not (datasets / "my/cartpole-v0").exists()
