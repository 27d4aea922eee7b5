"""The end of a run in AWS: machines stop, its files are fetched and checked, and everything is destroyed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from troupe.common.errors import CheckpointError
from troupe.common.runtime.checkpoint import check, newest_first
from troupe.services.cloud.run import CloudRun
from troupe.services.cloud.tools import ToolError

_TRIES_S = 1800.0
_PAUSE_S = 30.0
_MACHINES_S = 900.0
"""The learner's group waits five minutes for its last copy; the rest is for machines that are slow to go."""
_LOOK_S = 10.0
_LATE_S = 600.0


def end(run: CloudRun, why: str) -> None:
    """Stop the machines, fetch what the run has written, destroy everything. May be begun again at any step.

    Raises:
        ToolError: a step cannot be done; those after it are not begun.
        CheckpointError: what was fetched is not whole; nothing is destroyed.
        GivenUpError: the user asks a second time.
    """
    run.say(f"{why}: ending the run")
    if run.record.began_s:
        run.say("stopping the machines, with a last checkpoint")
        _patiently(run, "stop the machines", lambda: _stop(run))
        _wait_for_machines(run)
        _patiently(run, "fetch the run", lambda: _fetch(run))
    _patiently(run, "destroy everything", lambda: _destroy(run))
    if left := run.terraform.resources():
        raise ToolError(f"{len(left)} resources are left in AWS, such as {left[0]}: {run.advice}")
    run.look_at_spending(machines={})
    run.record.ended, run.record.stop_s = why, 0.0
    run.save()


def _stop(run: CloudRun) -> None:
    # That AWS ends them stays, should this be cut short; but nothing can be planned for a time that is over.
    is_late = run.record.stop_s < time.time() + _LATE_S
    run.terraform.apply(running=False, **({"stop_at": ""} if is_late else {}))


def _wait_for_machines(run: CloudRun) -> None:
    """Wait until no machine is left; the group of the learner waits for its last copy to the bucket."""
    deadline_s = time.monotonic() + _MACHINES_S
    counts: dict[str, int] = {"any": 1}
    while counts and time.monotonic() < deadline_s:
        try:
            counts = run.aws.machines()
            run.look_at_spending(counts)
        except ToolError as error:
            run.say(f"cannot list the machines: {error}")
        if counts:
            run.pause(_LOOK_S)
    if counts:
        run.say(f"{sum(counts.values())} machines are still there after {_MACHINES_S / 60:.0f} minutes")


def _fetch(run: CloudRun) -> None:
    """Have every file of the run on this computer, and a whole checkpoint if there was any."""
    there = run.aws.copied(run.record.bucket)
    if not there:
        run.say("the run had copied nothing to its bucket yet: nothing to fetch")
        return
    total_gb = sum(there.values()) / 1e9
    run.say(f"fetching {len(there)} files, {total_gb:.2g} GB, into {run.run_dir}")
    run.aws.fetch(run.record.bucket, run.run_dir)
    if missing := [name for name, size in there.items() if not _is_here(run.run_dir / name, size)]:
        raise ToolError(f"{len(missing)} files of the run were not fetched, such as {missing[0]}")
    if any(name.startswith("checkpoints/step-") for name in there):
        run.say(f"checkpoint {_whole_checkpoint(run.run_dir)} is here and complete")


def _whole_checkpoint(run_dir: Path) -> str:
    """Name of the newest checkpoint that is whole.

    Raises:
        CheckpointError: none is.
    """
    wrong = CheckpointError(f"{run_dir} has no checkpoint")
    for path in newest_first(run_dir / "checkpoints"):
        try:
            check(path)
        except CheckpointError as error:
            wrong = error
        else:
            return path.name
    raise wrong


def _is_here(file: Path, size: int) -> bool:
    return file.is_file() and file.stat().st_size == size


def _destroy(run: CloudRun) -> None:
    if not run.terraform.resources():
        return
    run.say("destroying everything in AWS")
    if run.record.began_s:
        # Its files are here; without the first the bucket would stay.
        run.terraform.apply(destroy_artifacts=True, running=False, stop_at="")
    run.terraform.destroy()


def _patiently(run: CloudRun, what: str, step: Callable[[], None]) -> None:
    """Try a step again for half an hour: a network may come back, and credentials may be renewed."""
    deadline_s = time.monotonic() + _TRIES_S
    while True:
        try:
            return step()
        except ToolError as error:
            if time.monotonic() > deadline_s:
                raise
            run.say(f"cannot {what} yet: {error}")
        run.pause(_PAUSE_S)
