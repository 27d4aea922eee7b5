"""A shard in this process, whose every step the test decides."""

from tests.harness import until
from tests.replay.storage.replays import make_insert, open_tables
from troupe.common.wire import sockets
from troupe.common.wire.codec import decode
from troupe.services.replay.requests import RequestHandlers


class SteppedShard:
    """A queue behind a socket. It serves a message when it is told to."""

    def __init__(self, folder, context, endpoint):
        self.router = sockets.make_router(context, endpoint)
        self.replay = open_tables(folder, "default:limiter=queue,capacity=9")
        self.filled = 0
        self.restart(1)

    def restart(self, session):
        """Forget what a process would forget."""
        self.requests = RequestHandlers(self.replay, self.router, session, lambda: {"session": session})

    def fill(self, count):
        """Put rollouts of versions 0, 1, 2, ... in the queue."""
        for _ in range(count):
            insert = make_insert(self.filled + 1, 0, 4, [0], [4], [1.0])
            insert.version, self.filled = self.filled, self.filled + 1
            self.replay.insert(insert)

    def take(self, client=None, kind=None):
        """The next message (of a kind: others are served), which is not served. The client goes on."""

        def look():
            while (frames := sockets.receive_frames(self.router)) is not None:
                taken = frames[0].bytes, decode(frames[1:])
                if kind in (None, taken[1].type):
                    return taken
                self.requests.serve(*taken)
            if client:
                client.poll(5)
            return None

        return until(look, why=lambda: f"no {kind} came")

    def serve_all(self):
        """Serve what has come."""
        while (frames := sockets.receive_frames(self.router)) is not None:
            self.requests.serve(frames[0].bytes, decode(frames[1:]))
        self.requests.advance()

    def serve_until(self, client, condition):
        """Serve and let the client go on."""

        def serve():
            client.poll(5)
            self.serve_all()

        until(condition, step=serve)

    def versions(self, client, count):
        """Of the next batches that the client gets."""
        seen = []

        def serve():
            batch = client.receive(0.005)
            if batch is not None:
                seen.append(int(batch.versions[0]))
            self.serve_all()

        until(lambda: len(seen) >= count, step=serve, why=lambda: seen)
        return seen

    def close(self):
        self.router.close(0)
        self.replay.close()
