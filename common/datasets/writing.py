"""Writing a data set by Minari itself, so that every program that reads Minari reads it."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from troupe.common.datasets.reading import folder_of
from troupe.common.datasets.trajectory import Trajectory, shown
from troupe.common.errors import ConfigError, DatasetError
from troupe.common.installation import install_command

if TYPE_CHECKING:
    from troupe.common.envs import EnvSpec
    from troupe.common.spaces import Leaf

_MARGIN_BYTES = 1 << 20
"""Room on the disk beyond twice an episode's arrays: for what HDF5 writes beside them."""


class DatasetWriter:
    """Writes episodes one by one; they are there, all at once, after `finish`.

    Until then they are in a hidden folder, which goes with this process: what an error, a signal or a power
    cut leaves of a data set is never taken for one. It stays where a whole one cannot be put in its place.

    Args:
        name: a new ID: `NAME-v0`, with names of folders before it if wanted, `my/pendulum/NAME-v0`.
        spec: of the environment.
        recoverable: whether Gymnasium makes the environment again from the ID of a `gym:` environment alone.
        told: what the data set says of itself, such as `algorithm_name` and `description`.

    Raises:
        ConfigError: Minari is not installed, or the environment's actions cannot be written.
        DatasetError: the ID is none, or is taken, or there can be no folder for it.
    """

    def __init__(self, name: str, spec: EnvSpec, *, recoverable: bool = True, **told: str) -> None:
        try:
            import minari
            from minari.dataset.minari_dataset import parse_dataset_id
        except ImportError:
            raise ConfigError(f"data sets need the package minari: {install_command('minari')}") from None
        try:
            parse_dataset_id(name)
        except (ValueError, TypeError):
            raise DatasetError(
                f"{name!r} is not a data set ID: use NAME-v0, such as my/{_example(spec)}-v0"
            ) from None
        self._minari, self.name, self.folder = minari, name, folder_of(name)
        self._check_free()
        if len(spec.actions.leaves) > 1 or spec.actions.leaves[0].path:
            raise ConfigError(
                f"actions of {spec.id} have several parts, which cannot be written to a data set"
            )
        self.spec, self._told, self._recoverable = spec, told, recoverable
        self._storage: Any = None
        self._hidden = self._made()
        # At the end of the process too, whatever ends it but a kill.
        self._remove = weakref.finalize(self, shutil.rmtree, self._hidden, ignore_errors=True)
        self.episodes = self.steps = 0

    def _check_free(self) -> None:
        if self.folder.exists():
            raise DatasetError(
                f"the data set {self.name} already exists in {self.folder}: choose another version, or "
                "remove it"
            )

    def _made(self) -> Path:
        """The hidden folder, made before anybody plays for a data set that could not be written."""
        root = folder_of("")
        try:
            root.mkdir(parents=True, exist_ok=True)
            above = next(each for each in self.folder.parents if each.exists())
            if not above.is_dir():
                raise NotADirectoryError(f"{above} is not a folder")
            if not os.access(above, os.W_OK):
                raise PermissionError(f"no permission to write into {above}")
            # Beside the others, so that it can be renamed; Minari does not look into hidden folders.
            return Path(tempfile.mkdtemp(prefix=".unfinished-", dir=root))
        except OSError as error:
            raise self._refused(error) from None

    def finish(self) -> None:
        """Have the data set be there, whole; without an episode there is none.

        Raises DatasetError where the disk refuses, or one has come: says where the episodes are.
        """
        if not self.episodes:
            return
        from minari.namespace import create_namespace, list_local_namespaces

        namespace, _, _ = self.name.rpartition("/")
        try:
            self._check_free()
            if namespace and namespace not in list_local_namespaces():
                create_namespace(namespace)
            os.rename(self._hidden / self.name, self.folder)
        except (OSError, DatasetError) as error:
            raise self._kept(self._refused(error) if isinstance(error, OSError) else error) from None
        self._remove()

    def _kept(self, refused: DatasetError) -> DatasetError:
        """Keep what is written, and say where."""
        if not self.episodes:
            return refused
        self._remove.detach()
        where = self._hidden / self.name
        return DatasetError(f"{refused}; the episodes are in {where}, which --offline takes")

    def _refused(self, error: OSError) -> DatasetError:
        return DatasetError(
            f"cannot write the data set into {self.folder}: {error.strerror or error}; mend that, or have "
            "MINARI_DATASETS_PATH name another folder"
        )

    def add(self, trajectory: Trajectory) -> None:
        """Write an episode.

        Raises DatasetError where the disk refuses; with too little room, it says where those before are.
        """
        # Looked at before: of a file that HDF5 could not write as a whole, nothing can be read any more.
        arrays_bytes = trajectory.obs.nbytes + trajectory.actions.nbytes + trajectory.rewards.nbytes
        room = shutil.disk_usage(self._hidden)
        # Some file systems, such as tmpfs without a limit, say that they have 0 bytes in all.
        if room.total and room.free < 2 * arrays_bytes + _MARGIN_BYTES:
            raise self._kept(self._refused(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
        spec, flags = self.spec, np.zeros((2, trajectory.steps), bool)
        flags[0 if trajectory.terminated else 1, -1] = True
        buffer = self._minari.data_collector.EpisodeBuffer(
            id=self.episodes,
            observations=shown(spec, trajectory.obs),
            actions=np.asarray(spec.actions.natives(trajectory.actions)),
            rewards=trajectory.rewards,
            terminations=flags[0],
            truncations=flags[1],
            infos={},
        )
        try:
            self._write(buffer)
        except OSError as error:
            raise self._refused(error) from None
        self.episodes += 1
        self.steps += trajectory.steps

    def _write(self, buffer: Any) -> None:
        if self._storage is not None:
            self._storage.update_episodes([buffer])
            return
        with _root(str(self._hidden)), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about authors, and versions of environments
            self._storage = self._minari.create_dataset_from_buffers(
                self.name,
                [buffer],
                env=_registered(self.spec.id) if self._recoverable else None,
                observation_space=_observation_space(self.spec),
                action_space=_space(self.spec.actions.leaves[0]),
                jpeg_encoding=False,  # it would lose detail
                **self._told,
            ).storage


@contextmanager
def _root(folder: str) -> Iterator[None]:
    """Let Minari keep its data sets in `folder` meanwhile."""
    name = "MINARI_DATASETS_PATH"
    before = os.environ.get(name)
    os.environ[name] = folder
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _example(spec: EnvSpec) -> str:
    return spec.id.rpartition(":")[2].rpartition("/")[2].partition("-")[0].lower()


def _registered(env_id: str) -> Any:
    """Gymnasium's specification of a `gym:` environment, with which others make it again; else None."""
    import gymnasium

    family, _, name = env_id.partition(":")
    return gymnasium.registry.get(name) if family == "gym" else None


def _observation_space(spec: EnvSpec) -> Any:
    from gymnasium import spaces

    def box(shape: tuple[int, ...], dtype: str) -> Any:
        kind = np.dtype(dtype)
        low: float = -np.inf if kind.kind == "f" else int(np.iinfo(kind).min)
        high: float = np.inf if kind.kind == "f" else int(np.iinfo(kind).max)
        return spaces.Box(low, high, shape, dtype=kind)

    if not spec.obs_leaves:
        return box(spec.obs_shape, spec.obs_dtype)
    return _nested_space(
        [leaf.path for leaf in spec.obs_leaves], [box(leaf.shape, leaf.dtype) for leaf in spec.obs_leaves]
    )


def _nested_space(paths: list, parts: list) -> Any:
    from gymnasium import spaces

    from troupe.common.spaces import nested

    def made(nest: Any) -> Any:
        if isinstance(nest, dict):
            return spaces.Dict({key: made(part) for key, part in nest.items()})
        return spaces.Tuple([made(part) for part in nest]) if isinstance(nest, tuple) else nest

    return made(nested(paths, parts))


def _space(leaf: Leaf) -> Any:
    """The space of an action."""
    from gymnasium import spaces

    if leaf.choices and not leaf.shape:
        return spaces.Discrete(leaf.choices[0], start=leaf.start[0])
    if leaf.choices:
        counts, starts = (np.array(each).reshape(leaf.shape) for each in (leaf.choices, leaf.start))
        return spaces.MultiDiscrete(counts, start=starts)
    low = np.array([-np.inf if each is None else each for each in leaf.low], leaf.dtype).reshape(leaf.shape)
    high = np.array([np.inf if each is None else each for each in leaf.high], leaf.dtype).reshape(leaf.shape)
    return spaces.Box(low, high, leaf.shape, np.dtype(leaf.dtype).type)
