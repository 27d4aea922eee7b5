"""A learner that says what cannot be, over a real group: the others use nothing of it, and say who it was."""

import contextlib
import hashlib
import itertools
import json
import math
import socket
import threading

import numpy as np
import pytest
import torch
from torch import nn

from tests.agents.unrolled import SMALL, VECTOR, random_batch
from tests.harness import Context, until
from tests.learner.peers.clients import joined
from troupe.common.agents import make_agent
from troupe.common.agents.base import Batch
from troupe.common.agents.learners.hearsay import MisledError
from troupe.common.agents.learners.reduction import Reduction
from troupe.common.config.algorithms import agent_model
from troupe.common.runtime import StopSignal
from troupe.services.learner.control.budget import StepBudget
from troupe.services.learner.peers.group import GroupLostError, Meeting, ProcessGroup, joined_store, within
from troupe.services.learner.peers.seats import OwnSeats
from troupe.services.learner.peers.state import StateDiffersError, equalize, packed
from troupe.services.learner.peers.survivors import exchange_places, settled
from troupe.services.learner.peers.team import Rules, Share, Team
from troupe.services.learner.saving.counters import RunCounters

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

HOST = "127.0.0.1"
_epochs = itertools.count()
NAN, INFINITE = float("nan"), float("inf")


@pytest.fixture(scope="module")
def meeting():
    return Meeting(HOST)


@pytest.fixture
def together(meeting):
    """Runs each of two functions of a group in a thread; what they return or raise."""

    def run(*bodies):
        found, number = [None] * len(bodies), next(_epochs)

        def body(rank):
            store = joined_store(HOST, meeting.port, 60.0)
            group = ProcessGroup(store, number, rank, len(bodies), HOST, 60.0)
            try:
                found[rank] = bodies[rank](group)
            except Exception as error:
                found[rank] = error
            finally:
                group.close()

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(len(bodies))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    return run


def says(numbers):
    return lambda group: group.gather(torch.tensor(numbers, dtype=torch.float64))


def blamed(error, *ranks):
    assert isinstance(error, MisledError), error
    assert error.ranks == ranks
    return True


# ------------------------------------------------------------------------ an update


@pytest.mark.parametrize("rows", [NAN, INFINITE, -1.0, 0.5, 1e6])
def test_a_share_that_cannot_be(together, rows):
    error, _ = together(lambda group: Reduction(group, max_rows=100).exchange(3), says([rows]))
    assert blamed(error, 1)


def test_a_number_that_cannot_be(together):
    error, _ = together(lambda group: Reduction(group, max_rows=100).exchange(3, [0.0]), says([3, NAN]))
    assert blamed(error, 1)


def merged(group):
    reduction = Reduction(group)
    reduction.exchange(3)
    return reduction.moments(3, torch.ones(2), torch.ones(2))


def after_rows(numbers):
    def body(group):
        says([3])(group)
        return says(numbers)(group)

    return body


@pytest.mark.parametrize(
    "moments",
    [
        [-1, 1, 1, 1, 1],
        [0.5, 1, 1, 1, 1],
        [1e300, 1, 1, 1, 1],
        [3, INFINITE, 1, 1, 1],
        [3, NAN, 1, 1, 1],
        [3, 1e20, 1, 1, 1],
        [3, 1, 1, -1, 1],
        [3, 1, 1, 1, 1e200],
    ],
)
def test_statistics_that_cannot_be(together, moments):
    error, _ = together(merged, after_rows(moments))
    assert blamed(error, 1)


def test_statistics_of_no_samples_count_for_nothing(together):
    (count, mean, variance), _ = together(merged, after_rows([0, NAN, NAN, NAN, NAN]))
    assert (count, mean.tolist(), variance.tolist()) == (3, [1.0, 1.0], [1.0, 1.0])


def test_who_has_the_run_may_have_diverged_and_says_so_itself(together):
    _, (_, mean, _) = together(after_rows([3, NAN, 1, 1, 1]), merged)
    assert mean.isnan().any()


@pytest.mark.parametrize("weight", [NAN, -3.0, 1e300])
def test_a_weight_that_cannot_be(together, weight):
    def means(group):
        reduction = Reduction(group)
        reduction.exchange(3)
        return reduction.means([(torch.tensor(1.0), 3), (torch.tensor(2.0), 3)])

    def lies(group):
        says([3])(group)
        return group.gather(torch.tensor([[1.0, 1.0], [3, weight]], dtype=torch.float64))

    error, _ = together(means, lies)
    assert blamed(error, 1)


def descended(bad=()):
    """The body of a learner whose gradient is NaN if its rank is in `bad`; returns the gradient."""

    def body(group):
        weights, reduction = nn.Parameter(torch.ones(3)), Reduction(group)
        reduction.exchange(3)
        with reduction.averaging([weights]):
            (weights.sum() * (NAN if group.rank in bad else 1.0)).backward()
        return weights.grad

    return body


def test_a_gradient_that_is_not_finite_is_of_who_has_it(together):
    honest, broken = together(descended([1]), descended([1]))
    assert blamed(honest, 1)
    assert blamed(broken, 1)


def test_training_that_has_diverged_for_who_has_the_run_diverges_as_with_one_learner(together):
    for gradient in together(descended([0]), descended([0])):
        assert gradient.isnan().all()


def test_a_gradient_that_nobody_admits_ends_the_update_and_accuses_nobody(together):
    def lies(group):
        says([3])(group)
        group.sum(torch.tensor([NAN, NAN, NAN, 1.0, 3.0]))  # with whether there is one, and the weight
        group.gather(torch.tensor([1.0]))

    error, _ = together(descended(), lies)
    assert blamed(error)


# ------------------------------------------------------------------------- the state


def learner(seed, updates=0):
    agent = make_agent(agent_model("policy_gradient")(**SMALL), VECTOR, seed=seed)
    agent.state()
    counters = RunCounters(1, StepBudget(100))
    counters.updates = updates
    return agent, counters


def sends(buffer, updates=7, size=None, digest=None):
    """The body of a learner that has this state."""

    def body(group):
        size_ = len(buffer) if size is None else size
        told = hashlib.sha256(buffer).digest() if digest is None else digest
        digest_ = torch.frombuffer(bytearray(told), dtype=torch.int64)
        group.gather(torch.cat([torch.tensor([updates, 0, size_]), digest_]))
        group.broadcast(torch.frombuffer(bytearray(buffer), dtype=torch.uint8), group.rank)
        group.gather(digest_)

    return body


def state(change):
    """A right state that `change` has spoiled: its header, and the bytes of its arrays."""
    data = packed(*learner(9, updates=7)).numpy().tobytes()
    length = int.from_bytes(data[:8], "little")
    head, arrays = json.loads(data[8 : 8 + length]), bytearray(data[8 + length :])
    change(head, arrays)
    text = json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text + bytes(arrays)


def put(*path, value):
    def change(head, arrays):
        place = head
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value

    return change


def not_finite(head, arrays):
    begin = 0
    for _, dtype, shape in head["arrays"]:
        if dtype == "float32":
            break
        begin += math.prod(shape) * np.dtype(dtype).itemsize
    arrays[begin : begin + 4] = np.float32(NAN).tobytes()


STATES = {
    "no text": lambda: b"\xff" * 100,
    "nothing": lambda: b"\0" * 8,
    "shorter than its header": lambda: (1 << 60).to_bytes(8, "little") + b"{}",
    "too deep": lambda: (200_000).to_bytes(8, "little") + b"[" * 200_000,
    "a list": lambda: (2).to_bytes(8, "little") + b"[]",
    "objects": lambda: state(put("arrays", 0, 1, value="O")),
    "negative": lambda: state(put("arrays", 0, 2, value=[-1])),
    "enormous": lambda: state(put("arrays", 0, 2, value=[1 << 40, 1 << 40])),
    "another shape": lambda: state(put("arrays", 0, 2, value=[1])),
    "another algorithm": lambda: state(put("agent", "algorithm", value="someones")),
    "updates beyond counting": lambda: state(put("updates", value=1 << 60)),
    "agent's updates": lambda: state(put("agent", "updates", value=-1)),
    "steps that are not finite": lambda: state(put("learned_steps", value=INFINITE)),
    "weights that are not finite": lambda: state(not_finite),
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_cannot_be_leaves_that_of_the_others(together, name):
    agent, counters = learner(1, updates=3)
    before = packed(agent, counters).numpy().tobytes()
    error, _ = together(lambda group: equalize(group, agent, counters), sends(STATES[name]()))
    assert blamed(error, 1)
    assert packed(agent, counters).numpy().tobytes() == before


def test_a_right_state_is_taken_over(together):
    agent, counters = learner(1, updates=3)
    right = state(lambda *parts: None)
    changed, _ = together(lambda group: equalize(group, agent, counters), sends(right))
    assert changed is True
    assert packed(agent, counters).numpy().tobytes() == right


@pytest.mark.parametrize(
    "lie",
    [
        {"updates": -1},
        {"updates": 1 << 60},
        {"size": 0},
        {"size": -5},
        {"size": 1 << 50},
        {"digest": b"a" * 32},
    ],
    ids=str,
)
def test_what_is_said_of_a_state_has_to_be_so(together, lie):
    agent, counters = learner(1, updates=3)
    error, _ = together(lambda group: equalize(group, agent, counters), sends(STATES["objects"](), **lie))
    assert blamed(error, 1)
    assert counters.updates == 3


def test_who_cannot_have_the_state_of_the_run_ends(together):
    agent, counters = learner(1)
    _, error = together(sends(STATES["objects"]()), lambda group: equalize(group, agent, counters))
    assert isinstance(error, StateDiffersError)


# --------------------------------------------------------------------- the next epoch


@pytest.mark.parametrize(
    "place",
    ["203.0.113.7 80", "127.0.0.1", "127.0.0.1 0", "127.0.0.1 99999", "127.0.0.1 1 2", "a b", "\xff \xb2"],
)
def test_a_place_where_no_learner_may_be(together, place):
    def lies(group):
        told = bytearray(place.encode("latin-1").ljust(64, b"\0"))
        group.gather(torch.frombuffer(told, dtype=torch.uint8))

    error, _ = together(lambda group: exchange_places(group, "", ""), lies)
    assert blamed(error, 1)


@pytest.mark.parametrize(
    "text", [b"", b"\xff", b"7", b"[1, 1]", b"[2, 1]", b"[-1]", b"[4]", b'["1"]', b"[true]", b"[" * 200_000]
)
def test_survivors_that_there_cannot_be(text):
    with pytest.raises(RuntimeError, match="does not say who continues"):
        settled(text, 4)
    assert settled(b"[1, 3]", 4) == [1, 3]


# ---------------------------------------------------------------------------- the store


def test_garbage_at_the_meeting_leaves_it_open():
    meeting, rng = Meeting(HOST), np.random.default_rng(0)
    for size in (1, 7, 100, 10_000):
        for _ in range(20):
            with socket.create_connection((HOST, meeting.port)) as sender:
                try:
                    sender.sendall(rng.bytes(size))
                except OSError:  # it has had enough
                    continue
    store = joined_store(HOST, meeting.port, 60.0)
    store.set("a", "b")
    assert store.get("a") == b"b"


@pytest.fixture
def garbling(meeting):
    """The port of a meeting whose answers can be changed: `garble.set()`."""
    garble = threading.Event()
    with contextlib.ExitStack() as ends:
        server = ends.enter_context(socket.create_server((HOST, 0)))

        def copy(source, target, change):
            with contextlib.suppress(OSError):
                while data := source.recv(1 << 16):
                    target.sendall(b"\xff" * len(data) if change and garble.is_set() else data)
                target.shutdown(socket.SHUT_WR)

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    asks = ends.enter_context(server.accept()[0])
                    answers = ends.enter_context(socket.create_connection((HOST, meeting.port)))
                    for each in ((asks, answers, False), (answers, asks, True)):
                        threading.Thread(target=copy, args=each, daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1], garble
        server.shutdown(socket.SHUT_RDWR)


def test_a_meeting_that_answers_garbage_is_one_that_is_gone(garbling):
    port, garble = garbling
    store = joined_store(HOST, port, 60.0)
    store.set("a", "b")
    assert within(60.0, lambda: store.get("a")) == b"b"
    garble.set()
    # Which would be so many bytes that there is no memory for them.
    with pytest.raises(RuntimeError):
        within(60.0, lambda: store.get("a"))
    with pytest.raises(GroupLostError):
        ProcessGroup(store, 0, 1, 2, HOST, 1.0)


# ----------------------------------------------------------------------------- the run


@pytest.fixture
def liar(server):
    """Comes to every epoch with the right state, and says that its share has minus one rows."""
    context, ended, lies = Context(), threading.Event(), []
    client = joined(context, server)

    def come():
        epoch = -1
        while not ended.is_set():
            seat = client.next_seat(epoch, 0.1)
            if seat is None:
                continue
            epoch = seat.epoch
            try:
                store = joined_store(seat.host, seat.port, 60.0)
                group = ProcessGroup(store, seat.epoch, seat.rank, seat.learners, HOST, 60.0)
                exchange_places(group, "", "")
                equalize(group, *learner(2))
                group.gather(torch.tensor([-1.0, *[0] * 11], dtype=torch.float64))
                lies.append(epoch)
                group.close()
            except (GroupLostError, RuntimeError):
                continue

    thread = threading.Thread(target=come)
    thread.start()
    yield lies
    ended.set()
    thread.join()
    client.close("done")
    context.destroy(linger=0)


def test_the_run_goes_on_without_one_that_lies_and_leaves_it_out(server, liar, caplog):
    agent, counters = learner(1)
    team = Team(agent, counters, OwnSeats(server, "", StopSignal()), Rules(True, 3, timeout_s=60.0))
    until(lambda: server.seating.waits)
    batch = Batch(random_batch(np.random.default_rng(1), agent, 3), np.ones(3, np.float32))

    def learned():
        team.learn(Share(lambda *told: batch, 3, 0.0))
        return counters.updates >= 3

    until(learned)
    assert (team.learners, len(liar)) == (1, 1)
    assert "learner 1 sent a row count outside" in caplog.text
    assert "sent impossible values: left out for 30 s" in caplog.text
    team.close()
