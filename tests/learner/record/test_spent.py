import types

import pytest

from troupe.services.learner.record import spent as module
from troupe.services.learner.record.spent import PERIOD_S, Spent


class Clock:
    """Goes on only where it is told to."""

    def __init__(self):
        self.now_s = 100.0

    def monotonic(self):
        return self.now_s


def test_time_goes_into_updates_and_versions_and_waits_are_neither(monkeypatch):
    clock, prefetch = Clock(), types.SimpleNamespace(waited_s=7.0)
    monkeypatch.setattr(module, "system", clock)
    spent = Spent()
    with spent.update(prefetch):
        clock.now_s += 4.0
        prefetch.waited_s += 3.0
    with spent.publish():
        clock.now_s += 2.0
    assert clock.now_s - 100.0 > PERIOD_S
    clock.now_s += 4.0
    assert spent.metrics() == pytest.approx({"learner/update_share": 0.1, "learner/publish_share": 0.2})
    assert spent.metrics() == {}
    clock.now_s += 10.0
    assert spent.metrics() == {"learner/update_share": 0.0, "learner/publish_share": 0.0}
