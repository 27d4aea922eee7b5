"""Command lines of a local run."""

import pytest

from common.config import load_config
from common.runtime.checkpoint import save_checkpoint
from services.processes import child_specs


def specs(tmp_path, resume=False, **overrides):
    config = load_config("cartpole-apex", None, {k.replace("__", "."): v for k, v in overrides.items()}, {})
    return {spec.name: spec for spec in child_specs(config, tmp_path, tmp_path / "sockets", resume=resume)}


def test_one_of_everything(tmp_path):
    found = specs(tmp_path)
    assert list(found) == ["learner", "replay", "actor-0", "evaluator", "tensorboard"]
    assert [name for name, spec in found.items() if spec.essential] == ["learner", "replay", "actor-0"]
    assert {name for name, spec in found.items() if spec.nice} == {"evaluator", "tensorboard"}
    learner = found["learner"].command(0)
    assert learner[1:3] == ["-m", "services.learner"]
    assert f"ipc://{tmp_path}/sockets/control" in learner
    assert "--resume" not in learner
    assert "--reload_multifile=true" in found["tensorboard"].command(0)
    assert found["actor-0"].environment["OMP_NUM_THREADS"] == "1"
    assert not any("--metrics-port" in spec.command(0) for spec in found.values())


def test_shards_processes_and_what_is_off(tmp_path):
    options = {"replay__shards": "2", "actor__processes": "3", "evaluator__enabled": "false"}
    found = specs(tmp_path, net__tensorboard_port="0", learner__torch_threads="4", **options)
    assert list(found) == ["learner", "replay-0", "replay-1", "actor-0", "actor-1", "actor-2"]
    assert found["learner"].environment["OMP_NUM_THREADS"] == "4"
    assert f"ipc://{tmp_path}/sockets/replay-1" in found["replay-1"].command(0)


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
