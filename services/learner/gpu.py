"""How busy the learner's GPU is, and what it draws, as NVIDIA's management library says."""

from __future__ import annotations

import logging
from typing import Any

import torch

from troupe.common import system
from troupe.common.installation import install_command

_log = logging.getLogger(__name__)

PERIOD_S = 2.0


class GpuMeter:
    """Measures the GPU of a torch device now and then; nothing of another device, or without the library.

    The GPU is found by its UUID, since numbers differ where `CUDA_VISIBLE_DEVICES` hides some.
    """

    def __init__(self, device: str) -> None:
        self._handle: Any = None
        self._next_s = 0.0
        if torch.device(device).type != "cuda":
            return
        try:
            import pynvml
        except ImportError:
            _log.info("GPU usage and power are not measured: %s", install_command("gpu"))
            return
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            uuid = torch.cuda.get_device_properties(device).uuid
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except pynvml.NVMLError as error:
            _log.warning("GPU usage and power are not measured: %s", error)

    def metrics(self) -> dict[str, float]:
        """Share of the last moments in which it worked (0 to 1), watts, bytes in use by all processes.

        Empty between two measurements; what a GPU does not tell, such as a part of one (MIG), is left out.
        """
        if self._handle is None or system.monotonic() < self._next_s:
            return {}
        self._next_s = system.monotonic() + PERIOD_S
        nvml, handle = self._nvml, self._handle
        asked = {
            "gpu/busy_share": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "gpu/power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "gpu/memory_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
        }
        found = {}
        for name, ask in asked.items():
            try:
                found[name] = float(ask())
            except nvml.NVMLError:
                continue
        return found
