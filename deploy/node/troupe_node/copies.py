"""The run's directory in S3: copied every minute, fetched by a machine that replaces the learner's."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from troupe_node.ending import is_complete, let_go, stop_machines
from troupe_node.machine import Node, NodeError, client, give, load_node, make_own, patiently, write_own

_log = logging.getLogger(__name__)

# Of a run's directory: the stored items are far too many, and logs go to CloudWatch.
NOT_COPIED = {"replay", "logs"}
RESTORED = ".restored"
# A file that grows (events, metrics.csv) is copied whole, and the bucket keeps every copy for days: a large
# one is copied again a minute per megabyte later, at most this much.
LONGEST_PAUSE_S = 900.0
# An older status is of a learner that is gone, or stuck: publishing it would keep the alarm quiet.
STATUS_STALE_S = 300.0


def files_of(folder: Path) -> Iterator[tuple[str, Path]]:
    """Pairs of key and path to copy; a checkpoint's manifest follows what it vouches for."""
    paths = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    for path in sorted(
        paths, key=lambda one: (one.name in ("MANIFEST.json", "LATEST"), one.name == "LATEST", one)
    ):
        relative = path.relative_to(folder)
        if relative.parts[0] not in NOT_COPIED and not any(part.startswith(".") for part in relative.parts):
            yield relative.as_posix(), path


def listing(s3: Any, bucket: str, prefix: str) -> dict[str, tuple[int, float]]:
    """Size in bytes and time of change of every object under a prefix, by the rest of its key."""
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    return {
        one["Key"][len(prefix) :]: (int(one["Size"]), one["LastModified"].timestamp())
        for page in pages
        for one in page.get("Contents", [])
    }


def is_due(size_bytes: int, copied_s: float, now_s: float) -> bool:
    """Whether a file that has changed since it was copied should be copied again now."""
    return now_s - copied_s >= min(LONGEST_PAUSE_S, size_bytes / 1e6 * 60)


def sync(last: bool = False) -> None:
    """Copy what is new, forget checkpoints that the learner forgot, publish progress.

    With `last` the learner has ended: files that grow are copied however short ago they were, the machines of
    a run that is complete are stopped, and a group that waits for this machine's last copy may end it.
    """
    node = load_node(patience_s=30.0)
    if node.role != "learner":
        return  # whose notice began this; there is nothing to copy
    s3, bucket, prefix = client("s3"), node.config["bucket"], f"runs/{node.run}/"
    there = listing(s3, bucket, prefix)
    here: set[str] = set()
    for key, path in files_of(node.run_dir):
        here.add(key)
        try:
            stat = path.stat()
            size, copied_s = there.get(key, (-1, 0.0))
            changed = size != stat.st_size or copied_s < stat.st_mtime
            if changed and (last or is_due(stat.st_size, copied_s, time.time())):
                s3.upload_file(str(path), bucket, prefix + key)
        except FileNotFoundError:
            continue  # pruned meanwhile
        except PermissionError:  # it shall not keep the others from being copied, nor the run from ending
            _log.warning("%s is not copied: only its owner may read it", path)
    if any(key.startswith("checkpoints/") for key in here):
        for key in there.keys() - here:
            if key.startswith("checkpoints/"):
                s3.delete_object(Bucket=bucket, Key=prefix + key)
    if last and is_complete(node):
        stop_machines(node)
    publish_progress(node)
    if last:
        let_go(node)


def publish_progress(node: Node) -> None:
    """Publish the run's counters as metrics: an alarm watches them."""
    file = node.run_dir / "status.json"
    try:
        if time.time() - file.stat().st_mtime > STATUS_STALE_S:
            return
        status = json.loads(file.read_text())
    except (OSError, ValueError):
        return
    values = {"Steps": status.get("steps"), "Updates": status.get("updates")}
    values["EpisodeReturn"] = status.get("metrics", {}).get("train/episode_return")
    data = [
        {"MetricName": name, "Value": float(value), "Dimensions": [{"Name": "Run", "Value": node.run}]}
        for name, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value)  # CloudWatch refuses the others
    ]
    if data:
        client("cloudwatch").put_metric_data(Namespace="Troupe", MetricData=data)


def restore(node: Node) -> None:
    """Fetch the run's directory on a machine that has no checkpoint: it replaces one that was lost."""
    make_own(node.run_dir)
    done = (
        node.run_dir / RESTORED
    )  # not the checkpoints themselves: an earlier attempt may have been cut short
    if done.exists():
        return
    s3, bucket, prefix = client("s3"), node.config["bucket"], f"runs/{node.run}/"
    found = patiently(f"bucket {bucket}", lambda: listing(s3, bucket, prefix))
    for key, (_, copied_s) in found.items():
        path = node.run_dir / key
        if node.run_dir.resolve() not in path.resolve().parents:
            raise NodeError(f"{prefix + key} in {bucket} leads out of the run's directory")
        path.parent.mkdir(parents=True, exist_ok=True)
        s3.download_file(bucket, prefix + key, str(path))
        os.utime(path, (copied_s, copied_s))  # as old as its copy: nothing to copy back
        give(path)
    for folder in [path for path in node.run_dir.rglob("*") if path.is_dir()]:
        give(folder)
    write_own(done, "", 0o644)
    if found:
        _log.info("restored %d files of the run from %s", len(found), bucket)
