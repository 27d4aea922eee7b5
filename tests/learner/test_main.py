import socket

import pytest

from troupe.common.config import load_config, to_toml
from troupe.common.config.field_options import parse_with_fields
from troupe.common.errors import ConfigError
from troupe.common.runtime import StopSignal
from troupe.common.runtime.files import atomic_write
from troupe.services.learner import __main__ as command
from troupe.services.learner.__main__ import main_parser
from troupe.services.learner.service import Learner


def run_config(run_dir, preset, overrides, **more):
    """The configuration of a learner's command line, written as the learner does once it has bound."""
    config = command.run_config(run_dir, preset, overrides, **more)
    if preset is not None:
        run_dir.mkdir(exist_ok=True)
        atomic_write(run_dir / "config.toml", to_toml(config).encode())
    return config


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


def test_the_same_command_line_begins_a_run_and_goes_on_with_it(tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    monkeypatch.setenv("TROUPE_RUN__SEED", "7")
    first = run_config(run_dir, "cartpole-apex", {}, resume=True)
    assert first.run.seed == 7
    monkeypatch.delenv("TROUPE_RUN__SEED")
    monkeypatch.setenv("TROUPE_RUN__TOTAL_STEPS", "99")
    again = run_config(run_dir, "cartpole-apex", {"net.control": "tcp://127.0.0.1:5999"}, resume=True)
    assert (again.run.seed, again.run.total_steps) == (7, 99)
    # The changed value stays when the variable is gone; an address never does.
    monkeypatch.delenv("TROUPE_RUN__TOTAL_STEPS")
    once_more = run_config(run_dir, "cartpole-apex", {}, resume=True)
    assert (once_more.run.total_steps, once_more.net.control) == (99, first.net.control)


def test_what_cannot_change_in_a_run_is_refused_and_leaves_it_alone(tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    run_config(run_dir, "cartpole-apex", {}, resume=True)
    before = (run_dir / "config.toml").read_text()
    monkeypatch.setenv("TROUPE_ENV__ID", "gym:Acrobot-v1")
    with pytest.raises(ConfigError, match=r"env\.id"):
        run_config(run_dir, "cartpole-apex", {}, resume=True)
    monkeypatch.delenv("TROUPE_ENV__ID")
    with pytest.raises(ConfigError, match="run of cartpole-apex"):
        run_config(run_dir, "pong-apex", {}, resume=True)
    assert (run_dir / "config.toml").read_text() == before


def test_a_setting_that_would_do_nothing_is_refused_before_there_is_a_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TROUPE_ENV__STICKY_ACTIONS", "0.25")
    with pytest.raises(ConfigError, match=r"env\.sticky_actions would have no effect: gym:CartPole-v1"):
        run_config(tmp_path / "run", "cartpole-apex", {})
    assert not (tmp_path / "run").exists()


def test_fields_on_the_command_line_come_before_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("TROUPE_RUN__SEED", "7")
    words = [
        "cartpole-apex",
        "--run-dir",
        str(tmp_path / "run"),
        "--run.seed",
        "9",
        "--total-steps=50",
        "--resume",
    ]
    args, fields = parse_with_fields(main_parser(), words)
    assert args.resume
    config = run_config(args.run_dir, args.preset, fields)
    assert (config.run.seed, config.run.total_steps) == (9, 50)
    assert run_config(args.run_dir, None, {"run.total_steps": "80"}).run.total_steps == 80
    with pytest.raises(ConfigError, match=r"cannot resume with agent\.gamma: [0-9.]+ -> 0\.5: structural"):
        run_config(args.run_dir, None, {"agent.gamma": "0.5"})


@pytest.mark.parametrize("taken", ["control", "announce", "inference"])
def test_a_learner_that_cannot_bind_leaves_no_run_behind(tmp_path, taken):
    """The next start, with --resume, would go on with a run that never began."""
    names = ("control", "announce", "inference")
    options = {f"net.{name}": f"ipc://{tmp_path}/{name}" for name in names}
    options |= {"agent.mlp_units": "[8]", "agent.hidden_units": "8", "inference.mode": "central"}
    with socket.create_server(("127.0.0.1", 0)) as other:
        options[f"net.{taken}"] = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        config = load_config("cartpole-apex", None, options, {})
        with pytest.raises(ConfigError, match="cannot bind"):
            Learner(config, tmp_path / "run", resume=False, stop=StopSignal(), write_config=True)
    assert not (tmp_path / "run").exists()
    learner = Learner(config, tmp_path / "run", resume=False, stop=StopSignal(), write_config=True)
    assert load_config(None, tmp_path / "run" / "config.toml", {}, {}) == config
    learner._close()
