"""Optimizers step as torch's do, and leave its compiler alone."""

import copy
import subprocess
import sys

import pytest
import torch

from troupe.common.agents.learners import optimizers

UPDATES = """
import sys
from tests.agents.contract import OPTIONS, agent_of, batch
from troupe.common.config.algorithms import ALGORITHMS
for name in [*ALGORITHMS, *OPTIONS]:
    agent = agent_of(name)
    agent.update(batch(agent))
    agent.load_state(*agent.state())
    agent.update(batch(agent))
    assert "torch._dynamo" not in sys.modules, name
"""


def test_no_algorithm_imports_the_compiler():
    ended = subprocess.run([sys.executable, "-c", UPDATES], capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("name", ["Adam", "RAdam"])
def test_they_step_as_torchs_and_their_states_are_exchanged(name):
    begin = torch.tensor([1.0, -2.0])
    ours, theirs = torch.nn.Parameter(begin.clone()), torch.nn.Parameter(begin.clone())
    mine, torchs = getattr(optimizers, name)([ours], lr=0.1), getattr(torch.optim, name)([theirs], lr=0.1)
    for step in range(12):
        for parameter, optimizer in ((ours, mine), (theirs, torchs)):
            optimizer.zero_grad()
            (parameter * torch.tensor([1.0, step - 4.0])).sum().backward()
            optimizer.step()
            assert parameter.requires_grad
        assert torch.equal(ours, theirs)
        assert not torch.equal(ours, begin)
        mine.load_state_dict(copy.deepcopy(torchs.state_dict()))
