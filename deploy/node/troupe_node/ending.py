"""The end of a run, whose machines would cost as much as before, and of the learner's machine."""

from __future__ import annotations

import json
import logging
import tomllib

from botocore.exceptions import ClientError

from troupe_node.machine import Node, client, required_metadata
from troupe_node.notice import notice

_log = logging.getLogger(__name__)


def is_complete(node: Node) -> bool:
    """Whether the learner, which has left, wrote that the run is complete."""
    try:
        status = json.loads((node.run_dir / "status.json").read_text())
        # Not the total in the status: a learner before this one wrote it, and it may have been raised.
        total_steps = tomllib.loads((node.run_dir / "config.toml").read_text())["run"]["total_steps"]
    except (OSError, ValueError, KeyError):
        return False
    return bool(status.get("steps", 0) >= total_steps)


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


def let_go(node: Node) -> None:
    """Tell the group, where it waits with the end of this machine, that everything has been copied."""
    hook = node.config.get("learner", {}).get("hook")
    if not hook or not notice():
        return
    try:
        client("autoscaling").complete_lifecycle_action(
            AutoScalingGroupName=hook["group"],
            LifecycleHookName=hook["name"],
            InstanceId=required_metadata("instance-id"),
            LifecycleActionResult="CONTINUE",
        )
        _log.info("the run is copied: %s may end this machine", hook["group"])
    except ClientError as error:  # it ends the machine all the same, when the hook has waited long enough
        _log.warning("%s: %s", hook["group"], error)
