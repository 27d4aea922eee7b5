"""The numbers of inserts, tried by a stranger with msgpack and nothing of Troupe: INSERTED means stored."""

import msgpack
import numpy as np
import pytest
import zmq

from tests.replay import processes


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


def test_one_that_leaves_oldest_out_skips_no_number(server, stranger):
    peer = stranger(server("--table", "default:capacity=100"))
    assert kinds(peer.insert(1)) == ("INSERTED", 1)
    answer = peer.insert(3)
    assert kinds(answer) == ("ERROR", 3, "gap")
    assert answer[2]["expected"] == 2
    assert kinds(peer.insert(2)) == ("INSERTED", 2)
    assert kinds(peer.insert(3)) == ("INSERTED", 3)
    assert peer.chunks() == 3


def test_a_number_that_was_left_out_is_not_inserted_later(server, stranger):
    peer = stranger(server("--table", "default:capacity=100"))
    assert kinds(peer.insert(1)) == ("INSERTED", 1)
    assert kinds(peer.insert(3, oldest=3)) == ("INSERTED", 3)
    assert kinds(peer.insert(2)) == ("ERROR", 2, "not_stored")
    assert peer.chunks() == 2


def test_the_number_0_is_refused(server, stranger):
    peer = stranger(server("--table", "default:capacity=100"))
    assert kinds(peer.insert(0)) == ("ERROR", 0, "bad_field")
    assert peer.chunks() == 0


WRONG = {
    "bad_priority": {"priority": float("nan")},
    "bad_chunk": {"steps": 2},
    "no_table": {"table": "nowhere"},
}


@pytest.mark.parametrize("kind", ["bad_priority", "bad_chunk", "no_table"])
def test_what_was_refused_is_refused_again_also_after_a_restart(server, stranger, kind):
    endpoint = server("--table", "default:capacity=100")
    peer = stranger(endpoint)
    assert kinds(peer.insert(1)) == ("INSERTED", 1)
    assert kinds(peer.insert(2, **WRONG[kind])) == ("ERROR", 2, kind)
    assert kinds(peer.insert(2, **WRONG[kind])) == ("ERROR", 2, "not_stored")
    assert kinds(peer.insert(3)) == ("INSERTED", 3)
    processes.kill(server.process)
    peer = stranger(server("--table", "default:capacity=100"))
    for number, expected in (
        (1, ("INSERTED", 1)),
        (2, ("ERROR", 2, "not_stored")),
        (3, ("INSERTED", 3)),
        (4, ("INSERTED", 4)),
    ):
        assert kinds(peer.insert(number)) == expected
    assert peer.chunks() == 3
