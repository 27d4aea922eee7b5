from tests.membership import _closed_peers, connect, ctx, serve  # noqa: F401 - fixtures
