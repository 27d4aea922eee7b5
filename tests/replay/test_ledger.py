"""A ledger of a queue over the wire, with little room: what was acknowledged is given, once, or there.

But for what the documents name: a batch that was on its way when the server was killed. One kill by default;
`TROUPE_CHAOS=1` makes it twenty-five.
"""

import collections

import numpy as np

from tests.harness import CHAOS, Context, until
from tests.replay import processes
from tests.replay.rollouts import rollout
from troupe.common.wire.replay.client import ReplayClient

KILLS = 25 if CHAOS else 1
WRITERS = 2
TABLES = ("--table", "default:capacity=100000", "--table", "rollouts:limiter=queue,capacity=100000")
ROOM = ("--max-bytes", "60000")  # some twenty chunks
BATCH = 2


class Ledger:
    """Writers to a queue, one to another table that fills the files, and one that samples the queue."""

    def __init__(self, folder):
        self.folder = folder
        self.endpoint = f"ipc://{folder}/replay"
        self.context = Context()
        self.writers = [self.client(f"writer-{i}") for i in range(WRITERS)]
        self.filler, self.sampler = self.client("filler"), self.client("sampler")
        self.made = [0] * WRITERS
        self.filled = 0
        self.given: list[tuple[int, int]] = []
        self.process = None

    def begin(self):
        self.start()
        processes.insert(self.filler, 0, 9)  # so that there is something that the queue pushes out
        assert self.filler.flush(60)
        self.filled = 1

    def client(self, name):
        return ReplayClient(self.endpoint, ctx=self.context, name=name, liveness_s=30.0)

    def start(self):
        self.process = processes.start(self.folder / "data", self.endpoint, *TABLES, *ROOM)

    def write(self):
        """One turn of everybody who writes."""
        for i, writer in enumerate(self.writers):
            if writer.insert(rollout(self.made[i], i), "rollouts"):
                self.made[i] += 1
            writer.poll(2)
        self.filled += self.filler.insert(processes.chunk(self.filled, 9))
        self.filler.poll(2)

    def fill(self):
        """One turn of them; whether the files hold no more of the queue."""
        self.write()
        return any("queues; waits for samples" in each.blocked_reason for each in self.writers)

    def turn(self):
        """One turn of all."""
        self.sample()
        self.write()

    def is_acknowledged(self):
        """Whether everything is that was written."""
        for writer in self.writers:
            writer.poll(2)
        return not any(writer.outstanding for writer in self.writers)

    def sample(self, timeout_s=0.01):
        """Have one request on its way, and note what comes."""
        if not self.sampler.outstanding_samples:
            self.sampler.request_sample(BATCH, "rollouts")
        batch = self.sampler.receive(timeout_s)
        if batch is None:
            return False
        self.given += zip(batch.fields["producer"][:, 0].tolist(), batch.versions.tolist(), strict=True)
        return True

    def close(self):
        self.process.kill()
        self.process.wait()
        for each in (*self.writers, self.filler, self.sampler):
            each.close(0)
        self.context.destroy(linger=0)


def test_what_a_queue_acknowledged_is_given_once_or_is_there(tmp_path):
    ledger = Ledger(tmp_path)
    rng = np.random.default_rng(3)
    try:
        ledger.begin()
        for kill in range(KILLS + 1):
            goal = sum(ledger.made) + 25
            # Nobody samples: the files fill until they hold no more of the queue.
            until(ledger.fill, why=lambda: ledger.made)
            if not kill:
                assert ledger.sampler.status(60)["evicted_early_items"] > 0
            until(
                lambda goal=goal: sum(ledger.made) >= goal and rng.random() <= 0.1,
                step=ledger.turn,
                why=lambda: (ledger.made, ledger.sampler.wait_reason),
            )
            if kill < KILLS:
                processes.kill(ledger.process)
                ledger.start()
        until(ledger.is_acknowledged, step=ledger.sample, why=lambda: ledger.writers[0].blocked_reason)
        until(
            lambda: ledger.sampler.status(60)["tables"]["rollouts"]["items"] < BATCH,
            step=lambda: ledger.sample(0.5),
        )
        left = ledger.sampler.status(60)["tables"]["rollouts"]["items"]
        assert max(collections.Counter(ledger.given).values()) == 1, "nothing is given twice"
        lost = sum(ledger.made) - len(ledger.given) - left
        assert 0 <= lost <= KILLS * BATCH, "one request was on its way at each kill"
        for i in range(WRITERS):
            numbers = [number for producer, number in ledger.given if producer == i]
            assert numbers == sorted(numbers)
    finally:
        ledger.close()
