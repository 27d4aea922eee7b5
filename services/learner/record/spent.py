"""Where the time of the learner's main loop goes, beside waiting for batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from troupe.common import system
from troupe.services.learner.batches.prefetch import Prefetcher

PERIOD_S = 5.0


class Spent:
    """Clocks of the main loop; `metrics` makes shares of them every `PERIOD_S`."""

    def __init__(self) -> None:
        self._update_s = self._publish_s = 0.0
        self._last_s, self._last = system.monotonic(), (0.0, 0.0)

    @contextmanager
    def update(self, prefetch: Prefetcher) -> Iterator[None]:
        """Around an update: what it waits for batches is none of it."""
        began_s, waited_s = system.monotonic(), prefetch.waited_s
        yield
        self._update_s += system.monotonic() - began_s - (prefetch.waited_s - waited_s)

    @contextmanager
    def publish(self) -> Iterator[None]:
        """Around a new version, from the weights on the device to its announcement."""
        began_s = system.monotonic()
        yield
        self._publish_s += system.monotonic() - began_s

    def metrics(self) -> dict[str, float]:
        """Shares of the time since the last ones; empty before it is time for new ones."""
        elapsed_s = system.monotonic() - self._last_s
        if elapsed_s < PERIOD_S:
            return {}
        totals = (self._update_s, self._publish_s)
        update_s, publish_s = (now - last for now, last in zip(totals, self._last, strict=True))
        self._last_s, self._last = self._last_s + elapsed_s, totals
        return {
            "learner/update_share": min(1.0, max(0.0, update_s / elapsed_s)),
            "learner/publish_share": min(1.0, publish_s / elapsed_s),
        }
