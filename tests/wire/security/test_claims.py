"""What the holder of a key may claim: real keys, real sockets."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zmq

from tests.harness import LOOPBACK, Untyped, games, told_to_wait, until
from troupe.common.errors import ConfigError
from troupe.common.wire import messages, sockets
from troupe.common.wire.codec import Message, encode
from troupe.common.wire.replay.client import ReplayClient
from troupe.common.wire.replay.sharded import ShardedReplayClient
from troupe.common.wire.security import claims
from troupe.common.wire.security.keys import load_keys, make_keys
from troupe.common.wire.sockets import Security
from troupe.services.evaluator.video import encode_gif, encode_mp4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys")
    make_keys(path)
    return path


@pytest.fixture
def secured(folder):
    return lambda role: Security(keys=load_keys(folder, role))


@pytest.fixture
def second_actor(folder, tmp_path):
    """An actor with a key of its own, in the same allow-list."""
    own = tmp_path / "second"
    own.mkdir(mode=0o700)
    public, secret = zmq.curve_keypair()
    for name, content in (("actor.secret", secret), *((n, (folder / n).read_bytes()) for n in PUBLIC)):
        (own / name).touch(0o600)
        (own / name).write_bytes(content)
    with (folder / "allowed").open("a") as file:
        file.write(f"actor {public.decode()}\n")
    return Security(keys=load_keys(own, "actor"))


PUBLIC = ("learner.public", "replay.public")


def names(server):
    return sorted(peer["name"] for peer in server.peers())


# -- where a shard is --


@pytest.mark.parametrize("role", ["viewer", "actor", "evaluator"])
def test_only_a_replay_key_announces_a_shard(serve, connect, secured, role):
    server = serve(security=secured("learner"))
    settings = {"role": role, "security": secured(role), "replay_endpoint": "tcp://127.0.0.1:5560"}
    with pytest.raises(ConfigError, match=f"its role is {role}: that is for the role replay only"):
        connect(server, "someone", **settings).join(60)
    assert server.shards() == []
    connect(server, "replay-0", **{**settings, "role": "replay", "security": secured("replay")}).join(60)
    assert server.shards() == ["tcp://127.0.0.1:5560"]


BAD_ADDRESSES = [
    *("a", "tcp://", "tcp://:1", "tcp://*:5560", "tcp://host:0", "tcp://host:65536", "tcp://host:*"),
    *("tcp://_:5560", "tcp://a b:5560", "tcp://a;b:5560", "tcp://[::g]:5560", "inproc://x", "udp://a:1"),
    *("ipc://evil.sock", "ipc:///tmp/evil.sock", "ipc://@abstract", "ipc:///tmp/a\0b", "ipc:///none/x"),
    "tcp://" + "a" * 4000 + ":5560",
]


@pytest.mark.parametrize("keyed", [True, False])
@pytest.mark.parametrize("address", BAD_ADDRESSES)
def test_an_address_that_cannot_be_used_is_refused(serve, connect, secured, address, keyed):
    server = serve(security=secured("learner") if keyed else None)
    client = connect(
        server, "replay-0", replay_endpoint=address, security=secured("replay") if keyed else None
    )
    with pytest.raises(ConfigError, match="refuses replay-0"):
        client.join(60)
    assert server.shards() == []
    assert server.peers() == []


def test_an_ipc_shard_stands_beside_the_sockets_of_the_run(serve, connect, secured, tmp_path):
    private, open_to_all = tmp_path / "private", tmp_path / "open"
    for directory, mode in ((private, 0o700), (open_to_all, 0o777)):
        directory.mkdir()
        directory.chmod(mode)
    server = serve(f"ipc://{private}/control", shard_sockets=f"ipc://{open_to_all}/replay-0")
    connect(server, "replay-0", replay_endpoint=f"ipc://{private}/replay-0").join(60)
    assert server.shards() == [f"ipc://{private}/replay-0"]
    for directory, why in ((open_to_all, "others may write in"), (tmp_path, "no ipc sockets there")):
        with pytest.raises(ConfigError, match=why):
            connect(server, "replay-1", replay_endpoint=f"ipc://{directory}/replay-1").join(60)
    # With TCP, only where the learner's own configuration says so.
    elsewhere = {"replay_endpoint": f"ipc://{private}/replay-2", "security": secured("replay")}
    with pytest.raises(ConfigError, match="no ipc sockets there"):
        connect(serve(security=secured("learner")), "replay-2", **elsewhere).join(60)
    told = serve(security=secured("learner"), shard_sockets=f"ipc://{private}/replay-0")
    connect(told, "replay-2", **elsewhere).join(60)
    assert told.shards() == [f"ipc://{private}/replay-2"]


def test_a_member_does_without_an_address_that_is_unsafe_where_it_is(ctx, connect, tmp_path):
    """The learner may be on another machine, where that directory is private."""
    router = sockets.make_router(ctx, LOOPBACK)
    client = connect(sockets.bound_endpoint(router), "actor-0", liveness_s=30.0)
    pool = ThreadPoolExecutor()
    joining = pool.submit(client.join, 60)
    frames = until(lambda: sockets.receive_frames(router))
    state = {"session": 1, "version": -1, "steps": 0, "updates": 0, "stopping": False}
    welcome = {
        **state,
        **{"config": {}, "slots": [], "total_slots": 1, "announce": LOOPBACK.replace("*", "1")},
        **{"heartbeat_s": 0.05, "liveness_s": 30.0},
        "shards": ["a", "ipc:///tmp/evil", "ipc://evil", "tcp://127.0.0.1:5560"],
    }
    sockets.send(router, Message(messages.Welcome.TYPE, welcome, {}, 1), frames[0].bytes)
    joining.result(90)
    pool.shutdown()
    assert client.shards == ["tcp://127.0.0.1:5560"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("heartbeat_s", value) for value in (1e-9, 0.0, -1.0, 1e9, float("nan"), float("inf"))),
        *(("liveness_s", value) for value in (1e-9, 0.0, -1.0, 1e9, float("nan"), float("inf"))),
        ("total_slots", 2**40),
    ],
)
def test_a_welcome_with_numbers_that_no_run_may_have_is_one_line(ctx, connect, field, value):
    router = sockets.make_router(ctx, LOOPBACK)
    client = connect(sockets.bound_endpoint(router), "actor-0", liveness_s=30.0)
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(client.join, 60)
        frames = until(lambda: sockets.receive_frames(router))
        state = {"session": 1, "version": -1, "steps": 0, "updates": 0, "stopping": False}
        welcome = {**state, "config": {}, "slots": [], "total_slots": 1, "announce": "tcp://127.0.0.1:1"}
        welcome |= {"heartbeat_s": 0.05, "liveness_s": 30.0, "shards": [], field: value}
        sockets.send(router, Message(messages.Welcome.TYPE, welcome, {}, 1), frames[0].bytes)
        with pytest.raises(ConfigError, match=rf"cannot be used: WELCOME\.{field}: expected") as caught:
            joining.result(90)
    assert "\n" not in str(caught.value)


def impostors(ctx, other):
    """Who may listen at the address of a shard without its key: no keys, other keys, and nobody."""
    yield sockets.make_router(ctx, LOOPBACK)
    yield sockets.make_router(ctx, LOOPBACK, Security(keys=load_keys(other, "replay")))


@pytest.mark.parametrize("kind", [0, 1])
def test_a_shard_without_the_replay_key_is_left_out_and_ends_nobody(ctx, secured, tmp_path, kind):
    """Neither the learner, which samples, nor an actor, which inserts; the honest shard serves on."""
    make_keys(tmp_path / "other")
    false = list(impostors(ctx, tmp_path / "other"))[kind]
    endpoint = sockets.bound_endpoint(false)
    learner = ShardedReplayClient(
        [endpoint], ctx=ctx, name="learner", security=secured("learner"), tolerate_refusals=True
    )
    actor = ReplayClient(endpoint, ctx=ctx, name="actor-0", security=secured("actor"), tolerate_refusals=True)
    learner.request_sample(8)

    def both_say_why():
        assert learner.receive(0.01) is None
        actor.poll(10)
        return "key" in learner.wait_reason and "key" in actor.blocked_reason

    until(both_say_why, 60)
    assert sockets.receive_frames(false) is None
    learner.close(0)
    actor.close()


def test_a_shard_that_gets_its_key_at_last_is_used(ctx, secured, monkeypatch):
    monkeypatch.setattr("troupe.common.wire.link.RETRY_AUTH_S", 0.2)
    false = sockets.make_router(ctx, LOOPBACK)
    endpoint = sockets.bound_endpoint(false)
    actor = ReplayClient(endpoint, ctx=ctx, name="actor-0", security=secured("actor"), tolerate_refusals=True)

    def refused():
        actor.poll(10)
        return "key" in actor.blocked_reason

    until(refused, 60)
    false.close(linger=0)
    true = None

    def bound():
        nonlocal true
        try:
            true = sockets.make_router(ctx, endpoint, secured("replay"))
        except ConfigError:
            return False
        return True

    until(bound)

    def arrives():
        actor.poll(10)
        return sockets.receive_frames(true)

    until(arrives, 60)
    actor.close()


# -- names --


def test_nobody_takes_the_name_of_a_live_service(serve, connect, secured, second_actor):
    server = serve(security=secured("learner"), liveness_s=60.0)
    joined = {}
    for name, role in (
        ("actor-0", "actor"),
        ("evaluator", "evaluator"),
        ("replay-0", "replay"),
        ("x", "actor"),
    ):
        joined[name] = connect(server, name, role=role, security=secured(role))
        joined[name].join(60)
    for name in ("actor-0", "evaluator", "replay-0"):
        with pytest.raises(ConfigError, match=f"{name} is a name for the role"):
            connect(server, name, role="viewer", security=secured("viewer")).join(60)
    for role, security in (("viewer", secured("viewer")), ("evaluator", secured("evaluator"))):
        taken = connect(server, "x", role=role, security=security)
        why = "the name x belongs to a process with role actor"
        assert why in told_to_wait(taken, lambda taken=taken, why=why: why in taken._member.waiting_for)
    taken = connect(server, "x", role="actor", security=second_actor)
    why = "the name x belongs to a process with another key"
    assert why in told_to_wait(taken, lambda: why in taken._member.waiting_for)
    for client in joined.values():
        client.check()
        assert client.connected
    assert names(server) == sorted(joined)


@pytest.mark.parametrize("name", ["ACTOR-0", "actor-0 ", " learner", "Evaluator", "\uff41ctor-0"])
def test_nobody_takes_a_name_that_looks_like_a_service_s(serve, connect, secured, name):
    server = serve(security=secured("learner"), liveness_s=60.0)
    with pytest.raises(ConfigError, match=r"looks like (actor-0|learner|evaluator): give another --name"):
        connect(server, name, role="actor", security=secured("actor")).join(60)
    connect(server, "my actor", role="actor", security=secured("actor")).join(60)


def test_a_restart_still_replaces_and_an_ended_lease_frees_the_name(serve, connect, secured, second_actor):
    server = serve(security=secured("learner"), liveness_s=60.0)
    first = connect(server, "x", role="actor", security=secured("actor"))
    first.join(60)
    again = connect(server, "x", role="actor", security=secured("actor"))
    again.join(60)
    assert [peer["incarnation"] for peer in server.peers()] == [again.incarnation]
    again.close()
    first.close()
    until(lambda: not server.peers())
    connect(server, "x", role="actor", security=second_actor).join(60)


def test_a_viewer_cannot_keep_a_name_from_a_service(serve, connect, secured):
    server = serve(security=secured("learner"), liveness_s=60.0)
    connect(server, "rack-7", role="viewer", security=secured("viewer")).join(60)
    connect(server, "rack-7", role="actor", slots_wanted=2, security=secured("actor")).join(60)
    until(lambda: [peer["role"] for peer in server.peers()] == ["actor"])


# -- slots --


@pytest.mark.parametrize("role", ["viewer", "evaluator", "replay"])
def test_only_actors_get_slots(serve, connect, secured, role):
    server = serve(security=secured("learner"))
    with pytest.raises(ConfigError, match=f"its role is {role}: that is for the role actor only"):
        connect(server, "someone", role=role, slots_wanted=8, security=secured(role)).join(60)
    assert connect(server, "actor-0", slots_wanted=8, security=secured("actor")).join(60).slots == list(
        range(8)
    )


def test_the_slots_of_one_key_are_bounded(serve, connect, secured, second_actor):
    server = serve(security=secured("learner"), max_per_key=5, liveness_s=60.0)
    assert len(connect(server, "actor-0", slots_wanted=4, security=secured("actor")).join(60).slots) == 4
    assert len(connect(server, "actor-1", slots_wanted=4, security=secured("actor")).join(60).slots) == 1
    third = connect(server, "actor-2", slots_wanted=4, security=secured("actor"))
    assert "hold all 5 slots" in told_to_wait(third, lambda: "hold all 5" in third._member.waiting_for)
    assert connect(server, "actor-3", slots_wanted=3, security=second_actor).join(60).slots == [5, 6, 7]


# -- reports --


MP4 = np.frombuffer(encode_mp4(np.zeros((2, 8, 8, 3), np.uint8)), np.uint8)
FILM = np.frombuffer(encode_gif(np.zeros((2, 8, 8, 3), np.uint8)), np.uint8)
WIDE = np.frombuffer(
    b"GIF89a" + (65535).to_bytes(2, "little") + (8).to_bytes(2, "little") + bytes(9), np.uint8
)
REPORTS = [  # role, metrics, fields, blobs
    ("viewer", {"learner/loss": 1.0}, {}, {}),
    ("viewer", {"actor/steps": 1.0}, {}, {}),
    ("viewer", {"viewer/x": 1.0}, {}, {}),
    ("viewer", {}, {"episodes": [[1.0, 2]]}, {}),
    ("viewer", {}, {}, {"video": FILM}),
    ("actor", {"learner/loss": 1.0}, {}, {}),
    ("actor", {"eval/episode_return": 1.0}, {}, {}),
    ("actor", {"params/version": 1.0}, {}, {}),
    ("actor", {"actor/" + "x" * 100: 1.0}, {}, {}),
    ("actor", {f"actor/{i}": 1.0 for i in range(1000)}, {}, {}),
    ("actor", {"actor/a\nb": 1.0}, {}, {}),
    ("actor", {"actor/": 1.0}, {}, {}),
    ("actor", {"actor//a": 1.0}, {}, {}),
    ("actor", {"actor/../a": 1.0}, {}, {}),
    ("actor", {"actor/a/": 1.0}, {}, {}),
    ("actor", {"actor/a:b": 1.0}, {}, {}),
    ("actor", {"actor/a": float("nan")}, {}, {}),
    ("actor", {"actor/a": float("-inf")}, {}, {}),
    ("replay", {"replay/items": 1e31}, {}, {}),
    ("actor", {}, {"episodes": [[1.0, 2]] * 5000}, {}),
    ("actor", {}, {"anything": 1}, {}),
    ("actor", {}, {"trouble": "x" * 501}, {}),
    ("actor", {}, {"trouble": "two\nlines"}, {}),
    ("actor", {}, {"trouble": 1}, {}),
    ("replay", {}, {"trouble": "x"}, {}),
    ("actor", {}, {}, {"video": FILM}),
    ("evaluator", {"eval/version": 1e300}, {}, {}),
    ("evaluator", {"eval/version": float("nan")}, {}, {}),
    ("evaluator", {"eval/version": -5}, {}, {}),
    ("actor", {"actor/steps": 10}, {"episodes": [["many", None], 3]}, {}),
    ("actor", {"actor/steps": 10}, {"episodes": [{}]}, {}),
    ("actor", {"actor/steps": 10}, {"episodes": {"a": 1}}, {}),
    ("actor", {"actor/steps": 10}, {"episodes": [[float("nan"), 1.0]]}, {}),
    ("actor", {}, {"episodes": [[1.0, -1]]}, {}),
    ("actor", {}, {"episodes": [[1.0, 2.0**54]]}, {}),
    ("actor", {}, {"episodes": [[1.0, float("nan")]]}, {}),
    ("actor", {}, {"episodes": [[1e31, 1]]}, {}),
    ("evaluator", {}, {"episodes": [[float("inf"), 1]]}, {}),
    ("actor", {}, {"episodes": [[1.0, 2, 0, float("nan")]]}, {}),
    ("actor", {}, {"episodes": [[1.0, 2, 0, "many"]]}, {}),
    ("actor", {}, {"episodes": [[1.0, 2, 0, 1.0, 1.0]]}, {}),
    ("evaluator", {"actor/steps": 1.0}, {}, {}),
    ("replay", {}, {"episodes": [[1.0, 2]]}, {}),
    ("evaluator", {}, {}, {"video": np.zeros((1, 131072, 1, 3), np.uint8)}),
    ("evaluator", {}, {}, {"video": np.zeros(100, np.uint8)}),
    ("evaluator", {}, {}, {"video": np.zeros(0, np.uint8)}),
    ("evaluator", {}, {}, {"video": WIDE}),
    ("evaluator", {}, {}, {"video": np.concatenate([FILM, np.zeros(claims.MAX_VIDEO_BYTES, np.uint8)])}),
    ("evaluator", {}, {}, {"picture": FILM}),
    ("actor", {}, {"episodes": [[1.0, 2]], "part": 0}, {}),
    ("evaluator", {}, {"episodes": [[1.0, 2]], "part": 0}, {}),
    ("evaluator", {"eval/version": 1.0}, {"episodes": [[1.0, 2]], "part": -1}, {}),
    ("evaluator", {"eval/version": 1.0}, {"episodes": [[1.0, 2]], "part": "0"}, {}),
    ("evaluator", {"eval/version": 1.0}, {"part": 0}, {}),
    ("evaluator", {"eval/version": 1.0}, {"episodes": [[1.0, 2]], "part": 0, "trouble": "x"}, {}),
    ("evaluator", {}, {"part": 0, "trouble": "x"}, {}),
    ("evaluator", {}, {"trouble": "x"}, {}),
    ("evaluator", {"eval/version": 1.0}, {"episodes": [[1.0, 2]], "part": 0, "tasks": ["a", "b"]}, {}),
    ("evaluator", {"eval/version": 1.0}, {"episodes": [[1.0, 2]], "part": 0, "tasks": ["a,\n"]}, {}),
    ("evaluator", {"eval/version": 1.0}, {"episodes": [[1.0, 2]], "tasks": ["a"]}, {}),
    ("actor", {}, {"tasks": ["a", "b"], "episodes": [[1.0, 2]]}, {}),
    ("actor", {}, {"tasks": ["a"], "episodes": 1}, {}),
    ("actor", {}, {"tasks": "a", "episodes": [[1.0, 2]]}, {}),
    ("replay", {}, {"episodes": [[1.0, 2]], "tasks": ["a"]}, {}),
    ("actor", {}, {"episodes": [[1.0, 2, -1]]}, {}),
    ("actor", {}, {"episodes": [[1.0, 2, 1.5]]}, {}),
    ("evaluator", {}, {}, {"mp4": MP4}),
    ("evaluator", {}, {}, {"video": FILM, "mp4": FILM}),
    ("evaluator", {}, {}, {"video": FILM, "mp4": MP4[:4]}),
    ("evaluator", {}, {}, {"video": FILM, "mp4": MP4.astype(np.float32)}),
    ("evaluator", {}, {}, {"video": FILM, "mp4": np.resize(MP4, claims.MAX_VIDEO_BYTES + 1)}),
]


@pytest.mark.parametrize("number", range(len(REPORTS)))
def test_a_report_that_its_role_may_not_make_is_not_taken(serve, connect, secured, number):
    role, metrics, fields, blobs = REPORTS[number]
    server = serve(security=secured("learner"))
    client = connect(server, "someone", role=role, security=secured(role))
    client.join(60)
    assert client.send_telemetry(metrics, blobs, Untyped(fields))
    until(server.rejected)
    assert set(server.rejected()) <= {"claim", "bad_field"}
    assert server.telemetry.empty()
    assert client.connected


def test_nobody_floods_the_learner_with_reports_and_films(serve, connect, secured, monkeypatch):
    for rate in ("REPORTS_PER_S", "VIDEOS_PER_S"):  # else a slow machine would be given more
        monkeypatch.setattr(claims, rate, 0.0)
    server = serve(security=secured("learner"), liveness_s=60.0)
    actor = connect(server, "actor-0", security=secured("actor"))
    evaluator = connect(server, "evaluator", security=secured("evaluator"))
    for client in (actor, evaluator):
        client.join(60)
    for number in range(20):
        evaluator.send_telemetry({"eval/version": number}, {"video": FILM})
    until(lambda: server.rejected().get("too_many") == 20 - claims.VIDEOS_AT_ONCE)
    assert server.telemetry.qsize() == claims.VIDEOS_AT_ONCE
    sent = 0
    while server.rejected()["too_many"] < 100:
        actor._membership.waker.wake()
        for _ in range(100):
            sent += actor.send_telemetry({"actor/steps": 1.0})
        until(lambda: not actor._member.telemetry)
    again = connect(server, "actor-0", security=secured("actor"))  # a new process under the name gets no more
    again.join(60)
    rejected = server.rejected()["too_many"]
    for _ in range(200):
        again.send_telemetry({"actor/steps": 1.0})
    until(lambda: server.rejected()["too_many"] > rejected)
    assert evaluator.connected


def test_a_flood_of_long_headers_is_refused_before_it_is_decoded(serve, connect, secured, monkeypatch):
    monkeypatch.setattr(claims, "HEADER_BYTES_PER_S", 0.0)
    monkeypatch.setattr(claims, "HEADER_BYTES_AT_ONCE", 1 << 18)
    server = serve(security=secured("learner"), liveness_s=60.0)
    actor = connect(server, "actor-0", slots_wanted=1, security=secured("actor"))
    actor.join(60)
    crowd = Untyped({"episodes": [[0.5, 1, 0]] * 4096})
    for _ in range(30):
        actor.send_telemetry({}, None, crowd)
    until(lambda: server.rejected().get("too_many", 0) + server.telemetry.qsize() == 30)
    with server._lock:
        (peer,) = server._roster._by_name.values()
        left = peer.headers._left
    assert 0 <= left < len(encode(Message("TELEMETRY", {"fields": crowd.entries()}))[0])
    assert actor.connected  # small messages are served as ever


def test_a_role_does_not_fill_the_record_with_names(serve, connect, secured, monkeypatch):
    monkeypatch.setattr(claims, "MAX_METRIC_NAMES", 5)
    server = serve(security=secured("learner"))
    evaluator = connect(server, "evaluator", security=secured("evaluator"))
    evaluator.join(60)
    seen = []
    for first in (0, 3, 6):
        evaluator.send_telemetry({f"eval/{first + i}": 1.0 for i in range(3)}, {}, games([1.0, 2]))
        report = server.telemetry.get(timeout=120)
        assert report.fields == games([1.0, 2])  # what is known is taken all the same
        seen += report.metrics
    assert seen == [f"eval/{i}" for i in range(5)]
    assert server.rejected() == {"too_many": 2}
    actor = connect(server, "actor-0", security=secured("actor"))  # another role has names of its own
    actor.join(60)
    names = claims.MetricNames()  # and so has another key
    crowd = {f"actor/{i}": 1.0 for i in range(9)}
    assert len(names.known("actor", "one", crowd)) == 5
    assert names.known("actor", "two", {"actor/steps": 4.0}) == {"actor/steps": 4.0}
    actor.send_telemetry({"actor/steps": 1.0})
    assert server.telemetry.get(timeout=120).metrics == {"actor/steps": 1.0}


def test_every_role_may_report_what_is_its_own(serve, connect, secured):
    server = serve(security=secured("learner"))
    own = {
        "actor": ({"actor/steps": 4.0, "params/staleness": 1.0}, games([1.0, 2, 0]), {}),
        "replay": ({"replay/items": 3.0}, games(), {}),
        "evaluator": ({"eval/episode_return": 2.0}, games(), {"video": FILM, "mp4": MP4}),
    }
    for role, (metrics, fields, blobs) in own.items():
        wanted = {"slots_wanted": 1} if role == "actor" else {}
        client = connect(server, "someone", role=role, security=secured(role), **wanted)
        client.join(60)
        assert client.send_telemetry(metrics, blobs, fields)
        report = server.telemetry.get(timeout=120)
        assert (report.role, report.metrics, report.fields) == (role, metrics, fields)
        client.close()
        until(lambda: not server.peers())
    assert server.rejected() == {}


def test_the_directory_of_another_user_proves_nothing(tmp_path):
    if os.getuid():
        pytest.skip("giving files away takes root")
    os.chown(tmp_path, 65534, -1)
    assert "others may write in" in claims.unusable(f"ipc://{tmp_path}/replay-0")
