"""The number format in which a processor computes faster, found by a trial."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch

_log = logging.getLogger(__name__)

# The fastest of each counts, for noise only ever adds time. A minibatch of pixels may take long, so it is
# tried a few times; a step of all slots takes milliseconds, and on a busy machine few are undisturbed.
_MIN_TRIALS, _MAX_TRIALS = 3, 50
_TRIALS_S = 1.0
# bfloat16 has to take at most this share of float32's time: it is less exact, so a draw is no gain.
_WORTH = 0.9

# What /proc/cpuinfo says of processors with units for bfloat16: of Intel's and AMD's the first two.
_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}


def has_bfloat16_units(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor says that it multiplies bfloat16 itself; False where it says nothing."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return False
    said = (line.partition(":") for line in lines)
    return any(
        key.strip() in ("flags", "Features") and not _BFLOAT16_FLAGS.isdisjoint(flags.split())
        for key, _, flags in said
    )


def faster_dtype(
    wanted: str,
    device: torch.device,
    step: Callable[[torch.dtype], object],
    *,
    of: str,
    what: str,
    has_units: Callable[[], bool] = has_bfloat16_units,
    clock: Callable[[], float] = time.perf_counter,
) -> torch.dtype:
    """The number format to compute in: what was `wanted`, or for `auto` what a trial of `step` finds faster.

    A processor without units for bfloat16 emulates it, so slowly that a trial costs seconds: none is made.
    With units it is not always faster, so that is measured.

    Args:
        wanted: a value of `agent.compute_dtype` or `actor.compute_dtype`.
        device: where it is computed. On a GPU `auto` is float32, which there may use the units for TF32.
        step: what is tried, with arithmetic in this format; it must change nothing.
        of: what computes, for the log.
        what: a step, for the log.
        has_units: whether the processor has units for bfloat16.
        clock: seconds since anything.
    """
    if wanted != "auto" or device.type != "cpu":
        return torch.bfloat16 if wanted == "bfloat16" else torch.float32
    if not has_units():
        _log.info("%s computes in float32: the processor has no units for bfloat16", of)
        return torch.float32
    seconds: dict[torch.dtype, list[float]] = {torch.float32: [], torch.bfloat16: []}
    for dtype in seconds:
        step(dtype)  # the first time is slower: kernels are chosen, memory is taken
    for trial in range(_MAX_TRIALS):
        if trial >= _MIN_TRIALS and sum(map(sum, seconds.values())) >= _TRIALS_S:
            break
        for dtype, times in seconds.items():  # in alternation, so that another program disturbs both
            began_s = clock()
            step(dtype)
            times.append(clock() - began_s)
    exact, short = (min(times) for times in seconds.values())
    chosen = torch.bfloat16 if short < _WORTH * exact else torch.float32
    _log.info(
        "%s computes in %s: %s takes %.1f ms in float32 and %.1f ms in bfloat16",
        of,
        str(chosen).removeprefix("torch."),
        what,
        1000 * exact,
        1000 * short,
    )
    return chosen
