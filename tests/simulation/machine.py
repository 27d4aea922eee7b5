"""Puts a `World` in the place of the machine: clocks, threads, sockets, and a guard over everything else."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from tests.simulation import actors, threads
from tests.simulation import sockets as simulated
from tests.simulation.network import Network
from tests.simulation.world import World
from troupe.common import installation, system
from troupe.common.data import format as data_format
from troupe.common.data import plan as memory_plan
from troupe.common.runtime import files, usage, watchdog
from troupe.common.wire import intake, link, server, sockets
from troupe.common.wire.control import client
from troupe.common.wire.replay import files as shared_files
from troupe.common.wire.security import handshakes
from troupe.services.evaluator import service as evaluator
from troupe.services.learner.batches import prefetch
from troupe.services.learner.control import announcer
from troupe.services.replay import rates, scrubber, service
from troupe.services.replay.storage import group_commit, opened, producers

_watched: World | None = None
_folder = ""

_PATHS = {
    *("open", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.truncate", "os.scandir"),
    *("os.listdir", "os.chmod", "os.link", "os.symlink", "shutil.rmtree"),
}
_WITHIN = {"os.remove", "os.rmdir"}
_LOOKS = {"open", "os.listdir", "os.scandir"}
_NEVER = (
    "socket.",
    "subprocess.",
    "os.fork",
    "os.exec",
    "os.posix_spawn",
    "os.system",
    "time.sleep",
)
_READ_ONLY = (sys.prefix, sys.base_prefix, str(Path(__file__).parents[2]))
"""Where Python looks for modules, which are imported when they are needed."""


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Note what simulated code asks of the real machine."""
    world = _watched
    if world is None or world.current is None:
        return
    if event in _PATHS:
        path = arguments[0]
        if isinstance(path, (str, bytes, os.PathLike)):
            place = os.fsdecode(path)
            if event in _WITHIN and arguments[-1] >= 0:  # the open folder that a name is in
                place = os.path.join(os.readlink(f"/proc/self/fd/{arguments[-1]}"), place)
            if not place.startswith(_folder) and not (event in _LOOKS and place.startswith(_READ_ONLY)):
                world.violations.append(f"{event} {place}")
    elif event.startswith(_NEVER):
        world.violations.append(f"{event} {arguments!r:.100}")


sys.addaudithook(_audit)


def _guarded(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    """What no audit event tells of: refused to Troupe's own code, which has to ask `troupe.common.system`."""

    def function(*args: Any, **options: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if _watched is not None and _watched.current is not None and caller.startswith("troupe."):
            _watched.violations.append(f"{name} in {caller}")
        return real(*args, **options)

    return function


class Intake:
    """Receives; what TCP keeps in the kernel is not simulated, so there is nothing to bound."""

    period_ms = math.inf

    def __init__(self, socket: Any, message_bytes: int, of_all: int = 2) -> None:
        self._socket = socket

    def receive(self) -> list[zmq.Frame] | None:
        return sockets.receive_frames(self._socket)

    def look(self, counts: Counter[str]) -> None:
        pass


class _File:
    """A locked file: the lock ends with the process."""

    def __init__(self, world: World, path: Path) -> None:
        self._locks: dict[Path, Any] = world.__dict__.setdefault("locks", {})
        self._path = path
        if path in self._locks:
            raise files.ConfigError("locked")
        path.touch()
        self._locks[path] = world.here().node
        world.here().node.at_exit.append(self.close)

    def close(self) -> None:
        self._locks.pop(self._path, None)


@contextlib.contextmanager
def simulated_machine(seed: int, *, keep_log: bool = False) -> Iterator[tuple[World, Network, Path]]:
    """A world in the place of this process's clock, threads, sockets and generators.

    Files are real, in a folder of their own: what a killed process has written to a mapped file is there.
    """
    global _watched, _folder
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        world = World(seed, keep_log)
        network = Network(world, folder)
        undo: list[tuple[Any, str, Any]] = []

        def put(owner: Any, name: str, value: Any) -> None:
            undo.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)

        for name in ("monotonic", "time", "sleep"):
            put(system, name, getattr(world, name))
            put(time, name, _guarded(f"time.{name}", getattr(time, name)))
        for name in ("perf_counter", "process_time"):
            put(system, name, world.monotonic)
        put(os, "urandom", _guarded("os.urandom", os.urandom))
        put(random, "uniform", _guarded("random.uniform", random.uniform))
        put(np.random, "default_rng", _seeded_only(np.random.default_rng))
        put(system, "random", random.Random(seed))
        put(system, "pid", lambda: 1000 + len(world.nodes))
        put(system, "hostname", lambda: world.here().node.host)
        for name in ("Thread", "Event", "Condition", "Queue"):
            put(system, name, getattr(threads, name))
        put(threads, "world", world)
        put(zmq, "Poller", simulated.Poller)
        put(sockets, "Waker", threads.Waker)
        for module in (server, announcer, intake):
            put(module, "Intake", Intake)
        for asks in (shared_files, opened, client):
            put(asks, "boot_id", world.boot_id)
        put(group_commit, "os", threads.Eventfds)
        # All processes have this one, and one that is torn may never let go of it.
        put(data_format, "_LOCK", contextlib.nullcontext())
        put(handshakes, "_answer", lambda endpoint, greeting: b"")
        put(handshakes, "_numbers", itertools.count())
        put(link, "_numbers", itertools.count(1))
        put(producers, "MAX_PRODUCERS", 64)  # of files that are made anew for every seed
        put(prefetch, "IDLE_POLL_S", 0.25)  # a third of the time would go into looks
        put(service, "POLL_S", 0.25)
        put(scrubber, "CHUNK_PERIOD_S", 0.25)
        put(rates, "PERIOD_S", 3.0)
        put(evaluator, "play", actors.play)
        put(installation, "version", lambda: "0")
        put(installation, "commit", lambda: "")
        put(memory_plan, "memory_limit_bytes", lambda: 1 << 30)
        put(memory_plan, "disk_limit_bytes", lambda folder: 1 << 30)
        put(watchdog, "_hold_off", lambda limit_s: None)  # a timer in C, which would end this process
        put(watchdog, "_loops", set())
        put(usage.OwnUsage, "__init__", lambda self, prefix, period_s=2.0: None)
        put(usage.OwnUsage, "metrics", lambda self: {})  # the processor's time is not simulated
        put(opened, "lock_file", lambda path, refusal: _File(world, path))
        logging.disable(logging.CRITICAL if not keep_log else logging.NOTSET)
        _watched, _folder = world, folder
        try:
            yield world, network, Path(folder)
        finally:
            world.close()
            _watched = None
            logging.disable(logging.NOTSET)
            for owner, name, value in reversed(undo):
                setattr(owner, name, value)


def _seeded_only(real: Callable[..., Any]) -> Callable[..., Any]:
    def default_rng(seed: Any = None) -> Any:
        if seed is None and _watched is not None and _watched.current is not None:
            _watched.violations.append("numpy.random.default_rng without a seed")
        return real(seed)

    return default_rng
