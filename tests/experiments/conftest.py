from tests.experiments.sweeps import command  # noqa: F401 - a fixture
