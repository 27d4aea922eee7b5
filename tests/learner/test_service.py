import contextlib
import json
import queue
import threading
import time

import numpy as np
import pytest
import torch

from tests.harness import Context, Untyped, games, until
from tests.learner.runs import evaluated, make_config, report, run_learner
from troupe.common.config import load_config
from troupe.common.errors import CheckpointError, ConfigError, PeerError
from troupe.common.runtime import StopSignal, checkpoint
from troupe.common.runtime.checkpoint import load_checkpoint, load_newest, newest_first
from troupe.common.wire.control.client import ControlClient
from troupe.common.wire.link import new_incarnation
from troupe.services.learner import service
from troupe.services.learner.control.reports import Report
from troupe.services.learner.record import totals
from troupe.services.learner.saving import checkpoints
from troupe.services.learner.saving.finite import DivergedError, check_metrics
from troupe.services.learner.service import Learner


def test_what_is_stopped_is_what_is_resumed(tmp_path):
    config = make_config(tmp_path)
    running = run_learner(config, tmp_path)
    params = report(config, {}, steps=320)
    report(config, {}, games([20.0, 20]), steps=100)
    running.end()
    status = json.loads((tmp_path / "status.json").read_text())
    saved = load_newest(tmp_path / "checkpoints")
    assert status["steps"] == saved.meta["steps"] == 420

    again = run_learner(config, tmp_path, resume=True)
    assert again.service.counters.steps == 420
    resumed = report(config, {}, steps=5)
    again.end()
    assert resumed.params["hidden.weight"].tolist() == params.params["hidden.weight"].tolist()
    assert json.loads((tmp_path / "status.json").read_text())["steps"] == 425


def test_no_step_is_told_of_that_the_last_checkpoint_does_not_hold(tmp_path):
    config = make_config(tmp_path)
    running = run_learner(config, tmp_path)
    report(config, {}, steps=320)
    writer, budget = running.service.checkpoints._writer, running.service.counters.budget
    begin = writer.begin

    def meanwhile(*arguments):
        budget.report(99, 50)
        begin(*arguments)

    writer.begin = meanwhile
    running.end()
    assert load_newest(tmp_path / "checkpoints").meta["steps"] == 320
    assert json.loads((tmp_path / "status.json").read_text())["steps"] == 320


def test_a_complete_run_ends_by_itself(tmp_path):
    config = make_config(tmp_path, **{"run.total_steps": "50", "evaluator.enabled": "false"})
    running = run_learner(config, tmp_path)
    report(config, {}, steps=50)
    running.join()
    assert load_newest(tmp_path / "checkpoints").meta["steps"] == 50


def test_the_first_update_is_measured(tmp_path, monkeypatch):
    """A short run has few: nothing said why it did not learn where all were made within the period."""
    monkeypatch.setattr(service, "METRICS_PERIOD_S", 3600.0)
    running = run_learner(make_config(tmp_path), tmp_path)
    assert running.service._wish().measure
    running.end()


def test_a_run_that_learned_from_little_of_what_it_counts_says_so(tmp_path, monkeypatch, caplog):
    """As behind a shard that acknowledges everything and hands out nothing."""
    monkeypatch.setattr(totals, "SLACK_STEPS", 0)
    fields = {"run.total_steps": "50", "evaluator.enabled": "false", "agent.mlp_units": "[8]"}
    addresses = {f"net.{name}": f"ipc://{tmp_path}/{name}" for name in ("control", "announce", "replay")}
    config = load_config("cartpole-impala", None, {**fields, **addresses, "net.heartbeat_s": "0.2"}, {})
    running = run_learner(config, tmp_path)
    report(config, {}, steps=50)
    running.join()
    assert "complete with 50 steps and has learned from 0 of them" in caplog.text


def test_the_end_waits_for_an_evaluator_that_is_starting(tmp_path):
    config = make_config(tmp_path, **{"run.total_steps": "50"})
    running = run_learner(config, tmp_path)
    report(config, {}, steps=50)

    def told():
        with contextlib.suppress(FileNotFoundError):
            return json.loads((tmp_path / "status.json").read_text())["note"]

    def look():
        assert running.alive
        time.sleep(0.05)

    until(lambda: told() == "waiting for the evaluator to start", step=look, why=told)
    context = Context()
    client = ControlClient(
        context, config.net.control, role="evaluator", name="evaluator", incarnation=new_incarnation()
    )
    try:
        client.join(60.0)
        version = evaluated(client, config, 3.0).version
        running.join()
    finally:
        client.close()
        context.destroy(linger=0)
    assert running.service.reporter.evaluated_version == version


def test_the_end_does_not_wait_for_ever_for_an_evaluator(tmp_path, monkeypatch):
    monkeypatch.setattr(service, "EVALUATOR_START_S", 0.5)
    config = make_config(tmp_path, **{"run.total_steps": "50"})
    running = run_learner(config, tmp_path)
    report(config, {}, steps=50)
    running.join()


def test_a_run_that_is_complete_already_says_so_to_whoever_comes(tmp_path):
    config = make_config(tmp_path, **{"run.total_steps": "50", "evaluator.enabled": "false"})
    first = run_learner(config, tmp_path, linger_s=600.0)  # says nothing to a run that only becomes complete
    report(config, {}, steps=50)
    first.join()
    again = run_learner(config, tmp_path, resume=True, linger_s=600.0)
    context = Context()
    client = ControlClient(
        context, config.net.control, role="actor", name="late", incarnation=new_incarnation(), slots_wanted=1
    )
    try:
        client.join(60.0)
        until(lambda: client.state.stopping, why=lambda: "nobody says that the run is complete")
        assert client.state.steps == 50
    finally:
        client.close()
        context.destroy(linger=0)
    again.end()  # does not wait for the rest of the time
    at_once = run_learner(config, tmp_path, resume=True)
    at_once.join()


def test_nothing_is_added_to_the_record_of_a_run_that_is_complete(tmp_path):
    config = make_config(tmp_path, **{"run.total_steps": "50"})
    first = run_learner(config, tmp_path)
    report(config, {}, steps=50)
    first.end()

    def record():
        files = (path for path in tmp_path.rglob("*") if path.is_file() and path.name != "status.json")
        return {path.relative_to(tmp_path): path.read_bytes() for path in files}

    before = record()
    assert {"metrics.csv", "episodes.csv"} <= {path.name for path in before}
    again = run_learner(config, tmp_path, resume=True, linger_s=600.0)
    report(config, {"actor/steps": 1.0}, steps=0)
    evaluation = {"eval/episode_return": 9.0, "eval/version": 1.0}
    report(config, evaluation, role="evaluator", fields=games([9.0, 3]))
    again.end()
    assert record() == before


def test_nonsense_from_a_service_does_not_stop_the_learner(tmp_path):
    config = make_config(tmp_path)
    running = run_learner(config, tmp_path)
    report(config, {}, Untyped(episodes=[{}]))
    report(config, {}, steps=20)
    running.end()
    assert load_newest(tmp_path / "checkpoints").meta["steps"] == 20


def test_a_flood_of_reports_neither_keeps_the_learner_nor_its_end(tmp_path):
    running = run_learner(make_config(tmp_path), tmp_path)
    ended = threading.Event()
    reports = running.service.control.telemetry

    def flood():
        episodes = games(*[[1.0, 2]] * 1000)
        while not ended.is_set():
            with contextlib.suppress(queue.Full):
                reports.put(Report("actor-0", "actor", 1, {"actor/steps": 7.0}, episodes), timeout=0.1)

    def status():
        with contextlib.suppress(OSError):
            return json.loads((tmp_path / "status.json").read_text())["wall_s"]
        return 0.0

    flooding = threading.Thread(target=flood)
    flooding.start()
    try:
        first = until(status)
        until(lambda: status() > first)
        running.stop.set()
        ended_in_time = running.wait(60)
    finally:
        ended.set()
        flooding.join()
        running.end()
    assert ended_in_time


def test_a_run_that_is_to_learn_from_a_data_set_says_who_has_to_bring_it(tmp_path, monkeypatch, caplog):
    """Begun by hand, without the launcher that imports it."""
    monkeypatch.setattr(service, "DATASET_WAIT_S", 1.0)
    fields = {"run.offline": "my/cartpole-v0", "actor.processes": "0"}
    learner = Learner(make_config(tmp_path, **fields), tmp_path, resume=False, stop=StopSignal())
    with caplog.at_level("INFO"), pytest.raises(PeerError) as ended:
        learner.run()
    wanted = (
        f"fill shards by `troupe replay import {tmp_path}/config.toml --data-dir DIR`, and run each by "
        f"`troupe replay serve --learner ipc://{tmp_path}/control --data-dir DIR/shard-0 --adopt`"
    )
    assert f"waits for shards that hold the data set; {wanted}" in caplog.text
    assert "no batch of the data set after 1 s (no replay shard has joined)" in str(ended.value)
    assert str(ended.value).endswith(wanted)


def test_divergence_stops_before_it_is_saved_or_published(tmp_path):
    learner = Learner(make_config(tmp_path), tmp_path, resume=False, stop=StopSignal())
    with pytest.raises(DivergedError, match="learning_rate"):
        check_metrics({"learner/loss": float("nan")}, 1)
    check_metrics({"learner/loss": 1.0}, 1)
    learner.checkpoints.save()
    params = {name: array.copy() for name, array in learner.agent.params().items()}
    params["hidden.weight"][0, 0] = np.nan  # since the metrics were looked at last
    learner.agent.load_params(params)
    learner.counters.updates += 1
    with pytest.raises(DivergedError, match=r"hidden\.weight.* not finite at update 1"):
        learner.checkpoints.save()
    with pytest.raises(DivergedError, match=r"hidden\.weight.* not finite at update 1"):
        learner._publish()
    assert learner.counters.version == 0
    assert load_newest(tmp_path / "checkpoints").meta["updates"] == 0
    learner._close()


def test_an_idle_learner_pushes_no_checkpoint_out(tmp_path):
    config = make_config(tmp_path, **{"learner.checkpoint_period_s": "1", "learner.keep_checkpoints": "2"})
    first = run_learner(config, tmp_path)
    report(config, {}, steps=20)
    first.end()
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert len(saved) == 2  # of the start, and of the stop
    idle = run_learner(config, tmp_path, resume=True)
    for _ in range(3):
        idle.service.checkpoints._next_s = 0.0
        time.sleep(0.5)
    idle.end()
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == saved


class SlowDisk:
    """A disk on which nothing becomes durable until `go_on` is set."""

    def __init__(self, monkeypatch):
        self.waits = threading.Event()
        self.go_on = threading.Event()
        fsync = checkpoint.fsync_path

        def slow(path):
            self.waits.set()
            assert self.go_on.wait(90)
            fsync(path)

        monkeypatch.setattr(checkpoint, "fsync_path", slow)


def begun(run_dir):
    """The first checkpoint, before which nobody hears of the run."""
    return until(lambda: list(newest_first(run_dir / "checkpoints")))[0]


def test_training_goes_on_while_a_slow_disk_writes(tmp_path, monkeypatch):
    config = make_config(tmp_path)
    running = run_learner(config, tmp_path)
    learner, folder = running.service, tmp_path / "checkpoints"
    try:
        before = report(config, {}, steps=20)
        begun(tmp_path)
        until(lambda: learner.counters.steps == 20)
        disk = SlowDisk(monkeypatch)
        learner.checkpoints._next_s = 0.0
        assert disk.waits.wait(60)
        learner.agent.load_params({name: array + 1 for name, array in before.params.items()})
        learner.checkpoints._next_s = 0.0  # the next one is due, and waits for the disk
        report(config, {}, steps=30)
        until(
            lambda: json.loads((tmp_path / "status.json").read_text())["steps"] >= 50,
            why=lambda: "the learner's loop stands still",
        )
        assert len(list(folder.glob("step-*"))) == 1
        running.stop.set()
        assert not running.wait(0.5), "it did not wait for what is being written"
        disk.go_on.set()
    finally:
        running.end()
    assert [path.name for path in newest_first(folder)][:2] == ["step-000000000050", "step-000000000020"]
    name = "hidden.weight"
    former = load_checkpoint(folder / "step-000000000020").arrays[f"net/{name}"]
    np.testing.assert_array_equal(former, before.params[name])  # of the time at which it was begun
    np.testing.assert_array_equal(load_newest(folder).arrays[f"net/{name}"], before.params[name] + 1)


def test_a_disk_that_hangs_cannot_keep_a_learner_that_stops(tmp_path, monkeypatch, caplog):
    running = run_learner(make_config(tmp_path), tmp_path)
    first = begun(tmp_path)
    report(running.service.config, {}, steps=20)
    disk = SlowDisk(monkeypatch)
    monkeypatch.setattr(checkpoints, "CHECKPOINT_S", 0.5)
    try:
        running.end()
        assert "not on disk after" in caplog.text
        assert load_newest(tmp_path / "checkpoints").path == first
    finally:
        disk.go_on.set()
    assert running.service.checkpoints._writer.wait(60)


def test_a_complete_run_whose_end_cannot_be_saved_says_so(tmp_path, monkeypatch):
    config = make_config(tmp_path, **{"run.total_steps": "50", "evaluator.enabled": "false"})
    running = run_learner(config, tmp_path)
    begun(tmp_path)

    def save(directory, *arguments, **options):
        raise CheckpointError("cannot write a checkpoint: No space left on device")

    monkeypatch.setattr(checkpoint, "save_checkpoint", save)
    report(config, {}, steps=50)
    with pytest.raises(
        CheckpointError, match=r"the last checkpoint could not be written into .*checkpoints: "
    ):
        running.join()


def test_resuming_needs_a_matching_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint"):
        Learner(make_config(tmp_path), tmp_path, resume=True, stop=StopSignal())
    run_learner(make_config(tmp_path), tmp_path).end()
    with pytest.raises(CheckpointError, match=r"agent\.gamma = 0\.99 instead of 0\.5"):
        Learner(make_config(tmp_path, **{"agent.gamma": "0.5"}), tmp_path, resume=True, stop=StopSignal())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_cuda_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="use cpu"):
        Learner(
            make_config(tmp_path, **{"learner.device": "cuda"}), tmp_path, resume=False, stop=StopSignal()
        )


@pytest.mark.parametrize(("wait_s", "told"), [(60.0, False), (0.5, True)])
def test_a_long_wait_is_told_and_a_short_one_is_not(tmp_path, monkeypatch, caplog, wait_s, told):
    caplog.set_level("INFO")
    monkeypatch.setattr(service, "TOLD_WAIT_S", wait_s)
    running = run_learner(make_config(tmp_path), tmp_path)
    if told:
        until(lambda: "learner waits for batches: " in caplog.text)
    else:
        time.sleep(1.5)
    running.end()
    assert ("learner waits for batches: " in caplog.text) == told


def test_a_run_that_was_complete_ends_at_once_and_says_so(tmp_path, caplog, monkeypatch):
    caplog.set_level("INFO")
    monkeypatch.setattr(service, "EVALUATOR_START_S", 600.0)  # longer than `join` waits
    config = make_config(tmp_path, **{"run.total_steps": "100"})
    running = run_learner(config, tmp_path)
    report(config, {}, steps=100)
    running.end()
    run_learner(config, tmp_path, resume=True).join()
    assert "the run was already complete at 100 steps; to continue, raise run.total_steps" in caplog.text
    assert "waiting for the evaluator" not in caplog.text[caplog.text.index("was already complete") :]
