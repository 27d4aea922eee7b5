"""What a shard counts."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Counters:
    """What has happened since this process started."""

    inserted_chunks: int = 0
    inserted_items: int = 0
    inserted_steps: int = 0
    duplicate_inserts: int = 0
    sampled_batches: int = 0
    sampled_items: int = 0
    updated_priorities: int = 0
    invalid_priorities: int = 0
    unknown_priorities: int = 0
    evicted_early_items: int = 0
    damaged_chunks: int = 0
    refused: dict[str, int] = field(default_factory=dict)
