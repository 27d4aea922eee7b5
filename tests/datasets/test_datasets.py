"""Episodes written as Minari data sets, read back, and read by Minari; files that nobody should trust."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from types import SimpleNamespace

import h5py
import minari
import numpy as np
import pytest

from tests.harness import leave
from troupe.common.config import EnvConfig
from troupe.common.datasets import Dataset, Trajectory
from troupe.common.datasets.writing import DatasetWriter
from troupe.common.envs import EnvSpec, make_spec
from troupe.common.errors import ConfigError, DatasetError
from troupe.common.spaces import ActionSpec, Leaf

REALS = ActionSpec((Leaf(shape=(2,), dtype="float32", low=(-2.0, None), high=(6.0, None)),))
BINNED = ActionSpec((Leaf(shape=(2,), dtype="float32", low=(-2.0, 0.0), high=(6.0, 1.0)),), bins=5)
SHIFTED = ActionSpec((Leaf(choices=(3,), start=(-1,)),))
SEVERAL = ActionSpec((Leaf(shape=(2,), choices=(2, 3), start=(0, 5)),))
PARTS = (
    Leaf(("far", "x"), (2,), "float32"),
    Leaf(("far", "y"), (2, 3), "uint8"),
    Leaf(("near",), (), "int64"),
)

SPECS = {
    "reals": EnvSpec("test:reals", (3,), "float32", REALS, 0, 1, False),
    "binned": EnvSpec("test:binned", (3,), "float32", BINNED, 0, 1, False),
    "choice": EnvSpec("gym:CartPole-v1", (4,), "float32", ActionSpec.discrete(2), 0, 1, False),
    "shifted": EnvSpec("test:shifted", (3,), "int8", SHIFTED, 0, 1, False),
    "several": EnvSpec("test:several", (3,), "float32", SEVERAL, 0, 1, False),
    "pixels": EnvSpec("test:pixels", (2, 20, 20), "uint8", SHIFTED, 2, 1, True),
    "parts": EnvSpec("test:parts", (22,), "uint8", SHIFTED, 0, 1, False, obs_leaves=PARTS),
}


def episodes(spec, lengths=(1, 5, 3)):
    rng = np.random.default_rng(0)
    for number, steps in enumerate(lengths):
        shape = (steps + 1, *spec.obs_shape)
        if spec.obs_leaves:
            x, y = (
                rng.normal(size=(steps + 1, 2)).astype(np.float32),
                rng.integers(0, 255, (steps + 1, 6), np.uint8),
            )
            near = rng.integers(-9, 9, (steps + 1, 1))
            obs = np.concatenate([x.view(np.uint8), y, near.view(np.uint8)], axis=1)
        elif spec.obs_dtype == "float32":
            obs = rng.normal(size=shape).astype(np.float32)
        else:
            obs = rng.integers(0, 100, shape).astype(spec.obs_dtype)
        yield Trajectory(
            obs, spec.actions.random(rng, steps), rng.normal(size=steps), terminated=number % 2 == 0
        )


def written(spec, name="my/test-v0"):
    made, writer = (
        list(episodes(spec)),
        DatasetWriter(name, spec, algorithm_name="sac", description="Made by a test."),
    )
    for each in made:
        writer.add(each)
    writer.finish()
    return made


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_what_is_written_is_read_again(spec):
    made = written(spec)
    found = Dataset("my/test-v0")
    assert (found.episodes, found.steps) == (3, 9)
    for one, two in zip(made, found.trajectories(spec), strict=True):
        np.testing.assert_array_equal(one.obs, two.obs)
        assert two.obs.dtype == spec.obs_dtype
        # Through the environment's own units and back, in float32.
        np.testing.assert_allclose(one.actions, two.actions, atol=1e-6)
        assert two.actions.dtype == spec.actions.dtype
        np.testing.assert_array_equal(one.rewards, two.rewards)
        assert one.terminated == two.terminated


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_minari_reads_it_with_the_environments_own_actions(spec):
    made = written(spec)
    theirs = minari.load_dataset("my/test-v0")
    assert theirs.total_steps == 9
    for one, two in zip(made, theirs.iterate_episodes(), strict=True):
        assert theirs.action_space.contains(two.actions[0])
        np.testing.assert_allclose(two.actions, np.asarray(spec.actions.natives(one.actions)), rtol=1e-6)
        assert two.terminations.tolist() == [False] * (one.steps - 1) + [one.terminated]
        assert two.truncations.tolist() == [False] * (one.steps - 1) + [not one.terminated]
        if not spec.obs_leaves:
            np.testing.assert_array_equal(two.observations, one.obs)
        else:
            np.testing.assert_array_equal(
                two.observations["far"]["x"], one.obs[:, :8].copy().view(np.float32)
            )
    known = theirs.spec.env_spec
    assert (known.id if known else None) == ("CartPole-v1" if spec.id.startswith("gym:") else None)


def test_it_reads_what_others_have_written(datasets):
    """Numbers in float64 and episodes that only stop, as in the data sets of D4RL."""
    import gymnasium

    rng, spec = np.random.default_rng(0), SPECS["reals"]
    obs, actions, rewards = rng.normal(size=(6, 3)), rng.uniform(-9, 9, (5, 2)), rng.normal(size=5)
    nothing = np.zeros(5, bool)
    buffer = minari.data_collector.EpisodeBuffer(
        observations=obs,
        actions=actions,
        rewards=rewards,
        terminations=nothing,
        truncations=nothing,
        infos={},
    )
    spaces = gymnasium.spaces
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about its author, who is not named
        minari.create_dataset_from_buffers(
            "other/set-v3", [buffer], observation_space=spaces.Box(-9, 9, (3,), np.float64),
            action_space=spaces.Box(-9, 9, (2,), np.float64),
        )  # fmt: skip
    for name in ("other/set-v3", str(datasets / "other" / "set-v3")):
        (found,) = Dataset(name).trajectories(spec)
        np.testing.assert_array_equal(found.obs, obs.astype(np.float32))
        assert found.actions[:, 0] == pytest.approx(((actions[:, 0] - 2) / 4).clip(-1, 1), abs=1e-6)
        assert found.actions[:, 1] == pytest.approx(actions[:, 1], abs=1e-5)
        assert not found.terminated


# -------------------------------------------------------------- what is refused


def one_line(call, error, match):
    with pytest.raises(error, match=match) as refused:
        call()
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


def test_a_data_set_of_another_environment_is_refused():
    written(SPECS["reals"])
    dataset = Dataset("my/test-v0")
    for name, match in (
        ("choice", "observations float32"),
        ("pixels", "observations float32"),
        ("parts", "episode 0"),
    ):
        one_line(
            lambda name=name: list(dataset.trajectories(SPECS[name])), DatasetError, f"does not fit.*{match}"
        )
    other = EnvSpec("test:other", (3,), "float32", SHIFTED, 0, 1, False)
    one_line(lambda: list(dataset.trajectories(other)), DatasetError, r"actions \[2\] instead of \[\]")


def test_ids_that_are_none_or_taken_are_refused_and_nothing_is_left_of_what_is_not_finished(datasets):
    spec = SPECS["reals"]
    one_line(lambda: Dataset("my/absent-v0"), DatasetError, "there is no data set my/absent-v0")
    for name in ("../up-v0", "no version", "", "/tmp/here-v0"):
        one_line(lambda name=name: DatasetWriter(name, spec), DatasetError, "not a data set ID")
    written(spec)
    one_line(
        lambda: DatasetWriter("my/test-v0", spec), DatasetError, "the data set my/test-v0 already exists"
    )
    writer = DatasetWriter("my/other-v0", spec)
    writer.add(next(episodes(spec)))
    del writer
    assert not (datasets / "my" / "other-v0").exists()
    assert not list(datasets.glob(".unfinished-*"))
    nested = make_spec(EnvConfig(id="tests.envs.matching:Match-v0", kwargs={"actions": "dict"}))
    one_line(lambda: DatasetWriter("my/other-v0", nested), ConfigError, "several parts")


def test_where_no_data_set_can_be_nobody_plays_for_one(datasets, tmp_path, monkeypatch):
    spec = SPECS["reals"]
    datasets.mkdir()
    (datasets / "my").touch()
    one_line(lambda: DatasetWriter("my/sub/test-v0", spec), DatasetError, "not a folder; .* another folder")
    (tmp_path / "file").touch()
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "file"))
    one_line(lambda: DatasetWriter("test-v0", spec), DatasetError, "cannot write the data set into .*file")


def check_kept(refusal, made, spec):
    """One line says where the episodes are, and there they are."""
    assert "\n" not in refusal
    folder = refusal.split("the episodes are in ")[1].split(",")[0]
    for one, two in zip(made, Dataset(folder).trajectories(spec), strict=True):
        np.testing.assert_array_equal(one.obs, two.obs)


@pytest.mark.parametrize("name", ["my/test-v0", "my"])
def test_episodes_that_cannot_be_put_in_their_place_are_kept(name, datasets):
    spec = SPECS["reals"]
    made, writer = list(episodes(spec)), DatasetWriter("my/test-v0", spec)
    for each in made:
        writer.add(each)
    place = datasets / name
    place.parent.mkdir(exist_ok=True)
    if name == "my":  # a file: no folder can be there
        place.touch()
    else:
        place.mkdir()
    with pytest.raises(DatasetError, match="which --offline takes") as refused:
        writer.finish()
    del writer
    check_kept(str(refused.value), made, spec)


def test_episodes_before_the_disk_is_full_are_kept(disk, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(disk))
    spec = SPECS["reals"]
    made, writer = list(episodes(spec)), DatasetWriter("my/test-v0", spec)
    for each in made:
        writer.add(each)
    leave(disk, 1 << 16)
    with pytest.raises(DatasetError, match=r"No space left on device.*; the episodes are in ") as refused:
        writer.add(made[0])
    del writer
    check_kept(str(refused.value), made, spec)


def test_a_file_system_that_says_nothing_of_its_room_takes_episodes(datasets, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(total=0, free=0))
    writer = DatasetWriter("my/test-v0", SPECS["reals"])
    writer.add(next(iter(episodes(writer.spec))))
    assert writer.episodes == 1


KILLED = """
import os, signal, sys
from tests.datasets.test_datasets import DatasetWriter, SPECS, episodes
writer = DatasetWriter("my/killed-v0", SPECS["reals"])
for each in episodes(SPECS["reals"]):
    writer.add(each)
    if len(sys.argv) > 1:
        raise ArithmeticError
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("words", [[], ["raise"]], ids=["killed", "raised"])
def test_what_was_not_finished_is_no_data_set(words, datasets):
    """Neither to us nor to Minari, whatever ended the process that wrote it."""
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, *words], capture_output=True, timeout=120, check=False
    )
    assert ended.returncode == (1 if words else -signal.SIGKILL)
    left = [path for path in datasets.rglob("*") if path.is_file()]
    assert bool(left) is not bool(words)  # who is killed cannot clean up
    one_line(lambda: Dataset("my/killed-v0"), DatasetError, "there is no data set")
    assert minari.list_local_datasets() == {}
    written(SPECS["reals"], "my/killed-v0")
    assert list(minari.list_local_datasets()) == ["my/killed-v0"]
    assert minari.namespace.list_local_namespaces() == ["my"]


def changed(file, name, array):
    del file[name]
    file[name] = array


def linked(file, name, link):
    del file[name]
    file[name] = link


def external(file, path):
    """An array whose numbers are those of any file."""
    path.write_bytes(b"secret!!" * 5)
    del file["episode_1/rewards"]
    file["episode_1"].create_dataset("rewards", (5,), "f8", external=[(str(path), 0, 40)])


def huge(file):
    del file["episode_1/rewards"]
    file["episode_1"].create_dataset("rewards", (1 << 40,), "f8", chunks=(1 << 16,))


def many(file):
    """Each below a GiB, and nothing of them in the file."""
    del file["episode_1/observations"]
    for name in "abcdef":
        file.create_dataset(f"episode_1/observations/{name}", (1 << 26,), "f4", chunks=(1 << 16,))


def wide(file):
    """Few groups, and 40 ** 5 ways to the array at their end."""
    del file["episode_1/observations"]
    inner = file["episode_1/rewards"]
    for depth in range(5):
        group = file.create_group(f"group_{depth}")
        for number in range(40):
            group[str(number)] = inner
        inner = group
    file["episode_1/observations"] = inner


def chunk(file):
    del file["episode_1/rewards"]
    options = {"chunks": (1 << 28,), "maxshape": (None,), "compression": "gzip"}
    file["episode_1"].create_dataset("rewards", (5,), "f8", **options)


DAMAGE = {
    "a member is missing": (lambda f, p: f.pop("episode_1/actions"), "no actions"),
    "an episode is missing": (lambda f, p: f.pop("episode_2"), "no episode_2"),
    "lengths differ": (
        lambda f, p: changed(f, "episode_1/terminations", np.zeros(4, bool)),
        "different lengths",
    ),
    "an observation is missing": (
        lambda f, p: changed(f, "episode_1/observations", np.zeros((5, 3), np.float32)),
        "5 observations and 5 actions for 5 steps",
    ),
    "it goes on after its end": (
        lambda f, p: changed(f, "episode_1/terminations", np.ones(5, bool)),
        "goes on",
    ),
    "a reward is NaN": (lambda f, p: changed(f, "episode_1/rewards", np.full(5, np.nan)), "not finite"),
    "an observation is infinite": (
        lambda f, p: changed(f, "episode_1/observations", np.full((6, 3), 1e300)),
        "not finite",
    ),
    "an action is NaN": (lambda f, p: changed(f, "episode_1/actions", np.full((5, 2), np.nan)), "not finite"),
    "text": (lambda f, p: changed(f, "episode_1/rewards", [b"x"] * 5), "instead of numbers"),
    "objects": (
        lambda f, p: (
            f.pop("episode_1/rewards")
            and f.create_dataset("episode_1/rewards", (5,), h5py.vlen_dtype(np.uint8))
        ),
        "instead of numbers",
    ),
    "a number": (lambda f, p: changed(f, "episode_1/rewards", 1.0), "no array"),
    "a group": (lambda f, p: f.pop("episode_1/rewards") and f.create_group("episode_1/rewards"), "no array"),
    "a link into another file": (
        lambda f, p: linked(f, "episode_1/rewards", h5py.ExternalLink(str(p), "/x")),
        "link",
    ),
    "a link": (lambda f, p: linked(f, "episode_1/rewards", h5py.SoftLink("/episode_0/rewards")), "link"),
    "numbers of another file": (lambda f, p: external(f, p), "in another file"),
    "a terabyte": (lambda f, p: huge(f), "beyond 1 GiB"),
    "many arrays": (lambda f, p: many(f), "beyond 1 GiB"),
    "a large chunk": (lambda f, p: chunk(f), "beyond 1 GiB"),
    "a web of links": (lambda f, p: wide(f), "more than 1000 parts"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_or_hostile_file_is_refused_in_a_line(name, datasets, tmp_path):
    written(SPECS["reals"])
    damage, match = DAMAGE[name]
    with h5py.File(datasets / "my/test-v0/data/main_data.hdf5", "a") as file:
        damage(file, tmp_path / "other")
    one_line(lambda: list(Dataset("my/test-v0").trajectories(SPECS["reals"])), DatasetError, match)


def outcome_of(read):
    """How a process by itself ends that reads: HDF5's library may crash, or go on for ever."""
    pid = os.fork()
    if not pid:
        code = 70
        with contextlib.suppress(BaseException):
            signal.setitimer(signal.ITIMER_VIRTUAL, 2.0)  # of the processor's time
            try:
                read()
                code = 0
            except DatasetError as error:
                code = 3 if "\n" not in str(error) else 4
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_flipped_and_missing_bytes_of_the_file_are_no_error_that_has_no_type(datasets):
    written(SPECS["reals"])
    path, rng = datasets / "my/test-v0/data/main_data.hdf5", np.random.default_rng(0)
    whole, outcomes = path.read_bytes(), []
    for number in range(60):
        data = bytearray(whole)
        if number % 3:
            for place in rng.integers(0, len(data), 8):
                data[place] ^= 1 << rng.integers(8)
        else:
            del data[rng.integers(len(data)) :]
        path.write_bytes(data)
        outcomes.append(outcome_of(lambda: list(Dataset("my/test-v0").trajectories(SPECS["reals"]))))
    # Those below 0 are of the library.
    assert {code for code in outcomes if code >= 0} <= {0, 3}
    assert outcomes.count(3) > 20


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "cannot read"),
        ("[]", "cannot read"),
        ("[" * 100_000, "cannot read"),
        ('{"data_format": "hdf5"}', "cannot read"),
        ('{"data_format": "arrow", "total_episodes": 3, "total_steps": 9}', "only hdf5"),
        ('{"data_format": "hdf5", "total_episodes": -1, "total_steps": 9}', "-1 episodes"),
        ('{"data_format": "hdf5", "total_episodes": 1e999, "total_steps": 9}', "cannot read"),
        ('{"data_format": "hdf5", "total_episodes": 7, "total_steps": 9}', "no episode_3"),
        ('{"data_format": "hdf5", "total_episodes": 2, "total_steps": 9}', "6 steps instead of 9"),
        ('{"data_format": "hdf5", "total_episodes": 3, "total_steps": 4}', "6 steps or more instead of 4"),
    ],
)
def test_metadata_that_say_something_else_are_refused_in_a_line(text, match, datasets):
    written(SPECS["reals"])
    (datasets / "my/test-v0/data/metadata.json").write_text(text)
    one_line(lambda: list(Dataset("my/test-v0").trajectories(SPECS["reals"])), DatasetError, match)


def test_nothing_is_imported_that_a_data_set_names(datasets):
    """Minari's own reader would make the environment of `env_spec` where the spaces are missing."""
    written(SPECS["choice"])
    path = datasets / "my/test-v0/data/metadata.json"
    metadata = json.loads(path.read_text())
    metadata.pop("observation_space")
    metadata["env_spec"] = json.dumps({"id": "X-v0", "entry_point": "tests.datasets.hostile:ran"})
    path.write_text(json.dumps(metadata))
    assert len(list(Dataset("my/test-v0").trajectories(SPECS["choice"]))) == 3


def test_a_folder_without_data_is_refused(datasets):
    written(SPECS["reals"])
    folder = datasets / "my/test-v0"
    (folder / "data/main_data.hdf5").unlink()
    one_line(
        lambda: list(Dataset("my/test-v0").trajectories(SPECS["reals"])),
        DatasetError,
        "damaged.*No such file",
    )
    shutil.rmtree(folder / "data")
    one_line(lambda: Dataset(str(folder)), DatasetError, "there is no data set")
