import json
import threading
import time

import numpy as np
import pytest
import zmq

from common.config import load_config
from common.errors import CheckpointError, ConfigError
from common.runtime import StopSignal
from common.runtime.checkpoint import load_newest
from common.wire.codec import WireError
from common.wire.control import Telemetry
from common.wire.control_client import ControlClient, new_incarnation
from services.learner.counters import RunCounters
from services.learner.reporter import Reporter
from services.learner.service import DivergedError, Learner

OVERRIDES = {
    "net.liveness_s": "5",
    "net.heartbeat_s": "0.2",
    "agent.mlp_units": "[8]",
    "agent.hidden_units": "8",
}


def make_config(tmp_path, **more):
    addresses = {f"net.{name}": f"ipc://{tmp_path}/{name}" for name in ("control", "announce", "replay")}
    return load_config("cartpole-apex", None, {**OVERRIDES, **addresses, **more}, {})


class Running:
    """A learner in a thread of this process, without replay: enough for everything but updates."""

    def __init__(self, config, run_dir, resume=False):
        self.stop = StopSignal()
        self.learner = Learner(config, run_dir, resume=resume, stop=self.stop)
        self.thread = threading.Thread(target=self.learner.run)
        self.thread.start()

    def end(self):
        self.stop.set()
        self.thread.join(90)
        assert not self.thread.is_alive()


def report(config, metrics, fields=None):
    context = zmq.Context()
    client = ControlClient(
        context,
        config.net.control,
        role="actor",
        name="actor-0",
        incarnation=new_incarnation(),
        slots_wanted=4,
    )
    try:
        client.join(60.0)
        params = client.wait_params(60.0)
        assert client.send_telemetry(metrics, fields=fields or {})
        time.sleep(0.5)
    finally:
        client.close()
        context.destroy(linger=0)
    return params


def test_what_is_stopped_is_what_is_resumed(tmp_path):
    config = make_config(tmp_path)
    running = Running(config, tmp_path)
    params = report(config, {"actor/steps": 320})
    report(config, {"actor/steps": 100}, {"episodes": [[20.0, 20]]})
    running.end()
    status = json.loads((tmp_path / "status.json").read_text())
    checkpoint = load_newest(tmp_path / "checkpoints")
    assert status["steps"] == checkpoint.meta["steps"] == 420

    again = Running(config, tmp_path, resume=True)
    assert again.learner.counters.steps == 420
    resumed = report(config, {"actor/steps": 5})
    again.end()
    assert resumed.params["hidden.weight"].tolist() == params.params["hidden.weight"].tolist()
    assert json.loads((tmp_path / "status.json").read_text())["steps"] == 425


def test_a_complete_run_ends_by_itself(tmp_path):
    config = make_config(tmp_path, **{"run.total_steps": "50", "evaluator.enabled": "false"})
    running = Running(config, tmp_path)
    report(config, {"actor/steps": 60})
    running.thread.join(60)
    assert not running.thread.is_alive()
    assert load_newest(tmp_path / "checkpoints").meta["steps"] == 60


@pytest.mark.parametrize(
    ("metrics", "fields"),
    [
        ({"actor/steps": float("inf")}, {}),
        ({"actor/steps": float("nan")}, {}),
        ({"actor/steps": -5}, {}),
        ({"eval/version": 1e300}, {}),
        ({"actor/steps": 10}, {"episodes": [["many", None], 3]}),
        ({"actor/steps": 10}, {"episodes": [{}]}),
        ({"actor/steps": 10}, {"episodes": {"a": 1}}),
        ({"actor/steps": 10}, {"episodes": [[float("nan"), 1.0]]}),
    ],
)
def test_nonsense_of_a_service_is_refused_whole(tmp_path, metrics, fields):
    reporter = Reporter(tmp_path, "gym:CartPole-v1", 100, 10.0, RunCounters(1), None)
    with pytest.raises(WireError):
        reporter.collect(Telemetry("actor-0", "actor", 1, metrics, fields))
    with pytest.raises(WireError):
        reporter.collect(Telemetry("viewer", "viewer", 1, {"actor/steps": 100.0}))
    assert reporter._counters.steps == 0
    reporter.close()


def test_nonsense_from_a_service_does_not_stop_the_learner(tmp_path):
    config = make_config(tmp_path)
    running = Running(config, tmp_path)
    report(config, {"actor/steps": float("inf")}, {"episodes": [{}]})
    report(config, {"actor/steps": 20})
    running.end()
    assert load_newest(tmp_path / "checkpoints").meta["steps"] == 20


def test_divergence_stops_before_it_is_saved_or_published(tmp_path):
    learner = Learner(make_config(tmp_path), tmp_path, resume=False, stop=StopSignal())
    with pytest.raises(DivergedError, match="learning_rate"):
        learner._check_finite({"learner/loss": float("nan")})
    learner._check_finite({"learner/loss": 1.0})
    learner._checkpoint()
    params = {name: array.copy() for name, array in learner.agent.params().items()}
    params["hidden.weight"][0, 0] = np.nan  # since the metrics were looked at last
    learner.agent.load_params(params)
    learner.counters.updates += 1
    with pytest.raises(DivergedError, match=r"hidden\.weight.* not finite at update 1"):
        learner._checkpoint()
    with pytest.raises(DivergedError, match=r"hidden\.weight.* not finite at update 1"):
        learner._publish()
    assert learner.counters.version == 0
    assert load_newest(tmp_path / "checkpoints").meta["updates"] == 0
    learner._close()


def test_an_idle_learner_pushes_no_checkpoint_out(tmp_path):
    config = make_config(tmp_path, **{"learner.checkpoint_period_s": "1", "learner.keep_checkpoints": "2"})
    first = Running(config, tmp_path)
    report(config, {"actor/steps": 20})
    first.end()
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert len(saved) == 2  # of the start, and of the stop
    idle = Running(config, tmp_path, resume=True)
    for _ in range(3):
        idle.learner._next_checkpoint = 0.0
        time.sleep(0.5)
    idle.end()
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == saved


def test_resuming_needs_a_matching_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint"):
        Learner(make_config(tmp_path), tmp_path, resume=True, stop=StopSignal())
    Running(make_config(tmp_path), tmp_path).end()
    with pytest.raises(CheckpointError, match="structural"):
        Learner(make_config(tmp_path, **{"agent.gamma": "0.5"}), tmp_path, resume=True, stop=StopSignal())


def test_no_cuda_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="use cpu"):
        Learner(
            make_config(tmp_path, **{"learner.device": "cuda"}), tmp_path, resume=False, stop=StopSignal()
        )
