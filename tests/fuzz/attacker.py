"""A process that sends hostile messages, and nothing else: `python -m tests.fuzz.attacker JSON`.

The argument is a JSON map: `seed`, `first` and `count` say which messages; `targets` is a list of
[server, role, endpoint, public key of the server, own secret key], which take turns (keys are empty without);
no turn begins after `limit_s` seconds, if that is there. Each line that is printed says by kind what was sent
and answered so far.
To make one message again that did harm, give it as `first`, with a `count` of 1 and the same targets.
"""

from __future__ import annotations

import collections
import contextlib
import json
import random
import socket
import sys
import time
from dataclasses import dataclass

import msgpack
import zmq

from tests.fuzz import mutation

TURN = 250
"""Messages to one target, over one connection, before it is another's turn."""

PATIENCE_S = 120.0
TELL_S = 5.0
QUESTION = {"replay": "STATUS", "control": "HEARTBEAT", "inference": "ACTIONS"}


@dataclass
class Target:
    """One socket, and who is at it."""

    server: str
    role: str
    endpoint: str
    server_key: str
    secret_key: str
    specs: list | None = None


class Attacker:
    """Sends the messages of a seed to targets in turn."""

    def __init__(self, seed: int, targets: list[Target]) -> None:
        self.context = zmq.Context()
        self.seed = seed
        self.targets = targets
        self.sent: collections.Counter[str] = collections.Counter()
        self.answers: collections.Counter[str] = collections.Counter()

    def run(self, first: int, count: int, limit_s: float) -> None:
        """Send messages `first` to `first + count - 1`, as far as the time goes."""
        number, end_s, told_s = first, time.monotonic() + limit_s, time.monotonic()
        while number < first + count and time.monotonic() < end_s:
            if time.monotonic() > told_s + TELL_S:
                told_s = time.monotonic()
                self.tell()
            turn = number // TURN
            end = min((turn + 1) * TURN, first + count)
            self.turn(self.targets[turn % len(self.targets)], number, end)
            number = end
        self.tell()

    def tell(self) -> None:
        """Print what was sent and answered."""
        print(json.dumps({"sent": self.sent, "answers": self.answers}), flush=True)

    def turn(self, target: Target, number: int, end: int) -> None:
        """Send some messages over a connection of their own, and see that the server answers afterwards."""
        with self.connect(target) as peer:
            if target.server == "replay" and target.specs is None:
                target.specs = self.ask(peer, target, "CREDIT", {"incarnation": 1, "name": "fuzz"}).get(
                    "fields"
                )
            for each in range(number, end):
                kind, made = mutation.message(
                    target.server, self.seed, each, role=target.role, specs=target.specs
                )
                self.sent[f"{target.server} {kind}"] += 1
                try:
                    self.send(peer, made)
                except TimeoutError:
                    raise SystemExit(
                        f"{target.server} takes nothing after {self.seed}:{each} ({target.role})"
                    ) from None
                if each % 8 == 0:
                    self.receive(peer)
            if target.server in QUESTION:
                self.ask(peer, target, QUESTION[target.server], {})
        self.noise(target, random.Random(number))

    def connect(self, target: Target) -> zmq.Socket:
        """A connection with the target's key."""
        peer = self.context.socket(zmq.XSUB if target.server == "announce" else zmq.DEALER)
        peer.linger = 1000
        if target.server_key:
            peer.curve_serverkey = target.server_key.encode()
            peer.curve_secretkey = target.secret_key.encode()
            peer.curve_publickey = zmq.curve_public(target.secret_key.encode())
        peer.connect(target.endpoint)
        return peer

    def send(self, peer: zmq.Socket, frames: list[bytes]) -> None:
        """Send a message when there is room."""
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(zmq.Again):
                peer.send_multipart(frames, zmq.NOBLOCK)
                return
            self.receive(peer)
            if time.monotonic() > deadline_s:
                raise TimeoutError
            peer.poll(100, zmq.POLLIN | zmq.POLLOUT)

    def receive(self, peer: zmq.Socket) -> None:
        """Count the answers that are there."""
        with contextlib.suppress(zmq.Again):
            while True:
                self.count(peer.recv_multipart(zmq.NOBLOCK))

    def ask(self, peer: zmq.Socket, target: Target, kind: str, fields: dict) -> dict:
        """The fields of the answer to a message that is right, which has to come."""
        number = 1 << 60
        self.send(peer, [msgpack.packb({"v": 1, "t": kind, "i": number, "f": fields, "a": []})])
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            if peer.poll(100) and (header := self.count(peer.recv_multipart()))["i"] == number:
                return header["f"]
        raise SystemExit(
            f"{target.server} at {target.endpoint} does not answer {target.role or 'a stranger'}"
        )

    def count(self, frames: list[bytes]) -> dict:
        """Count an answer by what it is."""
        header = msgpack.unpackb(frames[0], strict_map_key=False)
        self.answers[header["f"].get("kind", header["t"])] += 1
        return header

    def noise(self, target: Target, rng: random.Random) -> None:
        """Connect without ZeroMQ: bytes, and the greeting of a peer with keys that goes on otherwise."""
        host, port = target.endpoint.removeprefix("tcp://").split(":")
        greeting = (
            b"\xff" + bytes(8) + b"\x7f\x03\x01" + rng.choice((b"CURVE", b"NULL", b"PLAIN")).ljust(20, b"\0")
        )
        with socket.create_connection((host, int(port)), PATIENCE_S) as peer:
            peer.sendall(rng.choice((greeting + bytes(32), b"")) + rng.randbytes(rng.randrange(400)))


def main() -> None:
    """Attack as the argument says, and print what was answered, by kind."""
    words = json.loads(sys.argv[1])
    attacker = Attacker(words["seed"], [Target(*target) for target in words["targets"]])
    attacker.run(words["first"], words["count"], words.get("limit_s", float("inf")))
    attacker.context.destroy(linger=1000)


if __name__ == "__main__":
    main()
