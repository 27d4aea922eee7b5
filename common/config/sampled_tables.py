"""Whether an algorithm can learn from the tables that a run's batches come from, without waiting for ever."""

from __future__ import annotations

from typing import TYPE_CHECKING

from troupe.common.config.fields import AgentConfig
from troupe.common.data.table_config import TableConfig

if TYPE_CHECKING:
    from troupe.common.config.replay_section import ReplayConfig


def check_sampled_tables(agent: AgentConfig, replay: ReplayConfig) -> None:
    """Raise ValueError, in one line, where it cannot learn from these tables or would wait for ever."""
    shares = replay.shares()
    tables = replay.sampled_tables()
    if not tables:
        raise ValueError(
            f"replay.tables has no table `default`, into which {agent.algorithm} inserts: give one this "
            "name, or give tables a share"
        )
    if sum(shares.values()) != replay.batch_size:
        raise ValueError(
            f"the shares of replay.tables add up to {sum(shares.values())} rows, but replay.batch_size is "
            f"{replay.batch_size}: make them the same"
        )
    # Every case below would otherwise end in silence: actors hold, the learner waits, no process has an error
    # to report. So they are worked out beforehand, each with the field to change.
    _check_kinds(agent, replay, tables)
    _check_features(agent, tables)
    for table in tables:
        _check_room(table, shares[table.name], replay)
    if len(tables) > 1:
        _check_warm_up(replay)
        _check_ratios(tables, shares)


def _check_kinds(agent: AgentConfig, replay: ReplayConfig, tables: list[TableConfig]) -> None:
    """Queues are for algorithms that want one; what else they take beside it is their affair."""
    algorithm, needs = agent.algorithm, agent.table
    queues = [table for table in tables if table.is_queue]
    others = [table for table in tables if not table.is_queue]
    if needs.kind == "queue" and not queues:
        # Two batches for each shard: one is learned from while the next gathers.
        room = max(64, 2 * replay.batch_size * replay.shards)
        queue = f'[{{name = "default", limiter = "queue", capacity = {room}}}]'
        raise ValueError(f"{algorithm} learns from a queue table: set replay.tables to {queue}, or the like")
    if needs.kind == "prioritized" and queues:
        remedy = f"take the share from `{queues[0].name}`" if others else "set replay.tables to []"
        raise ValueError(f"{algorithm} learns from a prioritized table: {remedy}, or the like")
    if len(queues) > 1:
        raise ValueError(
            f"every unroll goes to all tables with a share, so `{queues[0].name}` and `{queues[1].name}` "
            "would both give it: leave one queue"
        )
    if needs.kind == "queue" and others and not needs.replays:
        raise ValueError(
            f"{algorithm} learns from fresh unrolls only: take the share from `{others[0].name}`, or take "
            "agent.algorithm impala"
        )
    # Replayed unrolls are old by intention, so a bound on age would throw all of them away.
    if needs.kind == "queue" and others and agent.allowed_staleness is not None:
        raise ValueError(
            f"{algorithm} keeps to agent.max_staleness = {agent.allowed_staleness}, which the unrolls of "
            f"`{others[0].name}` do not: set it to none, or take the share from that table"
        )
    if needs.kind == "queue" and not others and agent.of_replayed_rows:
        raise ValueError(
            f"agent.{agent.of_replayed_rows[0]} is for replayed rows, and replay.tables has no table with a "
            "share that gives any: add one (docs/elite.md), or leave the field out"
        )
    for table in queues:
        # With a bound on staleness an actor counts on every unroll being learned from before it acts on.
        if agent.allowed_staleness is not None and not table.holds_writers:
            raise ValueError(
                f"{algorithm} keeps to agent.max_staleness = {agent.allowed_staleness} and waits for every "
                f"unroll, but when_full of `{table.name}` drops some: set it to wait, or the other to none"
            )
        if needs.max_times_sampled and table.max_times_sampled != needs.max_times_sampled:
            raise ValueError(
                f"{algorithm} may learn {needs.max_times_sampled} time from an item, but the table "
                f"`{table.name}` has max_times_sampled={table.max_times_sampled}"
            )


def _check_features(agent: AgentConfig, tables: list[TableConfig]) -> None:
    """Who samples or removes by distance needs an agent that stores features, and measures them."""
    # A field of IMPALA alone; asked by name, so that this module does not import an algorithm, and torch with
    # it.
    if getattr(agent, "behaviour_features", "none") != "none":
        return
    for table in tables:
        if {table.sampler, table.remover} & {"elite", "attentive"}:
            raise ValueError(
                f"`{table.name}` in replay.tables goes by features, and {agent.algorithm} stores none: set "
                "agent.behaviour_features of impala to torso or head, or take another sampler or remover"
            )


def _check_room(table: TableConfig, rows: int, replay: ReplayConfig) -> None:
    """A batch has to find its rows, and the limiter has to let it take them."""
    what = "replay.batch_size" if not table.share else f"the share of `{table.name}`"
    # A batch comes from one shard, so each shard has to hold a whole one.
    if table.is_queue and table.capacity < rows * replay.shards:
        raise ValueError(
            f"replay.tables should let `{table.name}` hold a batch of each shard, {rows} x "
            f"{replay.shards} items, not {table.capacity}: a queue of fewer never fills a batch"
        )
    if table.capacity < rows:
        field = (
            f"the capacity of `{table.name}` in replay.tables" if replay.tables else "replay.capacity_items"
        )
        raise ValueError(f"{what} ({rows}) should not exceed {field} ({table.capacity})")
    error = table.samples_per_insert_error
    if replay.tables and table.samples_per_insert and error is not None and 2 * error < rows:
        raise ValueError(
            f"samples_per_insert_error ({error:g}) of `{table.name}` in replay.tables should be at least "
            f"half of {what} ({rows}), or both sides would wait forever"
        )


def _check_warm_up(replay: ReplayConfig) -> None:
    """Until the first batch all tables hold the same items: once the queue is full, none gets more."""
    tables = replay.sampled_tables(replay.shards)
    most = max(tables, key=lambda table: table.min_items)
    for queue in tables:
        if queue.holds_writers and queue.capacity < most.min_items:
            raise ValueError(
                f"`{most.name}` in replay.tables waits for {most.min_items} items (of each shard), but every "
                f"unroll also goes into the queue `{queue.name}`, which is full with {queue.capacity}: lower "
                f"min_items, raise the capacity of `{queue.name}`, or set its when_full to keep_latest"
            )


def _check_ratios(tables: list[TableConfig], shares: dict[str, int]) -> None:
    """Rows of one batch are drawn together, and inserts counted together: one ratio settles all others."""
    limited = [table for table in tables if table.samples_per_insert]
    queue = next((table for table in tables if table.is_queue), None)
    for table in limited:
        rows, first = shares[table.name], limited[0]
        if queue is not None:
            # A queue gives every item the same number of times. Each batch takes its share from both, and
            # inserts go to both, so the other table's samples per insert follow from the shares; a second
            # limiter could only contradict.
            ratio = rows / shares[queue.name] * queue.max_times_sampled
            raise ValueError(
                f"beside the queue `{queue.name}` an item of `{table.name}` is sampled {ratio:g} times, as "
                f"the shares say: leave samples_per_insert of `{table.name}` out"
            )
        ratio = first.samples_per_insert / shares[first.name] * rows
        # Relative: the ratio may have been typed with a few digits only.
        if abs(table.samples_per_insert - ratio) > 1e-6 * ratio:
            raise ValueError(
                f"the shares and samples_per_insert of `{first.name}` have items of `{table.name}` sampled "
                f"{ratio:g} times: set its samples_per_insert to that, or leave it out"
            )
        most = max(tables, key=lambda each: each.min_items)
        if table.min_items < most.min_items:
            raise ValueError(
                f"`{table.name}` in replay.tables would have actors wait at its samples_per_insert before "
                f"`{most.name}` has its min_items: set min_items of `{table.name}` to {most.min_items}"
            )
