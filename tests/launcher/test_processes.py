"""Command lines of a local run."""

import socket
from pathlib import Path

import pytest

from troupe.common.config import load_config
from troupe.common.runtime.checkpoint import save_checkpoint
from troupe.services.launcher.processes import child_specs
from troupe.services.launcher.workspace import BoardPort, TensorBoardPort


def specs(tmp_path, resume=False, preset="cartpole-apex", **overrides):
    config = load_config(preset, None, {k.replace("__", "."): v for k, v in overrides.items()}, {})
    port = TensorBoardPort(config.net.tensorboard_port)
    found = child_specs(config, tmp_path, tmp_path / "sockets", port, resume=resume)
    return {spec.name: spec for spec in found}


def test_tensorboard_takes_the_next_port_where_its_own_was_taken(tmp_path, caplog):
    """Two runs that start together find the same port free: TensorBoard binds it seconds later."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = specs(tmp_path, net__tensorboard_port=str(port))["tensorboard"].command
    assert words(0)[words(0).index("--port") + 1] == str(port)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen()
        again = int(words(1)[words(1).index("--port") + 1])
    assert port < again <= port + 20
    assert f"port {port} was taken: TensorBoard of this run is on http://localhost:{again}" in caplog.text


def test_the_board_of_a_run_shows_that_run(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = load_config(
        "cartpole-apex", None, {"net.board_port": str(port), "net.tensorboard_port": "0"}, {}
    )
    pages = TensorBoardPort(0), BoardPort(config.net, 0)
    board = child_specs(config, tmp_path, tmp_path / "sockets", *pages, resume=False)[-1]
    assert (board.name, board.essential) == ("board", False)
    assert board.command(0)[2:] == ["-m", "troupe.services.board.beside", str(tmp_path), str(port)]


def test_one_of_everything(tmp_path):
    found = specs(tmp_path)
    assert list(found) == ["learner", "replay", "actor-0", "evaluator", "tensorboard"]
    assert [name for name, spec in found.items() if spec.essential] == ["learner", "replay", "actor-0"]
    assert {name for name, spec in found.items() if spec.nice} == {"evaluator", "tensorboard"}
    learner = found["learner"].command(0)
    assert learner[1:4] == ["-P", "-m", "troupe.services.learner"]
    assert f"ipc://{tmp_path}/sockets/control" in learner
    assert "--resume" not in learner
    save_checkpoint(tmp_path / "checkpoints", {}, {"steps": 40, "updates": 7})
    (tmp_path / "status.json").write_text('{"updates": 9}')  # a restart loses two of them
    assert found["learner"].progress() == 7
    assert found["actor-0"].progress() is None
    (tmp_path / "status.json").write_text('{"steps": 40}')
    assert found["actor-0"].progress() == 40
    words = found["tensorboard"].command(0)
    assert "--reload_multifile=true" in words
    (shown,) = Path(words[words.index("--logdir") + 1]).iterdir()
    assert shown.name == tmp_path.name
    assert shown.readlink() == tmp_path / "tensorboard"
    assert found["actor-0"].environment["OMP_NUM_THREADS"] == "1"
    assert not any("--metrics-port" in spec.command(0) for spec in found.values())


def test_several_evaluators_have_names_and_ports_of_their_own(tmp_path):
    found = specs(tmp_path, evaluator__processes="2", net__metrics_port="9100", net__tensorboard_port="0")
    assert list(found) == ["learner", "replay", "actor-0", "evaluator-0", "evaluator-1"]
    for name, port in (("evaluator-0", "9103"), ("evaluator-1", "9104")):
        words = found[name].command(0)
        assert words[3] == "troupe.services.evaluator"
        assert words[words.index("--name") + 1] == name
        assert words[words.index("--metrics-port") + 1] == port
        assert not found[name].essential


def test_shards_processes_and_what_is_off(tmp_path):
    options = {"replay__shards": "2", "actor__processes": "3", "evaluator__enabled": "false"}
    found = specs(tmp_path, net__tensorboard_port="0", learner__torch_threads="4", **options)
    assert list(found) == ["learner", "replay-0", "replay-1", "actor-0", "actor-1", "actor-2"]
    assert found["learner"].environment["OMP_NUM_THREADS"] == "4"
    assert f"ipc://{tmp_path}/sockets/replay-1" in found["replay-1"].command(0)


def test_who_waits_for_the_other_gets_every_core(tmp_path, monkeypatch):
    monkeypatch.setattr("troupe.services.launcher.processes.usable_cores", lambda: 8)
    turns = {"preset": "cartpole-ppo", "learner__torch_threads": "auto", "actor__torch_threads": "auto"}
    threads = {}
    for staleness in ("0", "1", "none"):
        found = specs(tmp_path, **turns, actor__processes="2", agent__max_staleness=staleness)
        threads[staleness] = [
            found[name].environment["OMP_NUM_THREADS"] for name in ("learner", "actor-0", "actor-1", "replay")
        ]
    every = ["8", "4", "4", "1"]
    assert threads == {"0": every, "1": every, "none": ["1", "1", "1", "1"]}


def test_actors_that_run_the_network_load_torch_while_the_learner_does(tmp_path):
    assert "--preload" in specs(tmp_path)["actor-0"].command(0)
    assert "--preload" not in specs(tmp_path, inference__mode="central")["actor-0"].command(0)


def test_every_service_has_a_status_port_of_its_own(tmp_path):
    found = specs(tmp_path, net__metrics_port="9100")
    ports = {name: spec.command(3)[-1] for name, spec in found.items() if "--metrics-port" in spec.command(0)}
    assert ports == {"learner": "9100", "replay": "9101", "actor-0": "9102", "evaluator": "9103"}


@pytest.mark.parametrize("resume", [False, True])
def test_a_restarted_learner_resumes_what_there_is(tmp_path, resume):
    learner = specs(tmp_path, resume=resume)["learner"]
    assert ("--resume" in learner.command(0)) is resume
    assert ("--resume" in learner.command(1)) is resume
    save_checkpoint(tmp_path / "checkpoints", {}, {"steps": 1})
    assert ("--resume" in learner.command(0)) is resume
    assert "--resume" in learner.command(1)


def test_who_names_the_environment_permits_its_module(tmp_path, monkeypatch):
    monkeypatch.setenv("TROUPE_MODULES", "another")
    found = specs(tmp_path, env__id="my.module:Env-v0")
    assert found["actor-0"].environment["TROUPE_MODULES"] == "my.module,another"
    monkeypatch.delenv("TROUPE_MODULES")
    assert specs(tmp_path)["evaluator"].environment["TROUPE_MODULES"] == ""
