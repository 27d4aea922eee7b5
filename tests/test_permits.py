"""Which modules a run may have a service import."""

import sys

import pytest

from troupe.common.config import config_from_dict, load_config
from troupe.common.config.algorithms import algorithm_module
from troupe.common.envs import environment_module
from troupe.common.errors import ConfigError
from troupe.common.permits import check_modules, modules_of, permitted_config


def run_of(env_id="gym:CartPole-v1", algorithm="apex", wrappers=()):
    """The configuration of a run, as a service has it that does not import the algorithm."""
    env = {"id": env_id, "wrappers": list(wrappers)}
    return config_from_dict({"env": env, "agent": {"algorithm": algorithm}}, typed_agent=False)


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
    config = run_of(env_id=env_id)
    check_modules(config, [module] if module else [], "the run")
    if module:
        for permitted in ((), ("my.modul",), ("thi",), ("x",)):
            with pytest.raises(ConfigError, match=f"--modules {module}, TROUPE_MODULES={module},"):
                check_modules(config, permitted, "the run")
    check_modules(config, [], "the run", plays=False)


@pytest.mark.parametrize(("algorithm", "module"), [("apex", ""), ("this", ""), ("my.module", "my.module")])
def test_the_module_of_an_algorithm(algorithm, module):
    assert algorithm_module(algorithm) == module
    config = run_of(algorithm=algorithm)
    check_modules(config, ["my"], "the run")
    if module:
        with pytest.raises(ConfigError, match=r"the run has the algorithm my.module, .*--modules my.module"):
            check_modules(config, ["your", "m", "my.modules"], "the run")
    check_modules(config, [], "the run", thinks=False)


def test_a_package_permits_what_is_below_it_and_our_own_needs_no_word():
    check_modules(run_of(env_id="my.module.deep:Env-v0"), ["other", "my.module"], "the run")
    check_modules(run_of(env_id="troupe.common.envs.recall:Recall-v0"), [], "the run")
    with pytest.raises(ConfigError):
        check_modules(run_of(env_id="troupe.common.envsx:E"), [], "the run")


def test_all_that_is_missing_is_said_at_once():
    config = run_of("my.maze:Maze-v0", "my.learner", wrappers=["your.code:Wrap", "my.maze:Wrap"])
    with pytest.raises(ConfigError) as refused:
        check_modules(config, [], "the run")
    words = "my.maze,your.code,my.learner"
    python = "modules=['my.maze', 'your.code', 'my.learner'] in Python"
    advice = f"--modules {words}, TROUPE_MODULES={words}, or {python}"
    assert str(refused.value) == (
        "the run has the environment my.maze:Maze-v0 and the wrapper your.code:Wrap and the wrapper "
        "my.maze:Wrap and the algorithm my.learner, which would run my.maze and your.code and my.learner: "
        f"if you trust that, permit it with {advice}"
    )
    with pytest.raises(ConfigError, match=r"--modules your.code, "):
        check_modules(config, ["my"], "the run")


def test_a_configuration_of_somebody_else_imports_nothing_that_is_not_permitted():
    values = load_config("cartpole-apex", None, {}, {}).to_dict()
    config = permitted_config(values, (), "the run")
    assert config.to_dict() == values
    assert modules_of(config) == []
    values["agent"] = {"algorithm": "xml.dom.pulldom"}
    sys.modules.pop("xml.dom.pulldom", None)
    with pytest.raises(ConfigError, match=r"which would run xml.dom.pulldom"):
        permitted_config(values, ["xml.sax"], "the run")
    assert "xml.dom.pulldom" not in sys.modules
    for permitted in (["xml"], "json,xml"):
        with pytest.raises(ConfigError, match="registers no algorithm"):
            permitted_config(values, permitted, "the run")
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
    values["env"]["wrappers"] = ["gymnasium.wrappers:ClipReward", "your.code:Wrap", "troupe.common.envs.x:Y"]
    with pytest.raises(ConfigError, match=r"has the wrapper your.code:Wrap, which would run your.code"):
        permitted_config(values, ["my"], "the run")
    config = permitted_config(values, ["your"], "the run")
    assert modules_of(config) == ["your.code"]
    for wrong in ("os", "os:", ":system", "os:a.b", "os system:x"):
        with pytest.raises(ConfigError, match=r"should be package\.module:Name"):
            config_from_dict({**values, "env": {"wrappers": [wrong]}})


@pytest.mark.parametrize("module", ["$(touch x)", "..", "a b", "`id`", "a;b"])
def test_what_is_no_module_is_not_advised(module):
    with pytest.raises(ConfigError, match="names something to import that is not a module") as refused:
        permitted_config({"env": {"id": f"{module}:X-v0"}}, (), "the run")
    assert "--modules" not in str(refused.value)
