"""Keeps the machines on this host the same as the instances of the stand-in for AWS."""

from __future__ import annotations

import base64
import time
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from tests.deploy.client import Client
from tests.deploy.conftest import Cloud
from tests.deploy.machines import Image, Machine, Vpc, is_dead, is_own, remove
from tests.deploy.vpc_services import Relay, Resolver, bound_in, instance_metadata

API_PORT = 8080
NAMES_S = 1.0


class Fleet:
    """The machines of a run: `follow` boots what AWS has started and ends what AWS has terminated.

    Attributes:
        machines: the running ones, by instance.
        ask: see `Client`.
        vpc: the network between them.
    """

    def __init__(self, cloud: Cloud, deploy_python: str, image: Image, folder: Path, run: str) -> None:
        remove(is_dead)
        self.machines: dict[str, Machine] = {}
        self._image, self._folder, self._run = image, folder, run
        self._client = Client(cloud, deploy_python)
        self.ask = self._client.ask
        self._names: dict[str, str] = {}
        self._names_until_s = 0.0
        [network] = self.ask("ec2", "describe_vpcs", Filters=self._tag())["Vpcs"]
        self.vpc = Vpc(network["CidrBlock"])
        port = urlsplit(cloud.url).port
        assert port is not None
        self._relay = Relay(bound_in(self.vpc.name, self.vpc.router, API_PORT), ("127.0.0.1", port))
        self._resolver = Resolver(bound_in(self.vpc.name, self.vpc.dns, 53, stream=False), self._find_name)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for machine in self.machines.values():
            machine.close()
        self._relay.close()
        self._resolver.close()
        remove(is_own)
        self._client.close()

    def follow(self) -> None:
        """Boot the machines that AWS has started since, and end those that it has terminated."""
        reservations = self.ask("ec2", "describe_instances", Filters=self._tag())["Reservations"]
        instances = {one["InstanceId"]: one for group in reservations for one in group["Instances"]}
        running = {name: one for name, one in instances.items() if one["State"]["Name"] == "running"}
        for name in self.machines.keys() - running.keys():
            self.machines.pop(name).close()
        for machine in self.machines.values():
            machine.check()
        for name in running.keys() - self.machines.keys():
            self.machines[name] = self._boot(running[name])
        groups = self.ask("autoscaling", "describe_auto_scaling_instances")["AutoScalingInstances"]
        for one in groups:
            if one["InstanceId"] in self.machines:
                values = self.machines[one["InstanceId"]].metadata.values
                leaves = one["LifecycleState"].startswith("Terminating")
                values["autoscaling/target-lifecycle-state"] = "Terminated" if leaves else "InService"

    def of(self, role: str) -> list[Machine]:
        """The running machines of a role, the oldest first."""
        return [machine for machine in self.machines.values() if machine.role == role]

    def terminate(self, machine: Machine) -> None:
        """Let AWS take a machine: its group starts another at once."""
        self.ask("ec2", "terminate_instances", InstanceIds=[machine.instance])
        self.follow()

    def keys(self, bucket: str) -> set[str]:
        """What is in the bucket."""
        found = self.ask("s3", "list_objects_v2", Bucket=bucket, MaxKeys=1000)
        return {one["Key"] for one in found.get("Contents", [])}

    def _tag(self) -> list[dict[str, Any]]:
        return [{"Name": "tag:Run", "Values": [self._run]}]

    def _boot(self, instance: dict[str, Any]) -> Machine:
        name, address = instance["InstanceId"], instance["PrivateIpAddress"]
        tags = {tag["Key"]: tag["Value"] for tag in instance["Tags"]}
        data = self.ask("ec2", "describe_instance_attribute", InstanceId=name, Attribute="userData")
        return Machine(
            self.vpc,
            self._image,
            self._folder,
            instance=name,
            role=tags["Role"],
            address=address,
            user_data=base64.b64decode(data["UserData"]["Value"]).decode(),
            metadata=instance_metadata(name, address, profile=tags["Name"]),
            # The one thing that differs from a machine in AWS: there the names of AWS lead to AWS.
            environment={"AWS_ENDPOINT_URL": f"http://{self.vpc.router}:{API_PORT}"},
        )

    def _find_name(self, name: str) -> str | None:
        """Address of a name in the private zones."""
        if time.monotonic() >= self._names_until_s:
            found = {}
            for zone in self.ask("route53", "list_hosted_zones")["HostedZones"]:
                records = self.ask("route53", "list_resource_record_sets", HostedZoneId=zone["Id"])
                for record in records["ResourceRecordSets"]:
                    if record["Type"] == "A":
                        found[record["Name"].rstrip(".")] = record["ResourceRecords"][0]["Value"]
            self._names, self._names_until_s = found, time.monotonic() + NAMES_S
        return self._names.get(name)
