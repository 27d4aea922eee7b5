import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import zmq

from common.errors import ConfigError, PeerError
from common.wire.control.client import ControlClient, new_incarnation
from common.wire.control.server import ControlServer

LOOPBACK = "tcp://127.0.0.1:*"
CONFIG = {"env": {"id": "atari:pong"}, "agent": {"n_steps": 3}, "net": {"control": "here"}}


def until(condition: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    """Wait for something to become true; the test fails where it does not."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, "it never happened"
        time.sleep(0.005)
    return value


def bind(start: Callable[[], Any]) -> None:
    """Start a server where one has just stopped: ZeroMQ gives the port up in the background."""
    deadline_s = time.monotonic() + 30
    while True:
        try:
            return start()
        except ConfigError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.02)


def told_to_wait(client: ControlClient, reason: Callable[[], bool]) -> str:
    """What a client says that tries to join, is told for a `reason` to wait, and gives up."""
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(client.join, 600)
        until(reason)
        client.close()
        with pytest.raises(PeerError) as caught:
            joining.result(60)
    return str(caught.value)


@pytest.fixture
def ctx() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def serve(ctx: zmq.Context) -> Iterator[Callable[..., ControlServer]]:
    """Starts control servers, and stops them. Nobody counts as silent where the test does not say so."""
    servers = []

    def start(control: str = LOOPBACK, **options: Any) -> ControlServer:
        settings = {
            "config_dict": CONFIG,
            "structural_hash": "abc",
            "total_slots": 8,
            "heartbeat_s": 0.05,
            "liveness_s": 60.0,
        }
        server = ControlServer(ctx, control, LOOPBACK, **{**settings, **options})
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
