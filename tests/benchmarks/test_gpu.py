"""The benchmark of a GPU, as far as a machine without one can run it."""

import json
import socket
import subprocess
import sys

import pytest
import torch


def run(*words):
    command = [sys.executable, "-m", "benchmarks.gpu", "--json", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_do():
    done = run()
    assert done.returncode == 2
    assert done.stdout == ""
    assert "torch finds no GPU here" in done.stderr
    assert done.stderr.count("\n") == 1


def test_its_code_runs_on_a_cpu():
    pytest.importorskip("ale_py")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    few = ("--shards", "1", "--port", port, "--actors", "1", "--slots", "4")
    done = run("--device", "cpu", "--small", "--seconds", "0.1", *few)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    names = [
        f"{name}_{what}" for name in ("apex", "r2d2", "impala", "ppo") for what in ("update_ms", "kernels_ms")
    ]
    for name in (*names, "apex_steps_per_s", "batches_per_s", "inference_steps_per_s"):
        assert figures[name] > 0, name
    assert figures["apex_graphs"] == 0  # a CPU has none
