"""The GPU's meter. Its numbers are those of a stand-in: the tests run where there is no GPU."""

import sys
from types import SimpleNamespace

import pytest
import torch

from troupe.services.launcher.progress import RunView, gpu_line, plain_line
from troupe.services.learner import gpu
from troupe.services.learner.gpu import GpuMeter


class NVMLError(Exception):
    pass


def refuse(*_):
    raise NVMLError("Not Supported")


@pytest.fixture
def nvml(monkeypatch):
    """NVIDIA's library on a machine with one GPU, and torch on the same."""
    library = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: {"GPU-12-ab": "handle"}[uuid],
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=45, memory=9),
        nvmlDeviceGetPowerUsage=lambda handle: 210_500,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=3 << 30),
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="12-ab"))
    return library


def test_use_power_and_memory_are_measured_now_and_then(nvml, monkeypatch):
    meter = GpuMeter("cuda:0")
    assert meter.metrics() == {
        "gpu/busy_share": 0.45,
        "gpu/power_w": 210.5,
        "gpu/memory_bytes": float(3 << 30),
    }
    assert meter.metrics() == {}
    monkeypatch.setattr(gpu, "PERIOD_S", 0.0)
    meter._next_s = 0.0
    nvml.nvmlDeviceGetUtilizationRates = refuse  # as of a part of a GPU
    assert set(meter.metrics()) == {"gpu/power_w", "gpu/memory_bytes"}


def test_without_a_gpu_or_the_library_nothing_is_measured(nvml, monkeypatch, caplog):
    caplog.set_level("INFO")
    assert GpuMeter("cpu").metrics() == {}
    assert not caplog.records
    nvml.nvmlInit = refuse
    assert GpuMeter("cuda").metrics() == {}
    assert "not measured: Not Supported" in caplog.text
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GpuMeter("cuda").metrics() == {}
    assert "[gpu]" in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_library_itself_says_that_there_is_no_driver(caplog):
    pytest.importorskip("pynvml")
    assert GpuMeter("cuda").metrics() == {}
    assert "are not measured" in caplog.text


def test_the_panel_and_the_lines_show_it():
    metrics = {"gpu/busy_share": 0.45, "gpu/power_w": 210.5, "gpu/memory_bytes": 3 * 2.0**30}
    assert gpu_line(metrics) == "GPU 45% busy, 210 W, 3.0 GiB"
    assert gpu_line({"gpu/power_w": 99.6}) == "GPU 100 W"
    assert gpu_line({}) == ""
    assert "| GPU 45% busy" in plain_line(RunView(100, metrics=metrics))
    assert "GPU" not in plain_line(RunView(100))
