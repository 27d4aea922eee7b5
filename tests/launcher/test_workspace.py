"""Directories, sockets, ports: each trouble is one line that says what to do."""

import errno
import os
import socket
import tempfile
from pathlib import Path

import numpy as np
import pytest

from troupe.common.config import load_config
from troupe.common.config.schema import NetConfig
from troupe.common.errors import CheckpointError, ConfigError
from troupe.common.runtime.checkpoint import save_checkpoint
from troupe.services.launcher import launcher, training, workspace
from troupe.services.launcher.workspace import (
    BoardPort,
    TensorBoardPort,
    claimed_run_dir,
    damage,
    own_command,
    saved_steps,
    shell_path,
    socket_directory,
    tensorboard_port,
)


def test_a_directory_that_may_not_be_looked_into_is_a_config_error(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", refuse)
    with (
        pytest.raises(ConfigError, match=r"cannot look into .*: Permission denied"),
        claimed_run_dir(tmp_path / "run", resume=False),
    ):
        pass


def test_a_new_run_gets_its_directories(tmp_path):
    with claimed_run_dir(tmp_path / "a" / "run", resume=False):
        assert {p.name for p in (tmp_path / "a" / "run").iterdir() if p.is_dir()} == {
            "logs",
            "checkpoints",
            "tensorboard",
            "videos",
            "replay",
        }


def test_a_run_that_goes_on_drops_the_items_of_one_in_one_process_that_was_killed(tmp_path):
    save_checkpoint(tmp_path / "checkpoints", {"x": np.zeros(1)}, {"steps": 77})
    (tmp_path / "config.toml").touch()
    (tmp_path / "serial-replay").mkdir()
    (tmp_path / "serial-replay" / "actions.ring").write_bytes(bytes(100))
    with claimed_run_dir(tmp_path, resume=True):
        assert not (tmp_path / "serial-replay").exists()


def test_a_directory_is_held_by_one_launcher(tmp_path):
    with (
        claimed_run_dir(tmp_path, resume=False),
        pytest.raises(ConfigError, match="in use by another process"),
        claimed_run_dir(tmp_path, resume=False),
    ):
        pass
    with claimed_run_dir(tmp_path, resume=False):
        (tmp_path / "config.toml").touch()
        with pytest.raises(ConfigError, match="holds a run that is training; choose another --run-dir"):
            training.check_unused(tmp_path)


def test_training_never_overwrites_a_run(tmp_path):
    (tmp_path / "config.toml").touch()
    with (
        pytest.raises(ConfigError, match=r"holds a run that wrote no checkpoint: remove it"),
        claimed_run_dir(tmp_path, resume=False),
    ):
        pass
    save_checkpoint(tmp_path / "checkpoints", {"x": np.zeros(1)}, {"steps": 77})
    with (
        pytest.raises(ConfigError, match=r"holds a run already; `.*troupe resume .*` continues it"),
        claimed_run_dir(tmp_path, resume=False),
    ):
        pass


def test_resuming_needs_a_run_with_a_checkpoint(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.toml"), claimed_run_dir(tmp_path, resume=True):
        pass
    (tmp_path / "config.toml").touch()
    begins = r"nothing to resume in .*: it has no checkpoint; `.* train .*/config\.toml` begins it again"
    with pytest.raises(CheckpointError, match=begins), claimed_run_dir(tmp_path, resume=True):
        pass
    save_checkpoint(tmp_path / "checkpoints", {"x": np.zeros(1)}, {"steps": 77})
    with claimed_run_dir(tmp_path, resume=True):
        pass
    assert saved_steps(tmp_path) == 77
    for path in (tmp_path / "checkpoints").glob("step-*"):
        (path / "MANIFEST.json").write_text("")
    with (
        pytest.raises(
            CheckpointError, match=begins.replace("it has no checkpoint", "all 1 checkpoints are damaged")
        ),
        claimed_run_dir(tmp_path, resume=True),
    ):
        pass


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match="cannot create the run directory"),
        claimed_run_dir(tmp_path / "file" / "run", resume=False),
    ):
        pass


def test_socket_paths_are_short_private_and_go_away(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with socket_directory() as path:
        assert len(str(path / "replay-63")) < 100
        assert path.stat().st_mode & 0o777 == 0o700
        with socket.socket(socket.AF_UNIX) as unix:
            unix.bind(str(path / "replay-63"))
    assert not path.exists()


def test_socket_directories_of_the_dead_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(workspace, "_MAX_SOCKET_PATH", 1000)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead, alive, other = (
        tmp_path / n for n in ("troupe-999999999-x", f"troupe-{os.getpid()}-x", "troupe-notes-x")
    )
    for path in (dead, alive, other):
        path.mkdir()
    with socket_directory():
        assert not dead.exists()
        assert alive.exists()
        assert other.exists()


def test_a_port_in_use_is_passed_over():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert port < tensorboard_port(port) <= port + 20
        assert TensorBoardPort(port).taken == port
    assert tensorboard_port(port) == port
    assert tensorboard_port(0) == 0
    assert (TensorBoardPort(port).taken, TensorBoardPort(0).taken) == (0, 0)


def test_no_port_at_all_names_the_field(monkeypatch):
    def refuse(port):
        raise OSError(errno.EADDRINUSE, "Address already in use")

    monkeypatch.setattr(workspace, "_check_free", refuse)
    with pytest.raises(ConfigError, match=r"ports 6006 to 6026 for TensorBoard are in use; set net\.tens"):
        tensorboard_port(6006)


def test_missing_tensorboard(monkeypatch):
    monkeypatch.setattr(workspace.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="tensorboard is not installed"):
        tensorboard_port(6006)


def board_port(taken=0, **net):
    return BoardPort(NetConfig(**net), taken)


def test_the_board_stands_beside_tensorboard_where_it_is_installed(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert board_port(tensorboard_port=0).number == 0
    assert board_port(board_port=0).number == 0
    assert board_port(tensorboard_port=0, board_port=port).number == port
    assert (
        port < board_port(taken=port, board_port=port).number <= port + 20
    )  # TensorBoard is about to take it
    monkeypatch.setattr(workspace, "BOARD_PORT", port)
    assert board_port().url == f"http://localhost:{port}"
    monkeypatch.setattr(workspace.importlib.util, "find_spec", lambda name: None)
    assert board_port().url == ""
    with pytest.raises(ConfigError, match=r"the board is not installed; .*\[board\].* net\.board_port to 0"):
        board_port(board_port=port)


def test_a_run_goes_on_without_a_board_that_nobody_asked_for(monkeypatch):
    def refuse(port):
        raise OSError(errno.EADDRINUSE, "Address already in use")

    monkeypatch.setattr(workspace, "_check_free", refuse)
    assert board_port().number == 0
    with pytest.raises(
        ConfigError, match=r"ports 7000 to 7020 for the board are in use; set net\.board_port"
    ):
        board_port(board_port=7000)


def test_shell_path(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert shell_path(tmp_path / "runs" / "a b") == "'runs/a b'"
    assert shell_path(Path("/elsewhere")) == "/elsewhere"


def test_a_damaged_newest_checkpoint_is_named(tmp_path):
    assert damage(tmp_path) == ""
    for steps in (1, 2):
        newest = save_checkpoint(tmp_path / "checkpoints", {"w": np.zeros(3)}, {"steps": steps})
    assert damage(tmp_path) == ""
    (newest / "arrays.safetensors").write_bytes(b"")
    assert newest.name in damage(tmp_path)


def test_the_command_is_one_that_the_users_shell_finds(tmp_path, monkeypatch):
    for place in ("venv", "elsewhere"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "troupe").touch(mode=0o755)
    monkeypatch.setattr(workspace.sys, "executable", str(tmp_path / "venv" / "python"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "elsewhere"))
    assert own_command() == "venv/troupe"
    monkeypatch.setenv("PATH", str(tmp_path / "venv"))
    assert own_command() == "troupe"


def test_a_run_without_actors_of_its_own_is_warned_of(monkeypatch, capsys, tmp_path):
    launched = []
    monkeypatch.setattr(launcher, "run", lambda *arguments, **named: launched.append(arguments))
    for count in ("0", "1"):
        training._launch(
            load_config("cartpole-apex", None, {"actor.processes": count}, {}), tmp_path, False, None, None
        )
        warned = "actor.processes is 0: this run waits until an actor joins" in capsys.readouterr().err
        assert warned == (count == "0")
    assert len(launched) == 2, "it may be meant"
