"""Packer: the templates are valid, the units and scripts fit each other."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.conftest import ROOT, run

PACKER = ROOT / "deploy" / "packer"
SCRIPTS = ROOT / "deploy" / "scripts"
UNITS = sorted((PACKER / "systemd").iterdir())

# What Packer 1.6.6, the last one in Debian, does not know yet. It has the builder of EC2 built in, so that a
# template can be checked without fetching a plugin.
SINCE_1_7 = [
    r"^  imds_support .*\n",
    r"^  temporary_security_group_source_public_ip .*\n",
    r"^  metadata_options \{\n(?:    .*\n)*  \}\n",
]


@pytest.mark.slow
def test_templates_are_valid(tmp_path: Path) -> None:
    packer = shutil.which("packer")
    if packer is None:
        pytest.skip("NOT TESTED: packer is not installed")
    env = {**os.environ, "CHECKPOINT_DISABLE": "1", "PACKER_CACHE_DIR": str(tmp_path / "cache")}
    old = "v1.6" in run(packer, "version", cwd=tmp_path, env=env)
    for file in PACKER.glob("*.pkr.hcl"):
        if old and file.name == "plugins.pkr.hcl":
            continue
        text = file.read_text()
        if old:
            for pattern in SINCE_1_7:
                text = re.sub(pattern, "", text, flags=re.MULTILINE)
        (tmp_path / file.name).write_text(text)
    if not old:
        run(packer, "init", ".", cwd=tmp_path, env=env)
    run(packer, "validate", ".", cwd=tmp_path, env=env)


def test_images_are_encrypted_and_use_metadata_version_2() -> None:
    text = (PACKER / "images.pkr.hcl").read_text()
    sources = re.findall(r'^source "amazon-ebs" "(\w+)" \{\n(.*?)^\}', text, re.MULTILINE | re.DOTALL)
    assert {name for name, _ in sources} == {"cpu", "gpu"}
    for name, body in sources:
        assert re.search(r"^  encrypt_boot +== true", body.replace("=", "=="), re.MULTILINE), name
        assert re.search(r'http_tokens +== "required"', body.replace("=", "==")), name


def test_packer_can_log_in_until_the_last_step() -> None:
    """It comes back by SSH after the reboot; the image that it leaves lets nobody in."""
    steps = (PACKER / "images.pkr.hcl").read_text().split('\n  provisioner "')[1:]
    closes = ["disable ssh.service" in step for step in steps]
    assert closes == [False] * (len(steps) - 1) + [True]
    assert any("reboot" in step for step in steps[:-1])
    assert "--now" not in steps[-1]
    assert "authorized_keys" in steps[-1]
    for script in SCRIPTS.glob("*.sh"):
        assert not re.search(r"systemctl .*\bssh", script.read_text()), script.name


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units_start_what_the_scripts_install(unit: Path) -> None:
    text = unit.read_text()
    installed = "".join(script.read_text() for script in SCRIPTS.glob("install*.sh"))
    for command in re.findall(r"^ExecStart=(\S+)", text, re.MULTILINE):
        directory, name = command.rsplit("/", 1)
        assert directory == "/opt/troupe/bin"
        assert f"$home/bin/{name}" in installed
    if "troupe-start" in text:
        role = re.search(r"^ExecStart=\S+ (\w+)", text, re.MULTILINE)
        assert role is not None
        assert f"\n  {role.group(1)})" in (SCRIPTS / "start.sh").read_text()
        # A service that root runs could read every key, and one that reaches the metadata service could do in
        # AWS what its machine may.
        assert "User=troupe" in text
        assert "\nIPAddressDeny=169.254.169.254\n" in text
        assert "NoNewPrivileges=yes" in text
        assert "KillSignal=SIGTERM" in text


def test_boot_starts_units_that_exist() -> None:
    boot = (ROOT / "deploy" / "node" / "troupe_node" / "boot.py").read_text()
    names = {unit.name for unit in UNITS}
    for name in re.findall(r'"(troupe-[a-z]+\.(?:service|timer))"', boot):
        assert name in names
    assert "troupe-actor@.service" in names


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.sh")), ids=lambda script: script.name)
def test_scripts_are_sound(script: Path) -> None:
    assert "set -euo pipefail" in script.read_text()
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True, timeout=60)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "--severity=warning", script], check=True, timeout=60)


def test_start_knows_its_options() -> None:
    """Every option that `start.sh` passes is one of the service's."""
    text = (SCRIPTS / "start.sh").read_text()
    for role in ("learner", "replay", "actor", "evaluator"):
        body = text.split(f"\n  {role})", 1)[1].split(";;", 1)[0]
        source = (ROOT / "services" / role / "__main__.py").read_text()
        if role == "learner":
            body = body.replace("--resume", "")
        for option in set(re.findall(r"(--[a-z-]+)", body)) - {"--keys"}:
            assert f'"{option}"' in source, f"{role} has no {option}"


def test_start_refuses_a_word_that_is_no_service() -> None:
    done = subprocess.run(
        ["bash", SCRIPTS / "start.sh", "actress"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "actress" in done.stderr


@pytest.mark.parametrize(("saved", "resumes"), [(False, False), (True, True)])
def test_learner_resumes_where_there_is_a_checkpoint(tmp_path: Path, saved: bool, resumes: bool) -> None:
    troupe = tmp_path / "bin" / "troupe"
    troupe.parent.mkdir()
    troupe.write_text('#!/bin/sh\necho "$@"\n')
    troupe.chmod(0o755)
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints").mkdir(parents=True)
    if saved:
        (run_dir / "checkpoints" / "step-000000000100").mkdir()
    env = {
        "PATH": os.environ["PATH"],
        "TROUPE_BIN": str(troupe.parent),
        "TROUPE_RUN_DIR": str(run_dir),
        "TROUPE_KEYS": "/keys",
    }
    output = run("bash", SCRIPTS / "start.sh", "learner", cwd=tmp_path, env=env)
    assert ("--resume" in output.split()) is resumes
    assert f"--run-dir {run_dir} --keys /keys" in output
