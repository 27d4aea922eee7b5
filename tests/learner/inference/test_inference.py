"""Central inference in one process: real sockets, a counting environment, an agent that notes things."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.harness import Context, until
from tests.learner.halves import SPEC, Actor, Learner, check_consecutive
from troupe.common.agents import Act
from troupe.common.envs.transfer import pack_step
from troupe.common.errors import ConfigError, TroupeError
from troupe.common.wire import messages, sockets
from troupe.common.wire.codec import Message, encode
from troupe.common.wire.security.keys import load_keys, make_keys
from troupe.common.wire.sockets import Security
from troupe.services.learner.inference import service as module


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Learner]]:
    monkeypatch.setattr(module, "SWEEP_S", 0.02)
    context = Context()
    learners = []

    def make(*args: Any, **kwargs: Any) -> Learner:
        learners.append(Learner(context, *args, **kwargs))
        return learners[-1]

    yield make
    for learner in learners:
        learner.service.stop()
        learner.service.check()
    context.destroy(linger=0)


def test_what_acting_makes_of_the_steps_is_the_same_as_in_the_actor(start: Callable[..., Learner]) -> None:
    learner = start()
    actor = Actor(learner, 1, [2, 5])
    actor.begin()
    actor.steps(40)
    actor.answer()
    learner.leases.clear()  # it has left: what is complete is flushed
    until(lambda: sum(chunk.steps for chunk in learner.chunks) == 2 * 39)
    for steps in check_consecutive(learner.chunks).values():
        assert steps == [divmod(number, 7) for number in range(39)]
    for chunk in learner.chunks:
        assert chunk.version == 3
        assert chunk.fields["discount"][-1] == (chunk.fields["obs"][-1, 1] != 7)
        # The memory counts on within an episode: the value after t steps is t + 1.
        want = 1.0 + chunk.fields["discount"] * (chunk.fields["obs"][1:, 1] + 1)
        np.testing.assert_allclose(chunk.priorities, want, rtol=1e-4)
    assert learner.agent.epsilons == {2 / 8, 5 / 8}


def test_an_actor_that_comes_again_is_never_mixed_with_the_one_before(start: Callable[..., Learner]) -> None:
    learner = start()
    first = Actor(learner, 1, [0, 1])
    first.begin()
    first.steps(5)  # in the middle of an episode and of a chunk
    held = first.answer()
    del learner.leases[1]
    second = Actor(learner, 2, [0, 1])
    second.begin()
    second.steps(12)
    second.answer()
    # The old one is not dead at all, but it may neither go on nor begin.
    assert held.actions is not None
    first.client.go_on(0, pack_step(first.env.step(held.actions), 0))
    assert first.step().actions is None
    until(lambda: first.client.poll(20) or learner.service.rejected[messages.UNKNOWN_PEER])
    learner.leases.clear()
    until(lambda: sum(chunk.steps for chunk in learner.chunks) == 2 * (4 + 11))
    assert sorted(map(len, check_consecutive(learner.chunks).values())) == [4, 4, 11, 11]


def test_a_slot_that_begins_again_ends_the_group_before(start: Callable[..., Learner]) -> None:
    learner = start()
    one = Actor(learner, 1, [0, 1])
    one.begin()
    one.steps(3)
    one.begin()  # games go on, in a new group
    one.steps(3)
    two = Actor(learner, 1, [1], group=1)
    two.begin()
    two.step()
    assert any(one.step().actions is None for _ in range(2))  # it has lost slot 1
    check_consecutive(learner.chunks)


def test_what_comes_twice_counts_once(start: Callable[..., Learner]) -> None:
    learner = start()
    actor = Actor(learner, 1, [0])
    actor.begin()
    actor.steps(3)
    again = actor.client._asked[0].question.message
    answer = actor.answer()
    number = again.request_id
    for _ in range(3):
        sockets.send(actor.client.socket, again)
    got = []
    until(lambda: got.append(sockets.receive(actor.client.socket)) or sum(m is not None for m in got) == 3)
    assert [m.request_id for m in got if m] == [number] * 3
    assert [m.arrays["actions"].tolist() for m in got if m] == [answer.actions.tolist()] * 3
    sockets.send(actor.client.socket, Message(again.type, again.fields, again.arrays, number - 1))  # late
    step = actor.env.step(answer.actions)
    actor.client.go_on(0, pack_step(step, 0))
    actor.steps(5)
    actor.answer()
    learner.leases.clear()
    until(lambda: sum(chunk.steps for chunk in learner.chunks) == 3 + 5)
    check_consecutive(learner.chunks)
    assert not learner.service.rejected


def test_a_lost_answer_is_asked_for_again(start: Callable[..., Learner], monkeypatch: Any) -> None:
    monkeypatch.setattr("troupe.services.actor.inference_client.RESEND_S", 0.1)
    learner = start()
    actor = Actor(learner, 1, [0])
    actor.begin()
    until(lambda: actor.client._send() or actor.client.socket.poll(20))
    assert sockets.receive(actor.client.socket).type == messages.Actions.TYPE  # and nobody takes it
    assert actor.answer().actions is not None


def test_a_restarted_learner_lets_them_begin_again(start: Callable[..., Learner]) -> None:
    before, after = start(), start()
    actor = Actor(before, 1, [0, 1])
    actor.begin()
    actor.steps(3)
    actor.client.move(after.service.endpoint)
    after.leases = {}
    until(lambda: after.service.rejected[messages.UNKNOWN_GROUP] or actor.client.poll(20))
    actor.begin()
    until(lambda: after.service.rejected[messages.UNKNOWN_PEER] or actor.client.poll(20))
    after.leases = {1: {0, 1}}  # it has joined
    assert actor.step().actions is None
    actor.steps(9)
    actor.answer()
    after.leases.clear()
    until(lambda: sum(chunk.steps for chunk in after.chunks) == 2 * 8)
    assert all(steps[0] == (0, 3) for steps in check_consecutive(after.chunks).values())  # where it was


def test_without_credit_there_are_no_answers(start: Callable[..., Learner], monkeypatch: Any) -> None:
    monkeypatch.setattr("troupe.services.actor.inference_client.RESEND_S", 0.1)
    learner = start()
    learner.replay.open = False
    actor = Actor(learner, 1, [0])
    actor.begin()
    actor.steps(4)  # the fourth completes a chunk
    until(lambda: actor.client.poll(20) or actor.client.wait_reason)
    assert "the shard is full" in actor.client.wait_reason
    assert not learner.chunks
    until(lambda: learner.service.metrics().get("inference/insert_blocked_share", 0) > 0)
    learner.replay.open = True
    actor.steps(4)
    check_consecutive(learner.chunks)


def test_on_policy_a_group_waits_at_the_end_of_its_unrolls_for_what_is_learned_from_them(
    start: Callable[..., Learner], monkeypatch: Any
) -> None:
    monkeypatch.setattr("troupe.services.actor.inference_client.RESEND_S", 0.1)
    learner = start(preset="cartpole-ppo")
    actors = [Actor(learner, incarnation, [2 * incarnation, 2 * incarnation + 1]) for incarnation in (1, 2)]
    for actor in actors:
        actor.begin()
    for version in (3, 4, 5):
        learner.offer(version)
        for actor in actors:  # one after the other: who waits keeps nobody else waiting
            actor.steps(32)
            assert actor.version == version
        for actor in actors:
            until(lambda actor=actor: actor.client.poll(20) or actor.client.wait_reason)
            assert f"bars more steps with version {version}" in actor.client.wait_reason
        # All has been handed over, though no chunk is full, but the newest step of each slot.
        acted = 32 * (version - 2)
        until(lambda acted=acted: sum(chunk.steps for chunk in learner.chunks) >= 4 * (acted - 1))
    monkeypatch.setattr(module, "HELD_LIMIT_S", 0.05)
    for actor in actors:  # no newer version comes: the learner may lack the unrolls of others
        actor.steps(1)


def test_who_waits_for_parameters_and_loses_its_slots_is_told(start: Callable[..., Learner]) -> None:
    learner = start(preset="cartpole-ppo")
    actor = Actor(learner, 1, [0])
    actor.begin()
    actor.steps(32)
    until(lambda: actor.client.poll(20) or learner.service._held)
    learner.leases.clear()
    assert actor.answer().actions is None
    assert not learner.service._held


def test_batches_gather_to_the_minimum_or_the_timeout(start: Callable[..., Learner]) -> None:
    learner = start(min_batch=4, timeout_ms=3000)
    two, three = Actor(learner, 1, [0, 1]), Actor(learner, 2, [2, 3, 4])
    two.begin()
    assert two.answer().waited_s < 2.5  # nobody else could come
    three.begin()
    assert three.answer().waited_s > 2.5
    two.client.go_on(0, pack_step(two.env.step(np.ones(2, int)), 0))
    three.client.go_on(0, pack_step(three.env.step(np.ones(3, int)), 0))
    two.answer()
    three.answer()
    assert learner.agent.batches == [2, 3, 5]


def test_the_newest_parameters_choose(start: Callable[..., Learner]) -> None:
    learner = start()
    actor = Actor(learner, 1, [0])
    actor.begin()
    actor.step()
    assert actor.version == 3
    learner.offer(8)
    until(lambda: actor.step().version == 8)
    assert learner.agent.bonus == 8


def bad_infers() -> dict[str, tuple[dict[str, Any], dict[str, np.ndarray]]]:
    obs = np.zeros((1, *SPEC.obs_shape), np.float32)
    one = {"first": obs}
    return {
        messages.UNKNOWN_PEER: ({"incarnation": 99, "group": 0, "slots": [0]}, one),
        messages.NOT_LEASED: ({"incarnation": 1, "group": 5, "slots": [7]}, one),
        messages.TOO_MANY_ROWS: ({"incarnation": 1, "group": 5, "slots": list(range(5000))}, one),
        messages.UNKNOWN_GROUP: ({"incarnation": 1, "group": 5, "after": 1}, one),
        "bad_field": ({"incarnation": 1, "group": 64, "slots": [0]}, one),
    }


@pytest.mark.parametrize("kind", bad_infers())
def test_requests_that_cannot_be_served_are_refused_and_harm_nobody(
    start: Callable[..., Learner], kind: str
) -> None:
    learner = start()
    actor = Actor(learner, 1, [0, 1])
    actor.begin()
    actor.step()
    dealer = sockets.make_dealer(learner.context, learner.service.endpoint)
    fields, arrays = bad_infers()[kind]
    until(lambda: sockets.send(dealer, Message(messages.Infer.TYPE, fields, arrays, 10)))
    answer = until(lambda: sockets.receive(dealer))
    assert (answer.type, answer.fields["kind"], answer.request_id) == (messages.Error.TYPE, kind, 10)
    actor.steps(10)
    check_consecutive(learner.chunks)
    assert learner.service.rejected[kind] == 1


def test_garbage_is_counted_and_dropped(start: Callable[..., Learner]) -> None:
    learner = start()
    actor = Actor(learner, 1, [0])
    actor.begin()
    actor.step()
    dealer = sockets.make_dealer(learner.context, learner.service.endpoint)
    arrays = {"first": np.full((1, *SPEC.obs_shape), np.nan, np.float32)}
    fields: dict[str, Any] = {"incarnation": 1, "group": 0, "slots": [0]}
    garbage = [
        [b"garbage"],
        [b""],
        [b"\xff" * 100_000],
        encode(Message("HELLO", {}, {}, 1)),
        encode(Message(messages.Infer.TYPE, fields, arrays, 999)),
        encode(Message(messages.Infer.TYPE, {**fields, "slots": [0, 0]}, {}, 999)),
        encode(Message(messages.Infer.TYPE, {**fields, "slots": ["x"]}, {}, 999)),
        encode(Message(messages.Infer.TYPE, {**fields, "slots": [0]}, {}, 999)),
        encode(Message(messages.Infer.TYPE, {}, {}, 999)),
        encode(Message(messages.Infer.TYPE, {"incarnation": 1, "group": 0, "after": 0}, {}, 0)),
    ]
    for frames in garbage:
        until(lambda frames=frames: sockets.send_frames(dealer, frames))
    until(lambda: sum(learner.service.rejected.values()) == len(garbage))
    actor.steps(20)
    check_consecutive(learner.chunks)


def test_a_client_learns_that_its_group_is_too_large(start: Callable[..., Learner]) -> None:
    actor = Actor(start(max_batch=1), 1, [0, 1])
    actor.begin()
    with pytest.raises(ConfigError, match=r"inference\.max_batch"):
        until(lambda: actor.client.poll(20))


def test_with_keys_only_actors_are_served(start: Callable[..., Learner], tmp_path: Any) -> None:
    folder = tmp_path / "keys"
    make_keys(folder)
    learner = start(Security(keys=load_keys(folder, "learner")))
    actor = Actor(learner, 1, [0], security=Security(keys=load_keys(folder, "actor")))
    actor.begin()
    actor.steps(2)
    other = Actor(learner, 2, [1], security=Security(keys=load_keys(folder, "evaluator")))
    other.begin()
    with pytest.raises(Exception, match="this one is for evaluator"):
        until(lambda: other.client.poll(20))
    nobody = Actor(learner, 3, [2])
    nobody.begin()
    with contextlib.suppress(TroupeError):  # it may have been told already that it is turned away
        assert not nobody.client.poll(300)
    actor.steps(2)
    assert learner.service.rejected[messages.REFUSED_KEY] == 1


def test_a_failure_of_the_network_is_the_learners(start: Callable[..., Learner]) -> None:
    learner = start()

    def fails(*args: Any) -> Act:
        raise RuntimeError("no memory")

    learner.agent.act = fails  # type: ignore[method-assign]
    actor = Actor(learner, 1, [0])
    actor.begin()
    until(lambda: actor.client.poll(20) or learner.service._failure)
    with pytest.raises(RuntimeError, match="no memory"):
        learner.service.check()
    learner.service._failure = None
