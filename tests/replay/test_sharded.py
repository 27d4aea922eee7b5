"""Several shards as one: what is sampled, with which probabilities, and what happens when one dies."""

import logging
from dataclasses import asdict

import numpy as np
import pytest
import zmq

from tests.harness import Shard, insert, until
from tests.replay.shards import TABLE, chunk, fill
from troupe.common.data.table_config import parse_table
from troupe.common.errors import PeerError
from troupe.common.wire import link, sockets
from troupe.common.wire.codec import WireError
from troupe.common.wire.replay import batch_reader, draws
from troupe.common.wire.replay.codec import encode_insert, infer_specs
from troupe.services.learner.batches.prefetch import Prefetcher
from troupe.services.replay import requests


@pytest.fixture
def patient(monkeypatch):
    """No shard counts as lost, however slow the machine is: the draws would be among the others."""
    monkeypatch.setattr(draws, "LOST_S", 1000.0)


@pytest.mark.usefixtures("patient")
def test_weights_over_unequal_shards_are_unbiased(context, start, connect):
    """The weighted mean of samples is the mean of all items, though shards differ in size and priorities."""
    rng = np.random.default_rng(3)
    shards = [start(name) for name in ("a", "b", "c")]
    everything, weights = [], []
    for shard, count, scale in zip(shards, (50, 400, 150), (30.0, 1.0, 0.2), strict=True):
        values, priorities = rng.normal(scale, 1.0, count), scale * rng.uniform(0.2, 1.0, count)
        fill(context, shard, values, priorities)
        everything.append(values)
        weights.append(float((priorities**0.7).sum()))
    true = np.concatenate(everything)
    client = connect(*shards)
    for _ in range(30):  # now the shards are known
        client.sample(16)
    means, came = [], dict.fromkeys(client.shards, 0)
    batches = 600
    for _ in range(batches):
        batch = client.sample(64)
        assert batch.table_items == len(true)
        assert batch.total_priority == pytest.approx(sum(weights))
        importance = 1 / (batch.table_items * batch.probabilities)
        # Centred, so that the spread is small; the mean of the weights is 1 likewise.
        means.append((np.mean(importance * (batch.fields["value"][:, 0] - true.mean())), importance.mean()))
        came[batch.shard] += 1
    mean, error = np.mean(means, axis=0), np.std(means, axis=0) / np.sqrt(batches)
    assert abs(mean[0]) < 4 * error[0]
    assert abs(mean[1] - 1) < 4 * error[1]
    assert error[0] < 0.5 * true.std()
    assert error[1] < 0.2
    for endpoint, weight in zip(client.shards, weights, strict=True):
        share = 0.99 * weight / sum(weights) + 0.01 / 3
        assert abs(came[endpoint] / batches - share) < 0.01


@pytest.mark.usefixtures("patient")
def test_importance_weights_of_all_shards_have_one_scale(context, start, connect):
    """An improbable shard's items weigh more than another's: its batches are not scaled by themselves."""
    rng = np.random.default_rng(5)
    shards, probabilities = [start(name) for name in ("a", "b", "c")], {}
    totals = np.array([1.0, 10.0, 100.0])
    chances = 0.99 * totals / totals.sum() + 0.01 / 3  # every shard gets a little, whatever it has
    for shard, count, total, chance in zip(shards, (300, 1000, 2000), totals, chances, strict=True):
        inside = rng.uniform(0.2, 1.0, count)
        inside /= inside.sum()
        fill(context, shard, np.arange(count), (total * inside) ** (1 / 0.7))
        probabilities[shard.endpoint] = chance * inside
    client = connect(*shards)
    met, last = set(), {}
    until(lambda: met == set(probabilities), step=lambda: met.add(client.sample(128).shard))
    # Now the shards are known.
    means = {shard.endpoint: [] for shard in shards}

    def weigh():
        batch = client.sample(128)
        true = probabilities[batch.shard][batch.fields["value"][:, 0].astype(int)]
        last[batch.shard] = true.min()
        if len(last) == len(shards):
            weights = batch.weights(0.4)
            np.testing.assert_allclose(weights, (true / min(last.values())) ** -0.4, rtol=1e-5)
            means[batch.shard].append(weights.mean())

    until(lambda: min(map(len, means.values())) >= 15, 200, step=weigh)
    least = min(each.min() for each in probabilities.values())
    wanted = [
        ((each / least) ** -0.4 * each).sum() / each.sum()  # the mean over what is drawn
        for each in probabilities.values()
    ]
    np.testing.assert_allclose([np.mean(each) for each in means.values()], wanted, rtol=0.03)
    assert wanted[0] > 1.3 * wanted[1] > 1.69 * wanted[2], "or one scale would make no difference"


def test_inserts_survive_a_shard_that_leaves_and_returns(start, connect):
    """Unacknowledged ones are sent again, and none that follows is taken for a repeat."""
    shards = [start(name) for name in ("a", "b")]
    client = connect(*shards, incarnation=5, liveness_s=300.0)  # or a stall would end the first's session
    both, sent = [shard.endpoint for shard in shards], 0

    def send(count):
        nonlocal sent
        for _ in range(count):
            insert(client, chunk([float(sent)], [1.0]))
            sent += 1

    send(6)
    assert client.flush(60)
    shards[0].end()
    send(6)  # by turns, three of them to the first, which does not answer
    client.set_shards(both[1:])
    send(4)
    assert client.outstanding >= 3
    shards[0] = start("a")
    client.set_shards(both)
    send(6)
    assert client.flush(60)
    assert sum(shard.table.size for shard in shards) == sent
    client.set_shards([])
    assert not client.insert(chunk([0.0], [1.0]))
    assert client.outstanding == 0


def test_a_single_shard_is_what_it_was(context, start, connect):
    shard = start("a")
    fill(context, shard, np.arange(100.0), np.ones(100))
    client = connect(shard)
    batch = client.sample(32)
    np.testing.assert_allclose(batch.probabilities, 0.01)
    assert batch.table_items == 100
    client.update(batch, np.full(32, 5.0))
    client.recycle(batch)
    assert client.sample(8).total_priority == pytest.approx(shard.table.sampler.total)
    assert shard.table.sampler.total > 100


def test_inserts_go_round_and_wait_for_nobody_in_particular(start, connect):
    shards = [start(name) for name in ("a", "b")]
    client = connect(*shards)
    until(
        lambda: not client.blocked_reason and client.credit >= 2 * 64,
        step=lambda: client.poll(20),
        why=lambda: client.blocked_reason,
    )
    for _ in range(20):
        insert(client, chunk(np.arange(10.0), np.ones(10)))
        client.poll(5)
    assert client.flush(60)
    assert client.outstanding == 0
    assert {address: each["tables"]["default"]["items"] for address, each in client.status(60).items()} == {
        shard.endpoint: 100 for shard in shards
    }
    assert client.counters["inserts"] == 20
    assert not client.paused
    sizes = [shard.table.size for shard in shards]
    assert sum(sizes) == 200
    assert min(sizes) == 100
    nobody = connect()
    assert not nobody.insert(chunk(np.arange(10.0), np.ones(10)))
    assert "no replay shard" in nobody.blocked_reason
    with pytest.raises(PeerError, match="no replay shard"):
        nobody.sample(4, timeout_s=0.05)
    assert nobody.outstanding_samples == 0
    with pytest.raises(PeerError, match="no replay shard"):
        nobody.status(0.05)


def test_a_shard_dies_and_returns(context, start, connect):
    shards = [start(name) for name in ("a", "b")]
    for i, shard in enumerate(shards):
        fill(context, shard, np.full(50, i), np.ones(50))
    client = connect(*shards, liveness_s=1.0)

    def batches(count, requests=6):
        """The shards of the next batches."""
        names = []

        def take():
            for _ in range(requests - client.outstanding_samples):
                client.request_sample(8)
            batch = client.receive(0.1)
            if batch is not None:
                names.append(batch.shard)
                assert batch.fields["value"].max() == client.shards.index(batch.shard)
                last[0] = batch

        until(lambda: len(names) >= count, step=take, why=lambda: client.wait_reason)
        return names

    last = [None]
    assert set(batches(20)) == set(client.shards)
    # One of them may seem lost for a moment where everything is slow.
    until(lambda: last[0].table_items == 100, step=lambda: batches(1))
    shards[1].end()
    # Those on their way are asked for again. Until then the figures are those of both.
    until(lambda: shards[1].endpoint not in batches(5) and last[0].table_items == 50)
    np.testing.assert_allclose(last[0].probabilities, 1 / 50)
    shards[1] = Shard(context, shards[1].replay.folder, shards[1].endpoint, **TABLE)
    try:
        until(lambda: shards[1].endpoint in batches(5))
        until(lambda: last[0].table_items == 100, step=lambda: batches(1))
    finally:
        shards[1].end()
    # The list of the run may forget a shard for good, and get another one.
    third = start("c")
    fill(context, third, np.full(50, 1), np.ones(50))
    client.set_shards([shards[0].endpoint, third.endpoint])
    until(lambda: set(batches(30)) == {shards[0].endpoint, third.endpoint})


@pytest.fixture
def queues(context, tmp_path):
    """Two shards of queues, by functions that start and end one."""
    running = {}

    def start(name):
        table = asdict(parse_table("default:limiter=queue,capacity=100"))
        running[name] = Shard(context, tmp_path / name, f"ipc://{tmp_path}/{name}.socket", **table)
        return running[name]

    yield start, lambda name: running.pop(name).end()
    for shard in running.values():
        shard.end()


def take_all(client, count):
    """So many values, by four requests at a time."""
    values = []

    def take():
        for _ in range(4 - client.outstanding_samples):
            client.request_sample(4)
        if (batch := client.receive(0.1)) is not None:
            values.extend(batch.fields["value"][:, 0])

    until(lambda: len(values) >= count, step=take, why=lambda: f"{sorted(values)}: {client.wait_reason}")
    return sorted(values)


def ask_both(client):
    for _ in range(4):
        client.request_sample(4)
    until(lambda: all(each.wanted for each in client._shards.values()), step=lambda: client.receive(0.1))


def test_what_a_queue_gives_when_its_shard_is_back_is_used(context, queues, connect):
    """The shard is tried with requests, whose items are nowhere else then."""
    start, end = queues
    first, second = start("a"), start("b")
    client = connect(first, second, liveness_s=1.0)
    ask_both(client)
    end("b")
    until(lambda: client._shards[second.endpoint].lost, step=lambda: client.receive(0.1))
    fill(context, start("b"), np.arange(8.0), np.ones(8))
    until(lambda: not client._shards[second.endpoint].lost, step=lambda: client.receive(0.1))
    fill(context, first, np.arange(8.0, 24.0), np.ones(16))
    assert take_all(client, 24) == list(range(24))


@pytest.mark.usefixtures("patient")
def test_what_a_queue_gives_late_is_used(context, queues, connect, monkeypatch):
    """A shard that answers after others were asked instead of it has given what is nowhere else."""
    monkeypatch.setattr(requests, "PARK_S", 60.0)  # what is asked of it waits there
    shards = [queues[0](name) for name in "ab"]
    client = connect(*shards)
    ask_both(client)
    with monkeypatch.context() as patch:
        patch.setattr(draws, "LOST_S", -1.0)
        until(lambda: client._shards[shards[0].endpoint].lost, step=lambda: client.receive(0))
    for at, shard in enumerate(shards):
        fill(context, shard, np.arange(8.0) + 8 * at, np.ones(8))
    assert take_all(client, 16) == list(range(16))


@pytest.mark.usefixtures("patient")
def test_a_shard_that_has_nothing_to_sample_holds_up_nobody(context, start, connect, monkeypatch):
    """It is left out of the draws, tried again by one request, and back when it has something."""
    monkeypatch.setattr(draws, "WAIT_S", 0.0)  # one request is always trying
    full, empty = start("full"), start("empty", min_items=50)
    fill(context, full, np.arange(100.0), np.ones(100))
    client = connect(full, empty)

    def batches(condition):
        def take():
            for _ in range(4 - client.outstanding_samples):
                client.request_sample(16)
            batch = client.receive(0.1)
            return batch if batch is not None and condition(batch) else None

        return until(take, why=lambda: client.wait_reason)

    def waits_at(shard):
        return len(client._shards[shard.endpoint].wanted)

    seen = []
    # With all four requests at the empty shard, nothing would ever come.
    batch = batches(lambda batch: seen.append(batch.shard) or (len(seen) >= 200 and waits_at(empty) <= 1))
    assert set(seen) == {full.endpoint}
    batch = batches(lambda batch: batch.table_items == 100)
    np.testing.assert_allclose(batch.probabilities * batch.table_items, 1)
    fill(context, empty, np.arange(300.0), np.ones(300))
    batches(lambda batch: batch.shard == empty.endpoint)
    until(  # drawn before that one had told what its shard holds
        lambda: not client.outstanding_samples,
        step=lambda: client.receive(0.1),
        why=lambda: client.wait_reason,
    )
    batch = batches(lambda batch: batch.table_items == 400 and batch.total_priority == 400)
    np.testing.assert_allclose(
        batch.probabilities,
        (0.99 * (0.25, 0.75)[batch.shard == empty.endpoint] + 0.005)
        / (100, 300)[batch.shard == empty.endpoint],
    )


@pytest.mark.usefixtures("patient")
def test_where_all_shards_wait_all_are_asked(context, start, connect):
    shards = [start(name, min_items=50) for name in ("a", "b", "c")]
    client = connect(*shards)
    client.request_sample(8)

    def nothing_comes():
        assert client.receive(0.05) is None

    until(lambda: client.counters["waits"] >= 4, step=nothing_comes, why=lambda: client.wait_reason)
    fill(context, shards[2], np.arange(100.0), np.ones(100))
    batch = client.receive(60)
    assert batch.shard == shards[2].endpoint
    assert client.outstanding_samples == 0


def test_a_batch_that_cannot_be_read_is_drawn_again(context, start, connect, monkeypatch):
    shards = [start(name) for name in ("a", "b")]
    for shard in shards:
        fill(context, shard, np.arange(50.0), np.ones(50))
    client = connect(*shards)
    read, bad = batch_reader.decode_batch, []

    def spoil(*arguments, **options):
        if len(bad) < 6:
            bad.append(None)
            raise WireError("bad_array", "spoilt")
        return read(*arguments, **options)

    monkeypatch.setattr(batch_reader, "decode_batch", spoil)
    for _ in range(4):
        client.request_sample(8)
    for left in (3, 2, 1, 0):
        assert client.receive(60) is not None
        assert client.outstanding_samples == left
    assert client.counters["bad_messages"] == len(bad) == 6


def test_a_shard_does_not_answer_only_when_it_has_been_silent_for_a_while(
    start, connect, tmp_path, monkeypatch, caplog
):
    caplog.set_level(logging.INFO)
    client = connect(liveness_s=1.0)
    client.set_shards([f"ipc://{tmp_path}/a.socket"])
    client.request_sample(4)
    client.receive(0)
    assert "has just been asked" in client.wait_reason
    monkeypatch.setattr(link, "SILENT_S", 0.2)
    until(lambda: "does not answer" in client.wait_reason, step=lambda: client.receive(0.05))

    def no_answer():
        client.receive(0.05)
        assert "does not answer" in client.wait_reason, "a new connection is no answer"

    until(lambda: client.counters["reconnects"], step=no_answer)
    assert "waits for replay" not in caplog.text, "whoever waits says so"
    start("a")
    until(lambda: "min size" in client.wait_reason, step=lambda: client.receive(0.05))


def test_the_learner_prefetches_from_all_shards(context, start):
    shards = [start(name, min_items=20) for name in ("a", "b")]
    live = []
    prefetch = Prefetcher(context, lambda: live, kept={"default"}, depth=4)
    prefetch.share({"default": 16}, ahead=None, held=False)
    prefetch.start()
    try:
        assert prefetch.get(0.05) is None
        assert "no replay shard" in prefetch.wait_reason
        live[:] = [shard.endpoint for shard in shards]
        for shard in shards:
            fill(context, shard, np.arange(50.0), np.ones(50))
        seen = []

        def take():
            batch = prefetch.get(120)
            seen.append(batch.shard)
            assert batch.fields["value"].shape == (16, 1)
            prefetch.put_priorities(batch, np.full(16, 2.0))

        # One that was asked too early gets its turn later.
        until(lambda: len(seen) >= 20 and set(seen) == set(live), step=take, why=lambda: seen)
    finally:
        prefetch.stop()

    def updated():
        return [shard.replay.counters.updated_priorities for shard in shards]

    until(lambda: sum(updated()) >= len(seen) * 16, why=updated)
    assert sum(updated()) == len(seen) * 16
    assert min(updated()) > 0


def test_many_processes_of_one_connection_are_refused_and_others_are_not(context, start, monkeypatch):
    monkeypatch.setattr("troupe.services.replay.storage.producers.MAX_SHARE", 2)
    shard = start("a")
    greedy = sockets.make_dealer(context, shard.endpoint, b"greedy")
    data = chunk([1.0], [1.0])
    answers = []
    for incarnation in (1, 2, 3):
        body = encode_insert(data, infer_specs(data), "default", incarnation=incarnation)
        assert greedy.poll(60_000, zmq.POLLOUT)
        assert sockets.send(greedy, body.message(1))
        assert greedy.poll(60_000)
        answers.append(sockets.receive(greedy))
    assert [answer.type for answer in answers] == ["INSERTED", "INSERTED", "ERROR"]
    assert answers[2].fields["kind"] == "too_many"
    assert "of one key or connection" in answers[2].fields["detail"]
    fill(context, shard, np.ones(3), np.ones(3))
    greedy.close(0)
