"""The learner's side of the control protocol, for learners that share batches."""

import pytest

from tests.harness import Context
from troupe.services.learner.control.epochs import Epochs
from troupe.services.learner.control.requests import Terms
from troupe.services.learner.control.server import ControlServer
from troupe.services.learner.control.slots import SlotRules


@pytest.fixture
def server(tmp_path):
    """A control server that hands out epochs."""
    context = Context()
    endpoints = (f"ipc://{tmp_path}/control", f"ipc://{tmp_path}/announce")
    server = ControlServer(context, *endpoints, Terms({}, run="a"), SlotRules(1), epochs=Epochs())
    server.start()
    yield server
    server.stop()
    context.destroy(linger=0)
