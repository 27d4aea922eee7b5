"""Packer: the templates are valid, the units and scripts fit each other."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.conftest import ROOT, run
from troupe.services.launcher.supervisor import FINAL_EXIT_CODES

PACKER = ROOT / "deploy" / "packer"
SCRIPTS = ROOT / "deploy" / "scripts"
UNITS = sorted((PACKER / "systemd").iterdir())
WATCHERS = {"troupe-tensorboard.service", "troupe-board.service"}
"""They show what the others write."""

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
    for command in re.findall(r"^ExecStart=([^+]\S+)", text, re.MULTILINE):
        directory, name = command.rsplit("/", 1)
        assert directory == "/opt/troupe/bin"
        assert f"$home/bin/{name}" in installed
    if "troupe-start" in text:
        role = re.search(r"^ExecStart=\S+ ([\w-]+)", text, re.MULTILINE)
        assert role is not None
        assert f"\n  {role.group(1)})" in (SCRIPTS / "start.sh").read_text()
        assert "KillSignal=SIGTERM" in text


CONFINED = """NoNewPrivileges=yes
PrivateTmp=yes
ProtectHome=yes
ProtectSystem=strict
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectControlGroups=yes
RestrictSUIDSGID=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
CapabilityBoundingSet=
"""


def lines_of(unit: str) -> set[str]:
    """Every line of a unit's file."""
    return set((PACKER / "systemd" / unit).read_text().splitlines())


@pytest.mark.parametrize(
    "unit", [unit.name for unit in UNITS if unit.suffix == ".service" and unit.name != "troupe-node.service"]
)
def test_a_unit_may_no_more_than_it_needs(unit: str) -> None:
    """A service that root runs could read every key; one that reaches the metadata service, or shares a user
    with what does, could do in AWS what its machine may."""
    lines = lines_of(unit)
    assert set(CONFINED.splitlines()) <= lines
    service = any("troupe-start" in line for line in lines)
    assert ("User=troupe" in lines, "IPAddressDeny=169.254.169.254" in lines) == (service, service)
    assert ("DynamicUser=yes" in lines) is not service
    assert any(line.startswith("ReadWritePaths=") for line in lines) is service
    # Root stops services, where a notice says so, and begins the last copy: nothing else.
    with_root = {line for line in lines if re.match(r"Exec\w+=[^/]*[+!]", line)}
    stops = {line for line in with_root if line.startswith("ExecStart=+/usr/bin/systemctl stop troupe-")}
    copy = "ExecStart=+/usr/bin/systemctl start --no-block troupe-last-sync.service"
    assert with_root - stops == ({copy} if stops else set())
    assert bool(stops) is (unit == "troupe-notice.service")


def test_a_notice_stops_every_service_that_has_something_to_flush() -> None:
    [stop] = [
        line
        for line in lines_of("troupe-notice.service")
        if line.startswith("ExecStart=+/usr/bin/systemctl stop")
    ]
    services = {
        unit.name.replace("@", "@*")
        for unit in UNITS
        if "User=troupe" in lines_of(unit.name) and unit.name not in WATCHERS
    }
    assert set(stop.split()[2:]) == services


def test_systemd_misses_the_signs_of_life_of_a_service_that_is_stopped() -> None:
    services = [unit.name for unit in UNITS if "User=troupe" in lines_of(unit.name)]
    watched = [name for name in services if {"WatchdogSec=300", "NotifyAccess=main"} <= lines_of(name)]
    assert set(services) - set(watched) == WATCHERS


def test_a_learner_that_ends_is_followed_by_the_last_copy() -> None:
    assert "OnSuccess=troupe-last-sync.service" in lines_of("troupe-learner.service")
    lines = lines_of("troupe-last-sync.service")
    assert "ExecStart=/opt/troupe/bin/troupe-node sync --last" in lines
    # The machines of a complete run are stopped sooner or later, and by a copy that began after the others.
    assert "Restart=on-failure" in lines
    assert any(line.startswith("After=") and "troupe-sync.service" in line for line in lines)


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
    for role in ("learner", "learner-peer", "replay", "actor", "evaluator"):
        body = text.split(f"\n  {role})", 1)[1].split(";;", 1)[0]
        folder = ROOT / "services" / role.removesuffix("-peer")
        source = "".join(file.read_text() for file in folder.glob("*.py"))
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


def start(tmp_path: Path, *words: str, **more: str) -> subprocess.Popen[str]:
    """`start.sh` with a command in the place of `troupe` that says its arguments and does what DOES says."""
    troupe = tmp_path / "bin" / "troupe"
    troupe.parent.mkdir(exist_ok=True)
    troupe.write_text('#!/bin/bash\necho "$@"\neval "$DOES"\n')
    troupe.chmod(0o755)
    env = {
        "PATH": os.environ["PATH"],
        "TROUPE_BIN": str(troupe.parent),
        "TROUPE_RUN_DIR": str(tmp_path / "run"),
        "TROUPE_KEYS": "/keys",
        "TROUPE_LEARNER": "tcp://learner:5550",
        "DOES": "exit 0",
        **more,
    }
    return subprocess.Popen(
        ("bash", str(SCRIPTS / "start.sh"), *words),
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units_give_up_after_the_statuses_that_the_launcher_gives_up_after(unit: Path) -> None:
    """Not those of actors and of learners that join: they are restarted after every status."""
    found = re.search(r"^RestartPreventExitStatus=(.*)$", unit.read_text(), re.MULTILINE)
    if found is None:
        assert unit.name not in {
            f"troupe-{role}.service" for role in ("learner", "replay", "evaluator", "tensorboard", "board")
        }
    else:
        assert {int(word) for word in found.group(1).split()} == set(FINAL_EXIT_CODES)


def test_keys_of_a_wrong_mode_are_mended(tmp_path: Path) -> None:
    command = tmp_path / "troupe"
    command.write_text(f'#!/bin/bash\nexec "{sys.executable}" -m troupe "$@"\n')
    command.chmod(0o755)
    words = (
        "bash",
        str(ROOT / "deploy" / "docker" / "keys.sh"),
        str(tmp_path / "set"),
        str(tmp_path / "roles"),
    )
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(words, env=env, check=True, timeout=120, cwd=ROOT)
    secret = tmp_path / "roles" / "actor" / "actor.secret"
    secret.chmod(0o644)
    subprocess.run(words, env=env, check=True, timeout=120, cwd=ROOT)
    assert secret.stat().st_mode & 0o777 == 0o600


def end(process: subprocess.Popen[str]) -> None:
    """Kill it, and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)


def lines_until(process: subprocess.Popen[str], word: str) -> str:
    """The output of a process up to the line that has `word` in it."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if word in line:
            return seen
    pytest.fail(f"no line with {word!r}: {seen}")


@pytest.mark.parametrize("status", FINAL_EXIT_CODES)
def test_where_everything_is_restarted_a_mistake_waits_to_be_put_right(tmp_path: Path, status: int) -> None:
    process = start(tmp_path, "learner", TROUPE_HOLD="1", DOES=f"echo the cause; exit {status}")
    try:
        assert "the cause\n" in lines_until(process, f"learner ended with status {status}")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.terminate()
        assert process.wait(60) == status
    finally:
        end(process)


@pytest.mark.parametrize(("hold", "status"), [("1", 0), ("1", 3), ("1", 70), ("", 2), ("", 4), ("", 5)])
def test_whatever_a_restart_may_mend_ends(tmp_path: Path, hold: str, status: int) -> None:
    process = start(tmp_path, "evaluator", TROUPE_HOLD=hold, DOES=f"exit {status}")
    process.communicate(timeout=60)
    assert process.returncode == status


def test_a_service_below_the_script_is_told_to_stop_and_ends_by_itself(tmp_path: Path) -> None:
    does = "trap 'echo saved; exit 5' TERM; echo begun; while :; do sleep 0.1; done"
    process = start(tmp_path, "learner", TROUPE_HOLD="1", DOES=does)
    try:
        lines_until(process, "begun")
        process.terminate()
        output, _ = process.communicate(timeout=60)
        assert (process.returncode, output) == (5, "saved\n")
    finally:
        end(process)


def test_shards_that_share_a_folder_take_numbers_that_are_free(tmp_path: Path) -> None:
    def shard() -> tuple[subprocess.Popen[str], str]:
        process = start(tmp_path, "replay", TROUPE_INDEX="free", DOES="echo begun; exec sleep 600")
        processes.append(process)
        said = lines_until(process, "begun")
        assert "--bind tcp://0.0.0.0:5560 " in said
        assert "--advertise" not in said
        found = re.search(r"--index (\d+) .*/run/replay/shard-(\d+) ", said)
        assert found is not None
        assert found.group(1) == found.group(2)
        return process, found.group(1)

    processes: list[subprocess.Popen[str]] = []
    try:
        first, number = shard()
        assert (number, shard()[1], shard()[1]) == ("0", "1", "2")
        first.kill()
        first.wait(60)
        assert shard()[1] == "0", "what a dead shard held was not taken again"
    finally:
        for process in processes:
            end(process)


@pytest.mark.parametrize(("saved", "resumes"), [(False, False), (True, True)])
def test_learner_resumes_where_there_is_a_checkpoint(tmp_path: Path, saved: bool, resumes: bool) -> None:
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints").mkdir(parents=True)
    if saved:
        (run_dir / "checkpoints" / "step-000000000100").mkdir()
    output, _ = start(tmp_path, "learner").communicate(timeout=60)
    assert ("--resume" in output.split()) is resumes
    assert f"--run-dir {run_dir} --keys /keys" in output
