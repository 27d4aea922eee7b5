"""A peer that asks and asks and reads nothing: `python -m tests.chaos.slow_reader JSON`."""

from __future__ import annotations

import json
import os
import sys
import time

import msgpack
import zmq

ASKED = 20_000


def main() -> None:
    """Ask for what is largest, as often as the socket takes it, until killed."""
    words = json.loads(sys.argv[1])
    socket = zmq.Context().socket(zmq.DEALER)
    socket.set(zmq.RCVHWM, 1)
    socket.set(zmq.RCVBUF, 4096)
    socket.curve_serverkey = words["server_key"].encode()
    socket.curve_secretkey = words["secret_key"].encode()
    socket.curve_publickey = zmq.curve_public(words["secret_key"].encode())
    socket.connect(words["endpoint"])
    if words["server"] == "learner":
        me = {
            "role": "viewer",
            "name": f"slow-{os.getpid()}",
            "incarnation": int.from_bytes(os.urandom(7), "big"),
        }
        ask(socket, "HELLO", me)
        time.sleep(1.0)
    for _ in range(ASKED):
        if words["server"] == "learner":
            ask(socket, "PARAMS_GET", {"version": -1})
        else:
            ask(socket, "STATUS", {})
    time.sleep(1000)


def ask(socket: zmq.Socket[bytes], kind: str, fields: dict[str, object]) -> None:
    """Send one question; the answer stays where it is."""
    socket.send(msgpack.packb({"v": 1, "t": kind, "i": 1, "f": fields, "a": []}))


if __name__ == "__main__":
    main()
