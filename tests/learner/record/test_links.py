"""What batches take on their way, as metrics of each shard."""

from types import SimpleNamespace

from troupe.services.learner.record import links


def test_links_are_those_of_shards_by_name_since_the_last_look(monkeypatch):
    now_s = 100.0
    monkeypatch.setattr(links.system, "monotonic", lambda: now_s)
    meter = links.Links()
    assert not meter.due()
    totals = {"batches": 10, "bytes": 5000, "took_s": 2.0}
    prefetch = SimpleNamespace(links={"tcp://a:1": totals, "tcp://b:1": totals}, unpacked_s=1.0)
    now_s += 10.0
    assert meter.due()
    found = meter.metrics(prefetch, {"tcp://a:1": "replay-0"})
    assert found == {
        "learner": {"learner/unpack_share": 0.1},
        "replay-0": {"learner/batch_ms": 200.0, "learner/link_bytes_per_s": 500.0},
    }
    now_s += 10.0
    assert meter.metrics(prefetch, {"tcp://a:1": "replay-0"}) == {"learner": {"learner/unpack_share": 0.0}}
