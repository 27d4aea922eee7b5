from tests.envs.engines import engines  # noqa: F401 - a fixture
