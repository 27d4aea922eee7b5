from tests.launcher.runs import start  # noqa: F401 - a fixture
