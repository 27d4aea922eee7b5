"""Writing chunks into the folders of shards, before any shard serves them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from troupe.common.agents import Agent
from troupe.common.config import Config
from troupe.common.data.inserts import LAST, MORE, HeldError
from troupe.common.data.plan import make_plan
from troupe.common.data.schema import stored_as
from troupe.common.datasets.fitting import chunks
from troupe.common.datasets.trajectory import Trajectory
from troupe.common.errors import ConfigError, DatasetError
from troupe.common.runtime.files import made_whole
from troupe.common.wire.replay.codec import decode_insert, encode_insert
from troupe.services.replay.storage.replay import Replay

UNFINISHED = ".unfinished"
"""Ends the name of a folder that is being written."""


def fill(config: Config, agent: Agent, trajectories: Iterable[Trajectory], folder: Path) -> int:
    """Write the episodes into `folder/shard-0` and on, in turn; returns the number of items.

    The folders are of no run: a shard takes them over with `--adopt`. `folder` is there when it is whole.

    Args:
        config: that `fitted` has made.
        agent: that is to learn from them.
        trajectories: one after the other.
        folder: new, or empty.

    Raises:
        ConfigError: the folder is in use or holds something, or has no room.
        DatasetError: what is to be stored cannot be learned from.
    """
    if folder.is_file() or (folder.exists() and any(folder.iterdir())):
        raise ConfigError(f"{folder} is a file, or not empty: give another --data-dir")
    folder = folder.resolve()
    if os.path.ismount(folder):
        raise ConfigError(
            f"{folder} is a mount point, which a rename cannot replace: give a folder in it, such as "
            f"--data-dir {folder / 'data'}"
        )
    try:
        with made_whole(folder, UNFINISHED) as unfinished:
            return _fill(config, agent, trajectories, unfinished)
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror or error}") from None


def _fill(config: Config, agent: Agent, trajectories: Iterable[Trajectory], folder: Path) -> int:
    section, steps = config.replay, config.actor.chunk_steps
    tables = section.shard_tables(section.shards)
    fields = stored_as(section.compression, agent.fields)
    with ExitStack() as opened:
        shards = []
        for index in range(section.shards):
            place = folder / f"shard-{index}"
            plan = make_plan(place, tables, section.max_bytes)
            shard = Replay(
                place, tables, budget_bytes=plan.store_bytes, specs=fields, item_steps=agent.item_steps
            )
            opened.callback(shard.close)
            shards.append(shard)
        items, inserted = 0, Counter[tuple[int, int]]()
        made = chunks(trajectories, agent, steps, config.env.reward_clip)
        for number, (chunk, last) in enumerate(made):
            for spec in agent.fields:
                if spec.bad_rows(chunk.fields[spec.name]) is not None:
                    limits = "{:g} to {:g}".format(*(spec.limits() or (0, 0)))
                    raise DatasetError(f"the data set has a value of {spec.name} beyond {limits}, or NaN")
            index, incarnation = number % len(shards), LAST if last else MORE
            inserted[index, incarnation] += 1
            message = encode_insert(chunk, fields, tables[0].name, incarnation=incarnation)
            try:
                shards[index].insert(decode_insert(message, inserted[index, incarnation]))
            except HeldError as error:
                raise ConfigError(f"cannot write into {folder}: {error}") from None
            items += len(chunk.offsets)
    return items
