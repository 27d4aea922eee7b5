"""Sees what goes wrong in an actor's environments, also while one of them holds up the actor's loop."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence

from troupe.common import system
from troupe.common.envs import VectorEnv
from troupe.common.envs.calls import RESET
from troupe.common.errors import OWN_ERROR
from troupe.common.runtime.lifecycle import INTERNAL_ERROR

_log = logging.getLogger(__name__)

PERIOD_S = 0.5
ENDS_AFTER = 6
"""Times `actor.env_stall_s` after which a hanging environment ends the process."""
MAX_TEXT = 400
SLOTS_AT_A_TIME = 8
"""An engine that resets all its slots in one call may take `env_stall_s` for each group of this size."""

Report = Callable[[dict[str, float], str], object]


class EnvWatch:
    """Counts failures and hangs of environments, reports them at once, ends a process that hangs for good.

    A hang is told apart by time that this thread has seen pass: a process that was stopped, or a machine that
    slept, does not hang.
    """

    def __init__(
        self,
        envs: Callable[[], Sequence[VectorEnv]],
        report: Report,
        stall_s: float,
        busy: Callable[[], object] = lambda: None,
    ) -> None:
        """Watch what `envs` gives, in a thread; `report` takes metrics and the trouble, from that thread.

        `busy` is called while a call of an environment goes on, whose patience is this class's matter.
        """
        self._envs = envs
        self._report = report
        self._stall_s = stall_s
        self._busy = busy
        self._failures = self._hangs = 0
        self._seen: dict[
            tuple[int, int | None, int], tuple[float, str, float]
        ] = {}  # how long, which call, patience
        self._for_good = ""
        self._lock = threading.Lock()
        self._stopped = system.Event()
        self._thread = system.Thread(target=self._run, name="env-watch", daemon=True)
        self._thread.start()

    def metrics(self) -> dict[str, float]:
        """Totals since the process started."""
        return {
            "actor/env_restarts_total": float(self._failures),
            "actor/env_hangs_total": float(self._hangs),
        }

    def look(self, passed_s: float = 0.0) -> None:
        """Take note of what has happened, with so much time since the last look; report what is new."""
        with self._lock:
            trouble = [*self._new_failures(), *self._new_hangs(passed_s)]
            if trouble:
                self._report(self.metrics(), _printable(trouble[-1]))
            if self._for_good:
                system.sleep(PERIOD_S)  # for the report to leave
                _end(self._for_good)

    def close(self) -> None:
        """Look once more, and stop."""
        self._stopped.set()
        self._thread.join()
        self.look()

    def _run(self) -> None:
        before_s, period_s = system.monotonic(), min(PERIOD_S, self._stall_s / 4)
        while not self._stopped.wait(period_s):
            now_s = system.monotonic()
            # At most two periods: what passes while this process is stopped, or the machine asleep, is not
            # the environment's.
            self.look(min(now_s - before_s, 2 * period_s))
            before_s = now_s

    def _new_failures(self) -> list[str]:
        found = []
        for env in self._envs():
            with contextlib.suppress(IndexError):
                while True:
                    found.append(str(env.failures.popleft()))
        self._failures += len(found)
        return found

    def _new_hangs(self, passed_s: float) -> list[str]:
        """Hangs that begin, that have lasted for as long again, and that are over."""
        before, self._seen = self._seen, {}
        found = []
        for index, env in enumerate(self._envs()):
            for call in env.calls.running():
                self._busy()
                key = index, call.slot, call.number
                before_s = before[key][0] if key in before else -passed_s
                now_s = before_s + passed_s

                stall_s = self._stall_s
                if call.slot is None and call.call == RESET:
                    # Atari loads the ROM of each slot anew where it is given a seed, a tenth of a second
                    # each.
                    stall_s *= max(1.0, env.num_slots / SLOTS_AT_A_TIME)
                self._seen[key] = now_s, f"{env.spec.id} hung {call}", stall_s
                text = f"{env.spec.id} hangs {call}, for {now_s:.0f} s"
                # Once, where the limit is crossed; the lines that follow are for each further multiple of it.
                if before_s < stall_s <= now_s:
                    self._hangs += 1
                    _log.warning("%s; the actor exits after %.0f s", text, ENDS_AFTER * stall_s)
                if max(0.0, before_s) // stall_s < now_s // stall_s:
                    found.append(text)
                if now_s >= ENDS_AFTER * stall_s:
                    self._for_good = text
        over = [before[key] for key in before.keys() - self._seen.keys()]
        found += [f"{words}, for {seconds:.0f} s" for seconds, words, stall_s in over if seconds >= stall_s]
        return found


def _printable(text: str) -> str:
    """As the learner takes it: what an environment says of itself may be anything."""
    return "".join(each if each.isprintable() else "?" for each in text)[:MAX_TEXT]


def _end(text: str) -> None:
    """The stacks, one line, and the end: nothing else gets the main thread out of a call that hangs."""
    faulthandler.dump_traceback()
    print(f"{OWN_ERROR} {text}: the actor exits so that it can be restarted", file=sys.stderr, flush=True)
    os._exit(INTERNAL_ERROR)
