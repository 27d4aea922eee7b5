"""Health and metrics over HTTP."""

import socket
import threading
import urllib.error
import urllib.request

import pytest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from tests.harness import PATIENCE_S, hung_up, until
from troupe.common.errors import ConfigError
from troupe.common.runtime import health
from troupe.common.runtime.http import MAX_CLIENTS, StatusServer


def get(server, path):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=PATIENCE_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_probes_and_metrics():
    state = {"ready": False}
    server = StatusServer(
        "replay", 0, ready=lambda: (state["ready"], "ok" if state["ready"] else "waits for the learner")
    )
    try:
        health.report({"replay/items": 12, "replay/samples_total": 3})
        assert get(server, "/healthz") == (200, "ok\n")
        assert get(server, "/readyz") == (503, "waits for the learner\n")
        state["ready"] = True
        assert get(server, "/readyz?x=1") == (200, "ok\n")
        status, text = get(server, "/metrics")
        assert status == 200
        assert 'troupe_replay_items{service="replay"} 12.0' in text
        assert 'troupe_replay_samples_total{service="replay"} 3.0' in text
        assert "process_resident_memory_bytes" in text
        assert get(server, "/etc/passwd")[0] == 404
        with pytest.raises(ConfigError, match=f"port {server.port} for metrics is in use"):
            StatusServer("other", server.port)
    finally:
        server.close()
    StatusServer("other", server.port).close()  # the port is free again


@pytest.mark.parametrize("sends", [b"", b"x"])
def test_who_takes_too_long_to_ask_is_hung_up_on(monkeypatch, sends):
    monkeypatch.setattr("troupe.common.runtime.http.CLIENT_S", 0.5)
    server = StatusServer("replay", 0)
    try:
        with socket.create_connection(("127.0.0.1", server.port), 60) as slow:
            assert hung_up(slow, sends)
    finally:
        server.close()


def test_labels_and_histograms(monkeypatch):
    monkeypatch.setattr(health, "_values", {})
    monkeypatch.setattr(health, "_families", ())
    items = GaugeMetricFamily("troupe_items_by_table", "items", labels=["table"])
    items.add_metric(['a "b" c'], 2)
    lost = CounterMetricFamily("troupe_lost", "lost", labels=["kind"])
    lost.add_metric(["x"], 7)
    ages = HistogramMetricFamily("troupe_age_s", "ages", labels=["table"])
    ages.add_metric(["a"], [("3", 1), ("10", 3), ("+Inf", 4)], 30.5)
    health.report({"items": 5, "free_count": 1}, [items, lost, ages])
    server = StatusServer("replay", 0)
    try:
        lines = get(server, "/metrics")[1].splitlines()
        health.report({"items": 6})  # what has labels stays as it was
        later = get(server, "/metrics")[1].splitlines()
    finally:
        server.close()
    assert "# TYPE troupe_age_s histogram" in lines
    at = [
        lines.index(f'troupe_age_s_bucket{{le="{b}",service="replay",table="a"}} {n}')
        for b, n in (("3", "1.0"), ("10", "3.0"), ("+Inf", "4.0"))
    ]
    assert at == sorted(at)
    assert 'troupe_age_s_sum{service="replay",table="a"} 30.5' in lines
    assert 'troupe_age_s_count{service="replay",table="a"} 4.0' in lines
    assert 'troupe_items_by_table{service="replay",table="a \\"b\\" c"} 2.0' in lines
    assert 'troupe_items{service="replay"} 5.0' in lines
    assert 'troupe_lost_total{kind="x",service="replay"} 7.0' in lines
    assert "# TYPE troupe_lost_total counter" in lines
    assert "# TYPE troupe_free_count gauge" in lines
    assert 'troupe_lost_total{kind="x",service="replay"} 7.0' in later


def test_silent_clients_keep_nobody_from_an_answer(monkeypatch):
    monkeypatch.setattr("troupe.common.runtime.http.CLIENT_S", 3600.0)  # so that only their number closes any
    server = StatusServer("replay", 0)
    silent = []
    try:
        for _ in range(300):
            silent.append(socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S))
        for _ in range(3):
            assert get(server, "/healthz")[0] == 200  # has a deadline of its own, see `get`
        until(lambda: _serving() <= MAX_CLIENTS)  # the threads of closed connections end a moment later
        assert silent[0].recv(1) == b"", "the oldest was closed"
    finally:
        for each in silent:
            each.close()
        server.close()


def _serving() -> int:
    return sum("process_request" in thread.name for thread in threading.enumerate())


def test_health_follows_the_reports(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(health.system, "monotonic", lambda: now[0])
    monkeypatch.setattr(health, "_reported_at", None)
    assert health.healthy()[0]
    assert not health.ready()[0]
    health.report({"x": 1.0})
    assert health.ready() == (True, "ok")
    assert health.values()["x"] == 1.0
    now[0] += health.STALE_AFTER_S + 1
    assert health.healthy() == (False, "the main loop has been silent for 121 s")
    health.report()
    assert health.healthy()[0]
