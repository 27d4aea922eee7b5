"""Who belongs to a run: both ends of the control connection over real sockets."""

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgpack
import pytest

from common.errors import ConfigError, PeerError
from common.wire import sockets
from common.wire.control.budget import StepBudget
from common.wire.control.server import ControlServer
from tests.wire.conftest import CONFIG, LOOPBACK, until


def names(server) -> list[str]:
    return [peer["name"] for peer in server.peers()]


# -- joining --


def test_a_service_needs_nothing_but_the_address_to_join(serve, connect):
    budget = StepBudget()
    budget.report(1, 500)
    server = serve(budget=budget)
    server.set_state(updates=7)
    client = connect(server, "actor-0", slots_wanted=3)
    welcome = client.join(5)
    assert welcome.config == CONFIG
    assert welcome.slots == client.slots == [0, 1, 2]
    assert (welcome.total_slots, welcome.steps, welcome.updates, welcome.version) == (8, 500, 7, -1)
    assert (welcome.heartbeat_s, welcome.liveness_s) == (0.05, 0.5)
    assert client.connected
    (peer,) = server.peers()
    assert (peer["role"], peer["name"], peer["slots"]) == ("actor", "actor-0", [0, 1, 2])
    assert peer["incarnation"] == client.incarnation


def test_services_come_in_any_order(serve, connect, ctx):
    server = serve()
    endpoint = server.control_endpoint
    server.stop()
    client = connect(endpoint, "actor-0", slots_wanted=1)
    result = []
    joining = threading.Thread(target=lambda: result.append(client.join(10)))
    joining.start()
    time.sleep(0.3)
    serve(endpoint)
    joining.join(10)
    assert result[0].slots == [0]


def test_an_unreachable_learner_is_a_peer_error_in_time(connect):
    client = connect("tcp://127.0.0.1:1", "actor-0")
    start = time.monotonic()
    with pytest.raises(PeerError, match=r"actor-0 could not join the learner at tcp://127.0.0.1:1 within"):
        client.join(0.4)
    assert 0.35 < time.monotonic() - start < 3


def test_a_wait_says_who_waits_for_whom(connect, caplog, monkeypatch):
    monkeypatch.setattr("common.wire.sockets.WaitLog.due", lambda self: True)
    caplog.set_level(logging.INFO)
    with pytest.raises(PeerError):
        connect("tcp://127.0.0.1:1", "actor-7").join(0.3)
    assert "actor-7 waits for the learner at tcp://127.0.0.1:1 since" in caplog.text


def test_a_learner_of_another_protocol_version_is_refused(ctx, connect):
    router = sockets.make_router(ctx, LOOPBACK)
    client = connect(sockets.bound_endpoint(router), "actor-0")
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(client.join, 5)
        identity, *_ = until(lambda: sockets.receive_frames(router))
        sockets.send_frames(router, [msgpack.packb({"v": 2, "from": "the future"})], identity.bytes)
        with pytest.raises(ConfigError, match="speaks protocol version 2, this is 1"):
            joining.result(5)


def test_a_service_of_another_protocol_version_is_told_so(ctx, serve, connect):
    server = serve()
    dealer = sockets.make_dealer(ctx, server.control_endpoint, b"future.1.1")
    until(lambda: sockets.send_frames(dealer, [msgpack.packb({"v": 2, "from": "the future"})]))
    answer = until(lambda: sockets.receive(dealer))
    assert (answer.type, answer.fields["kind"]) == ("ERROR", "version")
    assert "speaks protocol version 2, this is 1" in answer.fields["detail"]
    # What comes of such an answer, should it meet a HELLO:
    router = sockets.make_router(ctx, LOOPBACK)
    client = connect(sockets.bound_endpoint(router), "actor-0")
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(client.join, 5)
        identity, *_ = until(lambda: sockets.receive_frames(router))
        sockets.send(router, answer, identity.bytes)
        with pytest.raises(ConfigError, match=r"refuses actor-0: .* version 2"):
            joining.result(5)


@pytest.mark.parametrize("name", ["", "x" * 65, "a\nb"])
def test_a_hello_without_a_proper_name_is_refused(serve, connect, name):
    server = serve()
    with pytest.raises(ConfigError):
        connect(server, name, role="actor").join(5)
    assert names(server) == []


def test_an_unknown_role_is_refused(serve, connect):
    with pytest.raises(ConfigError, match="roles are"):
        connect(serve(), "actor-0", role="gardener").join(5)


# -- leases --


def test_slots_run_out_and_are_leased_again_after_silence(serve, connect):
    server = serve(total_slots=4)
    first = connect(server, "actor-0", slots_wanted=4)
    assert first.join(5).slots == [0, 1, 2, 3]
    second = connect(server, "actor-1", slots_wanted=4)
    with pytest.raises(PeerError, match="0 of the 4 slots"):
        second.join(0.4)
    # What kill -9 looks like from here: no more heartbeats, no BYE.
    first._link._stay = lambda dealer, sub: first._link.stopped.wait()
    first._link._request = lambda *anything: False
    first._link._send_telemetry = lambda dealer: None
    start = time.monotonic()
    assert second.join(5).slots == [0, 1, 2, 3]
    assert time.monotonic() - start > 0.2  # the lease was honoured until it ran out
    assert names(server) == ["actor-1"]


def test_a_lease_outlives_liveness_while_heartbeats_come(serve, connect):
    server = serve(liveness_s=0.3)
    connect(server, "actor-0", slots_wanted=4).join(5)
    time.sleep(0.8)
    assert names(server) == ["actor-0"]
    assert server.peers()[0]["seen_s_ago"] < 0.3


def test_bye_frees_the_slots_at_once(serve, connect):
    server = serve(liveness_s=60)
    first = connect(server, "actor-0", slots_wanted=8)
    first.join(5)
    first.close("spot interruption")
    until(lambda: not server.peers())
    assert connect(server, "actor-1", slots_wanted=8).join(5).slots == list(range(8))


def test_a_restarted_actor_takes_its_slots_over_at_once(serve, connect):
    server = serve(liveness_s=60)
    old = connect(server, "actor-0", slots_wanted=4)
    old.join(5)
    new = connect(server, "actor-0", slots_wanted=4)
    assert new.join(5).slots == [0, 1, 2, 3]
    # The old process, should it be alive after all, is told and does not fight for the name.
    with pytest.raises(ConfigError, match="unique"):
        until(lambda: old.check())
    assert names(server) == ["actor-0"]
    assert server.peers()[0]["incarnation"] == new.incarnation


# -- the learner restarts --


@pytest.mark.parametrize("pause_s", [0.0, 0.9])
def test_everyone_joins_again_after_the_learner_restarts(serve, connect, pause_s):
    server = serve()
    filler = connect(server, "actor-0", slots_wanted=2)
    filler.join(5)
    actor = connect(server, "actor-1", slots_wanted=2)
    replay = connect(server, "replay-0", replay_endpoint="tcp://127.0.0.1:5560")
    assert actor.join(5).slots == [2, 3]
    replay.join(5)
    filler.close()
    session = actor.state.session
    server.stop()
    time.sleep(pause_s)  # shorter and longer than liveness
    server = serve(server.control_endpoint)
    until(lambda: actor.joins == 2 and replay.joins == 2)
    assert actor.slots == [2, 3]
    assert actor.connected
    assert actor.state.session == server.session != session
    assert server.shards() == ["tcp://127.0.0.1:5560"]
    until(lambda: actor.shards == ["tcp://127.0.0.1:5560"])
    assert names(server) == ["actor-1", "replay-0"]


def test_a_silent_learner_is_noticed(serve, connect):
    server = serve()
    client = connect(server, "actor-0")
    client.join(5)
    server.stop()
    until(lambda: not client.connected, 3)


def test_reports_made_while_the_learner_is_away_arrive_later(serve, connect):
    server = serve()
    client = connect(server, "actor-0")
    client.join(5)
    server.stop()
    until(lambda: not client.connected)
    for number in range(300):
        assert client.send_telemetry({"actor/n": number})
    server = serve(server.control_endpoint)
    received = [server.telemetry.get(timeout=5).metrics["actor/n"] for _ in range(256)]
    assert received == list(range(300 - 256, 300))
    assert client.telemetry_dropped == 300 - 256


# -- the ends --


def test_a_port_in_use_is_one_line(ctx, serve):
    endpoint = serve().control_endpoint
    options = {"config_dict": {}, "structural_hash": "", "total_slots": 1}
    with pytest.raises(ConfigError, match="another process has it"):
        ControlServer(ctx, endpoint, LOOPBACK, **options).start()
    with pytest.raises(ConfigError, match="another process has it"):
        ControlServer(ctx, LOOPBACK, endpoint, **options).start()


def test_everything_may_be_closed_twice_and_unused(serve, connect):
    server = serve()
    client = connect(server, "actor-0")
    client.join(5)
    for _ in range(2):
        client.close()
        server.stop()
    unused = connect("tcp://127.0.0.1:1", "actor-1")
    unused.close()


def test_closing_ends_a_join_that_waits(connect):
    client = connect("tcp://127.0.0.1:1", "actor-0")
    threading.Timer(0.2, client.close).start()
    start = time.monotonic()
    with pytest.raises(PeerError):
        client.join(30)
    assert time.monotonic() - start < 3


def test_the_context_can_be_terminated_after_an_unclean_end(ctx, serve, connect):
    server = serve(LOOPBACK)
    client = connect(server, "actor-0")
    client.join(5)
    server.stop()
    start = time.monotonic()
    client.close()
    ctx.term()  # hangs where a socket was left open or lingers
    assert time.monotonic() - start < 4


def test_one_that_only_looks_is_no_news(serve, connect, caplog):
    caplog.set_level(logging.INFO)
    server = serve()
    for name in ("viewer-0", "actor-0"):
        client = connect(server, name)
        client.join(60)
        client.close("has seen enough")
        until(lambda: not server.peers())
    lines = [record.getMessage() for record in caplog.records if record.name == "common.wire.control.server"]
    assert not any("viewer-0" in line for line in lines), lines
    assert sum("actor-0" in line for line in lines) == 2, lines
