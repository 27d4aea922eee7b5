"""Ways to take batches, made of requests and answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

from troupe.common.errors import PeerError
from troupe.common.wire.replay.codec import SampleBatch


class Sampler(ABC):
    """What a client of one shard and a client of several have in common."""

    @property
    @abstractmethod
    def outstanding_samples(self) -> int:
        """Batches requested and not received."""

    @property
    @abstractmethod
    def no_batch_reason(self) -> str:
        """Why no batch comes, for an error."""

    @abstractmethod
    def request_sample(self, batch_size: int | Mapping[str, int], table: str = "default") -> object:
        """Ask for a batch."""

    @abstractmethod
    def receive(self, timeout_s: float) -> SampleBatch | None:
        """The next batch, or None."""

    @abstractmethod
    def cancel_samples(self) -> None:
        """Forget the batches that were requested and not received."""

    def sample(
        self, batch_size: int | Mapping[str, int], table: str = "default", timeout_s: float = 60.0
    ) -> SampleBatch:
        """Request one batch and wait for it. Raises PeerError after `timeout_s`."""
        self.request_sample(batch_size, table)
        batch = self.receive(timeout_s)
        if batch is None:
            self.cancel_samples()
            raise PeerError(self.no_batch_reason)
        return batch

    def batches(
        self,
        batch_size: int | Mapping[str, int],
        table: str = "default",
        *,
        prefetch: int = 2,
        timeout_s: float = 60.0,
    ) -> Iterator[SampleBatch]:
        """Batches without end, the next `prefetch` of which are on their way while one is used.

        The iteration ends with PeerError where there is no batch for `timeout_s`, and forgets what it has
        requested when it is closed. Nothing else may take batches from this client meanwhile.
        """
        try:
            while True:
                self._request_ahead(batch_size, table, max(1, prefetch))
                batch = self.receive(timeout_s)
                if batch is None:
                    raise PeerError(self.no_batch_reason)
                self._request_ahead(batch_size, table, prefetch)
                yield batch
        finally:
            self.cancel_samples()

    def _request_ahead(self, batch_size: int | Mapping[str, int], table: str, count: int) -> None:
        for _ in range(count - self.outstanding_samples):
            self.request_sample(batch_size, table)
