import pytest

from tests.board.serving import Served


@pytest.fixture
def serve():
    """Serves roots until the test is over."""
    served = []

    def start(*roots, **options):
        served.append(Served(*roots, **options))
        return served[-1]

    yield start
    for each in served:
        each.close()
