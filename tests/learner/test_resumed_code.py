"""Going on with a checkpoint that another version of Troupe wrote."""

import logging

import pytest

from troupe.common.agents import make_agent
from troupe.common.config import Config, load_config
from troupe.common.envs import make_spec
from troupe.common.runtime.checkpoint import save_checkpoint
from troupe.services.learner.control.budget import StepBudget
from troupe.services.learner.saving.checkpoints import RunCheckpoints
from troupe.services.learner.saving.counters import RunCounters


def checkpoints(directory):
    config: Config = load_config(preset="cartpole-ppo")
    spec = make_spec(config.env)
    agent = make_agent(config.agent, spec, seed=0)
    return RunCheckpoints(config, directory, agent, spec, RunCounters(1, StepBudget())), agent


def told(caplog):
    """What this thread has logged; others' may be those of an earlier test."""
    return [record.getMessage() for record in caplog.records if record.threadName == "MainThread"]


OTHERS = {
    "version": ({"version": "0.0.1", "commit": ""}, "Troupe 0.0.1"),
    "commit": ({"commit": "f00d"}, "(f00d)"),
    "nothing": (None, "an unknown version of Troupe"),
    "garbage": ("new\nline", "an unknown version of Troupe"),
    "lines": ({"version": "1\n2"}, "Troupe 1 2"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_run_of_another_version_is_resumed_with_a_line(other, tmp_path, caplog):
    code, named = OTHERS[other]
    first, agent = checkpoints(tmp_path)
    meta = first.meta() | {"agent": agent.state()[1]}
    written = {**meta["troupe"], **code} if isinstance(code, dict) else code
    save_checkpoint(tmp_path, agent.state()[0], meta | {"troupe": written})
    with caplog.at_level(logging.WARNING):
        checkpoints(tmp_path)[0].begin_run(resume=True)
    (line,) = told(caplog)
    assert named in line
    assert "\n" not in line
    assert f"this is Troupe {meta['troupe']['version']}" in line


def test_a_run_of_this_version_is_resumed_without_a_word(tmp_path, caplog):
    first, agent = checkpoints(tmp_path)
    save_checkpoint(tmp_path, agent.state()[0], first.meta() | {"agent": agent.state()[1]})
    with caplog.at_level(logging.WARNING):
        checkpoints(tmp_path)[0].begin_run(resume=True)
    assert not told(caplog)
