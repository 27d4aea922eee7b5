"""The end of a run: machines that have nothing left to do cost as much as others."""

from __future__ import annotations

import json
import logging
import subprocess
import tomllib

from botocore.exceptions import ClientError

from troupe_node.machine import Node, client

_log = logging.getLogger(__name__)


def has_ended(node: Node) -> bool:
    """Whether the run is complete and the learner, having written its last checkpoint, has left."""
    try:
        status = json.loads((node.run_dir / "status.json").read_text())
        # Not the total in the status: a learner before this one wrote it, and it may have been raised.
        total_steps = tomllib.loads((node.run_dir / "config.toml").read_text())["run"]["total_steps"]
    except (OSError, ValueError, KeyError):
        return False
    if status.get("steps", 0) < total_steps:
        return False
    words = ["systemctl", "is-active", "troupe-learner.service"]
    done = subprocess.run(words, check=False, timeout=60, capture_output=True, text=True)
    return done.stdout.strip() == "inactive"  # it is "failed" or "activating" where it should run


def stop_machines(node: Node) -> None:
    """Scale the run's groups to nothing, its own last; none are named where machines should stay."""
    groups = node.config.get("groups", [])
    if not groups:
        return
    _log.info("the run is complete: no more machines in %s", ", ".join(groups))
    autoscaling = client("autoscaling")
    for name in groups:
        try:
            autoscaling.set_desired_capacity(
                AutoScalingGroupName=name, DesiredCapacity=0, HonorCooldown=False
            )
        except ClientError as error:  # a group that was deleted shall not keep the others running
            _log.warning("%s: %s", name, error)
