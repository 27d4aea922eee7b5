"""Which modules a run may have a service import."""

import sys

import pytest

from common.config import config_from_dict, load_config
from common.config.algorithms import algorithm_module
from common.envs import environment_module
from common.errors import ConfigError
from common.permits import check_algorithm, check_environment, modules_of, permitted_config


@pytest.mark.parametrize(
    ("env_id", "module"),
    [
        ("atari:pong", ""),
        ("gym:CartPole-v1", ""),
        ("gym:ALE/Breakout-v5", ""),
        ("dmlab:contributed/dmlab30/rooms_watermaze", ""),
        ("football:academy_empty_goal", ""),
        ("gym:this:X", "this"),
        ("this:X", "this"),
        ("my.module:Env-v0", "my.module"),
    ],
)
def test_the_module_of_an_environment(env_id, module):
    assert environment_module(env_id) == module
    check_environment(env_id, [module] if module else [], "the run")
    if module:
        for permitted in ((), ("my.modul",), ("thi",), ("x",)):
            with pytest.raises(ConfigError, match=f"--modules {module} or TROUPE_MODULES={module}"):
                check_environment(env_id, permitted, "the run")


@pytest.mark.parametrize(("algorithm", "module"), [("apex", ""), ("this", ""), ("my.module", "my.module")])
def test_the_module_of_an_algorithm(algorithm, module):
    assert algorithm_module(algorithm) == module
    check_algorithm(algorithm, ["my"], "the run")
    if module:
        with pytest.raises(ConfigError, match=r"the run has the algorithm my.module, .*--modules my.module"):
            check_algorithm(algorithm, ["your", "m", "my.modules"], "the run")


def test_a_package_permits_what_is_below_it_and_our_own_needs_no_word():
    check_environment("my.module.deep:Env-v0", ["other", "my.module"], "the run")
    check_environment("common.envs.recall:Recall-v0", [], "the run")
    with pytest.raises(ConfigError):
        check_environment("common.envsx:E", [], "the run")


def test_a_configuration_of_somebody_else_imports_nothing_that_is_not_permitted():
    values = load_config("cartpole-apex", None, {}, {}).to_dict()
    config = permitted_config(values, (), "the run")
    assert config.to_dict() == values
    assert modules_of(config) == []
    values["agent"] = {"algorithm": "xml.dom.pulldom"}
    sys.modules.pop("xml.dom.pulldom", None)
    with pytest.raises(ConfigError, match=r"which runs the module xml.dom.pulldom"):
        permitted_config(values, ["xml.sax"], "the run")
    assert "xml.dom.pulldom" not in sys.modules
    with pytest.raises(ConfigError, match="registers no algorithm"):
        permitted_config(values, ["xml"], "the run")
    for agent in (5, ["apex"], {"algorithm": ["xml.dom"]}, {"algorithm": 7}):
        with pytest.raises(ConfigError):
            permitted_config({**values, "agent": agent}, (), "the run")
    with pytest.raises(ConfigError, match="no sections"):
        permitted_config(5, (), "the run")  # type: ignore[arg-type]


def test_a_run_has_the_modules_of_both_environment_and_algorithm():
    values = load_config("cartpole-apex", None, {}, {}).to_dict()
    values["env"] = {"id": "my.maze:Maze-v0"}
    assert modules_of(permitted_config(values, ["my"], "the run")) == ["my.maze"]


def test_wrappers_need_permission_as_the_environment_does():
    values = load_config("cartpole-apex", None, {}, {}).to_dict()
    values["env"]["wrappers"] = ["gymnasium.wrappers:ClipReward", "your.code:Wrap", "common.envs.x:Y"]
    with pytest.raises(ConfigError, match=r"has the wrapper your.code:Wrap, which runs the module your.code"):
        permitted_config(values, ["my"], "the run")
    config = permitted_config(values, ["your"], "the run")
    assert modules_of(config) == ["your.code", "common.envs.x"]
    for wrong in ("os", "os:", ":system", "os:a.b", "os system:x"):
        with pytest.raises(ConfigError, match=r"should be package\.module:Name"):
            config_from_dict({**values, "env": {"wrappers": [wrong]}})
