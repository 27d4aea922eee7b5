"""What tests of several parts need to run services inside this process."""

import contextlib
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from troupe.common.config import load_config
from troupe.common.data.schema import Chunk
from troupe.common.data.table_config import TableConfig
from troupe.common.errors import ConfigError, PeerError
from troupe.common.runtime.lifecycle import StopSignal
from troupe.common.wire import sockets
from troupe.common.wire.control.client import ControlClient
from troupe.common.wire.control.member import Params
from troupe.common.wire.control.messages import Game, TelemetryFields
from troupe.common.wire.control.params import Published
from troupe.common.wire.replay.client import ReplayClient
from troupe.common.wire.replay.sharded import ShardedReplayClient
from troupe.services.learner.control.budget import StepBudget
from troupe.services.learner.control.reports import Report
from troupe.services.learner.control.requests import Terms
from troupe.services.learner.control.server import ControlServer
from troupe.services.learner.control.slots import SlotRules
from troupe.services.learner.record.gathered import Gathered
from troupe.services.learner.record.reporter import Reporter
from troupe.services.learner.saving.counters import RunCounters
from troupe.services.replay.service import ReplayService
from troupe.services.replay.storage.replay import Replay

LOOPBACK = "tcp://127.0.0.1:*"
CONFIG = {"env": {"id": "atari:pong"}, "agent": {"n_steps": 3}, "net": {"control": "here"}}
PATIENCE_S = 120.0
"""A busy machine gets so long for what takes a moment."""
CHAOS = bool(os.environ.get("TROUPE_CHAOS"))
only_in_chaos = pytest.mark.skipif(not CHAOS, reason="takes long: make chaos")
"""Of several that prove nearly the same, the others."""


def until(
    condition: Callable[[], Any],
    timeout_s: float = PATIENCE_S,
    *,
    step: Callable[[], Any] = lambda: time.sleep(0.005),
    why: Callable[[], Any] = lambda: "it never happened",
) -> Any:
    """Wait for something to become true, and return it; the test fails where it does not.

    Args:
        condition: what is waited for; asked first.
        timeout_s: patience, which costs a test that passes nothing.
        step: done after each look that found it false; it has to wait a little, as `client.poll(20)` does.
        why: what the failure says.
    """
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, why()
        step()
    return value


def fetched(client: ControlClient) -> Params:
    """The parameters of a run, as soon as they have been fetched."""
    params: Params = until(lambda: client.params_if_newer(-1))
    return params


def insert(client: ReplayClient | ShardedReplayClient, chunk: Chunk, table: str = "default") -> None:
    """Insert a chunk as soon as replay gives credit for it."""
    until(
        lambda: client.insert(chunk, table),
        step=lambda: client.poll(20),
        why=lambda: client.blocked_reason,
    )


def end_tree(process: subprocess.Popen[Any]) -> None:
    """Kill a process with all that it has started, and wait until they are gone."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        found = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    for child in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    _, alive = psutil.wait_procs(found, timeout=PATIENCE_S)
    assert not alive, alive


def hung_up(client: socket.socket, sends: bytes) -> bool:
    """Whether a server closes a connection over which `sends` is sent now and then, and nothing else."""
    deadline_s = time.monotonic() + 60
    client.settimeout(0.05)
    while time.monotonic() < deadline_s:
        try:
            client.sendall(sends)
            if not client.recv(1024):
                return True
        except TimeoutError:
            pass
        except ConnectionError:
            return True
    return False


def games(*entries: list[Any], tasks: Sequence[str] = (), **more: Any) -> TelemetryFields:
    """Finished games, each as it stands in a message, for a report."""
    return TelemetryFields([Game(*entry) for entry in entries], list(tasks), **more)


def control_server(
    ctx: sockets.Context,
    control: str = LOOPBACK,
    announce: str = LOOPBACK,
    *,
    config: dict[str, Any] = CONFIG,
    structural_hash: str = "abc",
    total_slots: int = 8,
    **options: Any,
) -> ControlServer:
    """The learner's end of the control connection, not started yet; `options` are of any of its parts."""
    parts = {}
    for kind in (Terms, SlotRules):
        names = kind.__dataclass_fields__.keys() & options.keys()
        parts[kind] = {name: options.pop(name) for name in names}
    terms = Terms(config, structural_hash, **parts[Terms])
    return ControlServer(ctx, control, announce, terms, SlotRules(total_slots, **parts[SlotRules]), **options)


class Untyped(dict[str, Any]):
    """Fields of a report that nobody may send."""

    def entries(self) -> dict[str, Any]:
        """All of them, as they are."""
        return dict(self)


def evaluated(*returns: float, version: int = 12, played: Published | None = None) -> Report:
    """The whole of an evaluation, in one part."""
    entries = games(*([score, 10] for score in returns), part=0)
    return Report("evaluator", "evaluator", 3, {"eval/version": float(version)}, entries, played=played)


def make_reporter(path: Path, resumed_steps: int | None = None, **more: Any) -> Reporter:
    """The record of a run of Pong whose evaluations are of one game."""
    config = load_config("pong-apex", None, {"evaluator.episodes": "1"}, {})
    settings = {"env_id": "atari:pong", "total_steps": 1000, "log_every_s": 10.0, **more}
    settings = {"counters": RunCounters(4, StepBudget()), "gathered": Gathered(config), **settings}
    return Reporter(path, resumed_steps=resumed_steps, **settings)


def bind(start: Callable[[], Any]) -> None:
    """Start a server where one has just stopped: ZeroMQ gives the port up in the background."""

    def started() -> bool:
        try:
            start()
        except ConfigError:
            return False
        return True

    until(started)


def told_to_wait(client: ControlClient, reason: Callable[[], bool]) -> str:
    """What a client says that tries to join, is told for a `reason` to wait, and gives up."""
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(client.join, 600)
        until(reason)
        client.close()
        with pytest.raises(PeerError) as caught:
            joining.result(60)
    return str(caught.value)


class Context(zmq.Context):
    """Holds on to its sockets: what a test leaves open `destroy` closes, not the garbage collector."""

    held: list[zmq.Socket] | None = None  # pyzmq takes what no class names for an option of ZeroMQ's

    def socket(self, *args: Any, **options: Any) -> zmq.Socket:
        made = super().socket(*args, **options)
        self.held = [*(self.held or []), made]
        return made


class InThread:
    """A service whose `run` goes on in a thread until `stop` is set.

    Attributes:
        service: it.
        error: what ended it, once something has; None for a good end.
    """

    def __init__(self, service: Any, stop: StopSignal) -> None:
        self.service = service
        self.stop = stop
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.service.run()
        except BaseException as error:
            self.error = error

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def wait(self, timeout_s: float) -> bool:
        """Whether it ends within the time."""
        self._thread.join(timeout_s)
        return not self.alive

    def join(self, timeout_s: float = PATIENCE_S) -> None:
        """Wait for its end; raises what ended it."""
        assert self.wait(timeout_s), "it goes on"
        if self.error is not None:
            raise self.error

    def end(self) -> None:
        self.stop.set()
        self.join()


class Shard(InThread):
    """A shard of one table, in a folder that may have been another's."""

    def __init__(
        self, context: Any, folder: Any, endpoint: str, *, durable: str = "process", **table: Any
    ) -> None:
        self.replay = Replay(folder, [TableConfig(**table)], budget_bytes=1 << 26, seed=1, durable=durable)
        self.router = sockets.make_router(context, endpoint)
        self.endpoint = sockets.bound_endpoint(self.router)
        stop = StopSignal()
        super().__init__(ReplayService(self.replay, self.router, stop), stop)

    @property
    def table(self) -> Any:
        return self.replay.tables["default"]

    def end(self) -> None:
        try:
            super().end()
        finally:
            self.router.close(linger=0)
            self.replay.close()


def make_steps(control, steps, at_once=1):
    """Report steps as an actor does that makes so many at once: never more than the learner permits."""
    made = 0
    while made < steps:
        count = min(at_once, steps - made)
        assert control.may_step(count, 60), f"{made} of {steps} steps were permitted"
        made += count
        control.report_steps(made)


def leave(disk, room):
    """Fill the disk up to `room` bytes."""
    ballast = disk / "ballast"
    ballast.unlink(missing_ok=True)
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free - room)
