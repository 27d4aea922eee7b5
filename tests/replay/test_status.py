"""What a shard says about itself: to people, to scripts, and to Prometheus."""

import io
import subprocess
import sys
import time

import numpy as np
import pytest
import zmq
from rich.console import Console

from tests.replay import processes
from tests.replay.storage.replays import Items, make_insert, open_tables
from troupe.common.data.table_config import MAX_TABLES, check_tables, parse_table
from troupe.common.errors import ConfigError
from troupe.common.wire import messages
from troupe.common.wire.codec import Message, WireError, encode
from troupe.common.wire.rejections import MAX_CHARS, MAX_PEERS, Rejections, peer_name
from troupe.services.replay import rates as rates_module
from troupe.services.replay import statistics
from troupe.services.replay.rates import Rates, cut_to_fit
from troupe.services.replay.requests import RequestHandlers
from troupe.services.replay.statistics import AGE_BOUNDS_S, STALENESS_BOUNDS, Histogram, Statistics
from troupe.services.replay.status_page import print_page


def filled(folder, *texts, chunks=20):
    """Every chunk has one more step of version; priorities are 1, 2, 3, ..."""
    replay = open_tables(folder, *texts)
    for number in range(chunks):
        insert = make_insert(number + 1, number * 4, 4, range(4), [1] * 4, np.arange(4) + 1.0 + 4 * number)
        insert.version = number
        insert.items = {name: Items(*vars(insert.items["default"]).values()) for name in replay.tables}
        replay.insert(insert)
    return replay


def shown(families):
    """A function that finds what Prometheus is told, by name and labels."""
    samples = [sample for family in families for sample in family.samples]
    values = {(sample.name, *sorted(sample.labels.items())): sample.value for sample in samples}
    return lambda name, **labels: values[f"troupe_replay_{name}", *sorted(labels.items())]


def test_histograms_count_as_prometheus_expects():
    histogram = Histogram((1.0, 10.0))
    histogram.observe(np.array([0.5, 1.0, 5.0, 100.0]))
    histogram.observe(np.array([10.0]))
    assert histogram.buckets() == [("1", 2), ("10", 4), ("+Inf", 5)]
    assert histogram.sum == 116.5


def test_ages_staleness_and_priorities(tmp_path):
    replay = filled(tmp_path, "a:capacity=200", "b:sampler=lifo,capacity=10", chunks=40)
    statistics = Statistics(replay)
    assert statistics.newest_version == 39
    replay.store.times_s[:] = time.time() - 50  # or a little longer ago, until they are looked at
    statistics.sampled(replay.sample({"b": 8, "a": 64}))
    told = shown(statistics.families())
    assert told("sampled_age_s_count", table="a") == 64
    assert 50 <= told("sampled_age_s_sum", table="a") / 64 < 100
    assert told("sampled_age_s_bucket", table="b", le="30") == 0
    assert told("sampled_age_s_bucket", table="b", le="100") == 8
    assert told("sampled_staleness_bucket", table="b", le="1") == 8, "the newest two chunks"
    assert told("sampled_staleness_bucket", table="a", le="1") < 64
    assert told("priority", table="a", quantile="0") == 1
    assert told("priority", table="a", quantile="0.5") == pytest.approx(80.5)
    assert told("priority", table="a", quantile="1") == 160
    quantiles = statistics.quantiles("a")
    assert 50 <= quantiles["age_s"]["0.5"] < 100
    assert quantiles["staleness"]["1"] == 39
    assert len(AGE_BOUNDS_S) == len(set(AGE_BOUNDS_S))
    assert len(STALENESS_BOUNDS) == len(set(STALENESS_BOUNDS))


def test_quantiles_of_a_large_table_are_those_of_some_items(tmp_path):
    replay = filled(tmp_path, "a:capacity=20000", chunks=3000)
    quantiles = Statistics(replay).quantiles("a")["priority"]
    assert quantiles["0.5"] == pytest.approx(6000, rel=0.1)
    assert quantiles["0.9"] == pytest.approx(10800, rel=0.05)


def test_versions_of_an_abandoned_future_are_forgotten(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("troupe.services.replay.statistics.system.monotonic", lambda: now[0])
    statistics = Statistics(filled(tmp_path, "a:capacity=200"))
    statistics.inserted(500)
    statistics.inserted(20)
    assert statistics.newest_version == 500
    for _ in range(3):
        now[0] += 40
        statistics.inserted(21)
    assert statistics.newest_version == 21


def test_the_page_and_the_metrics_of_a_real_shard(server, client):
    endpoint = server(
        "--table", "default:capacity=1000,min_items=10", "--table", "rollouts:limiter=queue,capacity=2"
    )
    one = client(endpoint)
    one.status(120)
    for number in range(6):
        processes.insert(one, number)
    assert one.flush(60)
    one.sample(16, timeout_s=60)
    one.update_priorities(np.array([10**6], np.uint64), np.ones(1))
    one.request_sample(1, "rollouts")
    words = [sys.executable, "-m", "troupe.services.replay", "status", endpoint]
    page = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True).stdout
    for text in ("60 of 1,000", "prioritized", "fifo, 1 times", "from 10 items", "unknown priorities 1"):
        assert text in page, page
    assert "rollouts: samples wait" in page
    table = one.status(60)["tables"]["default"]
    assert table["sampled_total"] == 16
    assert table["current_samples_per_insert"] == pytest.approx(16 / 50)
    assert table["quantiles"]["priority"]["0.5"] == 1
    assert table["quantiles"]["age_s"]["1"] > 0


def test_bad_messages_are_counted_by_peer_of_so_many_peers():
    rejections = Rejections()
    for number in range(10 * MAX_PEERS):
        rejections.count(b"peer-%d" % number, "bad_field")
        rejections.count(b"peer-0", "bad_type")
    assert rejections.by_kind == {"bad_field": 10 * MAX_PEERS, "bad_type": 10 * MAX_PEERS}
    assert len(rejections.by_peer) == MAX_PEERS
    assert rejections.of(b"peer-0") == 10 * MAX_PEERS + 1, "who goes on is remembered"
    assert rejections.of(b"peer-1") == 0
    assert peer_name(b"\xff" * 255) == "ff" * (MAX_CHARS // 2)
    assert peer_name(b"a\nb") == "610a62"


def test_every_value_has_its_place_on_the_page(tmp_path, context):
    replay = filled(tmp_path, "a:capacity=30")
    socket = context.socket(zmq.ROUTER)
    requests = RequestHandlers(replay, socket, 1, dict)
    status = Rates(replay, requests).status() | {"failed_handshakes": 2}
    for number in range(3):
        requests.server.rejections.count(b"actor-0-1f" if number else b"\0\1\2\3\4", "bad_field")
    status |= requests.server.rejections.status()
    file = io.StringIO()
    print_page("tcp://here", status, Console(file=file, width=120, highlight=False))
    page = file.getvalue()
    assert "30 of 30" in page
    assert "failed handshakes 2, rejected bad field 3" in page
    assert "rejected from actor-0-1f: bad field 2" in page
    assert "rejected from 0001020304: bad field 1" in page
    small, status["tables"] = status["tables"]["a"], {}
    small["quantiles"]["age_s"] = {"0.1": 300.0, "0.5": 5000.0, "0.9": 7100.0}
    large = small | {"items": 2_000_000, "capacity": 2_000_000}
    for several in (
        {"default": small, "newest": small, "rollouts": small},
        {"a": small, "b": large, "c": large},
    ):
        status["tables"] = several
        file = io.StringIO()
        print_page("tcp://127.0.0.1:5570", status, Console(file=file, width=80, highlight=False))
        lines = file.getvalue().splitlines()
        assert sum("5.0 / 83.3 / 118.3 min" in line for line in lines) >= 1, lines
        assert file.getvalue().count("5.0 / 83.3 / 118.3 min") == 3, lines
        assert all(line[:1].strip() or set(line.split()) <= set(several) for line in lines), "nothing wraps"
        assert lines[1].endswith("GiB") or lines[1].endswith("MiB"), lines
    told = shown(Rates(replay, requests).families())
    assert told("rejected_total", kind="bad_field") == 3
    assert told("table_items", table="a") == 30
    assert told("table_inserted_total", table="a") == 20 * 4
    socket.close(0)


def test_the_status_of_as_many_tables_as_there_may_be_fits_in_a_message(tmp_path, context):
    names = [f"{'a_long_name_' * 5}{number:03}" for number in range(MAX_TABLES + 1)]
    options = "capacity=5,samples_per_insert=0.33333,samples_per_insert_error=1"
    replay = filled(tmp_path, *(f"{name}:{options}" for name in names[:-1]))
    socket = context.socket(zmq.ROUTER)
    requests = RequestHandlers(replay, socket, 1, dict)
    requests.grant_credit()
    assert len(requests.paused) == MAX_TABLES
    meter = Rates(replay, requests)
    few = cut_to_fit(meter.status() | {"tables": dict(list(meter.status()["tables"].items())[:8])})
    assert all(table["quantiles"] for table in few["tables"].values())
    status = cut_to_fit(meter.status())
    assert encode(Message(messages.StatusOk.TYPE, status))
    assert status["tables"].keys() == replay.tables.keys()
    for number in range(MAX_PEERS):
        for kind in range(15):
            requests.server.rejections.count(b"%064d" % number, f"kind_of_a_message_{kind}")
    with pytest.raises(WireError):
        encode(Message(messages.StatusOk.TYPE, meter.status()))
    status = cut_to_fit(meter.status())
    assert encode(Message(messages.StatusOk.TYPE, status))
    assert not any(table["quantiles"] for table in status["tables"].values()), "there was no room for them"
    assert sum(status["rejected"].values()) == MAX_PEERS * 15
    print_page("tcp://here", status, Console(file=io.StringIO(), width=80))
    with pytest.raises(ConfigError, match="at most"):
        check_tables([parse_table(name) for name in names])
    socket.close(0)
    replay.close()


@pytest.mark.parametrize(
    ("table", "waits_for"),
    [
        ("a:capacity=200,min_items=100", "items"),
        ("a:capacity=200,samples_per_insert=0.01,samples_per_insert_error=4", "ratio"),
    ],
)
def test_what_requests_wait_for_is_measured(tmp_path, context, monkeypatch, table, waits_for):
    """Over ten seconds, half of one until it is answered that there is nothing yet."""
    now_s = 1000.0
    clock = lambda: now_s  # noqa: E731
    monkeypatch.setattr(rates_module.system, "monotonic", clock)
    replay = filled(tmp_path, table)
    socket = context.socket(zmq.ROUTER)
    requests = RequestHandlers(replay, socket, 1, dict)
    meter = Rates(replay, requests)
    now_s += 8.0
    assert meter.due()
    requests.serve(b"learner", messages.Sample(shares=[("a", 8)]).message(1))
    requests.serve(b"learner", messages.Sample(shares=[("a", 8)]).message(2))
    requests.serve_parked()
    for _ in range(4):
        now_s += 0.5
        requests.serve_parked()
    assert meter.due()
    shares = {name: share for name, share in meter.metrics().items() if "waits_for" in name}
    assert shares.pop(f"replay/waits_for_{waits_for}_share") == pytest.approx(0.05)
    assert set(shares.values()) == {0.0}
    socket.close(0)
    replay.close()


def test_quantiles_that_take_long_are_told_again(tmp_path, monkeypatch):
    looks, look = [], Statistics._look

    def slow(self, name):
        looks.append(name)
        time.sleep(0.5)
        return look(self, name)

    monkeypatch.setattr(Statistics, "_look", slow)
    told = Statistics(filled(tmp_path, "default:capacity=100"))
    assert told.quantiles("default") == told.quantiles("default")
    assert len(looks) == 1
    monkeypatch.setattr(statistics, "CHEAP_S", np.inf)
    told = Statistics(told._replay)
    assert told.quantiles("default") != told.quantiles("default"), "ages grow"
    assert len(looks) == 3
