"""The share of each batch that is this learner's: from the prefetcher into updates, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from troupe.common.agents import Agent, Batch, Pending, Update
from troupe.common.config import Config
from troupe.common.runtime import Deadline
from troupe.common.wire.replay.codec import SampleBatch
from troupe.services.learner.batches.chooser import Chooser
from troupe.services.learner.batches.mixture import Mixture
from troupe.services.learner.batches.prefetch import Prefetcher
from troupe.services.learner.batches.usable import Usable, UsableItems
from troupe.services.learner.peers.team import Share, Team

IDLE_S = 1.0
"""How long a learner that joins asks a queue for nothing, unless there is an update before."""


class Wish(NamedTuple):
    """What an update goes by. Where several learners make it, the owner's count.

    Attributes:
        progress: of the run, 0 to 1.
        beta: exponent of the importance weights.
        measure: whether metrics are wanted.
    """

    progress: float = 0.0
    beta: float = 0.0
    measure: bool = False


class Lesson(NamedTuple):
    """An update, and what this learner brought to it, if anything.

    Without metrics, what a GPU finds may come later: it is None then.
    """

    sample: SampleBatch | None = None
    update: Update | None = None
    wish: Wish = Wish()


def part_of(shares: dict[str, int], rank: int, learners: int) -> dict[str, int]:
    """The rows of one of several learners, by table; all together are `shares`."""
    parts = {table: rows * (rank + 1) // learners - rows * rank // learners for table, rows in shares.items()}
    return {table: rows for table, rows in parts.items() if rows}


class Shares:
    """Takes batches, and keeps each until it has been learned from.

    Attributes:
        usable: leaves out the items that nobody can learn from.
        chooser: chooses among candidates.
        mixture: the tables that batches come from.
    """

    def __init__(
        self, config: Config, agent: Agent, prefetch: Prefetcher, mixture: Mixture, team: Team
    ) -> None:
        """Connect these; `prefetch` asks for nothing before this learner has a seat."""
        self.usable = UsableItems(agent, prefetch.put_priorities)
        self.chooser = Chooser(config, agent)
        self.mixture = mixture
        self._prefetch, self._team = prefetch, team
        # Else one learner might take the rows of two batches, another none, while acting waits for both.
        self._ahead = 1 if mixture.has_queue else config.learner.prefetch
        self._held: tuple[SampleBatch, Usable] | None = None
        self._pending: tuple[SampleBatch, Usable, Update | Pending] | None = None
        self._permitted = False  # the one after that at hand
        self._divided: tuple[int, int] | None = None  # rank and learners
        self._idle: Deadline | None = None

    def learn(
        self, timeout_s: float, wish: Callable[[], Wish], look: Callable[[Usable], None] | None = None
    ) -> Lesson | None:
        """One update of what there is, within `timeout_s`, and by now; None where there was none.

        Args:
            timeout_s: how long to wait for rows.
            wish: asked once these have come.
            look: is given what was learned from before its arrays are given back.
        """
        self._divide()
        held = self._held or (self._next(0.0) if self._pending else None)
        if held is None:
            self._settle()
            held = self._next(timeout_s)
        if held is None and not self._team.several:
            return None
        wanted = wish()
        share = None if held is None else self._share(*held, wanted.measure)
        learned = self._team.learn(share, progress=wanted.progress, beta=wanted.beta)
        if self._idle is not None and (learned.moved or self._idle.expired):
            self._idle = None
            self._prefetch.permit()
        if not learned.taken or held is None:
            self._held = held
            return Lesson() if learned.moved else None
        self._held = None
        sample, usable = held
        if look is not None and learned.update is not None:
            look(usable)
        # The one before: a GPU has gone on from it to this one without a gap.
        self._settle()
        update = learned.update
        if not (update is None or isinstance(update, Update) or wanted.measure):
            self._pending, update = (sample, usable, update), None
        else:
            update = None if update is None else update.settled()
            self._put(sample, usable, update)
        return Lesson(sample, update, wanted) if learned.moved else None

    def _settle(self) -> None:
        """Wait for the update that is under way, if one is."""
        if self._pending is not None:
            (sample, usable, pending), self._pending = self._pending, None
            self._put(sample, usable, pending.settled())

    def _put(self, sample: SampleBatch, usable: Usable, update: Update | None) -> None:
        """Send what an update says of its items; called last, as the arrays of the batch go back with it."""
        told = update.priorities if update is not None and self.mixture.rated else None
        if told is not None and usable.rows is not None:
            self._prefetch.put_priorities(usable.part(sample), told)
            told = None
        # The next batch may be unpacked into them at once.
        self._prefetch.put_priorities(sample, told)

    def _next(self, timeout_s: float) -> tuple[SampleBatch, Usable] | None:
        sample = self._prefetch.get(timeout_s)
        if sample is None:
            return None
        usable = self.usable.of(sample)
        # Before anything is computed: one NaN would spread through the gradient into every weight.
        if not len(usable.lengths):
            self._prefetch.put_priorities(sample, None)
            self._prefetch.permit()
            return None
        if usable.rows is None:
            usable = replace(usable, placed=self._prefetch.placed(sample))
        if sample.candidates:
            whole, (sample, usable, near) = sample, self.chooser.choose(sample, usable)
            self._prefetch.put_choice(whole, sample, near)
            if not len(usable.lengths):
                self._prefetch.permit()
                return None
        self._permitted = False
        return sample, usable

    def _share(self, sample: SampleBatch, usable: Usable, measure: bool) -> Share:
        replayed = self.mixture.replayed(sample)

        def batch(progress: float, beta: float, least: Mapping[str, float]) -> Batch:
            if not self._permitted:  # an update that is made again asks for no more
                self._permitted = True
                self._prefetch.permit()
            # On the scale of the whole batch: on that of a share, small ones would weigh more.
            whole = replace(sample, min_probabilities={**sample.min_probabilities, **least})
            return Batch(
                usable.fields,
                usable.chosen(whole.weights(beta)),
                usable.lengths,
                None if replayed is None else usable.chosen(replayed),
                progress=progress,
                measure=measure,
                placed=usable.placed,
            )

        steps = self.mixture.learned_steps(sample, usable)
        return Share(batch, len(usable.lengths), steps, sample.min_probabilities)

    def _divide(self) -> None:
        """Ask for this learner's rows only, where others have come or gone."""
        now = self._team.rank, max(1, self._team.learners)
        if self._team.learners and now != self._divided:
            ahead = None if now[1] == 1 else self._ahead
            if self._divided is None and ahead and self.mixture.has_queue and self._team.updates:
                # The others have asked for all rows of the next batch already: rows that are taken from them
                # now would leave it incomplete, while acting waits for the version after it.
                ahead, self._idle = 0, Deadline(IDLE_S)
            self._divided = now
            self._permitted = False  # the limit begins anew
            self._prefetch.share(part_of(self.mixture.shares, *now), ahead=ahead, held=self._held is not None)
