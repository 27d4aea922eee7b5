"""`kill -9` of the server under load: nothing acknowledged is lost, nothing is stored twice.

Two kills by default; `TROUPE_CHAOS=1` makes it fifty.
"""

import collections
import time

import numpy as np

from tests.harness import CHAOS, Context, until
from tests.replay import processes
from troupe.common.wire.replay.client import ReplayClient

KILLS = 50 if CHAOS else 2
PRODUCERS = 2


def read_all(client, items):
    """The (producer, action) of every item of the table, by id."""
    seen = {}

    def read():
        batch = client.sample(512)
        processes.check(batch)
        producers, actions = batch.fields["producer"][:, 0].tolist(), batch.fields["action"][:, 0].tolist()
        for i, producer, action in zip(batch.ids.tolist(), producers, actions, strict=True):
            assert seen.setdefault(i, (producer, action)) == (producer, action)
        # What has been seen need not be seen again.
        client.update_priorities(batch.ids, np.full(len(batch.ids), 1e-9))

    until(lambda: len(seen) >= items, step=read, why=lambda: f"{len(seen)} of {items} items")
    return seen


def test_nothing_acknowledged_is_lost_or_doubled(tmp_path):
    endpoint = f"ipc://{tmp_path}/replay"
    options = ("--table", "default:capacity=1000000,min_items=10")
    rng = np.random.default_rng(1)
    context = Context()
    process = processes.start(tmp_path / "data", endpoint, *options)
    actors = [
        ReplayClient(endpoint, ctx=context, name=f"actor-{i}", liveness_s=2.0) for i in range(PRODUCERS)
    ]
    learner = ReplayClient(endpoint, ctx=context, name="learner", liveness_s=2.0)
    made = [0] * PRODUCERS
    batches, updates = 0, {}
    try:
        for kill in range(KILLS + 1):
            end = time.monotonic() + rng.uniform(0.3, 0.9)
            progress = sum(made) + 20, batches + 5
            while time.monotonic() < end or sum(made) < progress[0] or batches < progress[1]:
                for producer, actor in enumerate(actors):
                    if actor.insert(processes.chunk(made[producer], producer)):
                        made[producer] += 1
                    else:
                        actor.poll(2)
                while learner.outstanding_samples < 3:
                    learner.request_sample(64)
                batch = learner.receive(0.002)
                if batch is not None:
                    processes.check(batch)
                    learner.update_priorities(batch.ids, np.full(64, 2.0))
                    batches += 1
            if kill < KILLS:
                processes.kill(process)
                process = processes.start(tmp_path / "data", endpoint, *options)
        for actor in actors:
            assert actor.flush(60), actor.blocked_reason
        while learner.outstanding_samples:
            learner.receive(5)
        # The last word before a kill counts as well: priorities that were read back survive.
        total = sum(made) * processes.STEPS
        status = learner.status()
        assert status["tables"]["default"]["items"] == total
        assert status["restored_items"] > 0
        some = learner.sample(64)
        learner.update_priorities(some.ids, np.linspace(1000, 2000, 64))
        updates = learner.sample(64)
        before = learner.status()["tables"]["default"]["total_priority"]
        processes.kill(process)
        process = processes.start(tmp_path / "data", endpoint, *options)
        after = learner.status(60)["tables"]["default"]
        assert after["items"] == total
        assert np.isclose(after["total_priority"], before, rtol=1e-12)
        assert len(updates.ids) == 64
        seen = read_all(learner, total)
        counts = collections.Counter(seen.values())
        assert len(counts) == total
        assert max(counts.values()) == 1
    finally:
        process.kill()
        process.wait()
        for each in (*actors, learner):
            each.close(0)
        context.destroy(linger=0)
