"""What limits a run: one table, for the panel, `troupe doctor` and docs/troubleshooting.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from troupe.services.launcher import causes
from troupe.services.launcher.causes import Figures
from troupe.services.launcher.measured import Measured
from troupe.services.launcher.view import RunView

Run = TypeVar("Run")
Threshold = TypeVar("Threshold")

STARTING = "starting: services are loading their libraries (a few seconds, longer on a busy machine)"
TOO_EARLY = "too early to say what limits training"
_SETTLED_S = 30.0  # before, starting processes take the processor and caches are cold


@dataclass(frozen=True)
class Finding:
    """What was found in a run.

    Attributes:
        name: of its row.
        loudness: 0 to 1.
        what: in words, with figures.
        advice: what would help.
    """

    name: str
    loudness: float
    what: str
    advice: str


@dataclass(frozen=True)
class Row(Generic[Run, Threshold]):
    """One row of a table: something that may be wrong with a run.

    Attributes:
        name: a word to branch on.
        symptom: what a user sees, for the page.
        measure: how loud it is and the figures of a run; None where it is not this.
        metrics: what it looks at, for the page.
        threshold: from which figure on it counts.
        words: what is wrong; braces take figures.
        advice: what helps, with the field that does it.
        page_advice: the same for the page, where it depends on figures.
    """

    name: str
    symptom: str
    measure: Callable[[Run], Figures | None]
    metrics: tuple[str, ...]
    threshold: Threshold
    words: str
    advice: str
    page_advice: str = ""

    def found(self, loudness: float, figures: Mapping[str, Any]) -> Finding:
        """What to say of a run that has this, with its figures."""
        return Finding(self.name, loudness, self.words.format(**figures), self.advice.format(**figures))


Limit = Row[Measured, float]
"""Something that may limit a run: loudness is the share of the run's time that it takes, as far as that is
measured, and counts from the threshold on. What only names a side (the actors, the learner, the processor) is
quieter than what names a cause."""

PAGES = ("tensorboard", "board")
"""Services that only show a run: it learns the same without them, so they are never what limits it."""


def verdict(view: RunView) -> tuple[str, str]:
    """Say what limits the run, and what would help (empty: nothing, or it will pass)."""
    state = _state(view)
    if state is not None:
        return state
    found = findings(view)
    return found[0].what, found[0].advice


def findings(view: RunView) -> list[Finding]:
    """Everything that limits the run, the loudest first; of a run that learns there is always something."""
    measured = Measured(view)
    found = []
    for limit in LIMITS:
        figures = limit.measure(measured)
        if figures is not None and figures[0] >= limit.threshold:
            found.append(limit.found(figures[0], {"waits": measured.waits, **figures[1]}))
    return sorted(found, key=lambda finding: -finding.loudness)


def _state(view: RunView) -> tuple[str, str] | None:
    """What a run is doing that has no rates to go by, or none that mean anything; None where it trains."""
    if any(s.name == "learner" and s.state in ("done", "stopped") for s in view.services):
        left = [s.name for s in view.services if s.state == "running"]
        ended = "complete" if view.steps >= view.total_steps else "stopped"
        return (f"waiting for {', '.join(left)} to end" if left else ended), ""
    if view.disk:
        return (
            view.disk,
            "free some space there: until then nothing is recorded, and replay may hold up the actors",
        )
    well = ("running", "done", "stopped")
    troubled = [s for s in view.services if s.state not in well and s.name not in PAGES]
    if troubled:
        return f"{troubled[0].name}: {troubled[0].state}", ""
    if view.silent:
        named = sorted(view.silent.items(), key=lambda item: -item[1])
        words = ", ".join(f"{name} has been silent for {age_s:.0f} s" for name, age_s in named[:3])
        more = f" and {len(named) - 3} more" if len(named) > 3 else ""
        return words + more, "it hangs, or is starved of CPU: see its log"
    if view.note:
        return view.note, ""
    items = view.metrics.get("replay/items")
    # The status of services names who has joined. Of a resumed run only the steps are known at first.
    if items is None and view.metrics and view.steps and view.actors is None:
        return "acting and learning take turns in one process: nothing waits for anything", ""
    if items is None:
        return STARTING, ""
    # Not only before the first update: a resumed run may have lost its items, and then waits for new ones.
    if items < view.min_items and not view.metrics.get("speed/updates_per_s"):
        if view.config is not None and view.config.run.offline:
            return (
                "waiting for replay to serve the data set: no shard has joined yet; it may still be starting",
                "",
            )
        if view.actors == 0:
            return "waiting for the first actor: none has joined yet; it may still be starting", ""
        return f"filling replay before learning starts: {items:,.0f} of {view.min_items:,} items", ""
    if view.elapsed_s < _SETTLED_S:
        return TOO_EARLY, ""
    return None


LIMITS = (
    Limit(
        "full-disk",
        "items leave replay before it is full",
        causes.full_disk,
        ("replay/evicted_early_per_s",),
        0.0,
        "bottleneck: a full disk (replay removes {lost:,.0f} of its oldest items a second for lack of space)",
        "free space on the disk of the run's replay/, or lower --replay.capacity_items or --replay.max_bytes",
    ),
    Limit(
        "environment",
        "few steps per second, and cores are idle",
        causes.slow_environment,
        ("actor/env_ms", "actor/cpu_cores", "learner/wait_share"),
        0.0,
        "bottleneck: the environment takes {step_ms:,.0f} ms a step",
        "--actor.env_threads (or --env.processes) steps several copies at a time",
    ),
    Limit(
        "one-actor",
        "one actor of several makes far fewer steps than the others",
        causes.slow_actor,
        ("actor/steps_per_s", "actor/slots"),
        0.15,
        "bottleneck: {name} makes {rate:,.1f} steps per second and slot, the others {usual:,.1f} "
        "(its environment takes {env_ms:,.0f} ms a round)",
        "check its machine, or give it fewer slots (`troupe actor --slots`)",
    ),
    Limit(
        "old-parameters",
        "actors act with old parameters, and returns rise late",
        causes.lagging,
        ("params/staleness", "speed/updates_per_s"),
        0.36,
        "{name} acts {lag:,.0f} versions behind the learner",
        "{advice}",
        f"a smaller --actor.params_period_steps; or, if the period is short, {causes.SLOW_PARAMS}",
    ),
    Limit(
        "neighbours",
        "everything is slow, and the run gets few of the cores",
        causes.neighbour,
        ("learner/starved_cores", "actor/starved_cores", "replay/starved_cores"),
        0.3,  # the scheduler alone causes less where cores are free
        "bottleneck: this machine, busy with other programs (the run gets {busy:.1f} of the "
        "{wanted:.1f} cores that it could use)",
        "stop some of them, or use a separate machine",
        "fewer other programs, or a separate machine",
    ),
    Limit(
        "evaluator",
        "training is slow while evaluations run",
        causes.evaluator,
        ("eval/cpu_cores",),
        0.0,
        "bottleneck: evaluation takes {cores:.1f} of the {busy:.1f} cores that the run has",
        "a larger --evaluator.period_s, fewer --evaluator.episodes, or evaluators on another machine",
    ),
    Limit(
        "torch-threads",
        "the learner is busy, and cores are idle",
        causes.torch_thread,
        ("learner/cpu_cores", "learner/wait_share", "speed/updates_per_s"),
        0.0,
        "bottleneck: learner, an update takes {update_ms:,.0f} ms with {threads} torch threads "
        "({free:.1f} cores idle)",
        "--learner.torch_threads {more}",
    ),
    Limit(
        "queue",
        "learner and actors both wait",
        causes.small_queue,
        ("learner/wait_share", "actor/insert_blocked_share"),
        0.0,
        "bottleneck: the queue holds {capacity:,} items, a batch takes {batch:,} ({waits})",
        "a larger `capacity` of that table in [[replay.tables]], such as {more:,}, and --learner.prefetch 2",
    ),
    Limit(
        "outstanding",
        "learner and actors both wait, and replay is not full",
        causes.few_outstanding,
        ("learner/wait_share", "actor/insert_blocked_share", "replay/insert_paused_share"),
        0.0,
        "bottleneck: actors may have {now:,} chunks unacknowledged ({waits})",
        "--actor.max_outstanding_inserts {more:,}",
    ),
    Limit(
        "small-batches",
        "central inference runs all the time, with few slots per batch",
        causes.small_batches,
        ("inference/busy_share", "inference/batch_slots", "actor/slots"),
        0.3,
        "bottleneck: central inference, {busy:.0%} busy with batches of {rows:.0f} of the {slots:.0f} slots",
        "{advice}",
        f"a larger --inference.min_batch with an {causes.GATHER}, or a larger --inference.max_batch",
    ),
    Limit(
        "link",
        "the learner waits although replay has batches",
        causes.slow_link,
        (
            "learner/batch_ms",
            "learner/link_bytes_per_s",
            "replay/waits_for_reader_share",
            "learner/wait_share",
        ),
        0.2,
        "bottleneck: the link to {name}, a batch takes {ms:,.0f} ms at {megabytes:,.1f} MB/s ({waits})",
        "a faster link, that shard next to the learner, --replay.compression lz4, or more --learner.prefetch",
    ),
    Limit(
        "unpacking",
        "the learner waits while its prefetch thread is busy",
        causes.unpacking,
        ("learner/unpack_share", "learner/wait_share"),
        0.3,
        "bottleneck: unpacking batches keeps the learner's prefetch thread busy {share:.0%} of the time",
        "--replay.compression none if link and memory have room, or a smaller --replay.batch_size",
    ),
    Limit(
        "samples-per-insert",
        "the learner waits for new items although replay is full of them",
        causes.limiter,
        ("replay/waits_for_ratio_share", "learner/wait_share"),
        0.15,
        "bottleneck: the limit of {ratio:g} samples per insert ({waits})",
        "a larger --replay.samples_per_insert, or more actors",
    ),
    Limit(
        "compression",
        "compression takes time but makes replay no smaller",
        causes.compression,
        ("actor/compression_ratio", "actor/pack_share", "inference/pack_share", "learner/unpack_share"),
        0.0,
        "compression takes {cost:.0%} of a core and makes observations {ratio:.2f} times smaller",
        "--replay.compression none",
    ),
    Limit(
        "cpu",
        "all cores are busy with the run",
        causes.cpu,
        ("learner/cpu_cores", "actor/cpu_cores", "replay/cpu_cores", "eval/cpu_cores"),
        0.0,
        "bottleneck: CPU (learner {learner:.1f}, actors {actors:.1f} of {cores} cores; {waits})",
        "more cores, or actors on other machines, would help",
    ),
    Limit(
        "turns",
        "acting and learning wait for each other",
        causes.turns,
        ("learner/wait_share",),
        0.0,
        "acting and learning take turns ({waits})",
        "agent.max_staleness = 1 would let them overlap; PPO then needs agent.decoupled = true",
    ),
    Limit(
        "actors",
        "the learner waits for batches",
        causes.actors,
        ("learner/wait_share",),
        0.0,
        "bottleneck: actors ({waits})",
        "more actor.processes or actor.slots would help",
    ),
    Limit(
        "serving",
        "the learner waits for batches of a data set",
        causes.serving,
        ("learner/wait_share",),
        0.0,
        "bottleneck: replay, which serves the data set ({waits})",
        "a larger learner.prefetch, or more replay.shards in a new run, would help",
    ),
    Limit(
        "learner",
        "the learner never waits",
        causes.learner,
        ("learner/wait_share",),
        0.0,
        "bottleneck: learner ({waits})",
        "a smaller network or batch, or a GPU, would help",
    ),
)
"""What may limit a run. Causes come before sides, as far as they explain as much."""
