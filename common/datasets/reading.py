"""Reading a Minari data set from its HDF5 file, which may be anybody's.

Minari's own reader would trust it: it imports and makes an environment that a file names, and reads arrays
of whatever size a file declares. Here only `metadata.json` and plain arrays of numbers are read, each after a
look at its size. The library of HDF5 itself may crash or hang on a file with flipped bits, so a run leaves
reading to a process of its own.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from troupe.common.data.schema import LARGEST_FLOAT, MAX_FIELD_BYTES
from troupe.common.datasets.trajectory import Trajectory, seen
from troupe.common.errors import ConfigError, DatasetError
from troupe.common.installation import install_command
from troupe.common.runtime.files import MAX_JSON_BYTES, check_regular

if TYPE_CHECKING:
    from troupe.common.envs import EnvSpec

DATA_FILE = "main_data.hdf5"
METADATA_FILE = "metadata.json"
MAX_DEPTH = 8
"""Of dictionaries in an observation."""
MAX_PARTS = 1000
"""Arrays and dictionaries of an episode: links make any number of a few bytes of a file."""


def folder_of(name: str) -> Path:
    """Where Minari keeps the data set with this ID."""
    root = os.environ.get("MINARI_DATASETS_PATH") or os.path.expanduser("~/.minari/datasets")
    return Path(root) / name


class Dataset:
    """A data set on this machine.

    Args:
        name: its ID, such as `mujoco/hopper/medium-v0`, or its folder.

    Attributes:
        name: as given.
        episodes: how many there are, by its metadata.
        steps: of all episodes, likewise.

    Raises:
        DatasetError: it is not there, or not whole.
        ConfigError: h5py is not installed.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        given = Path(name).expanduser()
        folder = given if given.is_dir() else folder_of(name)
        data = folder / "data" if (folder / "data").is_dir() else folder
        if not (data / METADATA_FILE).is_file():
            raise DatasetError(
                f"there is no data set {name} in {folder}: `minari list local` lists those that are here, "
                "`minari download ID` brings others"
            )
        self._path = data / DATA_FILE
        self.episodes, self.steps = self._promised(data / METADATA_FILE)

    def trajectories(self, spec: EnvSpec) -> Iterator[Trajectory]:
        """The episodes, one after the other; those without a step are passed over.

        Raises DatasetError where one is damaged, or is not of such an environment.
        """
        steps = 0
        with self._opened() as file:
            for number in range(self.episodes):
                if (trajectory := self._read(file, number, spec)).steps:
                    steps += trajectory.steps
                    if steps > self.steps:  # a file may go on for ever, and replay has room for these alone
                        break
                    yield trajectory
        if steps != self.steps:
            raise DatasetError(
                f"the data set {self.name} is damaged: {steps:,} steps or more instead of {self.steps:,}"
                if steps > self.steps
                else f"the data set {self.name} is damaged: {steps:,} steps instead of {self.steps:,}"
            )

    def _promised(self, path: Path) -> tuple[int, int]:
        """The numbers of episodes and of steps by the metadata."""
        try:
            metadata = json.loads(check_regular(path, MAX_JSON_BYTES).read_text())
            form = str(metadata["data_format"])
            episodes, steps = int(metadata["total_episodes"]), int(metadata["total_steps"])
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise DatasetError(f"cannot read {path}: {_one_line(error)}") from None
        if form != "hdf5":
            raise DatasetError(
                f"the data set {self.name} has the format {form[:20]!r}, only hdf5 can be read"
            )
        if not 0 < episodes <= steps < 1 << 31:
            raise DatasetError(f"the data set {self.name} has {episodes} episodes of {steps} steps")
        return episodes, steps

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Any]:
        try:
            import h5py
        except ImportError:
            raise ConfigError(f"data sets need the package h5py: {install_command('minari')}") from None
        try:
            with h5py.File(check_regular(self._path), "r") as file:
                yield file
        except ConfigError:
            raise
        # What h5py raises for damage is any of these.
        except (
            OSError,
            RuntimeError,
            LookupError,
            ValueError,
            TypeError,
            AttributeError,
            MemoryError,
        ) as error:
            raise DatasetError(f"the data set {self.name} is damaged: {_one_line(error)}") from None

    def _episode(self, file: Any, number: int) -> Any:
        return _member(file, f"episode_{number}")

    def _read(self, file: Any, number: int, spec: EnvSpec) -> Trajectory:
        group, room = self._episode(file, number), _Room()
        rewards, ends, cuts = (
            room.array(_member(group, name)) for name in ("rewards", "terminations", "truncations")
        )
        actions = _nest(_member(group, "actions"), room)
        steps = len(rewards)
        if any(each.shape != (steps,) for each in (rewards, ends, cuts)) or rewards.dtype.kind not in "biuf":
            raise self._fault(number, "rewards, terminations and truncations of different lengths")
        if (ends[:-1] | cuts[:-1]).any():
            raise self._fault(number, "it goes on after its end")
        if not (np.abs(rewards.astype(np.float64)) <= LARGEST_FLOAT).all():
            raise self._fault(number, "rewards that are not finite, or beyond 1e9")
        if not isinstance(actions, np.ndarray):
            raise self._fault(number, "actions of several parts, which cannot be read")
        try:
            obs, rows = seen(spec, _nest(_member(group, "observations"), room)), spec.actions.rows(actions)
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise DatasetError(
                f"the data set {self.name} does not fit {spec.id}: episode {number} has {_one_line(error)}"
            ) from None
        if len(obs) != steps + 1 or len(rows) != steps:
            raise self._fault(number, f"{len(obs)} observations and {len(rows)} actions for {steps} steps")
        return Trajectory(obs, rows, rewards.astype(np.float64), bool(steps and ends[-1]))

    def _fault(self, number: int, fault: str) -> DatasetError:
        return DatasetError(f"the data set {self.name} is damaged: episode {number}: {fault}")


def _member(group: Any, name: str) -> Any:
    """What is called so in a group; ValueError for a link, which may lead into another file."""
    import h5py

    if not isinstance(group, h5py.Group):
        raise ValueError(f"there is no group that holds {name}")
    if not isinstance(group.get(name, getlink=True), h5py.HardLink):
        raise ValueError(f"there is no {name}, or it is a link")
    return group[name]


def _nest(node: Any, room: _Room, depth: int = 0) -> Any:
    """An array, or a dictionary or tuple of such."""
    import h5py

    if isinstance(node, h5py.Dataset):
        return room.array(node)
    if depth > MAX_DEPTH:
        raise ValueError("a nest that is too deep")
    room.count()
    parts = {name: _nest(_member(node, name), room, depth + 1) for name in node}
    if parts and all(name.startswith("_index_") for name in parts):
        return tuple(parts[f"_index_{place}"] for place in range(len(parts)))
    return parts


class _Room:
    """What an episode may still take, in parts and bytes. ValueError for more, and for what is no array."""

    def __init__(self) -> None:
        self._parts, self._bytes = MAX_PARTS, MAX_FIELD_BYTES

    def count(self) -> None:
        """Take in one more part."""
        self._parts -= 1
        if self._parts < 0:
            raise ValueError(f"an episode of more than {MAX_PARTS} parts")

    def array(self, dataset: Any) -> np.ndarray:
        """The numbers of an array in this very file."""
        import h5py

        self.count()
        if not isinstance(dataset, h5py.Dataset) or dataset.shape is None or not dataset.shape:
            raise ValueError("no array where one should be")
        if dataset.external or dataset.is_virtual:
            raise ValueError("an array whose numbers are in another file")
        if dataset.dtype.kind not in "biuf":
            what = (
                "JPEG files, which Minari writes unless jpeg_encoding is False"
                if dataset.dtype.kind == "O"
                else ""
            )
            raise ValueError(f"an array of {what or dataset.dtype} instead of numbers")
        # HDF5 unpacks whole chunks, which may be larger than the array.
        chunk = math.prod(dataset.chunks or ()) * dataset.dtype.itemsize
        self._bytes -= math.prod(dataset.shape) * dataset.dtype.itemsize
        if self._bytes < 0 or chunk > MAX_FIELD_BYTES:
            raise ValueError(
                f"an array {list(dataset.shape)}, with which an episode is beyond {MAX_FIELD_BYTES >> 30} GiB"
            )
        return np.asarray(dataset[()])


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
