"""A second learner as containers start it, on a machine of its own: it shares batches over their network."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos import machines
from tests.deploy.conftest import ROOT
from tests.harness import end_tree, until
from troupe.common.wire.security.keys import make_keys

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PATIENCE_S = 600


class Services:
    """Services that `troupe-start` becomes, on two machines."""

    def __init__(self, folder: Path, network: machines.Network, ends: contextlib.ExitStack) -> None:
        self.folder, self._network, self._ends = folder, network, ends

    def start(self, machine: str, *words: str, **env: str) -> None:
        """Start a service on a machine."""
        command = self._network.inside(machine, "bash", str(ROOT / "deploy" / "scripts" / "start.sh"), *words)
        own = {key: text for key, text in os.environ.items() if not key.startswith("TROUPE_")}
        own |= {
            "TROUPE_BIN": str(Path(sys.executable).parent),
            "TROUPE_KEYS": str(self.folder / "keys"),
            "TROUPE_LEARNER": f"tcp://{self._network.address('learner')}:5550",
            "TROUPE_HOST": machine,
        }
        with (self.folder / f"{words[0]}.log").open("w") as log:
            process = subprocess.Popen(command, env=own | env, stderr=log, stdout=log)
        self._ends.callback(end_tree, process)

    def said(self, service: str, pattern: str) -> list[str]:
        """What the pattern finds in the log of a service."""
        return re.findall(pattern, (self.folder / f"{service}.log").read_text())


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    if machines.missing():
        pytest.skip(machines.missing())
    make_keys(tmp_path / "keys")
    with contextlib.ExitStack() as ends:
        network = machines.Network(["learner", "other"])
        ends.callback(network.close)
        yield Services(tmp_path, network, ends)


def test_a_second_learner_shares_batches_over_the_network_that_is_found(services: Services) -> None:
    run = {"TROUPE_RUN_DIR": str(services.folder / "run")}
    preset = {"TROUPE_PRESET": "cartpole-ppo", "TROUPE_RUN__TOTAL_STEPS": "10000000"}
    services.start("learner", "learner", **run, **preset, TROUPE_NET__LEARNER_NETWORK="own")
    services.start("learner", "replay", TROUPE_RUN_DIR=str(services.folder / "stored"))
    services.start("learner", "actor", "0")
    services.start("other", "learner-peer")
    together = r"epoch \d+: 2 learners share each batch, at update (\d+)"

    def there() -> bool:
        return bool(services.said("learner", together) and services.said("learner-peer", together))

    until(there, PATIENCE_S, step=lambda: time.sleep(0.5))
    written = services.folder / "run" / "config.toml"
    assert f'learner_network = "{machines.NETWORK}.0/24"' in written.read_text()
