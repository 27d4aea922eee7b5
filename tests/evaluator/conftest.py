from tests.datasets.conftest import datasets  # noqa: F401 - a fixture
from tests.envs.engines import engines  # noqa: F401 - a fixture
