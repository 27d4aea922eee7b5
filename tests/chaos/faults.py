"""The faults, each from its beginning to its end; a seed decides which, to whom and for how long."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.chaos.system import HANG_S, ROOT, TAG, System

KINDS = os.environ.get("TROUPE_CHAOS_KINDS", "").split()
SERVICES = ["learner", "replay", "actor-a", "actor-b", "evaluator"]


def kill(system: System, rng: random.Random) -> str:
    """`kill -9`."""
    name = rng.choice(SERVICES)
    system.children[name].signal(signal.SIGKILL)
    system.sleep(0.3)
    return name


def stop_and_continue(system: System, rng: random.Random) -> str:
    """SIGSTOP, and SIGCONT after some seconds, of which some are longer than a lease."""
    name, seconds = rng.choice(SERVICES), rng.choice([1.0, 4.0, 12.0])
    child = system.children[name]
    child.signal(signal.SIGSTOP)
    system.sleep(seconds)
    child.signal(signal.SIGCONT)
    return f"{name} for {seconds:.0f} s"


def hang(system: System, rng: random.Random) -> str:
    """SIGSTOP, and nobody continues it: the supervisor has to kill it."""
    name = rng.choice(SERVICES)
    child = system.children[name]
    pid = child.pid
    child.signal(signal.SIGSTOP)
    system.wait(lambda: child.pid != pid, 10 * HANG_S, f"end of {name}, which hangs")
    return name


def partition(system: System, rng: random.Random) -> str:
    """A machine's link goes down, and up again."""
    name, seconds = rng.choice(SERVICES), rng.choice([1.0, 5.0, 15.0])
    system.network.cut(name)
    system.sleep(seconds)
    system.network.join(name)
    return f"{name} for {seconds:.0f} s"


def slow_link(system: System, rng: random.Random) -> str:
    """A machine's link delays and loses packets, for some seconds."""
    name = rng.choice(SERVICES)
    system.network.slow_down(name)
    system.sleep(5.0)
    system.network.speed_up(name)
    return f"{name} ({system.network.slow})"


def full_disk(system: System, rng: random.Random) -> str:
    """The disk of the run's record, or of replay, is full for some seconds."""
    disk = rng.choice([system.run_disk, system.replay_disk])
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            with contextlib.suppress(OSError):  # there is no more room for so much
                while file.write(bytes(size)) == size:
                    pass
    system.sleep(4.0)
    ballast.unlink()
    return disk.name


def flood(system: System, rng: random.Random) -> str:
    """Hostile messages, as fast as they go, with every key and to every port."""
    targets = []
    for role in ("learner", "replay", "actor", "evaluator", "viewer"):
        for server, host, port, of in (
            ("replay", "replay", 5560, "replay"),
            ("control", "learner", 5550, "learner"),
        ):
            if role == "learner" and server == "replay":
                continue  # who has the learner's key may sample and change priorities as he likes
            if role == "actor" and server == "replay":
                continue  # who has an actor's may insert what he likes
            endpoint = f"tcp://{system.network.address(host)}:{port}"
            targets.append([server, role, endpoint, system.key(f"{of}.public"), system.key(f"{role}.secret")])
    words = {"seed": rng.getrandbits(20), "first": 0, "count": 10**9, "targets": targets}
    with stranger(system, "tests.fuzz.attacker", words):
        system.sleep(5.0)
    return f"seed {words['seed']}"


def slow_reader(system: System, rng: random.Random) -> str:
    """Peers ask a lot, and read nothing."""
    server, port = rng.choice([("learner", 5550), ("replay", 5560)])
    words = {
        "endpoint": f"tcp://{system.network.address(server)}:{port}",
        "server_key": system.key(f"{server}.public"),
        "secret_key": system.key("viewer.secret"),
        "server": server,
    }
    with stranger(system, "tests.chaos.slow_reader", words):
        system.sleep(5.0)
    return server


def spot_notice(system: System, rng: random.Random) -> str:
    """An actor's machine is taken, with notice, and another comes."""
    name = rng.choice(["actor-a", "actor-b"])
    child = system.children[name]
    pid = child.pid
    child.signal(signal.SIGTERM)
    system.wait(lambda: child.pid != pid, 60.0, f"end of {name}, which was told to stop")
    return name


FAULTS: list[Callable[[System, random.Random], str]] = [
    kill,
    kill,
    stop_and_continue,
    partition,
    slow_link,
    full_disk,
    flood,
    slow_reader,
    spot_notice,
    hang,
]


def choose(rng: random.Random, count: int, slow_links: bool) -> list[Callable[[System, random.Random], str]]:
    """So many faults, as mixed as they can be, in an order of the seed's."""
    kinds = [fault for fault in FAULTS if slow_links or fault is not slow_link]
    kinds = [fault for fault in kinds if not KINDS or fault.__name__ in KINDS]
    chosen = [kinds[number % len(kinds)] for number in range(count)]
    rng.shuffle(chosen)
    return chosen


@contextmanager
def stranger(system: System, module: str, words: dict[str, object]) -> Iterator[None]:
    """A process on a machine that has no part in the run."""
    command = system.network.inside("stranger", sys.executable, "-P", "-m", module, json.dumps(words))
    variables = {**os.environ, "PYTHONPATH": str(ROOT), TAG: system.tag}
    log = Path(system.folder, "stranger.log")
    with log.open("a") as out:
        process = subprocess.Popen(command, env=variables, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        process.kill()
        process.wait(60)
