"""Fixtures: control servers, and clients of theirs. A conftest.py imports them."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from tests.harness import LOOPBACK, Context, bind, control_server
from tests.wire import zmtp
from troupe.common.wire.control.client import ControlClient
from troupe.common.wire.link import new_incarnation
from troupe.services.learner.control.server import ControlServer


@pytest.fixture(autouse=True)
def _closed_peers() -> Iterator[None]:
    """What a test has opened is closed after it."""
    yield
    while zmtp.OPENED:
        zmtp.OPENED.pop().close()


@pytest.fixture
def ctx() -> Iterator[zmq.Context]:
    context = Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def serve(ctx: zmq.Context) -> Iterator[Callable[..., ControlServer]]:
    """Starts control servers, and stops them. Nobody counts as silent where the test does not say so."""
    servers = []

    def start(control: str = LOOPBACK, **options: Any) -> ControlServer:
        settings = {
            "heartbeat_s": 0.05,
            "liveness_s": 60.0,
        }
        server = control_server(ctx, control, **{**settings, **options})
        servers.append(server)
        bind(server.start)
        return server

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def connect(ctx: zmq.Context) -> Iterator[Callable[..., ControlClient]]:
    """Makes control clients, and closes them."""
    clients = []

    def make(where: ControlServer | str, name: str = "actor-0", **options: Any) -> ControlClient:
        endpoint = where if isinstance(where, str) else where.control_endpoint
        settings = {"role": name.split("-")[0], "incarnation": new_incarnation(), "heartbeat_s": 0.05}
        client = ControlClient(ctx, endpoint, name=name, **{**settings, "liveness_s": 60.0, **options})
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.close()
