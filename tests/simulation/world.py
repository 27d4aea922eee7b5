"""One seeded scheduler for whole processes: greenlets, a clock that jumps from event to event, a hashed log.

Everything happens in one thread. A greenlet runs until it waits for something simulated; then the scheduler
takes the next event from its heap and sets the clock to it. So a seed says exactly what happens, and an idle
second costs nothing.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

SPINS = 400
"""Polls without waiting after which a little time passes, so that a loop that waits for a time ends."""

SPIN_S = 1e-3
UNIX_S = 1.75e9
NOTED_LINES = 1000
"""So many lines are hashed at once."""
PREEMPT_S = 2e-3
"""For at most so long a thread may stand where others may go on."""


class Deadlock(Exception):
    """Nothing can happen any more, or everything happens without end."""


class Task:
    """A thread of a simulated process."""

    def __init__(self, node: Node, name: str, body: Callable[[], Any]) -> None:
        self.node = node
        self.name = f"{node.name}/{name}"
        self.token = 0  # of the present wait
        self.woken_at = -1  # the last wait that something has ended
        self.spins = 0
        self.done = False
        self.error: BaseException | None = None
        self.joiners: list[Task] = []
        self._body = body
        self._woken = False
        self.greenlet = greenlet(self._run, node.world.hub)  # where it goes on when this ends

    def _run(self) -> None:
        try:
            self._body()
        except GreenletExit as exit:
            if not (self.node.dead or self.node.world.closing):
                self.error = exit
        except BaseException as error:
            self.error = error
        finally:
            self.done = True
        if not self.node.dead:
            self.node.world.log("ends", self.name, type(self.error).__name__ if self.error else "")
            for task in self.joiners:
                task.wake()
            self.node.ended(self)

    def wake(self) -> None:
        """Have it go on where it waits, unless something else wakes it before."""
        token = self.token
        if token != self.woken_at:  # once is enough
            self.woken_at = token
            world = self.node.world
            world.at(world.now, self._resume, token, True)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until woken; False where the time was over first. Called in the task itself."""
        world = self.node.world
        self.token += 1
        token = self.token
        if timeout_s is not None:
            world.at(world.now + timeout_s, self._resume, token, False)
        world.to_hub()
        self.spins = 0
        return self._woken

    def _resume(self, token: int, woken: bool) -> None:
        if token != self.token or self.done or self.node.dead:
            return
        world = self.node.world
        if world.now < self.node.stalled_until:
            world.at(self.node.stalled_until, self._resume, token, woken)
            return
        self.token += 1
        self._woken = woken
        world.switch(self)

    def start(self) -> None:
        """Begin at once, as the scheduler sees it."""
        self._woken = True
        self.node.world.after(0.0, self._resume, self.token, True)


class Node:
    """A process: its threads, clock and sockets. Killed and started again, it is another."""

    def __init__(self, world: World, name: str, host: str) -> None:
        self.world = world
        self.name = name
        self.host = host
        self.dead = False
        self.stalled_until = 0.0
        self.reads_slowly_until = 0.0
        # All processes of a kernel have one clock.
        self.boot_s = world.boots_s.setdefault(host, 1000.0 + world.rng.random() * 1000.0)
        self.tasks: list[Task] = []
        self.at_exit: list[Callable[[], None]] = []
        self.result: BaseException | None = None
        self.finished = False

    def start(self, body: Callable[[], Any], name: str = "main") -> Task:
        """Start a thread."""
        task = Task(self, name, body)
        self.tasks.append(task)
        task.start()
        return task

    def ended(self, task: Task) -> None:
        """The main thread's end is the process's."""
        if task is self.tasks[0] and not self.dead:
            self.result, self.finished = task.error, True
            self.kill()

    def kill(self, *, leave: bool = True) -> None:
        """End it as SIGKILL does: no code of it runs any more, its sockets and locks are the kernel's.

        Where its own code calls this, it does not return, unless it is not to `leave`.
        """
        if self.dead:
            return
        self.dead = True
        self.world.news = True
        self.world.log("dies", self.name)
        for each in self.at_exit:
            each()
        current = self.world.current
        if leave and current is not None and current.node is self and not current.done:
            self.world.to_hub()  # for ever


class World:
    """Time, chance, and who runs."""

    def __init__(self, seed: int, keep_log: bool = False) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.now = 0.0
        self.current: Task | None = None
        self._boot_s = 0.0  # of the node of `current`
        self.nodes: list[Node] = []
        self.violations: list[str] = []
        self.closing = False
        self.events = 0
        self.wall_offset: dict[str, float] = {}
        self.boots_s: dict[str, float] = {}
        self._boots: dict[str, int] = {}
        self.lines: list[str] | None = [] if keep_log else None
        self._noted: list[str] = []  # and not hashed yet
        self.news = False
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._until_preempted = 0.0
        self._hash = hashlib.blake2b(digest_size=12)
        self.hub = getcurrent()

    # -- events --

    def at(self, time_s: float, call: Callable[..., None], *args: Any) -> None:
        """Have something happen then."""
        self._count = count = self._count + 1
        heappush(self._heap, (time_s if time_s > self.now else self.now, count, call, args))

    def after(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """Have something happen after a while."""
        self.at(self.now + delay_s, call, *args)

    def run(self, until_s: float, done: Callable[[], bool] | None = None) -> None:
        """Let things happen until then, or until `done`, which is asked where there are `news`."""
        heap, pop, self.news = self._heap, heappop, True
        while heap and heap[0][0] <= until_s:
            if self.news:
                self.news = False
                if done is not None and done():
                    return
            self.now, _, call, args = pop(heap)
            self.events += 1
            if self.events > 3_000_000:
                raise Deadlock(f"too many events at {self.now:.3f} s")
            call(*args)
        if not (done and done()):
            self.now = max(self.now, until_s)

    def switch(self, task: Task) -> None:
        """Run a task until it waits."""
        before, self.current = self.current, task
        boot_s, self._boot_s = self._boot_s, task.node.boot_s
        try:
            task.greenlet.switch()
        finally:
            self.current, self._boot_s = before, boot_s

    def to_hub(self) -> None:
        """Back to the scheduler, from a task."""
        task = self.current
        self.hub.switch()
        if self.closing or (task is not None and task.node.dead):
            raise GreenletExit

    def close(self) -> None:
        """End every greenlet; what they still do has no effect on anything."""
        self.closing = True
        for node in self.nodes:
            for task in node.tasks:
                if not task.greenlet.dead and task.greenlet:
                    self.current = task
                    task.greenlet.throw(GreenletExit)
        self.current = None

    # -- for tasks --

    def node(self, name: str, host: str = "") -> Node:
        """A new process."""
        node = Node(self, name, host or name)
        self.nodes.append(node)
        return node

    def here(self) -> Task:
        """Who runs."""
        task = self.current
        if task is None or self.closing or task.node.dead:
            raise GreenletExit
        return task

    def sleep(self, seconds: float) -> None:
        """Wait."""
        self.here().wait(max(seconds, 0.0))

    def spin(self) -> None:
        """Note a look that did not wait: time passes at last for a loop of them."""
        task = self.here()
        task.spins += 1
        if task.spins > SPINS:
            task.wait(SPIN_S)

    def preempt(self, chance: float = 0.02) -> None:
        """Let others go first, now and then, where threads may be interrupted."""
        task = self.current
        if task is None or self.closing or task.node.dead:
            raise GreenletExit
        self._until_preempted -= chance
        if self._until_preempted < 0.0:
            self._until_preempted = self.rng.expovariate(1.0)
            task.wait(self.rng.random() * PREEMPT_S)

    def monotonic(self) -> float:
        """The clock of the process that asks."""
        return self.now + self._boot_s

    def reboot(self, host: str) -> None:
        """Have the kernel of a host begin anew, with another clock and name of its boot."""
        self._boots[host] = self._boots.get(host, 0) + 1
        self.boots_s.pop(host, None)

    def boot_id(self) -> str:
        """The name of this boot of the machine that asks."""
        host = self.here().node.host
        return f"{host} {self._boots.get(host, 0)}"

    def time(self) -> float:
        """The time of day where the process is, as far as its clock knows."""
        host = self.current.node.host if self.current else ""
        return UNIX_S + self.now + self.wall_offset.get(host, 0.0)

    # -- what happened --

    def log(self, *words: object) -> None:
        """Note what happens: two runs of a seed have to note the same."""
        self.note(" ".join(map(str, words)))

    def note(self, line: str) -> None:
        """See `log`."""
        self._noted.append(f"{self.now:.9f} {line}")
        if len(self._noted) >= NOTED_LINES:
            self._hash_noted()

    def _hash_noted(self) -> None:
        self._hash.update("".join(self._noted).encode())
        if self.lines is not None:
            self.lines += self._noted
        self._noted.clear()

    def digest(self) -> str:
        """Of everything noted."""
        self._hash_noted()
        return self._hash.hexdigest()
