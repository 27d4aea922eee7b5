"""What a shard must do, said again as simply as can be: lists and dictionaries, no files, no network.

The model follows the messages that a shard has sent, in their order: each of them has to be one that the
shard may send now, and afterwards there must be nothing left that it should have sent.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass
class Item:
    """One step: its number, which its data tell, its priority, and its id once a batch has told it."""

    number: int
    priority: float
    item_id: int | None = None


@dataclass
class ModelTable:
    """A table of single steps.

    Attributes:
        capacity: of items.
        queue: whether it hands out each item once, in order, and holds writers while it is full.
        min_items, ratio, error: of the limiter; see `Limiter`.
        items: those that are there, oldest first.
        inserted, sampled: over the life of the table.
        ids: every id that was ever seen, with the item that had it.
    """

    capacity: int
    queue: bool = False
    min_items: int = 1
    ratio: float = 0.0
    error: float = 0.0
    items: deque[Item] = field(default_factory=deque)
    inserted: int = 0
    sampled: int = 0
    ids: dict[int, int] = field(default_factory=dict)

    @property
    def surplus(self) -> float:
        return self.ratio * (self.inserted - self.min_items) - self.sampled

    def room(self, count: int) -> bool:
        return not self.queue or len(self.items) + count <= self.capacity

    def insert(self, items: list[Item]) -> None:
        self.items += items
        self.inserted += len(items)
        while len(self.items) > self.capacity:
            assert not self.queue, "a queue lost what it had acknowledged"
            self.items.popleft()

    def ready(self, count: int) -> bool:
        """Whether a batch of this size is due."""
        if self.queue:
            return len(self.items) >= max(count, self.min_items)
        if not any(item.priority > 0 for item in self.items):
            return False
        enough = len(self.items) >= self.min_items
        return enough and (not self.ratio or self.surplus - count >= -self.error)

    def pauses(self) -> bool:
        """Whether writers should pause."""
        if self.queue:
            return len(self.items) >= self.capacity
        return bool(self.ratio) and len(self.items) >= self.min_items and self.surplus > self.error

    def sample(self, numbers: list[int], ids: list[int]) -> None:
        """Take note of a batch, row by row."""
        assert self.ready(len(numbers)), "a batch that the limiter forbids"
        by_number = {item.number: item for item in self.items}
        for place, (number, item_id) in enumerate(zip(numbers, ids, strict=True)):
            assert number in by_number, f"step {number} is given, and is not there"
            item = by_number[number]
            assert item.item_id in (None, item_id), "the id of an item has changed"
            assert self.ids.setdefault(item_id, number) == number, "an id was used twice"
            item.item_id = item_id
            if self.queue:
                assert number == self.items[place].number, "a queue gave one before its turn, or twice"
            else:
                assert item.priority > 0, "a priority of zero was sampled"
        if self.queue:
            for _ in numbers:
                self.items.popleft()
        self.sampled += len(numbers)

    def update(self, item_id: int, priority: float) -> None:
        """Set a priority, where the item is still there."""
        for item in self.items:
            if item.item_id == item_id:
                item.priority = priority


@dataclass
class Chunk:
    """An insert: by table the first step's number and how many, or one that has to be refused."""

    items: dict[str, list[tuple[int, float]]]
    bad: bool = False


@dataclass
class Producer:
    """A process that inserts.

    Attributes:
        chunks: every insert that it ever sent, by number.
        settled: the newest that was stored or refused.
        refused: those that were refused.
        held: those that wait for room in a queue, in order.
    """

    chunks: dict[int, Chunk] = field(default_factory=dict)
    settled: int = 0
    refused: set[int] = field(default_factory=set)
    held: deque[int] = field(default_factory=deque)


@dataclass
class Request:
    """A SAMPLE that was not answered yet."""

    peer: bytes
    number: int
    table: str
    count: int


class Model:
    """A shard's tables, its producers, and who waits for an answer."""

    def __init__(self, tables: dict[str, ModelTable]) -> None:
        self.tables = tables
        self.producers: dict[int, Producer] = {}
        self.waiting: list[Request] = []

    def room(self, chunk: Chunk) -> bool:
        return all(self.tables[name].room(len(items)) for name, items in chunk.items.items())

    def inserted(self, producer: Producer, sequence: int) -> None:
        """INSERTED came: it is stored now, or was before."""
        if sequence <= producer.settled:
            assert sequence not in producer.refused, "what was refused is called stored"
            return
        assert sequence == producer.settled + 1, "acknowledged before its turn"
        chunk = producer.chunks[sequence]
        assert not chunk.bad, "acknowledged what is wrong"
        assert self.room(chunk), "acknowledged without room"
        for name, items in chunk.items.items():
            self.tables[name].insert([Item(number, priority) for number, priority in items])
        self._settle(producer, sequence)

    def refused(self, producer: Producer, sequence: int) -> None:
        """ERROR came for an insert that is wrong."""
        assert producer.chunks[sequence].bad or sequence in producer.refused, "refused what is right"
        if sequence > producer.settled:
            producer.refused.add(sequence)
            self._settle(producer, sequence)

    def _settle(self, producer: Producer, sequence: int) -> None:
        producer.settled = sequence
        if producer.held and producer.held[0] == sequence:
            producer.held.popleft()

    def batch(self, peer: bytes, number: int, numbers: list[int], ids: list[int]) -> None:
        """BATCH came."""
        request = self._answered(peer, number)
        assert len(numbers) == request.count
        self.tables[request.table].sample(numbers, ids)

    def wait(self, peer: bytes, number: int) -> None:
        """WAIT came."""
        self._answered(peer, number)

    def forget(self, peer: bytes, number: int) -> None:
        """An answer found nobody."""
        self.waiting = [each for each in self.waiting if (each.peer, each.number) != (peer, number)]

    def _answered(self, peer: bytes, number: int) -> Request:
        found = [each for each in self.waiting if (each.peer, each.number) == (peer, number)]
        assert len(found) == 1, "an answer to nobody"
        self.waiting.remove(found[0])
        return found[0]

    def check_nothing_is_due(self) -> None:
        """Whatever can be done has been done."""
        for request in self.waiting:
            assert not self.tables[request.table].ready(request.count), f"{request} could be answered"
        for producer in self.producers.values():
            if producer.held:
                first = producer.chunks[producer.held[0]]
                assert not first.bad, "a held insert could be refused"
                assert not self.room(first), "a held insert has room"

    def restart(self) -> None:
        """Forget what a process forgets when it dies."""
        self.waiting.clear()
        for producer in self.producers.values():
            producer.held.clear()
