"""A shard that answers wrongly."""

import threading

import msgspec
import numpy as np

from tests.replay.shards import connect, fill, start  # noqa: F401
from troupe.common.wire import messages, sockets
from troupe.common.wire.codec import decode
from troupe.common.wire.replay.codec import specs_to_wire


def batch_of(specs, request, **changes):
    """A BATCH that is right but for the `changes`."""
    count = next(iter(request.counts().values()))
    arrays = {spec.name: np.zeros((count, spec.entries(1), *spec.shape), spec.dtype) for spec in specs}
    body = messages.Batch(
        table_items=count,
        total_priority=1e9,  # so that it is drawn
        fields=specs_to_wire(specs),
        ids=np.arange(count, dtype=np.uint64),
        probabilities=np.full(count, 1 / count),
        versions=np.zeros(count, np.int64),
        lengths=np.ones(count, np.int32),
        data=arrays,
    )
    return msgspec.structs.replace(body, **{n: c(body) if callable(c) else c for n, c in changes.items()})


def spoilt(**changes):
    return lambda specs, request: batch_of(specs, request, **changes)


class Misbehaving:
    """A shard in a thread, which gives a right answer, and then each of the `answers` in turn, for ever."""

    def __init__(self, context, endpoint, specs, answers):
        self.endpoint = endpoint
        self.asked = 0
        self._specs, self._answers = specs, answers
        self._router = sockets.make_router(context, endpoint)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        while not self._stopping.is_set():
            if not self._router.poll(50):
                continue
            frames = sockets.receive_frames(self._router)
            message, to = decode(frames[1:]), frames[0].bytes
            if message.type == messages.Credit.TYPE:
                body = messages.Credit(credit=0, session=9)
                sockets.send(self._router, body.message(message.request_id), to)
            elif message.type == messages.Sample.TYPE:
                self._answer(messages.Sample.of(message), message.request_id, to)

    def _answer(self, request, number, to):
        answer = self._answers[(self.asked - 1) % len(self._answers)] if self.asked else spoilt()
        self.asked += 1
        body = answer and answer(self._specs, request)
        if body is not None:
            sockets.send(self._router, body.message(number), to)
        elif answer is not None:
            sockets.send_frames(self._router, [b"garbage"], to)

    def stop(self):
        self._stopping.set()
        self._thread.join(60)
        self._router.close(linger=0)
