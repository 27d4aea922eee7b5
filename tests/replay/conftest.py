import pytest

from tests.replay import processes
from tests.replay.shards import connect, start  # noqa: F401 - fixtures
from tests.replay.strangers import stranger  # noqa: F401 - a fixture
from troupe.common.wire.replay.client import ReplayClient


@pytest.fixture
def server(tmp_path):
    """A function that starts a process with options, and returns its address."""
    running = []

    def make(*options, endpoint=None, folder="data"):
        endpoint = endpoint or f"ipc://{tmp_path}/replay"
        running.append(processes.start(tmp_path / folder, endpoint, *options))
        make.process = running[-1]
        return endpoint

    yield make
    for process in running:
        process.kill()
        process.wait()


@pytest.fixture
def client(context):
    """A function that makes clients."""
    clients = []

    def make(endpoint, **options):
        clients.append(ReplayClient(endpoint, ctx=context, **options))
        return clients[-1]

    yield make
    for each in clients:
        each.close(0)
