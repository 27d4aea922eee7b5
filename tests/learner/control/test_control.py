"""Who belongs to a run: both ends of the control connection over real sockets."""

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgpack
import pytest

from tests.harness import CONFIG, LOOPBACK, control_server, told_to_wait, until
from troupe.common import system
from troupe.common.errors import ConfigError, PeerError
from troupe.common.runtime.logging import MAX_PEER_CHARS
from troupe.common.wire import messages, sockets
from troupe.common.wire.codec import Message, WireError
from troupe.services.learner.control.budget import StepBudget
from troupe.services.learner.control.epochs import Epochs


def names(server) -> list[str]:
    return [peer["name"] for peer in server.peers()]


# -- joining --


def test_a_service_needs_nothing_but_the_address_to_join(serve, connect):
    budget = StepBudget()
    budget.report(1, 500)
    server = serve(budget=budget)
    server.set_state(updates=7)
    client = connect(server, "actor-0", slots_wanted=3)
    welcome = client.join(60)
    assert welcome.config == CONFIG
    assert welcome.slots == client.slots == [0, 1, 2]
    assert (welcome.total_slots, welcome.steps, welcome.updates, welcome.version) == (8, 500, 7, -1)
    assert (welcome.heartbeat_s, welcome.liveness_s) == (0.05, 60.0)
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
    joining = threading.Thread(target=lambda: result.append(client.join(60)))
    joining.start()
    time.sleep(0.3)
    serve(endpoint)
    joining.join(60)
    assert result[0].slots == [0]


def test_an_unreachable_learner_is_a_peer_error_in_time(connect):
    client = connect("tcp://127.0.0.1:1", "actor-0")
    with pytest.raises(PeerError, match=r"actor-0 could not join the learner at tcp://127.0.0.1:1 within"):
        client.join(0.4)


def test_a_wait_says_who_waits_for_whom(connect, caplog, monkeypatch):
    monkeypatch.setattr("troupe.common.wire.sockets.WaitLog.due", lambda self: True)
    caplog.set_level(logging.INFO)
    line = "actor-7 waits for the learner at tcp://127.0.0.1:1, "
    told_to_wait(connect("tcp://127.0.0.1:1", "actor-7"), lambda: line in caplog.text)


def test_a_learner_of_another_protocol_version_is_refused(ctx, connect):
    router = sockets.make_router(ctx, LOOPBACK)
    client = connect(sockets.bound_endpoint(router), "actor-0")
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(client.join, 60)
        identity, *_ = until(lambda: sockets.receive_frames(router))
        sockets.send_frames(router, [msgpack.packb({"v": 2, "from": "the future"})], identity.bytes)
        with pytest.raises(ConfigError, match="speaks protocol version 2, this is 1"):
            joining.result(90)


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
        joining = pool.submit(client.join, 60)
        identity, *_ = until(lambda: sockets.receive_frames(router))
        sockets.send(router, answer, identity.bytes)
        with pytest.raises(ConfigError, match=r"refuses actor-0: .* version 2"):
            joining.result(90)


@pytest.mark.parametrize("name", ["", "x" * 65, "a\nb"])
def test_a_hello_without_a_proper_name_is_refused(serve, connect, name):
    server = serve()
    with pytest.raises(ConfigError):
        connect(server, name, role="actor").join(60)
    assert names(server) == []


def test_an_unknown_role_is_refused(serve, connect):
    with pytest.raises(ConfigError, match="roles are"):
        connect(serve(), "actor-0", role="gardener").join(60)


# -- leases --


class Clock:
    """The monotonic clock, which leaps where a test would have to wait."""

    def __init__(self, monkeypatch):
        self._ahead_s = 0.0
        monkeypatch.setattr(system, "monotonic", lambda: time.monotonic() + self._ahead_s)

    def leap(self, seconds):
        self._ahead_s += seconds


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_slots_run_out_and_are_leased_again_after_silence(serve, connect, clock):
    server = serve(total_slots=4)
    first = connect(server, "actor-0", slots_wanted=4)
    assert first.join(60).slots == [0, 1, 2, 3]
    # What kill -9 looks like from here: no more heartbeats, no BYE.
    first._membership._link.send = lambda *anything: False
    first._membership._link.send_frames = lambda *anything: False
    # The last heartbeat has arrived before this one is told to wait, and does not count after the leap.
    second = connect(server, "actor-1", slots_wanted=4)
    none_left = "0 of the 4 slots"
    assert none_left in told_to_wait(second, lambda: none_left in second._member.waiting_for)
    clock.leap(61.0)
    third = connect(server, "actor-2", slots_wanted=4)
    assert third.join(60).slots == [0, 1, 2, 3]
    assert names(server) == ["actor-2"]


def test_a_lease_outlives_liveness_while_heartbeats_come(serve, connect, clock):
    server = serve(liveness_s=60.0)
    client = connect(server, "actor-0", slots_wanted=4)
    client.join(60)
    for _ in range(4):
        clock.leap(20.0)
        until(lambda: server.peers()[0]["seen_s_ago"] < 20.0)
    assert names(server) == ["actor-0"]
    assert client.joins == 1


def test_bye_frees_the_slots_at_once(serve, connect):
    server = serve(liveness_s=60)
    first = connect(server, "actor-0", slots_wanted=8)
    first.join(60)
    first.close("spot interruption")
    until(lambda: not server.peers())
    assert connect(server, "actor-1", slots_wanted=8).join(60).slots == list(range(8))


def test_a_shard_confirms_at_once_that_it_has_heard_of_the_end(serve, connect):
    server = serve(heartbeat_s=60.0)
    shard = connect(server, "replay-0", replay_endpoint="tcp://10.0.0.1:5560")
    shard.join(60)
    until(lambda: server.peers()[0]["clock_s"] is not None)  # the first heartbeat
    assert server.untold("replay")
    server.set_state(updates=1, stopping=True)
    until(lambda: shard.state.stopping)
    until(lambda: not server.untold("replay"), 30)  # the next heartbeat is due in a minute


def test_a_learner_that_misses_the_announcement_of_the_end_hears_with_its_next_heartbeat(
    serve, connect, monkeypatch
):
    make_sub = sockets.make_sub
    deaf = lambda ctx, endpoint, security: make_sub(ctx, "tcp://127.0.0.1:1", security)  # noqa: E731
    monkeypatch.setattr(sockets, "make_sub", deaf)
    server = serve(heartbeat_s=3.0, epochs=Epochs())
    learner = connect(server, "learner-1", role="learner")
    learner.join(60)
    # The first heartbeat follows at once: its answer would already tell of the end.
    until(lambda: server.peers()[0]["clock_s"] is not None)
    server.set_state(updates=1, stopping=True)
    assert server.untold("replay", "learner")  # the next one is due in 3 s
    until(lambda: learner.state.stopping)
    assert not server.untold("replay", "learner")


def test_a_restarted_actor_takes_its_slots_over_at_once(serve, connect):
    server = serve(liveness_s=60)
    old = connect(server, "actor-0", slots_wanted=4)
    old.join(60)
    new = connect(server, "actor-0", slots_wanted=4)
    assert new.join(60).slots == [0, 1, 2, 3]
    # The old process, should it be alive after all, is told and does not fight for the name.
    with pytest.raises(ConfigError, match="unique"):
        until(lambda: old.check())
    assert names(server) == ["actor-0"]
    assert server.peers()[0]["incarnation"] == new.incarnation


# -- the learner restarts --


@pytest.mark.parametrize("liveness_s", [60.0, 1.0])
def test_everyone_joins_again_after_the_learner_restarts(serve, connect, liveness_s):
    server = serve(liveness_s=liveness_s)
    filler = connect(server, "actor-0", slots_wanted=2)
    filler.join(60)
    actor = connect(server, "actor-1", slots_wanted=2)
    replay = connect(server, "replay-0", replay_endpoint="tcp://127.0.0.1:5560")
    assert actor.join(60).slots == [2, 3]
    replay.join(60)
    filler.close()
    session = actor.state.session
    until(lambda: len(names(server)) == 2)
    server.stop()
    if liveness_s < 60:
        until(lambda: not actor.connected and not replay.connected)
    joins = actor.joins, replay.joins
    server = serve(server.control_endpoint)
    until(lambda: actor.joins > joins[0] and replay.joins > joins[1])
    assert actor.slots == [2, 3]
    assert actor.connected
    assert actor.state.session == server.session != session
    assert server.shards() == ["tcp://127.0.0.1:5560"]
    until(lambda: actor.shards == ["tcp://127.0.0.1:5560"])
    assert names(server) == ["actor-1", "replay-0"]


def test_a_silent_learner_is_noticed(serve, connect):
    server = serve(liveness_s=1.0)
    client = connect(server, "actor-0")
    client.join(60)
    server.stop()
    until(lambda: not client.connected)


def test_reports_made_while_the_learner_is_away_arrive_later(serve, connect):
    server = serve(liveness_s=1.0)
    client = connect(server, "actor-0")
    client.join(60)
    server.stop()
    until(lambda: not client.connected)
    for number in range(300):
        assert client.send_telemetry({"actor/n": number})
    server = serve(server.control_endpoint)
    received = [server.telemetry.get(timeout=120).metrics["actor/n"] for _ in range(256)]
    assert received == list(range(300 - 256, 300))
    assert client.telemetry_dropped == 300 - 256


# -- the ends --


def test_a_port_in_use_is_one_line(ctx, serve):
    endpoint = serve().control_endpoint
    options = {"config": {}, "structural_hash": "", "total_slots": 1}
    with pytest.raises(ConfigError, match="another process has it"):
        control_server(ctx, endpoint, LOOPBACK, **options).start()
    with pytest.raises(ConfigError, match="another process has it"):
        control_server(ctx, LOOPBACK, endpoint, **options).start()


def test_everything_may_be_closed_twice_and_unused(serve, connect):
    server = serve()
    client = connect(server, "actor-0")
    client.join(60)
    for _ in range(2):
        client.close()
        server.stop()
    unused = connect("tcp://127.0.0.1:1", "actor-1")
    unused.close()


def test_closing_ends_a_join_that_waits(connect):
    client = connect("tcp://127.0.0.1:1", "actor-0")
    threading.Timer(0.2, client.close).start()
    with pytest.raises(PeerError):
        client.join(1000)  # longer than a test may take


def test_the_context_can_be_terminated_after_an_unclean_end(ctx, serve, connect):
    server = serve(LOOPBACK)
    client = connect(server, "actor-0")
    client.join(60)
    server.stop()
    client.close()
    ctx.term()  # hangs where a socket was left open or lingers


def test_one_that_only_looks_is_no_news(serve, connect, caplog):
    caplog.set_level(logging.INFO)
    server = serve()
    for name in ("viewer-0", "actor-0"):
        client = connect(server, name)
        client.join(60)
        client.close("has seen enough")
        until(lambda: not server.peers())
    lines = [
        record.getMessage()
        for record in caplog.records
        if record.name == "troupe.services.learner.control.requests"
    ]
    assert not any("viewer-0" in line for line in lines), lines
    assert sum("actor-0" in line for line in lines) == 2, lines


def test_who_comes_and_goes_all_the_time_does_not_fill_the_log(serve, connect, caplog, monkeypatch):
    monkeypatch.setattr("troupe.services.learner.control.requests.NEWS_AT_ONCE", 3)
    monkeypatch.setattr("troupe.services.learner.control.requests.NEWS_PER_S", 0.0)
    caplog.set_level(logging.INFO)
    server = serve()
    for _ in range(5):
        client = connect(server, "actor-0")
        client.join(60)
        client.close("again")
        until(lambda: not server.peers())
    lines = [
        record.getMessage()
        for record in caplog.records
        if record.name == "troupe.services.learner.control.requests"
    ]
    assert [("joins" in line, "leaves" in line, "too often" in line) for line in lines] == [
        (True, False, False),
        (False, True, False),
        (True, False, False),
        (False, False, True),
    ]


def test_a_peers_words_are_short_and_printable():
    words = "a\x1b[2J\nb" + "x" * 4000
    for body in (
        messages.Error.of(messages.Error(kind="gap\x07").message()),
        messages.Error.of(Message("ERROR", {"kind": "gap\x07", "detail": words}, {}, 1)),
    ):
        assert body.kind == "gap\\x07"
    assert body.detail.startswith("a\\x1b[2J bxx")
    reasons = [
        messages.Bye.of(Message("BYE", {"reason": words}, {}, 1)).reason,
        messages.Heartbeat.of(Message("HEARTBEAT", {"error": words}, {}, 1)).error,
        messages.Wait.of(Message("WAIT", {"reason": words}, {}, 1)).reason,
        messages.Credit.of(Message("CREDIT", {"reason": words, "credit": 1, "session": 1}, {}, 1)).reason,
        body.detail,
    ]
    assert all(text.isprintable() and len(text) == MAX_PEER_CHARS for text in reasons)
    hello = {"role": "actor", "name": "a", "incarnation": 1, "host": "h" * 256}
    with pytest.raises(WireError, match=r"HELLO\.host"):
        messages.Hello.of(Message("HELLO", hello, {}, 1))


def test_an_actor_that_has_joined_without_slots_may_ask_for_them(serve, connect):
    """It knows only from the run's config how many environments to make."""
    server = serve()
    client = connect(server, "actor-0")
    assert client.join(60).slots == []
    (before,) = server.peers()
    client.want_slots(2)
    assert client.join(60).slots == [0, 1]
    (peer,) = server.peers()
    assert (peer["name"], peer["slots"]) == (before["name"], [0, 1])
    assert client.joins == 2
