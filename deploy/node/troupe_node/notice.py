"""The notice that this machine will be taken: a spot machine by AWS, any by its auto-scaling group."""

from __future__ import annotations

import logging
import time

from troupe_node.machine import NodeError, metadata

_log = logging.getLogger(__name__)

POLL_S = 5.0
TARGET_STATE = "autoscaling/target-lifecycle-state"
"""Where the group says what it will do with the machine; `Terminated` while a hook holds the end."""


def notice() -> str:
    """What is known of this machine's end; empty while it is to stay."""
    if taken := metadata("spot/instance-action"):
        return f"spot notice: {taken}"
    return "its auto-scaling group ends it" if metadata(TARGET_STATE) == "Terminated" else ""


def watch_notice(poll_s: float = POLL_S) -> None:
    """Wait for the notice; the unit then stops the services, which flush."""
    while True:
        try:
            if found := notice():
                break
        except NodeError as error:
            _log.warning("%s", error)
        time.sleep(poll_s)
    _log.warning("this machine is about to go: %s", found)
