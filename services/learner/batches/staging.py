"""Batches on their way to a GPU: on a stream of their own, while the update before runs."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from troupe.common.agents.tensors import shared_tensor
from troupe.common.wire.replay.codec import SampleBatch


class Staging:
    """Copies batches to a GPU out of page-locked memory, into which they are unpacked.

    One thread calls `allocate` and `put`, another `take` and `drop`. Torch's allocators see to it that no
    memory is written over that a copy, or an update, still reads: that of the GPU knows both streams, and
    the arrays of a batch go back only after its update has ended.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._stream = torch.cuda.Stream(self._device)
        self._placed: dict[int, tuple[dict[str, Tensor], torch.cuda.Event]] = {}

    @staticmethod
    def allocate(shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """Page-locked memory, which a GPU reads by itself."""
        # Copies from pageable memory cannot run beside the GPU's work. Pinning is slow, which is why the pool
        # keeps arrays.
        return torch.empty(shape, dtype=getattr(torch, dtype), pin_memory=True).numpy()

    def put(self, batch: SampleBatch) -> None:
        """Begin to copy the fields of `batch`."""
        with torch.cuda.stream(self._stream):
            fields = {
                name: shared_tensor(array).to(self._device, non_blocking=True)
                for name, array in batch.fields.items()
            }
            self._placed[id(batch)] = fields, self._stream.record_event()

    def take(self, batch: SampleBatch) -> dict[str, Tensor]:
        """The fields of `batch`, which are there before whatever this thread computes next."""
        fields, copied = self._placed[id(batch)]
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(copied)
        for field in fields.values():
            field.record_stream(stream)
        return fields

    def drop(self, batch: SampleBatch) -> None:
        """Forget `batch`: it has been learned from, or never will be."""
        fields, copied = self._placed.pop(id(batch))
        # An array that is given back is written to at once, and a batch that was left out is still read.
        copied.synchronize()
        del fields


def staging_for(device: str) -> Staging | None:
    """That of a learner with this device; None on a CPU, which reads batches where they were unpacked."""
    return None if device == "cpu" else Staging(device)
