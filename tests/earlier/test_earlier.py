"""Runs of released versions: what they wrote is read, resumed and exported by today's code.

A release adds an archive (docs/compatibility.md#a-release says how); none goes before the next major version.
"""

import csv
import json
import re
import tarfile
import tomllib
from pathlib import Path

import pytest

from tests.launcher.runs import OPTIONS, metric, start  # noqa: F401
from troupe.services.__main__ import main

HERE = Path(__file__).parent
ROOT = Path(__file__).parents[2]
ARCHIVES = sorted(HERE.glob("*.tar.gz"))
VERSIONS = [path.name.removesuffix(".tar.gz") for path in ARCHIVES]


@pytest.fixture(params=ARCHIVES, ids=VERSIONS)
def run(request, tmp_path):
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="data")
        (top,) = {name.split("/")[0] for name in archive.getnames()}
    return tmp_path / top


def test_every_released_version_has_a_run():
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert set(released) <= set(VERSIONS)
    assert version in VERSIONS


def test_the_version_is_the_same_everywhere():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    number = r"\d+\.\d+\.\d+"
    for name, form in (
        ("CITATION.cff", rf"^version: ({number})$"),
        ("deploy/docker/Dockerfile", rf"^ARG VERSION=({number})$"),
        ("deploy/terraform/README.md", rf'^  version = "({number})"|ref=v({number})|refs/tags/v({number})'),
        ("CHANGELOG.md", r"\A.*?^## \[(\d[^]]*)\]"),
    ):
        found = re.finditer(form, (ROOT / name).read_text(), re.MULTILINE | re.DOTALL)
        assert {group for match in found for group in match.groups() if group} == {version}, name


def test_every_image_that_is_labelled_declares_what_its_label_says():
    """An argument has its value before the first FROM; a stage that does not declare it finds it empty."""
    head, *stages = re.split(r"^FROM ", (ROOT / "deploy/docker/Dockerfile").read_text(), flags=re.MULTILINE)
    labelled = [stage for stage in stages if "image.version" in stage]
    assert len(labelled) == 5
    for name in ("VERSION", "REVISION"):
        assert len(re.findall(rf"^ARG {name}=\S+$", head, re.MULTILINE)) == 1
        for stage in stages:
            declared = re.findall(rf"^ARG {name}\b.*", stage, re.MULTILINE)
            assert declared == ([f"ARG {name}"] if stage in labelled else []), stage.splitlines()[0]
            assert not declared or stage.index(declared[0]) < stage.index(f"${name}")


@pytest.mark.slow
def test_it_is_resumed_with_what_its_replay_holds(run, start):  # noqa: F811
    before = tomllib.loads((run / "config.toml").read_text())
    total = before["run"]["total_steps"]
    with (run / "metrics.csv").open() as file:
        updates = max(int(row["updates"]) for row in csv.DictReader(file))
    more = ["--total-steps", total + 300, "--evaluator.enabled", "false"]
    output = start("resume", run, *more, *OPTIONS).wait()
    assert f"replay: {before['replay']['capacity_items']:,} items restored" in output
    status = json.loads((run / "status.json").read_text())
    assert status["steps"] >= total + 300
    assert status["updates"] > updates
    assert float(metric(run, "replay/damaged_items_total")[-1]["value"]) == 0


def test_its_policy_is_exported(run, tmp_path, capsys):
    assert main(["export", str(run), "--format", "safetensors", "--out", str(tmp_path / "policy")]) == 0
    assert any(tmp_path.glob("policy*")), capsys.readouterr().out
