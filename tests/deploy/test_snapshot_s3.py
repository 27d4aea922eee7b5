"""A shard's snapshot in S3, and another shard that starts from it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from tests.deploy.conftest import Cloud, run
from tests.replay import processes
from troupe.common.wire.replay.client import ReplayClient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MAKE_BUCKET = "import boto3, sys; boto3.client('s3').create_bucket(Bucket=sys.argv[1])"
LIST_BUCKET = (
    "import boto3, sys\n"
    "for one in boto3.client('s3').list_objects_v2(Bucket=sys.argv[1])['Contents']: print(one['Key'])"
)


def test_a_shard_goes_on_from_a_snapshot_in_s3(
    cloud: Cloud, deploy_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("s3fs") is None:
        pytest.skip("NOT TESTED: s3fs is not installed: pip install -e '.[s3]'")
    for name, value in cloud.env.items():  # the shards inherit it, as on a machine with credentials
        if name.startswith("AWS_"):
            monkeypatch.setenv(name, value)
    run(deploy_python, "-c", MAKE_BUCKET, "backups", cwd=tmp_path, env=cloud.env)
    place = "s3://backups/run-7/shard-0"
    context, shards = zmq.Context(), []

    def shard(folder: str, *more: str) -> ReplayClient:
        endpoint = f"ipc://{tmp_path}/{folder}.sock"
        options = ("--table", "default:capacity=500", "--snapshot-to", "s3://backups/run-7", *more)
        shards.append(processes.start(tmp_path / folder, endpoint, *options))
        client = ReplayClient(endpoint, ctx=context)
        client.status(120)
        return client

    try:
        first = shard("first")
        for number in range(30):
            processes.insert(first, number)
        assert first.flush(60)
        progress = first.snapshot(place, 120)
        assert (progress["state"], progress["items"]) == ("done", 300)
        keys = run(deploy_python, "-c", LIST_BUCKET, "backups", cwd=tmp_path, env=cloud.env).split()
        assert "run-7/shard-0/snapshot.json" in keys

        words = [sys.executable, "-m", "troupe.services.replay", "snapshot", f"ipc://{tmp_path}/first.sock"]
        for wrong, status, cause in (
            (place, 5, "already exists"),
            ("s3://elsewhere/x", 2, "only below s3://backups/run-7"),
        ):
            refused = subprocess.run([*words, wrong], capture_output=True, text=True, timeout=120)
            assert (refused.returncode, refused.stderr.count("\n")) == (status, 1), refused.stderr
            assert cause in refused.stderr
        first.close(0)

        second = shard("second", "--restore", place)
        assert second.status(120)["restored_items"] == 300
        for _ in range(10):
            processes.check(second.sample(64, timeout_s=60))
        second.close(0)
    finally:
        for process in shards:
            process.kill()
            process.wait(60)
        context.destroy(linger=0)


def test_a_snapshot_that_s3_lacks_or_refuses_is_one_line(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("s3fs") is None:
        pytest.skip("NOT TESTED: s3fs is not installed: pip install -e '.[s3]'")
    for name, value in cloud.env.items():
        if name.startswith("AWS_"):
            monkeypatch.setenv(name, value)
    words = [
        sys.executable,
        "-m",
        "troupe.services.replay",
        "serve",
        "--bind",
        f"ipc://{tmp_path}/s",
        "--data-dir",
    ]
    words += [str(tmp_path / "data"), "--restore", "s3://nosuchbucket/run-7"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 5, done.stderr
    assert "Traceback" not in done.stderr
    assert "nosuchbucket" in done.stderr.strip().split("\n")[-1]
