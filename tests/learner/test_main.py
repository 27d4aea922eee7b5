import pytest

from common.config import load_config
from common.errors import ConfigError
from services.learner.__main__ import run_config


def test_a_preset_begins_a_run_with_the_environment_on_top(tmp_path, monkeypatch):
    monkeypatch.setenv("TROUPE_RUN__SEED", "7")
    config = run_config(tmp_path / "run", "cartpole-apex", {"net.control": "tcp://127.0.0.1:5999"})
    assert (config.run.seed, config.net.control) == (7, "tcp://127.0.0.1:5999")
    written = load_config(None, tmp_path / "run" / "config.toml", {}, {})
    assert written.run.seed == 7
    monkeypatch.setenv("TROUPE_RUN__SEED", "8")
    assert run_config(tmp_path / "run", None, {}).run.seed == 7
    with pytest.raises(ConfigError, match="--resume"):
        run_config(tmp_path / "run", "cartpole-apex", {})


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="name a preset"):
        run_config(tmp_path, None, {})
