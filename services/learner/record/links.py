"""What batches take on their way to the learner: per shard, and in the thread that unpacks them."""

from __future__ import annotations

from collections.abc import Mapping

from troupe.common import system
from troupe.services.learner.batches.prefetch import Prefetcher

PERIOD_S = 5.0


class Links:
    """Turns the prefetcher's totals into metrics, every `PERIOD_S`."""

    def __init__(self) -> None:
        self._last_s = system.monotonic()
        self._last: dict[str, dict[str, float]] = {}
        self._last_unpacked_s = 0.0

    def due(self) -> bool:
        """Whether it is time for new ones."""
        return system.monotonic() - self._last_s >= PERIOD_S

    def metrics(self, prefetch: Prefetcher, names: Mapping[str, str]) -> dict[str, dict[str, float]]:
        """Metrics by source: the learner, and each shard by its name; `names` are those of addresses."""
        now_s, links, unpacked_s = system.monotonic(), prefetch.links, prefetch.unpacked_s
        elapsed_s = max(1e-9, now_s - self._last_s)
        share = max(0.0, unpacked_s - self._last_unpacked_s) / elapsed_s
        found = {"learner": {"learner/unpack_share": min(1.0, share)}}
        for endpoint, totals in links.items():
            last = self._last.get(endpoint, {})
            batches, received, took_s = (
                totals[name] - last.get(name, 0.0) for name in ("batches", "bytes", "took_s")
            )
            if batches > 0 and endpoint in names:
                found[names[endpoint]] = {
                    "learner/batch_ms": took_s / batches * 1e3,
                    "learner/link_bytes_per_s": received / elapsed_s,
                }
        self._last, self._last_s, self._last_unpacked_s = links, now_s, unpacked_s
        return found
