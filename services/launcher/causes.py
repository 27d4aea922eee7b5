"""What may limit a run, as far as it is measured: how loud that is, and the figures of its words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from troupe.services.launcher.measured import Measured

WAITS = 0.3
"""A learner that waits for batches for this share of the time is not what limits the run."""
_SATURATED = 0.9  # of the cores
_LAG = 50.0  # versions that are as loud as anything
GATHER = "--inference.timeout_ms long enough to gather them"
SLOW_PARAMS = (
    "faster delivery of parameters: --learner.publish_dtype bfloat16, a larger "
    "--learner.publish_period_updates, or actors with --relay"
)

Figures = tuple[float, Mapping[str, Any]]
"""How loud a finding is, 0 to 1, and what its words are made of."""


def full_disk(run: Measured) -> Figures | None:
    """Replay drops what it should keep."""
    lost = sum(run.of("replay", "replay/evicted_early_per_s").values()) or run["replay/evicted_early_per_s"]
    return (1.0, {"lost": lost}) if lost > 0 else None


def slow_environment(run: Measured) -> Figures | None:
    """Actors sleep in their environments while the learner waits."""
    env_ms = run.typical("actor/env_ms")
    rest_ms = run.typical("actor/inference_ms") + run.typical("actor/accumulate_ms")
    step_ms = env_ms / max(1.0, run.view.env_rounds)
    # Actors that wait for their environments use no processor, whatever else is busy on the machine.
    if run.wait < WAITS or step_ms < 5.0 or run.cores("actor") >= 0.5 * run.actors:
        return None
    share = env_ms / max(1e-9, env_ms + rest_ms)
    return 0.9 * run.wait * share, {"step_ms": step_ms}  # threads do not take away all of it


def slow_actor(run: Measured) -> Figures | None:
    """One of several makes far fewer steps, slot by slot."""
    slots = run.of("actor", "actor/slots")
    rates = {
        name: rate / slots[name]
        for name, rate in run.of("actor", "actor/steps_per_s").items()
        if slots.get(name)
    }
    if len(rates) < 3:
        return None
    name = min(rates, key=rates.__getitem__)
    usual = sorted(rates.values())[len(rates) // 2]
    loudness = (1.0 - rates[name] / max(1e-9, usual)) * max(run.wait, WAITS)
    ms = run.of("actor", "actor/env_ms").get(name, 0.0)
    return loudness, {"name": name, "rate": rates[name], "usual": usual, "env_ms": ms}


def lagging(run: Measured) -> Figures | None:
    """Actors act with parameters of long ago."""
    lags = run.of("actor", "params/staleness") or {"actors": run["params/staleness"]}
    name = max(lags, key=lags.__getitem__)
    config, updates_per_s = run.view.config, run["speed/updates_per_s"]
    if config is None or not updates_per_s:
        return None
    # Versions that are published while an actor makes the steps between two looks.
    period_steps = config.actor.params_period_steps
    look_s = period_steps * config.total_slots / max(1e-9, run["speed/steps_per_s"])
    between = look_s * updates_per_s / config.learner.publish_period_updates
    advice = (
        f"a smaller --actor.params_period_steps than {period_steps:,}"
        if between > lags[name] / 4
        else SLOW_PARAMS
    )
    return 0.9 * min(1.0, lags[name] / _LAG), {"name": name, "lag": lags[name], "advice": advice}


def neighbour(run: Measured) -> Figures | None:
    """Others have the cores."""
    if run.busy > _SATURATED * run.view.cores:
        return None
    # Who waits for others loses nothing by it: what counts is the side that the run goes by.
    actors = min(1.0, run.missed("actor") / run.actors)
    learner = min(1.0, run.missed("learner"))
    wanted = min(run.busy + run.starved, run.view.cores)  # every thread counts, more than there are cores
    return run.wait * actors + (1.0 - run.wait) * learner, {"busy": run.busy, "wanted": wanted}


def evaluator(run: Measured) -> Figures | None:
    """Evaluation has much of what the run has of the cores."""
    cores, busy = run.cores("evaluator"), run.busy
    if busy + run.starved <= _SATURATED * run.view.cores or cores < 0.3 * busy:
        return None
    return 0.5 + 0.5 * min(1.0, cores / max(1e-9, busy)), {"cores": cores, "busy": busy}


def torch_thread(run: Measured) -> Figures | None:
    """Updates fill their threads while cores are idle."""
    config, used = run.view.config, run.cores("learner")
    if config is None or config.learner.device != "cpu" or not run["speed/updates_per_s"]:
        return None
    threads = config.torch_threads("learner", run.view.cores)
    free = run.view.cores - run.busy - run.starved
    update_ms = (1.0 - run.wait) / run["speed/updates_per_s"] * 1e3
    if run.wait >= WAITS or free < 0.5 or used < 0.7 * threads or update_ms < 5.0:
        return None
    figures = {"threads": threads, "more": threads + max(1, int(free)), "update_ms": update_ms, "free": free}
    return 0.6 * (1.0 - run.wait), figures


def small_queue(run: Measured) -> Figures | None:
    """A queue that both sides wait for."""
    queue, config = run.queue, run.view.config
    if config is None or queue is None or run.view.takes_turns or min(run.wait, run.blocked) < 0.15:
        return None
    figures = {"capacity": queue.capacity, "batch": config.replay.batch_size, "more": 4 * queue.capacity}
    return 0.9 * min(1.0, run.wait + run.blocked), figures


def few_outstanding(run: Measured) -> Figures | None:
    """Actors and learner wait, and replay holds nobody up."""
    config = run.view.config
    if config is None or run.queue is not None or min(run.wait, run.blocked) < 0.15:
        return None
    if run.most("replay", "replay/insert_paused_share") > 0.15:  # by a limiter, or for want of room
        return None
    now = config.actor.max_outstanding_inserts
    return 0.9 * min(1.0, run.wait + run.blocked), {"now": now, "more": 4 * now}


def small_batches(run: Measured) -> Figures | None:
    """Central inference runs for few slots at a time."""
    config, busy, rows = run.view.config, run["inference/busy_share"], run["inference/batch_slots"]
    slots = sum(run.of("actor", "actor/slots").values())
    if config is None or not slots or config.inference.mode != "central":
        return None
    full = rows > 0.8 * config.inference.max_batch
    advice = (
        f"--inference.max_batch {int(slots):,} or more, now {config.inference.max_batch:,}"
        if full
        else f"--inference.min_batch {max(2, int(slots // 2)):,}, with an {GATHER}"
    )
    figures = {"rows": rows, "slots": slots, "busy": busy, "advice": advice}
    return busy * (1.0 - min(1.0, rows / slots)), figures


def _not_replays_fault(run: Measured) -> float:
    """Share of the time in which the learner waits although replay has batches, and is not being unpacked."""
    waits = ("replay/waits_for_items_share", "replay/waits_for_ratio_share")
    nothing = sum(run.most("replay", metric) for metric in waits)
    others = min(1.0, run.missed("replay"))  # have the cores that it needs to answer
    return max(0.0, run.wait - nothing - run["learner/unpack_share"]) * (1.0 - others)


def slow_link(run: Measured) -> Figures | None:
    """Batches are there and come late."""
    took, rates = run.of("replay", "learner/batch_ms"), run.of("replay", "learner/link_bytes_per_s")
    if run.wait < WAITS or not took:
        return None
    name = max(took, key=took.__getitem__)
    loudness = max(_not_replays_fault(run), run.most("replay", "replay/waits_for_reader_share") * run.wait)
    return loudness, {"name": name, "ms": took[name], "megabytes": rates.get(name, 0.0) / 1e6}


def unpacking(run: Measured) -> Figures | None:
    """The thread beside the learner does not keep up."""
    share = run["learner/unpack_share"]
    return (share * run.wait, {"share": share}) if run.wait >= WAITS else None


def limiter(run: Measured) -> Figures | None:
    """The samples per insert hold the learner up."""
    config, share = run.view.config, run.most("replay", "replay/waits_for_ratio_share")
    if config is None or run.wait < WAITS:
        return None
    return 0.6 * run.wait * min(1.0, share / run.wait), {"ratio": config.replay.samples_per_insert}


def compression(run: Measured) -> Figures | None:
    """Packing costs time and saves no room."""
    config, ratio = run.view.config, run.typical("actor/compression_ratio")
    if config is None or config.replay.compression == "none" or not 0 < ratio < 1.2:
        return None
    cost = max(run.typical("actor/pack_share"), run["inference/pack_share"]) + run["learner/unpack_share"]
    return min(1.0, cost), {"ratio": ratio, "cost": cost}


def cpu(run: Measured) -> Figures | None:
    """The run has all cores."""
    if run.busy <= _SATURATED * run.view.cores:
        return None
    figures = {"learner": run.cores("learner"), "actors": run.cores("actor"), "cores": run.view.cores}
    return 0.45, figures


def turns(run: Measured) -> Figures | None:
    """Strictly on policy, each side waits for the other."""
    return (0.42 * run.wait, {}) if run.wait >= WAITS and run.view.takes_turns else None


def actors(run: Measured) -> Figures | None:
    """The learner waits."""
    return (0.4 * run.wait, {}) if run.wait >= WAITS and not run.offline else None


def serving(run: Measured) -> Figures | None:
    """It waits, and nobody acts."""
    return (0.4 * run.wait, {}) if run.wait >= WAITS and run.offline else None


def learner(run: Measured) -> Figures | None:
    """It does not."""
    return (0.4 * (1.0 - run.wait), {}) if run.wait < WAITS else None
