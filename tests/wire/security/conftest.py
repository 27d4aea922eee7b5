from tests.wire.security.secured import folder  # noqa: F401 - a fixture
