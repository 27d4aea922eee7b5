"""Families of environments outside this tree: the one of `examples/outside`, installed, and broken ones."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import troupe.services.__main__ as cli
from troupe.common.config import Config, load_config, load_layers
from troupe.common.config.env_section import EnvConfig
from troupe.common.envs import check_settings, environment_module, make_spec, make_vector
from troupe.common.errors import ConfigError
from troupe.common.permits import check_modules, modules_of
from troupe.services import commands

NUMBERS = itertools.count()
EXAMPLE = Path(__file__).parents[2] / "examples" / "outside"


def declare(folder: Path, package: str = "theirs", **families: str) -> None:
    """Write what an installed package says of itself."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = "".join(f"{name} = {module}\n" for name, module in families.items())
    (info / "entry_points.txt").write_text(f"[troupe.families]\n{lines}")


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which pip has installed the example."""
    folder, source = tmp_path_factory.mktemp("installed"), tmp_path_factory.mktemp("source") / "outside"
    shutil.copytree(EXAMPLE, source)  # setuptools leaves its own files beside what it builds
    offline = ["--no-deps", "--no-index", "--no-build-isolation", "--quiet"]
    words = ["-m", "pip", "install", *offline, "--target", str(folder), str(source)]
    subprocess.run([sys.executable, *words], check=True, timeout=200)
    return folder


@pytest.fixture
def installed(example: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(example))
    # For the processes that a check starts.
    monkeypatch.setenv("PYTHONPATH", str(example))
    return example


def config(env_id: str = "corridors:4", **fields: object) -> EnvConfig:
    return EnvConfig.model_validate({"id": env_id, "reward_clip": "none", **fields})


def run_of(env_id: str) -> Config:
    return load_config("cartpole-apex", None, {"env.id": env_id}, {})


@pytest.mark.usefixtures("installed")
def test_one_is_played_as_ours_are() -> None:
    assert make_spec(config()).obs_shape == (4,)
    vector = make_vector(config(), 2, seed=1)
    assert vector.reset().tolist() == [[1, 0, 0, 0]] * 2
    for _ in range(2):
        step = vector.step(np.array([1, 0]))
    step = vector.step(np.array([1, 0]))
    assert (step.reward.tolist(), step.terminated.tolist()) == ([1.0, np.float32(-0.01)], [True, False])
    assert step.final_obs[0].tolist() == [0, 0, 0, 1]
    assert step.obs[0].tolist() == [1, 0, 0, 0]
    assert step.episodes[0].return_raw == pytest.approx(0.98)
    vector.close()


@pytest.mark.usefixtures("installed")
def test_time_that_is_up_truncates_and_seeds_repeat() -> None:
    def play(seed: int) -> list[list[float]]:
        vector = make_vector(config(kwargs={"wind": 0.5, "limit": 30}), 3, seed)
        seen = [vector.reset().tolist()]
        for _ in range(40):
            step = vector.step(np.ones(3, np.int64))
            seen.append(step.obs.tolist())
        vector.close()
        return seen

    assert play(1) == play(1) != play(2)
    vector = make_vector(config(kwargs={"limit": 5}), 1, seed=0)
    vector.reset()
    steps = [vector.step(np.zeros(1, np.int64)) for _ in range(5)]
    assert [step.truncated[0] for step in steps] == [False] * 4 + [True]
    vector.close()


@pytest.mark.usefixtures("installed")
def test_its_module_is_imported_only_with_permission() -> None:
    run = run_of("corridors:4")
    assert environment_module("corridors:4") == "my_package.corridors"
    assert modules_of(run) == ["my_package.corridors"]
    check_modules(run, ["my_package"], "the run")
    with pytest.raises(ConfigError, match=r"--modules my_package.corridors, TROUPE_MODULES"):
        check_modules(run, ["my_package.corridor", "corridors"], "the run")
    # What the id says after the name is the family's own affair, and never a module.
    assert environment_module("corridors:os:system") == "my_package.corridors"


@pytest.mark.usefixtures("installed")
def test_fields_that_it_does_not_use_are_refused() -> None:
    loaded = load_layers(None, None, {"env.id": "corridors:4", "env.frame_stack": "2"}, {})
    with pytest.raises(
        ConfigError, match=r"env.frame_stack would have no effect: .* of the family " "`corridors`,"
    ):
        check_settings(loaded.config.env, make_spec(loaded.config.env), loaded.chosen("env"))
    with pytest.raises(ConfigError, match=r"no option 'wine' in env.kwargs; nearest: wind"):
        make_spec(config(kwargs={"wine": 1.0}))


@pytest.mark.usefixtures("installed")
def test_check_and_messages_know_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env", "check", "corridors:4", "--steps", "50", "--env.check_timeout_s", "200"]) == 0
    out = capsys.readouterr().out
    assert "corridors:4" in out
    assert "The environment works" in out
    with pytest.raises(SystemExit):
        cli.main(["env", "check", "--help"])
    assert "installed families: corridors:ID of my_package.corridors" in capsys.readouterr().out
    assert "corridors:ID" not in commands.page(), "docs/commands.md is the same everywhere"
    with pytest.raises(ConfigError, match=r"football:SCENARIO.*, corridors:ID or package.module:ID"):
        make_spec(config("nothing"))
    with pytest.raises(ConfigError, match=r"did you mean corridors:4\?"):
        make_spec(config("coridors:4"))


def test_ours_have_the_first_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(tmp_path, atari="theirs.games", games="theirs.games")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert environment_module("atari:pong") == ""
    assert make_spec(config("atari:pong")).obs_dtype == "uint8"
    assert environment_module("games:pong") == "theirs.games"


def test_a_name_that_two_packages_declare_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(tmp_path, games="theirs.games", same="shared.games", atari="theirs.games")
    declare(tmp_path, package="others", games="others.games", same="shared.games", atari="others.games")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert environment_module("same:pong") == "shared.games"
    assert make_spec(config("atari:pong")).obs_dtype == "uint8"
    for look in (make_spec, lambda config: environment_module(config.id)):
        with pytest.raises(ConfigError, match="others and theirs both declare games in"):
            look(config("games:pong"))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (None, "the family broken of theirs_{} needs the module theirs_{}"),
        ("import no_such_module", r"imports no_such_module, which is not installed \(theirs_{}.py:1\)$"),
        ("", "has no function make_spec; the entry point in troupe.families should name the module"),
        (
            "def make_spec(config): return 1 / 0",
            "failed in make_spec: ZeroDivisionError: division by zero \\(theirs_{}.py:1\\)",
        ),
        ("def make_spec(config): return config", "returned a EnvConfig from make_spec, not a EnvSpec"),
    ],
)
def test_what_is_wrong_with_one_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str | None, says: str
) -> None:
    # A module of its own in each case: Python keeps what it has imported.
    number = next(NUMBERS)
    declare(tmp_path, broken=f"theirs_{number}")
    if source is not None:
        (tmp_path / f"theirs_{number}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=says.replace("{}", str(number))) as error:
        make_spec(config("broken:1"))
    assert "\n" not in str(error.value)
