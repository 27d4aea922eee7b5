"""Distribution of parameters: how long until everybody has a new version, and what that costs the learner.

`python -m benchmarks.params --json [--seconds S] [--fetchers 1,4,16,64,256] [--per-host 16]`

Simulated fetchers are real control clients, many to a process; with a relay, `--per-host` of them share one.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import zmq

from benchmarks.common import parser, report
from troupe.common.wire.control.client import ControlClient
from troupe.common.wire.control.params import encode_params
from troupe.common.wire.link import new_incarnation
from troupe.services.learner.control.requests import Terms
from troupe.services.learner.control.server import ControlServer
from troupe.services.learner.control.slots import SlotRules

MAX_PER_PROCESS = 64
LIMIT_S = 120.0
WARM_UP = 3
MODES = {"direct": (False, False), "bf16": (False, True), "relay": (True, False), "relay_bf16": (True, True)}


def parameters() -> dict[str, np.ndarray]:
    """Weights of a dueling Nature network, 13.2 MB: the same as everybody's figures are of."""
    shapes = [(32, 4, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3), (1024, 3136), (6, 512), (1, 512)]
    rng = np.random.default_rng(0)
    return {f"w{i}": rng.standard_normal(shape).astype(np.float32) for i, shape in enumerate(shapes)}


def fetch(endpoint: str, first: int, count: int, relay: str, per_host: int) -> None:
    """A child: `count` fetchers; says when all of them have a version."""
    context = zmq.Context()
    clients = []
    for index in range(first, first + count):
        directory = Path(relay) / f"{index // per_host}" if relay else None
        client = ControlClient(
            context,
            endpoint,
            role="viewer",
            name=f"fetcher-{index}",
            incarnation=new_incarnation(),
            relay_directory=directory,
            relay_patience_s=LIMIT_S,
        )
        client.join(LIMIT_S)
        clients.append(client)
    versions, said = [-1] * count, -1
    while not clients[0].state.stopping:
        newest = clients[0].state.version
        for place, client in enumerate(clients):
            if versions[place] < newest and (params := client.params_if_newer(versions[place])):
                versions[place] = params.version
        if min(versions) > said:
            said = min(versions)
            print(said, time.monotonic(), flush=True)
        time.sleep(0.01)  # looking wakes the thread of a client that has not got it yet
    for client in clients:
        client.close()


def measure(count: int, seconds: float, *, relay: bool, bfloat16: bool, per_host: int) -> dict[str, float]:
    """One row: `count` fetchers, versions published one after another for `seconds`."""
    with tempfile.TemporaryDirectory() as folder:
        context = zmq.Context()
        server = ControlServer(
            context,
            "tcp://127.0.0.1:*",
            "tcp://127.0.0.1:*",
            Terms({"run": {"seed": 0}}, liveness_s=LIMIT_S),
            SlotRules(1),
            bfloat16=bfloat16,
        )
        server.start()
        children = []
        for first in range(0, count, MAX_PER_PROCESS):
            words = [server.control_endpoint, str(first), str(min(MAX_PER_PROCESS, count - first))]
            words += [f"{folder}/relay" if relay else "", str(per_host)]
            command = [sys.executable, "-m", "benchmarks.params", "--fetch", *words]
            children.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        try:
            figures = _publish(server, children, seconds, bfloat16=bfloat16)
        finally:
            server.set_state(stopping=True)
            for child in children:
                try:
                    child.wait(20)
                except subprocess.TimeoutExpired:
                    child.kill()
            server.stop()
            context.destroy(linger=0)
    return figures


def _publish(
    server: ControlServer, children: list[subprocess.Popen[str]], seconds: float, *, bfloat16: bool
) -> dict[str, float]:
    """Medians and means over the versions after the first few; a new one once everybody has the last."""
    params = parameters()
    size = encode_params(params, bfloat16=bfloat16)[1].nbytes
    process, times_ms, version, end = psutil.Process(), [], 0, float("inf")
    while version < WARM_UP + 3 or time.monotonic() < end:
        if version == WARM_UP:
            end, sent, used_s = time.monotonic() + seconds, server.params_sent, cpu_seconds(process)
        version += 1
        began = time.monotonic()
        server.publish(version, params)
        times_ms.append((max(_wait_for(child, version) for child in children) - began) * 1e3)
    measured = version - WARM_UP
    return {
        "ms": round(float(np.median(times_ms[WARM_UP:])), 1),
        "learner_mb": round((server.params_sent - sent) / measured * size / 1e6, 1),
        "learner_cpu_ms": round((cpu_seconds(process) - used_s) / measured * 1e3, 1),
    }


def cpu_seconds(process: psutil.Process) -> float:
    """CPU time of all threads, in Python and in the kernel."""
    times = process.cpu_times()
    return float(times.user + times.system)


def _wait_for(child: subprocess.Popen[str], version: int) -> float:
    """When all of a child's fetchers had `version`."""
    assert child.stdout is not None
    for line in child.stdout:
        said, when = line.split()
        if int(said) >= version:
            return float(when)
    raise SystemExit("a process of fetchers has ended")


def main() -> None:
    """The command line."""
    if sys.argv[1:2] == ["--fetch"]:
        address, first, many, folder, sharing = sys.argv[2:]
        fetch(address, int(first), int(many), folder, int(sharing))
        return
    args = parser(__doc__, seconds=5.0)
    args.add_argument("--fetchers", default="1,4,16,64,256")
    args.add_argument("--per-host", type=int, default=16, help="fetchers that share a relay")
    args.add_argument("--modes", default=",".join(MODES))
    options = args.parse_args()
    figures: dict[str, float | int | str] = {"per_host": options.per_host}
    for mode in options.modes.split(","):
        relay, bfloat16 = MODES[mode]
        for count in map(int, options.fetchers.split(",")):
            row = measure(count, options.seconds, relay=relay, bfloat16=bfloat16, per_host=options.per_host)
            figures |= {f"{mode}_{name}_{count}": value for name, value in row.items()}
            if not options.json:
                print(mode, count, row, flush=True)
    report("params", figures)


if __name__ == "__main__":
    main()
