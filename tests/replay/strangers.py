"""A client that sends anything."""

import msgpack
import numpy as np
import pytest
import zmq


class Stranger:
    """A DEALER that inserts chunks of one step."""

    def __init__(self, context, endpoint):
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)

    def ask(self, kind, number, fields, arrays=()):
        """The type, request id and fields of the next message."""
        table = [{"n": name, "d": array.dtype.name, "s": array.shape} for name, array in dict(arrays).items()]
        header = {"v": 1, "t": kind, "i": number, "f": fields, "a": table}
        frames = [array.tobytes() for array in dict(arrays).values()]
        self._socket.send_multipart([msgpack.packb(header), *frames])
        assert self._socket.poll(20_000)
        answer = msgpack.unpackb(self._socket.recv_multipart()[0])
        return answer["t"], answer["i"], answer["f"]

    def insert(self, number, *, value=1.0, priority=1.0, **fields):
        """Insert one step with this value; the same triple."""
        arrays = {
            "items/offsets": np.zeros(1, np.int32),
            "items/lengths": np.ones(1, np.int32),
            "items/priorities": np.full(1, priority),
            "chunk/x": np.full(1, value),
        }
        described = {"incarnation": 5, "steps": 1, "fields": [["x", "float64", [], 0, 0, "raw"]]}
        return self.ask("INSERT", number, described | fields, arrays)

    def chunks(self):
        return self.ask("STATUS", 9, {})[2]["chunks"]

    def close(self):
        self._socket.close(linger=0)


@pytest.fixture
def stranger(context):
    """A function that connects strangers."""
    made = []

    def connect(endpoint):
        made.append(Stranger(context, endpoint))
        return made[-1]

    yield connect
    for each in made:
        each.close()


def kinds(answer):
    """The type, the request id, and the kind where it is an ERROR."""
    kind, number, fields = answer
    return (kind, number, fields["kind"]) if kind == "ERROR" else (kind, number)
