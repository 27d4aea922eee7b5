"""A stand-in for AWS on loopback: moto's server, and a few answers that it lacks. Run with moto's Python.

python aws_server.py PORT [hold]

With `hold`, a lifecycle hook holds the end of a machine as in AWS; without machines nobody would let go.
"""

import json
import sys
import threading

from moto.autoscaling.exceptions import ValidationError
from moto.autoscaling.models import AutoScalingBackend, FakeAutoScalingGroup, InstanceState, LifecycleHook
from moto.autoscaling.responses import AutoScalingResponse
from moto.budgets.models import BudgetsBackend
from moto.budgets.responses import BudgetsResponse
from moto.core.responses import BaseResponse, EmptyResult
from moto.ec2.models.security_groups import SecurityGroupRule
from moto.iam.access_control import IAMPolicyStatement, PermissionResult
from moto.route53.models import FakeZone
from moto.route53.responses import Route53
from moto.s3.models import FakeDeleteMarker
from moto.server import main


def describe_subscribers_for_notification(self: BudgetsResponse) -> str:
    """Answer who is told, which the provider asks after it made a budget."""
    backend: BudgetsBackend = self.backend
    budget = backend.budgets[self._get_param("AccountId")][self._get_param("BudgetName")]
    wanted = self._get_param("Notification")
    found = [one.subscribers for one in budget.notifications if _same(one.details, wanted)]
    return json.dumps({"Subscribers": found[0] if found else []})


def list_tags_for_resource(self: BudgetsResponse) -> str:
    """Answer that a budget has no tags: it is made without any."""
    return json.dumps({"ResourceTags": []})


def description(self: SecurityGroupRule) -> str | None:
    """Say a rule's description also where a group, not a block, is let in."""
    text: str | None = self.ip_range.get("Description") or self.source_group.get("Description")
    return text


def add_vpc(self: FakeZone, vpc_id: str | None, vpc_region: str | None) -> dict[str, str | None]:
    """Remember a private zone's VPC under the names that AWS answers with, too."""
    vpc = {"vpc_id": vpc_id, "vpc_region": vpc_region, "VPCId": vpc_id, "VPCRegion": vpc_region}
    if vpc_id:
        self.vpcs.append(vpc)
    return vpc


def bool_param(self: Route53, name: str, default: bool = False) -> bool:
    """Take a zone with a VPC for a private one, as AWS does; moto wants to be told so in words."""
    if name == "HostedZoneConfig.PrivateZone":
        return bool(self._get_param("VPC.VPCId"))
    return bool(BaseResponse._get_bool_param(self, name, default))


PERMITTED = IAMPolicyStatement.is_action_permitted


def is_action_permitted(self: IAMPolicyStatement, *words: object, **names: object) -> PermissionResult:
    """Take the clients' HTTP for HTTPS; moto denies where a condition does not hold."""
    if "aws:SecureTransport" in json.dumps(self._statement.get("Condition")):
        return PermissionResult.NEUTRAL
    return PERMITTED(self, *words, **names)


SET_DESIRED_CAPACITY = AutoScalingBackend.set_desired_capacity


def set_desired_capacity(self: AutoScalingBackend, group_name: str, desired_capacity: int | None) -> None:
    """Refuse a group that is not there; moto breaks down."""
    if group_name not in self.autoscaling_groups:
        raise ValidationError(f"AutoScalingGroup name not found - no such group: {group_name}")
    SET_DESIRED_CAPACITY(self, group_name, desired_capacity)


UPDATE = FakeAutoScalingGroup.update


def update(self: FakeAutoScalingGroup, **changes: object) -> None:
    """Keep the types of a group's machines where nothing is said of them; moto forgets them."""
    before = self.mixed_instances_policy
    UPDATE(self, **changes)
    if not changes.get("launch_template") and not changes.get("launch_config_name"):
        self.mixed_instances_policy = changes.get("mixed_instances_policy") or before


CREATE_LIFECYCLE_HOOK = AutoScalingBackend.create_lifecycle_hook


def create_lifecycle_hook(self: AutoScalingBackend, *words: object, **names: object) -> LifecycleHook:
    """Keep a hook without role and target, as it was asked for; moto invents both."""
    hook = CREATE_LIFECYCLE_HOOK(self, *words, **names)
    hook.role_arn = hook.notification_target_arn = None
    return hook


SCALE = FakeAutoScalingGroup.set_desired_capacity
WAITS = "Terminating:Wait"


def scale(self: FakeAutoScalingGroup, new_capacity: int | None) -> None:
    """Have the group's hook hold machines that are too many; moto ends them at once."""
    hooks = self.autoscaling_backend.describe_lifecycle_hooks(self.name)
    ending = [hook for hook in hooks if hook.lifecycle_transition == "autoscaling:EC2_INSTANCE_TERMINATING"]
    for state in self.active_instances()[new_capacity or 0 :] if ending else ():
        state.lifecycle_state = WAITS
        timer = threading.Timer(ending[0].heartbeat_timeout, let_go, [self, state])
        timer.daemon = True
        timer.start()
    SCALE(self, new_capacity)


def let_go(group: FakeAutoScalingGroup, state: InstanceState) -> None:
    """End a machine that a hook has held, if it is still there."""
    backend = group.autoscaling_backend
    if state in group.instance_states and backend.autoscaling_groups.get(group.name) is group:
        group.instance_states.remove(state)
        backend.ec2_backend.terminate_instances([state.instance.id])


def complete_lifecycle_action(self: AutoScalingResponse) -> EmptyResult:
    """Note in the hook whose end it no longer holds, and end it; moto has no such action."""
    group, name = self._get_param("AutoScalingGroupName"), self._get_param("LifecycleHookName")
    hooks = self.autoscaling_backend.describe_lifecycle_hooks(group, [name])
    if not hooks:
        raise ValidationError(f"No active Lifecycle Action found with hook {name} of {group}")
    instance = self._get_param("InstanceId")
    hooks[0].notification_metadata = f"let go: {instance}"
    for state in self.autoscaling_backend.describe_auto_scaling_instances([instance]):
        if state.lifecycle_state == WAITS:
            let_go(state.auto_scaling_group, state)
    return EmptyResult()


def _same(one: dict[str, object], other: dict[str, object]) -> bool:
    names = ("NotificationType", "ComparisonOperator", "Threshold")
    return all(one.get(name) == other.get(name) for name in names)


def dispose(self: FakeDeleteMarker) -> None:
    """Do nothing: moto wants this of whatever is removed from a bucket, and a marker holds nothing."""


if __name__ == "__main__":
    FakeDeleteMarker.dispose = dispose
    AutoScalingBackend.set_desired_capacity = set_desired_capacity
    FakeAutoScalingGroup.update = update
    if sys.argv[2:] == ["hold"]:
        FakeAutoScalingGroup.set_desired_capacity = scale
    AutoScalingBackend.create_lifecycle_hook = create_lifecycle_hook
    AutoScalingResponse.complete_lifecycle_action = complete_lifecycle_action
    BudgetsResponse.describe_subscribers_for_notification = describe_subscribers_for_notification
    BudgetsResponse.list_tags_for_resource = list_tags_for_resource
    SecurityGroupRule.description = property(description)
    FakeZone.add_vpc = add_vpc
    Route53._get_bool_param = bool_param
    IAMPolicyStatement.is_action_permitted = is_action_permitted
    main(["-H", "127.0.0.1", "-p", sys.argv[1]])
