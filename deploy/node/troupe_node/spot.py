"""The notice that a spot machine will be taken."""

from __future__ import annotations

import logging
import os
import subprocess
import time

from troupe_node.copies import sync
from troupe_node.machine import NodeError, metadata

_log = logging.getLogger(__name__)

POLL_S = 5.0


def watch_spot(poll_s: float = POLL_S) -> None:
    """Wait for a spot machine's two minutes' notice, then stop its services: they flush what they hold."""
    while True:
        try:
            notice = metadata("spot/instance-action")
        except NodeError as error:
            _log.warning("%s", error)
            notice = None
        if notice:
            break
        time.sleep(poll_s)
    _log.warning("spot notice %s: stopping the services", notice)
    names = [
        "troupe-actor@*.service",
        "troupe-evaluator.service",
        "troupe-replay.service",
        "troupe-learner.service",
    ]
    subprocess.run(["systemctl", "stop", *names], check=False, timeout=110)
    if os.environ.get("TROUPE_ROLE") == "learner":
        sync(last=True)  # the checkpoint that stopping wrote
