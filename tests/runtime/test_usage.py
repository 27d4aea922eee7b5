"""What a service reports of its own process."""

import pytest

from troupe.common.runtime import usage


def test_a_share_of_memory_is_of_what_the_container_may_have(monkeypatch):
    monkeypatch.setattr(usage, "memory_limit_bytes", lambda: 1 << 28)
    metrics = usage.OwnUsage("actor").metrics()
    assert metrics["actor/memory_share"] == pytest.approx(metrics["actor/memory_bytes"] / (1 << 28))
