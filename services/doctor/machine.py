"""Limits, disk, processor, GPU and packages of this machine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import zmq

from troupe.common import installation
from troupe.common.config import Config
from troupe.common.data.plan import disk_limit_bytes, make_plan
from troupe.common.errors import ConfigError
from troupe.common.families import FAMILIES
from troupe.common.machine import memory_limit_bytes, usable_cores
from troupe.common.runtime import open_files
from troupe.common.runtime.checkpoint import newest_first
from troupe.services.doctor.checks import Check, State

MIN_FILES = 1024
"""Files and sockets of one process: a learner has some for each service."""
SLOW_DISK_BYTES_PER_S = 20e6
DISK_TEST_S = 1.0
DISK_TEST_BYTES = 1 << 26
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def versions() -> Iterator[Check]:
    """What is installed here, for comparison with other machines."""
    found = [f"troupe {installation.version()}", f"Python {platform.python_version()}"]
    for package in ("torch", "numpy", "pyzmq", "gymnasium"):
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {package}")
    yield Check("versions", "installed", ", ".join([*found, f"libzmq {zmq.zmq_version()}"]))


def limits() -> Iterator[Check]:
    """Files, locked memory, memory and cores that processes of this user, or container, may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # services raise the soft limit themselves
    few = 0 <= hard < MIN_FILES
    advice = open_files.advice(65536) if few else ""
    yield Check("limits", "open files", f"{hard:,}" if hard >= 0 else "unlimited", _state(few), advice)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    yield Check("limits", "locked memory", "unlimited" if locked < 0 else _size(locked))
    memory, whole = memory_limit_bytes(), int(psutil.virtual_memory().total)
    available = min(memory, int(psutil.virtual_memory().available))
    scarce = available < 0.1 * memory
    figure = f"{_size(available)} free of {_size(memory)}"
    figure += f" (this container's limit; the machine has {_size(whole)})" if memory < whole else ""
    advice = "end other programs, or lower --replay.capacity_items" if scarce else ""
    yield Check("limits", "memory", figure, _state(scarce), advice)
    cores, quota = usable_cores(), _cpu_quota()
    if quota and quota < cores:
        advice = f"--actor.processes for {quota:g} cores, or a larger limit of the container"
        yield Check("limits", "cores", f"{quota:g} by the container's limit, of {cores}", "note", advice)
    else:
        yield Check("limits", "cores", f"{cores} of {os.cpu_count()}")
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    try:
        os.close(os.memfd_create("troupe-doctor"))
        yield Check("limits", "shared memory", f"can be made, {_size(free)} in /dev/shm")
    except OSError as error:
        advice = "do without --env.processes, or let the container call memfd_create"
        yield Check("limits", "shared memory", f"cannot be made ({error.strerror})", "wrong", advice)


def _cpu_quota() -> float:
    """Cores that the control group grants; 0 for no limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return 0.0 if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        base = Path("/sys/fs/cgroup/cpu")
        quota_us = int((base / "cpu.cfs_quota_us").read_text())
        return max(0.0, quota_us / int((base / "cpu.cfs_period_us").read_text()))
    except (OSError, ValueError):
        return 0.0


def disk(folder: Path, config: Config) -> Iterator[Check]:
    """How fast the disk of a folder takes forced writes, and whether it has room."""
    place = next(each for each in (folder, *folder.absolute().parents) if each.is_dir())
    if not os.access(place, os.W_OK):
        yield Check("disk", str(place), "cannot be written", "wrong", "choose another --run-dir")
        return
    try:
        written, seconds = write_speed(place)
    except OSError as error:
        yield Check("disk", str(place), f"takes no file ({error.strerror})", "wrong", "make room there")
        return
    speed = written / seconds
    slow = speed < SLOW_DISK_BYTES_PER_S
    advice = "a faster disk: checkpoints wait for it (training does not)" if slow else ""
    yield Check(
        "disk", f"{place}, forced writes", f"{speed / 1e6:,.0f} MB/s", "note" if slow else "ok", advice
    )
    checkpoints = folder / "checkpoints"
    newest = next(newest_first(checkpoints), None) if checkpoints.is_dir() else None
    each = sum(file.stat().st_size for file in newest.glob("*")) if newest is not None else 0
    # A new one is written beside those that are kept.
    needed = each * 2 if newest is not None else 0
    free = shutil.disk_usage(place).free
    short = free < max(needed, 1 << 28)
    figure = f"{_size(free)} free" + (f", a checkpoint takes {_size(each)}" if each else "")
    advice = "make room: until then neither checkpoints nor curves are written" if short else ""
    yield Check("disk", f"{place}, room", figure, _state(short), advice)
    yield _replay_room(folder / "replay", config)


def write_speed(place: Path) -> tuple[int, float]:
    """Bytes that were written and forced to the disk, and seconds: about `DISK_TEST_S` at most."""
    block = os.urandom(1 << 20)
    written, began_s = 0, time.perf_counter()
    with tempfile.NamedTemporaryFile(dir=place, prefix=".troupe-doctor-") as file:
        while written < DISK_TEST_BYTES and (written == 0 or time.perf_counter() - began_s < DISK_TEST_S):
            file.write(block)
            file.flush()
            os.fsync(file.fileno())
            written += len(block)
    return written, max(1e-9, time.perf_counter() - began_s)


def _replay_room(folder: Path, config: Config) -> Check:
    """Whether replay has room for what the configuration wants of it, and may grow to what."""
    replay = config.replay
    shard = folder / "shard-0"
    try:
        plan = make_plan(shard, replay.shard_tables(replay.shards), replay.max_bytes)
    except ConfigError as error:
        return Check("disk", "replay's room", "too little", "wrong", str(error))
    present = sum(file.stat().st_blocks * 512 for file in folder.glob("*/*")) if folder.is_dir() else 0
    items = sum(table.capacity for table in replay.sampled_tables())
    grows = min(plan.store_bytes + plan.table_bytes, disk_limit_bytes(shard))
    figure = f"{_size(present)} now, for at most {items:,} items; a shard stays below {_size(grows)}"
    return Check("disk", "replay's room", figure)


def processor(config: Config) -> Iterator[Check]:
    """What the processor has for networks, and the threads that libraries take."""
    flags = _cpu_flags()
    has = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "bf16", "sve") if name in flags]
    fast = bool({"avx512_bf16", "amx_bf16", "bf16"} & flags)
    follows = (
        "bfloat16 in hardware: an algorithm with agent.compute_dtype = auto may choose it"
        if fast
        else "no bfloat16 in hardware: leave agent.compute_dtype at float32 or auto"
    )
    yield Check("processor", platform.machine(), f"{', '.join(has) or 'no vector units'}; {follows}")
    slow = platform.machine() == "x86_64" and bool(flags) and "avx2" not in flags
    if slow:
        yield Check("processor", "avx2", "absent", "note", "networks are several times slower without it")
    told = {name: os.environ[name] for name in _THREADS if name in os.environ}
    if told or usable_cores() == 1:
        yield Check("threads", "of libraries", ", ".join(f"{k}={v}" for k, v in told.items()) or "one core")
    else:
        advice = "with several services by hand on one machine: export OMP_NUM_THREADS=1"
        yield Check(
            "threads", "of libraries", f"OMP_NUM_THREADS is not set, {usable_cores()} cores", "note", advice
        )
    wanted = config.learner.torch_threads
    if wanted != "auto" and wanted > usable_cores():
        advice = f"--learner.torch_threads {usable_cores()}"
        yield Check(
            "threads", "learner.torch_threads", f"{wanted}, more than there are cores", "wrong", advice
        )


def _cpu_flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    return set(found[1].split()) if found else set()


def gpu(config: Config) -> Iterator[Check]:
    """Whether torch sees a GPU, and whether the run wants one."""
    wanted = config.learner.device != "cpu"
    if importlib.util.find_spec("torch") is None:
        advice = installation.install_command("learner")
        yield Check("gpu", "torch", "not installed", "wrong" if wanted else "note", advice)
        return
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        about = torch.cuda.get_device_properties(index)
        unused = "" if wanted else f"--learner.device cuda:{index} would use it"
        figure = f"{about.name}, {_size(about.total_memory)}"
        yield Check("gpu", f"cuda:{index}", figure, "ok" if wanted else "note", unused)
    if not count:
        advice = "a driver and a torch build for it, or --learner.device cpu" if wanted else ""
        yield Check("gpu", f"learner.device {config.learner.device}", "no GPU", _state(wanted), advice)


def packages(config: Config) -> Iterator[Check]:
    """Whether what each family of environments needs is installed, and which extras are."""
    prefix = config.env.id.partition(":")[0]
    for name, family in FAMILIES.items():
        missing = [each for each in family.packages if importlib.util.find_spec(each) is None]
        advice = installation.install_command(family.extra) if missing and family.extra else ""
        if missing:
            state = _state(name == prefix, otherwise="note")
            yield Check("packages", family.form, f"{', '.join(missing)} not installed", state, advice)
        elif family.packages:
            yield Check("packages", family.form, "installed")
    missing_extras = _missing_extras()
    trackers = set(config.run.trackers) & set(missing_extras)
    figure = f"not installed: {', '.join(missing_extras)}" if missing_extras else "all installed"
    advice = f"run.trackers wants {', '.join(sorted(trackers))}" if trackers else ""
    yield Check("packages", "extras", figure, _state(bool(trackers)), advice)


def _missing_extras() -> list[str]:
    """Extras of which a requirement is not there, sorted; none where the distribution is not known."""
    missing = set()
    try:
        requirements = importlib.metadata.requires(installation.DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    for text in requirements:
        found = re.match(r"""([A-Za-z0-9_.-]+).*?extra\s*==\s*["']([a-z0-9-]+)["']""", text)
        if found is None or found[1] == installation.DISTRIBUTION or found[2] in ("dev", "all"):
            continue
        try:
            importlib.metadata.version(found[1])
        except importlib.metadata.PackageNotFoundError:
            missing.add(found[2])
    return sorted(missing)


def _state(wrong: bool, otherwise: State = "ok") -> State:
    return "wrong" if wrong else otherwise


def _size(count: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 1024:,.0f} KiB"
