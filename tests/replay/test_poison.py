"""Items that no agent can learn from, sent by a holder of an actor's key, cost a run only themselves."""

import logging

import numpy as np
import pytest

from tests.harness import until
from tests.replay.learners import learnable, run_learner

POISON = {"action": -5, "bootstrap_steps": 255, "reward": np.nan, "discount": 2.0, "obs": np.inf}


@pytest.fixture
def member(server, tmp_path):
    """The address of a shard of the learner's run."""
    return lambda: server("--learner", f"ipc://{tmp_path}/control")


def test_a_run_goes_on_after_items_that_cannot_be_learned_from(member, client, tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    running = run_learner(tmp_path, tmp_path / "run")
    learner, replay = running.service, member()
    specs = learner.agent.fields
    actor, stranger = client(replay, specs=specs), client(replay, specs=specs)
    poison = [learnable(specs, 8, priority=1e30, **{name: value}) for name, value in POISON.items()]
    for each in poison:
        until(lambda each=each: stranger.insert(each))
    assert stranger.flush(60)
    for _ in range(40):
        until(lambda: actor.insert(learnable(specs, 64)))
    assert actor.flush(60)
    until(lambda: learner.counters.updates >= 50 or running.error)
    running.end()
    assert learner.shares.usable.left_out >= 8 * len(POISON)
    assert " outside of " in caplog.text
    assert "another holder of an actor's key" in caplog.text
