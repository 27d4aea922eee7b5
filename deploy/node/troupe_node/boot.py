"""From the few lines of user data to running services. Every step may run any number of times."""

from __future__ import annotations

import base64
import json
import logging
import os
import shlex
import subprocess
from pathlib import Path

from troupe_node.copies import restore
from troupe_node.machine import (
    ETC,
    LOGS,
    Node,
    NodeError,
    client,
    load_node,
    make_own,
    patiently,
    required_metadata,
    write_own,
)

_log = logging.getLogger(__name__)

AGENT = Path("/opt/aws/amazon-cloudwatch-agent/bin/amazon-cloudwatch-agent-ctl")
DNS_TTL_S = 10
FIRST_REPLAY_PORT = 5560


def prepare(start: bool = True) -> None:
    """Everything between the first boot and the running services."""
    node = load_node()
    fetch_keys(node)
    take_name(node)
    if node.role == "learner":
        take_public_address(node)
        restore(node)
        write_run_config(node)
    if node.role == "replay":
        mount_volume(node)
    for folder in (node.run_dir, LOGS):
        make_own(folder)
    service_env(node)
    start_log_agent(node)
    if start:
        subprocess.run(["systemctl", "start", "--no-block", *units(node)], check=True, timeout=60)


def units(node: Node) -> list[str]:
    """The systemd units of this machine's role."""
    if node.role == "learner":
        return [
            "troupe-learner.service",
            "troupe-tensorboard.service",
            "troupe-board.service",
            "troupe-sync.timer",
            "troupe-notice.service",
        ]
    if node.role == "actor":
        processes = int(node.config["actor"]["processes"]) or os.cpu_count() or 1
        return [*(f"troupe-actor@{i}.service" for i in range(processes)), "troupe-notice.service"]
    return [f"troupe-{node.role}.service", "troupe-notice.service"]


def fetch_keys(node: Node) -> None:
    """Write the own secret key, the servers' public keys and the allow-list."""
    ssm, folder = client("ssm"), ETC / "keys"
    make_own(folder, 0o700)
    name = f"{node.parameters}/keys/secret/{node.key}"
    values = {
        f"{node.key}.secret": patiently(
            f"secret key of the {node.key}",
            lambda: ssm.get_parameter(Name=name, WithDecryption=True)["Parameter"]["Value"],
        )
    }
    pages = ssm.get_paginator("get_parameters_by_path").paginate(Path=f"{node.parameters}/keys/public")
    for parameter in (one for page in pages for one in page["Parameters"]):
        values[parameter["Name"].rsplit("/", 1)[1]] = parameter["Value"]
    for file, value in values.items():
        write_own(folder / file, base64.b64decode(value).decode(), 0o600)


def take_name(node: Node) -> None:
    """Point this machine's name in the private zone at its address: replacements keep the name."""
    if not node.host:
        return
    name, address = f"{node.host}.{node.config['domain']}", required_metadata("local-ipv4")
    record = {
        "Name": name,
        "Type": "A",
        "TTL": DNS_TTL_S,
        "ResourceRecords": [{"Value": address}],
    }
    changes = {"Changes": [{"Action": "UPSERT", "ResourceRecordSet": record}]}
    dns = client("route53")
    patiently(
        f"name {name}",
        lambda: dns.change_resource_record_sets(HostedZoneId=node.config["zone_id"], ChangeBatch=changes),
    )
    _log.info("%s is %s", name, address)


def take_public_address(node: Node) -> None:
    """Take the address under which TensorBoard is looked at, where there is one."""
    allocation = node.config.get("learner", {}).get("address_allocation_id")
    if not allocation:
        return
    ec2, instance = client("ec2"), required_metadata("instance-id")
    patiently(
        "public address",
        lambda: ec2.associate_address(AllocationId=allocation, InstanceId=instance, AllowReassociation=True),
    )


def mount_volume(node: Node) -> None:
    """Attach the shard's volume, make a file system on a new one, and mount it as the run's directory."""
    volumes = node.config.get("replay", {}).get("volumes", [])
    volume = volumes[node.index] if node.index < len(volumes) else ""
    if not volume or os.path.ismount(node.run_dir):
        return
    ec2, instance = client("ec2"), required_metadata("instance-id")

    def attach() -> None:
        attached = ec2.describe_volumes(VolumeIds=[volume])["Volumes"][0]["Attachments"]
        if not any(one["InstanceId"] == instance for one in attached):
            ec2.attach_volume(VolumeId=volume, InstanceId=instance, Device="/dev/sdf")

    patiently(f"volume {volume}", attach)  # its last machine may still be shutting down
    # Nitro machines show a volume as an NVMe disk; udev links it by its id.
    device = Path("/dev/disk/by-id") / f"nvme-Amazon_Elastic_Block_Store_{volume.replace('-', '')}"

    def appear() -> None:
        if not device.exists():
            raise NodeError(f"{device} is not there yet")

    patiently(f"volume {volume}", appear)
    if subprocess.run(["blkid", str(device)], check=False, timeout=60, capture_output=True).returncode == 2:
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(device)], check=True, timeout=300)
    make_own(node.run_dir)
    subprocess.run(["mount", "-o", "noatime", str(device), str(node.run_dir)], check=True, timeout=60)


def write_run_config(node: Node) -> None:
    """Write the run's configuration: its file or preset, and what the machines change in it."""
    words = [os.environ.get("TROUPE_BIN", "/opt/troupe/venv/bin") + "/troupe", "config", "show"]
    if text := node.config.get("run_file"):
        # Beside the keys: it stays there, since the configuration names it as the run's preset.
        write_own(ETC / "run.toml", base64.b64decode(text).decode(), 0o644)
        words.append(str(ETC / "run.toml"))
    else:
        words.append(str(node.config["preset"]))
    for field, value in sorted(node.config["overrides"].items()):
        words += [f"--{field}", str(value)]
    done = subprocess.run(words, check=False, timeout=120, capture_output=True, text=True)
    if done.returncode:
        raise NodeError(f"{shlex.join(words[1:])}: {done.stderr.strip()}")
    write_own(node.run_dir / "config.toml", done.stdout, 0o644)


def service_env(node: Node) -> None:
    """Write what the units' `EnvironmentFile` reads."""
    values = {
        "TROUPE_RUN_DIR": str(node.run_dir),
        "TROUPE_LEARNER": node.learner,
        "TROUPE_KEYS": str(ETC / "keys"),
        "TROUPE_HOST": required_metadata("instance-id"),
        "TROUPE_LOGS": str(LOGS),
        "OMP_NUM_THREADS": "1",
    }
    if modules := node.config.get("modules"):
        values["TROUPE_MODULES"] = ",".join(modules)
    if node.role == "replay":
        values["TROUPE_INDEX"] = str(node.index)
        values["TROUPE_ADVERTISE"] = (
            f"tcp://{node.host}.{node.config['domain']}:{FIRST_REPLAY_PORT + node.index}"
        )
    write_own(ETC / "service.env", "".join(f"{name}={value}\n" for name, value in values.items()), 0o644)


def start_log_agent(node: Node) -> None:
    """Send the services' logs to CloudWatch, where its agent is installed."""
    group = node.config.get("log_groups", {}).get(node.role)
    if not group or not AGENT.exists():
        return
    entry = {"file_path": f"{LOGS}/*.log", "log_group_name": group, "log_stream_name": "{instance_id}"}
    settings = {"logs": {"logs_collected": {"files": {"collect_list": [entry]}}}}
    file = ETC / "cloudwatch.json"
    file.write_text(json.dumps(settings))
    words = [str(AGENT), "-a", "fetch-config", "-m", "ec2", "-s", "-c", f"file:{file}"]
    subprocess.run(words, check=False, timeout=120, capture_output=True)  # training does not depend on it
