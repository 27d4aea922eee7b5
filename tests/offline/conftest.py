from tests.datasets.conftest import datasets  # noqa: F401 - a fixture
from tests.launcher.runs import start  # noqa: F401 - a fixture
