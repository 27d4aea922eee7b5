"""What `import troupe` brings."""

import subprocess
import sys
import types

import gymnasium
import pytest

import troupe
from troupe.common.errors import ConfigError

COSTLY = ("torch", "numpy", "pydantic", "zmq", "gymnasium", "cv2", "troupe.common", "troupe.services")


def test_importing_it_is_cheap():
    code = f"import sys, troupe; dir(troupe); print([name for name in {COSTLY} if name in sys.modules])"
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert told.stdout == "[]\n"


def test_what_registers_an_algorithm_and_talks_to_replay_needs_no_torch():
    code = "import sys, troupe; troupe.register_algorithm, troupe.ReplayClient, troupe.Agent, troupe.tunable"
    code += "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_every_name_is_there_and_documented():
    assert sorted(troupe._HOMES) == sorted(troupe.__all__)
    for name in troupe.__all__:
        assert getattr(troupe, name).__doc__
        assert name in dir(troupe)
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        troupe.lod  # noqa: B018


class OwnEnv(gymnasium.Env):
    """Nothing happens in it."""


def test_an_environment_is_registered_once_under_one_name(monkeypatch):
    monkeypatch.setattr(gymnasium.envs.registration, "registry", dict(gymnasium.registry))
    monkeypatch.setattr(gymnasium, "registry", gymnasium.envs.registration.registry)
    for _ in range(2):
        assert troupe.register_env("Own-v0", OwnEnv, max_episode_steps=5) == f"{__name__}:Own-v0"
    assert gymnasium.spec("Own-v0").max_episode_steps == 5
    with pytest.raises(ConfigError, match=r"CartPole-v1 of .* has the same name as"):
        troupe.register_env("CartPole-v1", OwnEnv)
    main = types.new_class("MainEnv", (OwnEnv,), exec_body=lambda body: body.update(__module__="__main__"))
    with pytest.raises(ConfigError, match="put it into a module"):
        troupe.register_env("Main-v0", main)
