"""A learner in a thread, and what others report to it."""

import time

from tests.harness import Context, InThread, fetched, games, make_steps, until
from troupe.common.config import load_config
from troupe.common.runtime import StopSignal
from troupe.common.wire.control.client import ControlClient
from troupe.common.wire.link import new_incarnation
from troupe.services.learner.service import Learner

OVERRIDES = {
    "net.liveness_s": "5",
    "net.heartbeat_s": "0.2",
    "agent.mlp_units": "[8]",
    "agent.hidden_units": "8",
}


def make_config(tmp_path, **more):
    addresses = {f"net.{name}": f"ipc://{tmp_path}/{name}" for name in ("control", "announce", "replay")}
    return load_config("cartpole-apex", None, {**OVERRIDES, **addresses, **more}, {})


def run_learner(config, run_dir, resume=False, **more):
    """A learner in a thread, without replay: enough for everything but updates."""
    stop = StopSignal()
    return InThread(Learner(config, run_dir, resume=resume, stop=stop, **more), stop)


def evaluated(client, config, score):
    """An evaluator plays a whole evaluation, each game with this return; gives the parameters of it."""
    left = config.evaluator.episodes
    while left:
        given = until(client.next_games)
        played = [[score, 3]] * min(left, config.evaluator.slots)
        metrics = {"eval/version": float(given.params.version)}
        assert client.send_telemetry(metrics, fields=games(*played, part=given.part))
        left -= len(played)
    return given.params


def report(config, metrics, fields=None, steps=0, role="actor"):
    """An actor, or another service, comes, has made so many steps, reports, and leaves."""
    context = Context()
    client = ControlClient(
        context,
        config.net.control,
        role=role,
        name=f"{role}-0",
        incarnation=new_incarnation(),
        slots_wanted=4 if role == "actor" else 0,
    )
    try:
        client.join(60.0)
        params = fetched(client)
        if steps:
            make_steps(client, steps, at_once=4)
        assert client.send_telemetry(metrics, fields=fields)
        time.sleep(0.5)
    finally:
        client.close()
        context.destroy(linger=0)
    return params
