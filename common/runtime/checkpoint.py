"""Checkpoints that are whole or absent, and loading that falls back to the previous whole one.

A checkpoint is one directory, `step-000000123456`:

    arrays.safetensors   every array
    meta.json            counters, versions, whatever JSON the caller gives
    MANIFEST.json        format version, size and sha256 of the two files above

It is written under a temporary name, every file and directory is forced to the disk, and one rename makes
it visible; then `LATEST` is replaced. A crash at any point leaves either the old state or the new one. The
manifest finds what a crash cannot explain: a copy cut short, a flipped bit.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from troupe.common import system
from troupe.common.errors import CheckpointError, ConfigError, MisfitError
from troupe.common.runtime.files import (
    CERTIFICATE_FILE,
    CONFIG_FILE,
    MAX_JSON_BYTES,
    atomic_write,
    check_regular,
    fsync_path,
    readable,
)

_log = logging.getLogger(__name__)

FORMAT_VERSION = 1
LATEST = "LATEST"
ARCHIVE, BEST, RATED = "archive", "best", "rated"
"""Directories beside the newest checkpoints, which are never taken for one of them."""
_ARRAYS = "arrays.safetensors"
_META = "meta.json"
_MANIFEST = "MANIFEST.json"
_NAME = re.compile(r"step-(\d{12,})(?:\.(\d+))?")
_TEMPORARY = ".tmp-"


class Checkpoint(NamedTuple):
    """A loaded checkpoint."""

    arrays: dict[str, np.ndarray]
    meta: dict[str, Any]
    path: Path


def save_checkpoint(
    directory: str | Path, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any], *, keep: int = 3
) -> Path:
    """Write a checkpoint and drop all but the `keep` newest.

    Args:
        directory: `RUN/checkpoints`, created if needed.
        arrays: any numeric arrays by name; copied to disk in C order.
        meta: JSON values; `meta["steps"]` (default 0) names and orders the checkpoint.
        keep: how many checkpoints to leave, 0 for all.

    Returns:
        The new checkpoint's directory.

    Raises:
        CheckpointError: it could not be written (disk full, no permission); earlier ones are untouched.
    """
    from safetensors import SafetensorError  # only the learner and the evaluator have it installed
    from safetensors.numpy import save_file

    directory = Path(directory)
    temporary = directory / f"{_TEMPORARY}{system.pid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _remove_temporaries(directory)
        temporary.mkdir()
        # safetensors writes memory as it lies: an array that is channels-last would come back with its axes
        # mixed up.
        save_file({name: np.asarray(array, order="C") for name, array in arrays.items()}, temporary / _ARRAYS)
        (temporary / _META).write_text(json.dumps(dict(meta), indent=1, sort_keys=True))
        # The library's is the owner's alone; what copies a run may be another user.
        (temporary / _ARRAYS).chmod((temporary / _META).stat().st_mode)
        manifest = {
            "format": FORMAT_VERSION,
            "files": {n: _fingerprint(temporary / n) for n in (_ARRAYS, _META)},
        }
        (temporary / _MANIFEST).write_text(json.dumps(manifest, indent=1))
        # Data first, then the directory, then the rename, then its directory: after a power cut the name
        # exists only if everything under it does.
        for name in (_ARRAYS, _META, _MANIFEST):
            fsync_path(temporary / name)
        fsync_path(temporary)
        final = _free_name(directory, int(meta.get("steps", 0)))
        temporary.rename(final)
        fsync_path(directory)
        # Last, and not needed: without it the one with the most steps is taken. It is for runs that went back
        # to an older checkpoint, and now write fewer steps than damaged ones beside it have.
        atomic_write(directory / LATEST, f"{final.name}\n".encode())
    except (OSError, SafetensorError) as error:  # the second is what a full disk is to the library
        shutil.rmtree(temporary, ignore_errors=True)
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"cannot write a checkpoint into {directory}: {reason}") from error
    # After the new one is whole: a crash may leave one too many, never one too few.
    prune(directory, keep)
    return final


class CheckpointWriter:
    """Writes a run's checkpoints in a thread: one at a time, and none waits behind it.

    Only the copy of the state is left to the caller's loop; serialising, hashing, forcing to the disk and
    dropping old checkpoints happen beside it. All methods are for one thread.
    """

    def __init__(self, directory: str | Path, *, keep: int = 3) -> None:
        """Take `directory` and `keep` as `save_checkpoint` does."""
        self._directory = Path(directory)
        self._keep = keep
        self._has_parent = self._directory.parent.is_dir()
        self._thread: system.Thread | None = None
        self._failure: BaseException | None = None

    def begin(
        self, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any], written: Callable[[Path], None]
    ) -> None:
        """Begin to write one, with the arguments of `save_checkpoint`.

        Args:
            arrays: must not change until it is written: copies, not views of live weights.
            meta: must not change either.
            written: called by the thread with the new checkpoint's directory. One that cannot be written is
                an error in the log: a full disk must not end the training, and the previous one stays valid.

        Raises:
            RuntimeError: another one is being written; look at `wait(0)` first.
        """
        if not self.wait(0.0):
            raise RuntimeError("a checkpoint is being written already")

        def body() -> None:
            try:
                # Not made again: of a run directory that is renamed there would be two, each with half a run.
                if self._has_parent and not (run := self._directory.parent).is_dir():
                    raise CheckpointError(
                        f"cannot write a checkpoint: {run} was removed or renamed; put it back"
                    )
                written(save_checkpoint(self._directory, arrays, meta, keep=self._keep))
            except CheckpointError as error:
                _log.error("%s", error)
            except BaseException as error:
                self._failure = error  # for the caller: a thread that dies silently would save nothing more

        # A daemon, so that a disk that hangs cannot keep the process; what is half written is never taken.
        self._thread = system.Thread(target=body, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing is being written; False if that takes longer than `timeout_s`.

        Raises whatever the thread died of, other than a checkpoint that could not be written.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        return True


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Load one checkpoint directory after checking it against its manifest.

    Raises:
        CheckpointError: it is absent, incomplete or damaged.
    """
    path = Path(path)
    check(path)
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        meta = json.loads(check_regular(path / _META, MAX_JSON_BYTES).read_text(), parse_constant=_no_number)
        if not isinstance(meta, dict):
            raise ValueError(f"{_META} holds no names")
        if not isinstance(steps := meta.get("steps", 0), int) or steps < 0:
            raise ValueError(f"{_META} holds {str(steps)[:40]} steps")
        return Checkpoint(load_file(path / _ARRAYS), meta, path)
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error}") from error


def _no_number(word: str) -> float:
    """For what Python's JSON reads beyond the standard: NaN and infinities, which no counter is."""
    raise ValueError(f"{_META} holds {word}, which is no number")


def newest_meta(directory: Path) -> dict[str, Any]:
    """Read what the newest checkpoint says apart from its arrays, unchecked; empty if unreadable."""
    try:
        meta = json.loads(check_regular(next(newest_first(directory)) / _META, MAX_JSON_BYTES).read_text())
    except (OSError, ValueError, RecursionError, StopIteration):
        return {}
    return meta if isinstance(meta, dict) else {}


def is_deterministic(run_dir: Path) -> bool:
    """Whether a run goes on in one process; a lost certificate does not make it one of services."""
    if (run_dir / CERTIFICATE_FILE).is_file():
        return True
    return bool(newest_meta(run_dir / "checkpoints").get("lockstep"))


def load_newest(directory: str | Path) -> Checkpoint:
    """Load the newest whole checkpoint of a directory; damaged newer ones are named in the log.

    Raises:
        CheckpointError: there is none.
    """
    directory = Path(directory)
    damaged: list[CheckpointError] = []
    # Each is hashed whole before it is used; only a damaged one costs a second look.
    for path in newest_first(directory):
        try:
            whole = load_checkpoint(path)
        except CheckpointError as error:
            damaged.append(error)
            continue
        for reason in damaged:
            _log.warning("%s; %s is used instead", reason, path.name)
        return whole
    detail = f"all {len(damaged)} checkpoints are damaged" if damaged else "there is no checkpoint"
    raise CheckpointError(f"no checkpoint to load in {directory}: {detail}")


def open_checkpoint(path: Path) -> Checkpoint:
    """Load the newest whole checkpoint of a run or of a directory of checkpoints, or the given one.

    Raises:
        ConfigError: there is nothing of the kind at `path`.
        CheckpointError: it is damaged.
    """
    path = path.expanduser()
    with readable(path):
        if not path.is_dir():
            raise ConfigError(f"{path} is not a directory: give a run directory or a checkpoint directory")
        if (path / "checkpoints").is_dir() or (path / CONFIG_FILE).is_file():
            return load_newest(path / "checkpoints")
        if any(path.glob("step-*")):
            return load_newest(path)
        if not (path / _META).exists() and not path.name.startswith("step-"):
            raise ConfigError(f"{path} is neither a run directory nor a checkpoint")
        return load_checkpoint(path)


class Loadable(Protocol):
    """What begins with the weights of another: an agent."""

    def load_state(
        self, arrays: dict[str, np.ndarray], meta: dict[str, Any], *, to_learn: bool = True
    ) -> None:
        """See `troupe.common.agents.base.Agent`."""


def begin_from(
    agent: Loadable, path: str | Path, changed: Callable[[Any], Sequence[str]], *, optimizer: bool = False
) -> Path:
    """Give a new agent the network of a run or checkpoint; returns the checkpoint's directory.

    Args:
        agent: made, and not trained.
        path: of the run, or of the checkpoint.
        changed: what of the agent's configuration is otherwise in a given one, in words; see
            `troupe.common.config.changed_structure`.
        optimizer: also what its learner had: moments, target network, count of updates.

    Raises:
        ConfigError: there is none.
        CheckpointError: it is damaged, or of another network or algorithm.
    """
    arrays, meta, found = open_checkpoint(Path(path))
    if optimizer and not any(name.startswith("optimizer/") for name in arrays):
        raise CheckpointError(f"{found} holds no optimiser: leave out learner.init_optimizer")
    try:
        agent.load_state(arrays, meta.get("agent", {}), to_learn=optimizer)
    except MisfitError as error:
        otherwise = changed(meta.get("config"))
        fields = [each for section in ("agent.", "env.") for each in otherwise if each.startswith(section)]
        why = (
            f"it was trained with {', '.join(fields)}; give this run a network of the same fields"
            if fields
            else str(error)
        )
        raise CheckpointError(f"cannot start with {found}: {why}") from None
    except CheckpointError as error:
        raise CheckpointError(f"cannot start with {found}: {error}") from None
    return found


def keep_checkpoint(path: Path, directory: Path) -> None:
    """Keep a checkpoint in another directory too, by links where the file system has them.

    Raises OSError where that fails; a name that is there already is left as it is.
    """
    final, temporary = directory / path.name, directory / f"{_TEMPORARY}{system.pid()}"
    directory.mkdir(parents=True, exist_ok=True)
    _remove_temporaries(directory)
    if final.exists():
        return
    temporary.mkdir()
    for file in path.iterdir():
        try:
            # A link costs nothing and outlives the pruning of the other name.
            os.link(file, temporary / file.name)
        except OSError:
            shutil.copy2(file, temporary / file.name)
            fsync_path(temporary / file.name)
    fsync_path(temporary)
    temporary.rename(final)
    fsync_path(directory)


def check(path: Path) -> None:
    """Compare a checkpoint with its manifest.

    Raises:
        CheckpointError: a file is absent, has another size, or another sha256.
    """
    try:
        manifest = json.loads(check_regular(path / _MANIFEST, MAX_JSON_BYTES).read_text())
        files: dict[str, dict[str, Any]] = manifest["files"]
        version = manifest["format"]
        if not isinstance(files, dict) or not all(isinstance(files[name], dict) for name in files):
            raise ValueError("no files")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is not a whole checkpoint: it has no {_MANIFEST}") from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {path} is damaged: {_MANIFEST} cannot be read") from error
    if version != FORMAT_VERSION:
        raise CheckpointError(f"checkpoint {path} has format {version}; this version reads {FORMAT_VERSION}")
    for name in (_ARRAYS, _META):
        file = path / name
        expected = files.get(name)
        if expected is None or not file.is_file():
            raise CheckpointError(f"checkpoint {path} is damaged: {name} is missing")
        size = file.stat().st_size
        # Cheaper than the hash, and the commonest damage: a copy that was cut short.
        if size != expected.get("bytes"):
            raise CheckpointError(
                f"checkpoint {path} is damaged: {name} has {size} of {expected.get('bytes')} bytes"
            )
        if _fingerprint(file) != expected:
            raise CheckpointError(f"checkpoint {path} is damaged: {name} does not match its sha256")


def newest_first(directory: Path) -> Iterator[Path]:
    """Iterate over checkpoint directories: the one that LATEST names, then by falling steps."""
    found = {
        path.name: path for path in directory.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir()
    }
    try:
        text = check_regular(directory / LATEST, MAX_JSON_BYTES).read_text(errors="replace")
        latest = found.pop(text.strip(), None)
    except OSError:
        latest = None
    if latest is not None:
        yield latest
    yield from sorted(found.values(), key=_order, reverse=True)


def steps_of(path: Path) -> int:
    """Return the step count in a checkpoint directory's name, without opening it."""
    return _order(path)[0]


def prune(directory: Path, keep: int) -> None:
    """Remove all but the `keep` newest checkpoints (0 keeps all).

    Those with more steps than the one written last go first: the run went back to an earlier one, so they are
    damaged, or of a future that it has given up.
    """
    if keep <= 0:
        return
    found = list(newest_first(directory))
    for path in sorted(found, key=lambda path: _order(path) > _order(found[0]))[keep:]:
        # Renamed first, so that a half-removed checkpoint can never be taken for a damaged one.
        doomed = path.with_name(f"{_TEMPORARY}{path.name}")
        try:
            path.rename(doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            _log.warning("cannot remove the old checkpoint %s: %s", path, error)


def _order(path: Path) -> tuple[int, int]:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


def _free_name(directory: Path, steps: int) -> Path:
    """`step-N`, or `step-N.k` when a run that was resumed comes to the same step again."""
    taken = [_order(path)[1] for path in directory.glob(f"step-{steps:012d}*") if _NAME.fullmatch(path.name)]
    suffix = f".{max(taken) + 1}" if taken else ""
    return directory / f"step-{steps:012d}{suffix}"


def _remove_temporaries(directory: Path) -> None:
    """Remove what an interrupted save left (only one process writes a run's checkpoints)."""
    for path in directory.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}
