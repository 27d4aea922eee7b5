"""Evaluators that share the games of an evaluation, over real sockets."""

import numpy as np
import pytest

from tests.harness import games, until
from troupe.common.wire.control.params import Published, decode_params, encode_params
from troupe.common.wire.messages import TOO_MANY
from troupe.services.evaluator.video import encode_gif
from troupe.services.learner.control.budget import StepBudget
from troupe.services.learner.control.evaluations import Evaluations

GAMES = [[1.0, 2], [3.0, 4]]


def params(value):
    return {"w": np.full(8, value, np.float32)}


def played(client, given, version):
    metrics = {"eval/version": float(version), "eval/duration_s": 1.0}
    return client.send_telemetry(metrics, fields=games(*GAMES, part=given.part))


@pytest.fixture
def server(serve):
    server = serve(evaluations=Evaluations(6, 2, 0.0, 600.0))
    server.publish(5, params(5))
    return server


def evaluator(connect, server, name):
    client = connect(server, name, role="evaluator")
    client.join(60)
    return client


def test_one_evaluation_is_shared_and_the_next_has_the_newest_parameters(server, connect):
    one, two = (evaluator(connect, server, f"evaluator-{number}") for number in range(2))
    first = until(one.next_games)
    assert (first.part, first.params.version) == (0, 5)
    server.publish(6, params(6))
    until(lambda: two.state.version == 6)
    second = until(two.next_games)
    assert (second.part, second.params.version) == (1, 5)  # as those of the first part
    np.testing.assert_array_equal(second.params.params["w"], params(5)["w"])
    assert played(one, first, 5)
    third = until(one.next_games)
    assert (third.part, third.params.version) == (2, 5)
    assert played(one, third, 5)
    assert played(two, second, 5)
    again = until(two.next_games)
    assert (again.part, again.params.version) == (0, 6)
    np.testing.assert_array_equal(again.params.params["w"], params(6)["w"])
    reports = [server.telemetry.get(timeout=120) for _ in range(3)]
    assert sorted(report.fields.part for report in reports) == [0, 1, 2]
    for report in reports:
        assert report.played.version == 5
        assert decode_params(report.played.manifest, report.played.blob)["w"][0] == 5
    assert server.rejected() == {}


def test_an_earlier_version_comes_with_the_first_part_only(server, connect):
    early = Published(3, *encode_params(params(3), bfloat16=True), 10, 1, 0.0)
    one = evaluator(connect, server, "evaluator-0")
    first = until(one.next_games)
    assert first.opponent is None
    server.play_against(early)  # from the next evaluation on
    server.publish(6, params(6))
    given = [first]
    while len(given) < 6:
        assert played(one, given[-1], given[-1].params.version)
        given.append(until(one.next_games))
    parts = [(games.params.version, games.part) for games in given]
    assert parts == [(5, 0), (5, 1), (5, 2), (6, 0), (6, 1), (6, 2)]
    assert [games.opponent is None for games in given] == [True, True, True, False, True, True]
    assert given[3].opponent.version == 3
    np.testing.assert_array_equal(given[3].opponent.params["w"], params(3)["w"])
    # Whoever has the evaluated version already is told of the opponent all the same.
    one.close("dies")
    two = evaluator(connect, server, "evaluator-1")
    until(lambda: two.params_if_newer(-1))
    again = until(two.next_games)
    assert (again.part, again.opponent) == (2, None)


def test_an_evaluation_says_where_the_run_was_when_its_parameters_were_published(serve, connect):
    budget = StepBudget()
    server = serve(budget=budget, evaluations=Evaluations(2, 2, 0.0, 600.0))
    budget.report(1, 100)
    server.set_state(updates=7)
    server.publish(5, params(5))
    budget.report(1, 300)
    one = evaluator(connect, server, "evaluator")
    games = until(one.next_games)
    server.set_state(updates=20)
    server.publish(6, params(6))
    budget.report(1, 900)
    assert one.send_telemetry({}, {"video": encode_gif(np.zeros((2, 8, 8, 3), np.uint8))})
    assert played(one, games, 5)
    for _ in range(2):
        told = server.telemetry.get(timeout=120).played
        assert (told.version, told.steps, told.updates) == (5, 100, 7)


def test_one_that_dies_leaves_its_part_to_another(server, connect):
    one, two = (evaluator(connect, server, f"evaluator-{number}") for number in range(2))
    assert until(one.next_games).part == 0
    for part in (1, 2):
        games = until(two.next_games)
        assert games.part == part
        assert played(two, games, 5)
    one.close("dies")
    assert until(two.next_games).part == 0


def test_what_is_not_its_to_play_is_refused(server, connect):
    one, two = (evaluator(connect, server, f"evaluator-{number}") for number in range(2))
    games = until(one.next_games)
    assert played(two, games, 5)
    until(lambda: server.rejected().get("claim") == 1)
    assert played(one, games, 4)
    until(lambda: server.rejected().get("claim") == 2)
    assert server.telemetry.empty()
    assert played(one, games, 5)
    assert server.telemetry.get(timeout=120).fields.part == 0


def test_no_number_of_names_hides_the_version_of_a_part(server, connect):
    one = evaluator(connect, server, "evaluator")
    games = until(one.next_games)
    for report in range(3):
        assert one.send_telemetry({f"eval/{report}-{name}": 1.0 for name in range(250)})
    until(lambda: server.rejected().get(TOO_MANY))
    assert played(one, games, 5)
    reports = [server.telemetry.get(timeout=120) for _ in range(4)]
    assert reports[-1].metrics["eval/version"] == 5


def test_an_evaluation_that_nobody_gave_out_is_refused(server, connect):
    one = evaluator(connect, server, "evaluator")
    assert one.send_telemetry({"eval/version": float(1 << 53), "eval/episode_return": 1e9})
    until(lambda: server.rejected().get("claim") == 1)
    assert server.telemetry.empty()


def test_an_actor_gets_no_games(server, connect):
    actor = connect(server, "actor-0")
    actor.join(60)
    actor.next_games()
    until(lambda: server.rejected().get("claim"))
    assert actor.next_games() is None


def test_the_end_is_said_when_the_last_version_has_been_played(server, connect):
    one = evaluator(connect, server, "evaluator")
    assert until(one.next_games).part == 0
    server.publish(9, params(9))
    server.set_state(stopping=True)
    until(lambda: one.state.stopping)
    for part in range(3):
        games = until(one.next_games)
        assert (games.part, games.params.version) == (part, 9)
        assert not one.games_over
        assert played(one, games, 9)
    until(lambda: one.next_games() is None and one.games_over)
