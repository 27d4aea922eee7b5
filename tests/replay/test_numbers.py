"""The numbers of inserts, tried by a stranger with msgpack and nothing of Troupe: INSERTED means stored."""

import pytest

from tests.replay import processes
from tests.replay.strangers import kinds


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
