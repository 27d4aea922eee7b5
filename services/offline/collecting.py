"""The whole episodes of replay, read from its files and written as a Minari data set."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from troupe.common.agents import Agent, make_agent
from troupe.common.config import Config, load_config, read_config
from troupe.common.data.arena import Arena
from troupe.common.data.format import SIGNATURE_FILE, load_signature
from troupe.common.data.inserts import SERIAL, same_fields
from troupe.common.data.schema import FieldSpec, stored_as
from troupe.common.data.table_config import TableConfig
from troupe.common.datasets.trajectory import Trajectory
from troupe.common.datasets.writing import DatasetWriter
from troupe.common.envs import EnvSpec, make_spec
from troupe.common.errors import ConfigError, DatasetError
from troupe.common.machine import temporary_prefix
from troupe.common.runtime.files import CONFIG_FILE, SERIAL_FOLDER
from troupe.services.offline.episodes import Found, find_episodes, read_chunk
from troupe.services.replay.storage.replay import Replay
from troupe.services.replay.storage.snapshot import MANIFEST_FILE, restore_snapshot


def export(path: Path, name: str, preset: str = "", slots: int | None = None) -> str:
    """Write what is whole at `path` into a new data set; returns a line of what that was.

    Args:
        path: a run directory, a folder of shards or of one, or a snapshot on this machine.
        name: ID of the data set, or its folder.
        preset: by which `path` was filled; empty for that of its run.
        slots: most that step together in an actor process; None: `actor.slots`, or all slots of a run in one
            process.

    Raises:
        DatasetError: there is no whole episode, or there cannot be; says why.
        ConfigError: there is nothing to read, or no room to write.
    """
    if not (path / MANIFEST_FILE).is_file():
        return _export(path, _config_of(path, preset), name, slots)
    config = _config_of(path, preset)
    with tempfile.TemporaryDirectory(prefix=temporary_prefix()) as copied:
        _restore(path, Path(copied) / "shard-0")
        return _export(Path(copied), config, name, slots)


def _restore(snapshot: Path, folder: Path) -> None:
    """Make the folder of a shard from a snapshot, which holds the used parts of its files."""
    restore_snapshot(str(snapshot.resolve()), folder)  # of relative paths it takes none
    _, layout = load_signature(folder) or ((), {"tables": {}, "budget_bytes": 0})
    tables = [TableConfig(name=each, capacity=slots, min_items=1) for each, slots in layout["tables"].items()]
    Replay(folder, tables, budget_bytes=layout["budget_bytes"], adopt=True).close()


def _export(path: Path, config: Config, name: str, slots: int | None) -> str:
    spec = make_spec(config.env)
    agent, arenas = make_agent(config.agent, spec), _opened(path)
    if reason := _unfaithful_because(config, agent, arenas[0].specs):
        raise DatasetError(f"what replay holds cannot be exported: {reason}")
    # There, all slots step together and there is one shard, whatever is configured.
    serial = all((arena.chunks()[1]["incarnation"] == SERIAL).all() for arena in arenas)
    if len(arenas) < config.replay.shards and not serial:
        raise DatasetError(
            f"{path} has {len(arenas)} of {config.replay.shards} shards (replay.shards), and episodes are "
            "spread over all: give the folder that holds each of them as shard-N"
        )
    writer = DatasetWriter(
        _placed(name),
        spec,
        recoverable=not (config.env.kwargs or config.env.wrappers),
        algorithm_name=config.agent.algorithm,
        description="The whole episodes in the replay of a training by Troupe.",
    )
    together = spec.agents == 1 and (serial or config.inference.mode == "local")
    most = slots or (config.total_slots if serial else config.actor.slots)
    found = find_episodes(arenas, most if together else math.inf, config.actor.chunk_steps)
    left_out = _write(writer, found, arenas, agent.fields)
    if not writer.episodes:
        raise DatasetError(f"there is no whole episode in {path}, only {left_out}: nothing was written")
    writer.finish()
    held = f"{writer.episodes:,} episodes, {writer.steps:,} steps"
    return f"data set {writer.name}: {held}, in {writer.folder}; left out: {left_out}"


def _write(writer: DatasetWriter, found: Found, arenas: Sequence[Arena], specs: Sequence[FieldSpec]) -> str:
    """Write the episodes that are still there, and say what was left out."""
    pieces, steps = found.fragments, found.fragment_steps
    for chunks in found.episodes:
        trajectory = _trajectory(arenas, chunks, writer.spec, specs)
        if trajectory is None:  # its owner goes on, and the oldest leave
            pieces, steps = pieces + 1, steps + int(chunks["steps"].sum())
        else:
            writer.add(trajectory)
    return f"{pieces:,} pieces of episodes, {steps:,} steps"


def _config_of(path: Path, preset: str) -> Config:
    """What the items of `path` are for: by its run's configuration, unless a preset is named."""
    if preset:
        return load_config(preset, None, {}, os.environ)
    for folder in (path, *path.resolve().parents[:2]):
        if (folder / CONFIG_FILE).is_file():
            return read_config(folder / CONFIG_FILE)
    raise ConfigError(f"{path} is in no run directory: say with --preset what it was filled for")


def _opened(path: Path) -> list[Arena]:
    """The shards at `path`."""
    if (path / SIGNATURE_FILE).is_file():
        folders = [path]
    else:
        found = [*path.glob("replay/shard-*"), *path.glob("shard-*"), path / SERIAL_FOLDER]
        folders = [each for each in sorted(found) if (each / SIGNATURE_FILE).is_file()]
    if not folders:
        raise ConfigError(f"{path} holds no items of replay: give a run directory, or a folder with shard-0")
    try:
        return [Arena(folder) for folder in folders]
    except OSError as error:
        raise ConfigError(f"cannot read the shards in {path}: {error.strerror or error}") from None


def _unfaithful_because(config: Config, agent: Agent, specs: Sequence[FieldSpec]) -> str:
    """Why no episode can be put together again as it was played; empty where it can."""
    names = {spec.name for spec in specs}
    if "final_value" in names:
        return "unrolls do not hold the last observation of an episode"
    if "memory" in names:
        return "sequences for agents with memory are not taken apart"
    if not {"obs", "action", "reward", "discount"} <= names:
        return f"{config.agent.algorithm} stores its steps in a way of its own"
    if not same_fields(specs, stored_as(config.replay.compression, agent.fields)):
        return f"its fields are not those of {config.agent.algorithm} in {config.env.id}"
    steps = next(spec.after for spec in agent.fields if spec.name == "obs")
    if steps > 1:
        return f"it holds sums of {steps} rewards (agent.n_steps), not the reward of each step"
    if config.actor.hindsight_copies:
        return "some of its items have goals that were set in hindsight (actor.hindsight_copies)"
    if config.env.reward_clip != "none":
        return f'it holds rewards that were clipped (env.reward_clip = "{config.env.reward_clip}")'
    if config.env.id.startswith("atari:") and config.env.episodic_life:
        return "a lost life ends what it holds as an episode (env.episodic_life)"
    return "" if config.agent.gamma else "with agent.gamma = 0, no item says whether its episode ended"


def _placed(name: str) -> str:
    """The ID of a data set; if `name` is a folder, data sets are written beside it from now on."""
    if not name.startswith(("/", "./", "../", "~")):
        return name
    folder = Path(name).expanduser().resolve()
    os.environ["MINARI_DATASETS_PATH"] = str(folder.parent)
    return folder.name


def _trajectory(
    arenas: Sequence[Arena], chunks: NDArray, spec: EnvSpec, specs: Sequence[FieldSpec]
) -> Trajectory | None:
    """The episode of these chunks; None where one has left. DatasetError where it cannot be learned from."""
    obs, actions, rewards = list[NDArray](), list[NDArray](), list[NDArray]()
    for place, chunk in enumerate(chunks):
        fields = read_chunk(arenas[chunk["shard"]], chunk)
        if fields is None:
            return None
        for each in specs:
            if each.bad_rows(fields[each.name]) is not None:
                raise DatasetError(f"replay holds a value of {each.name} that cannot be learned from")
        shown = fields["obs"]
        if spec.stack:
            stacks = np.lib.stride_tricks.sliding_window_view(shown, spec.stack, axis=0)
            shown = np.moveaxis(stacks, -1, 1)
        # The last observation of a chunk is the first of the next.
        obs.append(shown if place == len(chunks) - 1 else shown[:-1])
        actions.append(fields["action"])
        rewards.append(fields["reward"])
    return Trajectory(
        np.concatenate(obs),
        np.concatenate(actions).astype(spec.actions.dtype),
        np.concatenate(rewards).astype(np.float64),
        bool(chunks[-1]["terminated"]),
    )
