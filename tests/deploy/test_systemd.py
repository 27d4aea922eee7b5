"""A systemd of its own runs the learner's unit as it is shipped, and looks for signs of life."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.deploy import machines
from tests.deploy.conftest import ROOT
from tests.deploy.machines import Machine, Vpc, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

UNIT = "troupe-learner.service"
PATIENCE_S = 900.0
USER_DATA = f"""#!/bin/sh
set -e
mkdir -p /etc/systemd/system/{UNIT}.d
# Instead of five minutes; Python has to start within.
printf '[Service]\\nWatchdogSec=120\\n' > /etc/systemd/system/{UNIT}.d/soon.conf
cat > /etc/troupe/service.env <<END
TROUPE_RUN_DIR=/var/lib/troupe/run
TROUPE_KEYS=/etc/troupe/keys
TROUPE_PRESET=cartpole-apex
TROUPE_LOGS=/var/log/troupe
END
systemctl daemon-reload
systemctl start --no-block {UNIT}
"""


@pytest.fixture
def machine(deploy_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """One that runs a learner, and nothing of a cloud."""
    if why := machines.missing():
        pytest.skip(f"NOT TESTED: {why}")
    folder = tmp_path_factory.mktemp("box")
    folder.chmod(0o755)
    image = machines.make_image(folder / "image", deploy_python)
    (image.root / "etc/systemd/system/multi-user.target.wants/troupe-node.service").unlink()
    keys = image.root / "etc/troupe/keys"
    words = [sys.executable, "-m", "troupe", "keys", "new", str(keys)]
    subprocess.run(words, cwd=ROOT, check=True, timeout=120, stdout=subprocess.DEVNULL)
    for path in (keys, *keys.iterdir()):
        os.chown(path, machines.UID, machines.UID)
    vpc = Vpc("10.77.0.0/24")
    machine = None
    try:
        place = (vpc, image, folder, "i-0000000000000000a", "learner", "10.77.0.10")
        machine = Machine(*place, USER_DATA, {}, {})
        yield machine
    finally:
        if machine is not None:
            machine.close()
        vpc.close()
        shutil.rmtree(folder, ignore_errors=True)


def asked(machine: Machine, what: str) -> str:
    """A property of the unit."""
    return machine.execute("systemctl", "show", "-p", what, "--value", UNIT).strip()


def test_a_service_that_is_stopped_is_killed_and_started_again(machine: Machine) -> None:
    run_dir = machine.root / "var/lib/troupe/run"

    def wait(condition: Callable[[], object], what: str) -> None:
        try:
            wait_until(condition, PATIENCE_S, what)
        except TimeoutError as error:
            status = machine.execute("systemctl", "status", UNIT)
            pytest.fail(f"{error}\n{status}\n{machine.journal()}\n{machine.log('*.log')[-3000:]}")

    wait(lambda: list(run_dir.glob("config.toml")), "a learner")
    heard = asked(machine, "WatchdogTimestampMonotonic")
    wait(lambda: asked(machine, "WatchdogTimestampMonotonic") != heard, "a sign of life")
    pid, before = asked(machine, "MainPID"), asked(machine, "NRestarts")
    machine.execute("kill", "-STOP", pid)
    wait(lambda: asked(machine, "NRestarts") != before, "the end of a learner that is stopped")
    wait(lambda: asked(machine, "MainPID") not in ("0", pid), "another learner")
    told = machine.execute("journalctl", "--no-pager", "-u", UNIT)
    assert "Watchdog timeout" in told
    assert f"Killing process {pid} " in told
    heard = asked(machine, "WatchdogTimestampMonotonic")
    wait(lambda: asked(machine, "WatchdogTimestampMonotonic") != heard, "a sign of life of the next one")
