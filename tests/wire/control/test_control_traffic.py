"""What goes over a control connection: parameters, reports, the state of the run."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from msgspec.structs import replace

from tests.harness import LOOPBACK, fetched, games, make_steps, until
from tests.wire.control.test_member import NEW
from troupe.common.wire import messages, sockets
from troupe.common.wire.codec import Message, decode
from troupe.common.wire.security.claims import GAME_STEPS_AHEAD
from troupe.services.evaluator.video import encode_gif
from troupe.services.learner.control import roster
from troupe.services.learner.control.budget import StepBudget

NOBODY = "tcp://127.0.0.1:9"
WEIGHTS = {"w": np.arange(300_000, dtype=np.float32).reshape(300, 1000), "n": np.array(3, np.int64)}


def scaled(factor: float) -> dict[str, np.ndarray]:
    return {"w": WEIGHTS["w"] * np.float32(factor), "n": WEIGHTS["n"]}


# -- parameters --


def test_the_newest_parameters_are_fetched(serve, connect):
    server = serve()
    client = connect(server, "actor-0")
    client.join(60)
    for version in range(1, 6):
        server.publish(version, scaled(version))
    until(lambda: client.state.version == 5)
    params = fetched(client)
    assert params.version == 5
    np.testing.assert_array_equal(params.params["w"], WEIGHTS["w"] * 5)
    assert params.params["n"].shape == ()
    assert not params.params["w"].flags.writeable


def test_parameters_may_travel_in_bfloat16(serve, connect):
    server = serve(bfloat16=True)
    client = connect(server, "actor-0")
    client.join(60)
    server.publish(1, scaled(0.3))
    params = fetched(client).params
    assert params["w"].dtype == np.float32
    np.testing.assert_allclose(params["w"], scaled(0.3)["w"], rtol=2.0**-8)
    assert not np.array_equal(params["w"], scaled(0.3)["w"])
    assert params["n"] == 3


def test_newer_parameters_come_without_waiting(serve, connect):
    server = serve()
    client = connect(server, "actor-0")
    client.join(60)
    server.publish(1, scaled(1))
    assert fetched(client).version == 1
    assert client.params_if_newer(1) is None
    server.publish(2, scaled(2))
    params = until(lambda: client.params_if_newer(1))
    assert params.version == 2
    assert params.params["w"][0, 1] == 2
    assert client.params_if_newer(2) is None
    until(lambda: server.peers()[0]["version"] == 2)


def test_a_late_joiner_gets_the_newest_parameters(serve, connect):
    server = serve()
    server.publish(41, scaled(1))
    server.publish(42, scaled(2))
    client = connect(server, "actor-0")
    assert client.join(60).version == 42
    assert fetched(client).version == 42


def test_many_askers_share_one_encoding(serve, connect, monkeypatch):
    server = serve()
    calls = []
    import troupe.services.learner.control.server as control

    encode_params = control.encode_params
    monkeypatch.setattr(
        control, "encode_params", lambda params, **how: calls.append(1) or encode_params(params, **how)
    )
    clients = [connect(server, f"actor-{index}") for index in range(5)]
    for client in clients:
        client.join(60)
    server.publish(1, WEIGHTS)
    for client in clients:
        np.testing.assert_array_equal(fetched(client).params["w"], WEIGHTS["w"])
    assert len(calls) == 1


def test_published_parameters_are_a_snapshot(serve, connect):
    server = serve()
    client = connect(server, "actor-0")
    client.join(60)
    weights = np.zeros(1000, np.float32)
    server.publish(1, {"w": weights})
    weights += 1  # the optimiser goes on
    assert fetched(client).params["w"].sum() == 0


def test_an_idle_membership_costs_next_to_nothing(serve, connect):
    connect(serve(heartbeat_s=1.0, liveness_s=15.0), "actor-0").join(60)
    start = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - start < 0.5


def test_those_who_are_many_are_told_to_beat_less_often_and_those_who_are_few_as_ever(
    serve, connect, monkeypatch
):
    monkeypatch.setattr(roster, "FREQUENT_ACTORS", 2)
    server = serve(heartbeat_s=0.05, total_slots=4)
    actors = [connect(server, f"actor-{number}", slots_wanted=1) for number in range(4)]
    evaluator = connect(server, "evaluator-0", role="evaluator")
    for client in (*actors, evaluator):
        client.join(60)
    until(lambda: [each._membership.heartbeat_s for each in actors] == [0.1] * 4)
    for client in actors[1:]:
        client.close()
    until(lambda: actors[0]._membership.heartbeat_s == 0.05)
    assert evaluator._membership.heartbeat_s == 0.05


@pytest.mark.parametrize(("heartbeat_s", "report_s"), [(0.05, 2.0), (1.0, 2.0), (3.0, 6.0), (20.0, 10.0)])
def test_actors_that_beat_less_often_report_less_often_within_limits(serve, connect, heartbeat_s, report_s):
    client = connect(serve(heartbeat_s=heartbeat_s), "actor-0")
    client.join(60)
    assert client.report_s == report_s


@pytest.mark.parametrize("version", [80, 100])
def test_parameters_of_a_restarted_learner_are_newer_whatever_their_number(serve, connect, version):
    server = serve()
    client = connect(server, "actor-0")
    client.join(60)
    server.publish(100, scaled(1))
    assert fetched(client).version == 100
    server.stop()
    server = serve(server.control_endpoint)
    server.publish(version, scaled(2))
    params = until(lambda: client.params_if_newer(100))
    assert params.version == version
    assert params.params["w"][0, 1] == 2
    assert client.params_if_newer(version) is None


# -- telemetry, state, shards --


def test_reports_arrive_whole_and_in_order(serve, connect):
    server = serve()
    client, actor = connect(server, "evaluator"), connect(server, "actor-0", slots_wanted=1)
    client.join(60)
    assert actor.join(60).slots == [0]
    video = encode_gif(np.random.default_rng(1).integers(0, 255, (20, 84, 84, 3), np.uint8))
    client.send_telemetry({"eval/episode_return": np.float32(21.0), "eval/version": 3}, {"video": video})
    client.send_telemetry({"eval/second": 2})
    report = server.telemetry.get(timeout=120)
    assert (report.source, report.role, report.incarnation) == ("evaluator", "evaluator", client.incarnation)
    assert report.metrics == {"eval/episode_return": 21.0, "eval/version": 3.0}
    assert report.blobs["video"].tobytes() == video
    assert server.telemetry.get(timeout=120).metrics == {"eval/second": 2.0}
    actor.send_telemetry({}, fields=games([21.0, 900, 0], [-21.0, 800, 0]))
    assert server.telemetry.get(timeout=120).fields == games([21.0, 900, 0], [-21.0, 800, 0])


def test_games_count_as_far_as_their_actor_has_made_their_steps(serve, connect):
    """Else an actor's key fills the file of games, and the learner's memory, with what nobody played."""
    server = serve()
    actor, idle = connect(server, "actor-0", slots_wanted=1), connect(server, "actor-1")
    actor.join(60)
    idle.join(60)
    idle.send_telemetry({"actor/steps": 1}, fields=games([1.0, 5, 0]))
    report = server.telemetry.get(timeout=120)
    assert (report.metrics, report.fields) == ({"actor/steps": 1.0}, games())
    actor.send_telemetry({}, fields=games(*[[1.0, 123_456, 0]] * 5, tasks="abcde"))
    # The first may have begun under an earlier learner.
    assert server.telemetry.get(timeout=120).fields == games([1.0, 123_456, 0], tasks=["a"])
    actor.send_telemetry({}, fields=games(*[[1.0, 4, 0]] * 3000))
    assert len(server.telemetry.get(timeout=120).fields.episodes) == GAME_STEPS_AHEAD // 4


def test_a_report_that_is_too_large_is_dropped_and_counted(serve, connect):
    client = connect(serve(), "actor-0")
    client.join(60)
    assert not client.send_telemetry({}, fields=games(trouble="x" * 70_000))
    assert client.telemetry_dropped == 1


def test_reports_made_just_before_the_end_arrive(serve, connect):
    server = serve()
    client = connect(server, "actor-0")
    client.join(60)
    for number in range(50):
        client.send_telemetry({"actor/n": number})
    client.close()
    assert [server.telemetry.get(timeout=120).metrics["actor/n"] for _ in range(50)] == list(range(50))


def test_the_counters_and_the_end_of_the_run_reach_everyone(serve, connect):
    server = serve()
    client = connect(server, "actor-0")
    client.join(60)
    client.report_steps(12)
    server.set_state(updates=3)
    until(lambda: (client.state.steps, client.state.updates) == (12, 3))
    assert not client.state.stopping
    server.set_state(stopping=True)
    until(lambda: client.state.stopping)
    assert [peer["name"] for peer in server.peers()] == ["actor-0"]
    client.close()
    until(lambda: not server.peers())


def test_the_learner_knows_which_shards_have_been_told_of_the_end(serve, connect):
    server = serve(heartbeat_s=0.5)
    shard = connect(server, "replay-0", replay_endpoint="tcp://127.0.0.1:7", heartbeat_s=0.5)
    actor = connect(server, "actor-0", heartbeat_s=0.5)
    shard.join(60)
    actor.join(60)
    assert server.untold("replay")
    assert not server.untold("evaluator")
    server.set_state(stopping=True)
    until(lambda: not server.untold("replay"))
    assert shard.state.stopping
    until(lambda: not server.untold("actor"))


def test_the_answer_to_a_repeated_hello_counts_where_it_brings_other_slots(ctx, connect):
    """The lease may have ended between the two, and another process has got the former slots."""
    router = sockets.make_router(ctx, LOOPBACK)
    client = connect(sockets.bound_endpoint(router), "actor-0", slots_wanted=1)

    def hello():
        while True:
            identity, *frames = until(lambda: sockets.receive_frames(router))
            message = decode(frames)
            if message.type == "HELLO":
                return identity.bytes, message

    with ThreadPoolExecutor() as pool:
        joining = pool.submit(client.join, 60)
        (identity, first), (_, second) = hello(), hello()
        for message, slots in ((first, [0]), (second, [1])):
            answer = replace(NEW, slots=slots, announce=NOBODY).message(message.request_id)
            until(lambda answer=answer: sockets.send(router, answer, identity))
        assert joining.result(90).slots in ([0], [1])
    until(lambda: client.slots == [1])
    assert client.joins == 2


def test_shards_come_and_go(serve, connect):
    server = serve()
    actor = connect(server, "actor-0")
    assert actor.join(60).shards == []
    shards = [connect(server, f"replay-{i}", replay_endpoint=f"tcp://127.0.0.1:{5560 + i}") for i in (1, 0)]
    for shard in shards:
        shard.join(60)
    assert server.shards() == ["tcp://127.0.0.1:5560", "tcp://127.0.0.1:5561"]
    until(lambda: actor.shards == ["tcp://127.0.0.1:5560", "tcp://127.0.0.1:5561"])
    shards[1].close()
    until(lambda: actor.shards == ["tcp://127.0.0.1:5561"])


def test_an_actor_hears_at_once_how_far_it_may_go(serve, connect):
    """And the learner how far it has come: not only with the next heartbeat."""
    budget = StepBudget(100)
    server = serve(budget=budget, heartbeat_s=60.0, liveness_s=120.0)
    actor = connect(server, "actor-0", slots_wanted=4)
    actor.join(60)
    made = 0
    while made < 100:
        assert actor.may_step(4, timeout_s=60.0), made
        made += 4
        actor.report_steps(made)
    until(lambda: budget.steps == 100)
    assert not actor.may_step(4)
    assert actor.state.steps <= 100


def test_steps_reported_last_are_counted(serve, connect):
    budget = StepBudget()
    server = serve(budget=budget)
    actor = connect(server, "actor-0", slots_wanted=4)
    actor.join(60)
    actor.report_steps(40)
    actor.close()
    until(lambda: not server.peers())
    assert budget.steps == 40


def test_an_actor_that_claims_more_than_it_was_permitted_is_refused_and_the_others_go_on(serve, connect):
    budget = StepBudget(100_000_000)
    server = serve(budget=budget)
    liar, honest = (connect(server, f"actor-{i}", slots_wanted=4) for i in range(2))
    liar.join(60)
    honest.join(60)
    for claim in (1 << 53, (1 << 53) - 1):
        before = server.rejected().get("claim", 0)
        liar.report_steps(claim)
        until(lambda before=before: server.rejected().get("claim", 0) > before)
    make_steps(honest, 2000, at_once=4)
    until(lambda: budget.steps == 2000)
    assert honest.may_step(4)


def test_only_actors_make_steps(serve, connect):
    budget = StepBudget()
    server = serve(budget=budget, liveness_s=1.0)  # their BYE is refused as well
    for name in ("viewer-0", "evaluator-0", "replay-0"):
        peer = connect(server, name)
        peer.join(60)
        peer.report_steps(1000)
        assert not peer.may_step(1)
        peer.close()
    until(lambda: not server.peers())
    assert budget.steps == 0


def test_a_rejoining_actor_goes_on_counting_where_it_was(serve, connect):
    """The learner has been restarted from a checkpoint that does not know of its last steps."""
    budget = StepBudget(1000)
    server = serve(budget=budget)
    actor = connect(server, "actor-0", slots_wanted=4)
    actor.join(60)
    actor.report_steps(300)
    until(lambda: budget.steps == 300)
    endpoint, joins = server.control_endpoint, actor.joins
    server.stop()
    actor.report_steps(320)
    restored = StepBudget(1000)
    restored.load_meta({"steps": 250, "reported": {str(actor.incarnation): 250}})
    serve(endpoint, budget=restored)
    until(lambda: actor.joins > joins)
    until(lambda: restored.steps == 320)
    assert actor.may_step(4)
    assert actor._member.steps_limit <= 320 + 340


def test_a_report_says_no_more_than_there_is():
    """Absent parts cost no bytes, as thousands of games share a header."""
    fields = games([1.5, 9], [2.0, 8, 3], [0.0, 7, 4, -1.0], part=0, trouble="x")
    said = messages.Telemetry(metrics={}, fields=fields, blobs={}).message().fields["fields"]
    assert said == {"episodes": [[1.5, 9], [2.0, 8, 3], [0.0, 7, 4, -1.0]], "part": 0, "trouble": "x"}
    read = messages.Telemetry.of(Message("TELEMETRY", {"fields": said}))
    assert read.fields == fields
