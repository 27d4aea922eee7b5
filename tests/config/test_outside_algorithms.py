"""Algorithms that are not of this tree: found by their module or an entry point, and used like the others."""

import shutil
import sys

import pytest

import troupe.services.__main__ as cli
from troupe.common.agents import make_agent
from troupe.common.config import check_resumable, load_config, read_config, to_toml
from troupe.common.config.algorithms import ALGORITHMS, agent_model, algorithm_module, register_algorithm
from troupe.common.config.explain import explain
from troupe.common.config.fields import AgentConfig, structural
from troupe.common.envs import make_spec
from troupe.common.errors import ConfigError
from troupe.common.permits import modules_of
from troupe.services.launcher import by_kind

SOURCE = """
from typing import Literal
from troupe.common.config.algorithms import register_algorithm
from troupe.common.config.fields import AgentConfig, structural, tunable

@register_algorithm
class TinyConfig(AgentConfig):
    algorithm: Literal[{name!r}] = structural({name!r}, "Tiny.")
    width: int = structural(4, "Width of it.", ge=1)
    speed: float = tunable(0.5, "Speed of it.", gt=0)
"""

TYPED = SOURCE.replace("{name!r}", "'tiny'").replace("    width", "    {field}\n    width")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Writes modules of a package that Python finds; returns the package's name."""
    name = f"outside_{abs(hash(str(tmp_path)))}"
    folder = tmp_path / "lib" / name
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    monkeypatch.setattr("troupe.common.config.algorithms._registered", {})
    yield name
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        del sys.modules[module]


def write(tmp_path, package, module, source):
    (tmp_path / "lib" / package / f"{module}.py").write_text(source)


def test_one_is_found_by_its_module_checked_saved_and_resumed(tmp_path, package):
    algorithm = f"{package}.tiny"
    write(tmp_path, package, "tiny", SOURCE.format(name=algorithm))
    preset = tmp_path / "tiny.toml"
    preset.write_text(f'[env]\nid = "gym:CartPole-v1"\n[agent]\nalgorithm = "{algorithm}"\nwidth = 7\n')
    config = load_config(str(preset), None, {"agent.speed": "2"}, {"TROUPE_AGENT__WIDTH": "8"})
    assert (config.agent.width, config.agent.speed) == (8, 2.0)
    assert modules_of(config) == [algorithm]
    for field, advice in (("agent.with", "nearest: agent.width"), ("agent.width", "should be greater")):
        with pytest.raises(ConfigError, match=advice):
            load_config(str(preset), None, {field: "0"}, {})

    file = tmp_path / "config.toml"
    file.write_text(to_toml(config))
    assert read_config(file) == config
    resumed = load_config(None, None, {"agent.speed": "3"}, {}, run_config=file)
    assert [str(change) for change in check_resumable(config, resumed)] == ["agent.speed: 2.0 -> 3.0"]
    with pytest.raises(ConfigError, match=r"agent.width: 8 -> 9"):
        check_resumable(config, load_config(None, None, {"agent.width": "9"}, {}, run_config=file))


def test_explain_tells_its_fields(tmp_path, package):
    write(tmp_path, package, "tiny", SOURCE.format(name=f"{package}.tiny"))
    text = explain(f"{package}.tiny")
    assert f"agent.width  (algorithm {package}.tiny)\n  Width of it.\n  type: integer >= 1" in text
    assert "n_steps" not in text
    assert f"(algorithm {package}.tiny)" in explain("agent.width"), "it is registered now"
    with pytest.raises(ConfigError, match="needs the module"):
        explain(f"{package}x.tiny")


def test_one_is_found_by_an_entry_point(tmp_path, package, monkeypatch):
    write(tmp_path, package, "tiny", SOURCE.format(name="tiny"))
    info = tmp_path / "lib" / "tiny-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[troupe.algorithms]\ntiny = {package}.tiny:TinyConfig\napex = {package}.tiny\n"
    )
    assert algorithm_module("tiny") == f"{package}.tiny"
    assert f"{package}.tiny" not in sys.modules
    assert agent_model("tiny")().width == 4
    assert agent_model("apex").__module__ == "troupe.common.agents.apex", "ours have the first word"
    assert "(algorithm tiny)" in explain("tiny")
    with pytest.raises(ValueError, match=r"unknown algorithm 'tinny'; nearest: tiny"):
        agent_model("tinny")
    with pytest.raises(ConfigError, match=r"'tinny'; nearest: tiny; --algo takes a2c, .*, tiny, or the"):
        by_kind.load("tinny", None, {}, {})
    with pytest.raises(ValueError, match=rf"{package}.tiny registers no algorithm .*it registers tiny"):
        agent_model(f"{package}.tiny")
    shutil.copytree(info, info.with_name("tinny-1.0.dist-info"))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: huge\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[troupe.algorithms]\ntiny = huge\n")
    with pytest.raises(ConfigError, match=r"^huge and tiny both declare tiny in troupe\.algorithms"):
        algorithm_module("tiny")


def test_one_that_raises_what_ctrl_c_does_is_no_ctrl_c(tmp_path, package, capsys):
    write(tmp_path, package, "tiny", "raise KeyboardInterrupt")
    assert cli.main(["config", "explain", f"{package}.tiny"]) == 2
    assert f"importing {package}.tiny failed: KeyboardInterrupt (tiny.py:1)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("", "registers no algorithm"),
        ("raise OSError('no way')", r"importing .* failed: OSError: no way \(tiny.py:1\)$"),
        ("\ndef f(:", r"importing .* failed: SyntaxError: invalid syntax \(tiny.py:2\)$"),
        ("exit(0)", r"importing .* ends the program \(tiny.py:1\): put what only a program does"),
        ("import no_such_module", r"imports no_such_module, which is not installed \(tiny.py:1\)$"),
        ("from os import nothing_like_it", r"failed: cannot import name .* \(tiny.py:1\)$"),
        (
            TYPED.format(field="x: print.__class__ = 1"),
            r"no type of a configuration .*function.* \(tiny.py:7\)$",
        ),
        (
            TYPED.format(field="x: object = structural(print, '')"),
            "the default of x in .* is a builtin_function",
        ),
        (TYPED.format(field="").replace("(AgentConfig)", ""), "TinyConfig should be a class derived from"),
        (SOURCE.format(name="a.b"), "the algorithm a.b cannot be found in the module"),
        (SOURCE.format(name="apex"), "should have a name of its own"),
    ],
)
def test_what_is_wrong_with_one_is_one_line(tmp_path, package, source, says):
    write(tmp_path, package, "tiny", source)
    with pytest.raises(ConfigError, match=says) as error:
        load_config(overrides={"agent.algorithm": f"{package}.tiny"})
    assert "\n" not in str(error.value)


def test_the_message_for_algo_names_it_once(tmp_path, package):
    write(tmp_path, package, "tiny", "import no_such_module")
    algo = f"{package}.tiny"
    with pytest.raises(ConfigError, match=rf"^the algorithm {algo}: the module"):
        by_kind.load(algo, None, {"env.id": "gym:CartPole-v1", "env.check_timeout_s": "0"}, {})


@pytest.mark.parametrize(
    ("make", "says"),
    [
        ("lambda config, spec: None", r"tiny.make is called as make\(config, .*unexpected .* 'seed'"),
        ("lambda config, spec, **_: None", "returned a NoneType, which has no spec, .*act, .*: troupe"),
    ],
)
def test_a_make_that_makes_no_agent_is_one_line(tmp_path, package, make, says):
    write(tmp_path, package, "tiny", f"{SOURCE.format(name=f'{package}.tiny')}\nmake = {make}")
    config = load_config(overrides={"agent.algorithm": f"{package}.tiny"})
    with pytest.raises(ConfigError, match=says):
        make_agent(config.agent, make_spec(config.env))


def test_a_name_belongs_to_the_first_module_that_registers_it(tmp_path, package):
    for module in ("one", "other"):
        write(tmp_path, package, module, SOURCE.format(name="tiny"))
    __import__(f"{package}.one")
    assert agent_model("tiny").__module__ == f"{package}.one"
    with pytest.raises(
        ConfigError, match=rf"the algorithm tiny of {package}.other has the same name as that of"
    ):
        __import__(f"{package}.other")


def test_a_model_needs_a_name_of_its_own():
    class Nameless(AgentConfig):
        width: int = structural(1, "Width.")

    with pytest.raises(ConfigError, match=r'algorithm: Literal\["tests.config.test_outside_algorithms"\]'):
        register_algorithm(Nameless)
    assert not any("." in name for name in ALGORITHMS)
