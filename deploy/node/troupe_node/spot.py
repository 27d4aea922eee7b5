"""The notice that a spot machine will be taken."""

from __future__ import annotations

import logging
import time

from troupe_node.machine import NodeError, metadata

_log = logging.getLogger(__name__)

POLL_S = 5.0


def watch_spot(poll_s: float = POLL_S) -> None:
    """Wait for a spot machine's two minutes' notice; the unit then stops the services, which flush."""
    while True:
        try:
            notice = metadata("spot/instance-action")
        except NodeError as error:
            _log.warning("%s", error)
            notice = None
        if notice:
            break
        time.sleep(poll_s)
    _log.warning("spot notice: %s", notice)
