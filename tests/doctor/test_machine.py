"""What is wrong with a machine: ports, keys, limits, disk and packages."""

import os
import socket
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.harness import until
from troupe.common.config import load_config
from troupe.common.wire.security.keys import make_keys
from troupe.services.doctor import machine, network


def config(**fields):
    return load_config("cartpole-apex", None, {name: str(value) for name, value in fields.items()}, {})


def by_name(checks):
    return {check.looked_at: check for check in checks}


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


def test_a_port_that_another_program_has_is_wrong_and_says_who(port):
    checks = by_name(network.ports(config(**{"net.control": f"tcp://127.0.0.1:{port}"})))
    held = checks[f"net.control {port}"]
    assert held.state == "wrong"
    assert f"process {os.getpid()}" in held.figure
    assert held.advice == "end it, or set --net.control to another; `troupe train` needs no such port"


def test_a_port_of_one_of_our_services_is_a_note_that_names_it(tmp_path):
    words = ["serve", "--bind", "tcp://127.0.0.1:*", "--data-dir", str(tmp_path / "data")]
    words += ["--table", "default:capacity=10", "--log-file", str(tmp_path / "log")]
    process = subprocess.Popen([sys.executable, "-m", "troupe.services.replay", *words])
    try:
        line = until(lambda: address_in(tmp_path / "log"))
        checks = by_name(network.ports(config(**{"net.replay": line})))
        held = checks[f"net.replay {line.rpartition(':')[2]}"]
        assert (held.state, held.figure) == ("note", f"held by replay (process {process.pid})")
    finally:
        process.kill()
        process.wait()


def address_in(log):
    found = [line for line in log.read_text().splitlines() if "serving at" in line] if log.exists() else []
    return found[0].split("serving at ")[1] if found else ""


def test_free_ports_are_fine():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = probe.getsockname()[1]
    checks = by_name(network.ports(config(**{"net.control": f"tcp://127.0.0.1:{free}"})))
    assert checks[f"net.control {free}"].figure == "free"


def test_keys_that_others_may_read_or_that_no_server_lets_in_are_named(tmp_path):
    make_keys(tmp_path / "keys")
    assert {check.state for check in network.keys(str(tmp_path / "keys"))} == {"ok"}
    (tmp_path / "keys" / "actor.secret").chmod(0o644)
    allowed = tmp_path / "keys" / "allowed"
    lines = [line for line in allowed.read_text().splitlines() if not line.startswith("viewer")]
    allowed.write_text("\n".join(lines) + "\n")
    checks = by_name(network.keys(str(tmp_path / "keys")))
    assert "chmod 600" in checks["actor.secret"].advice
    assert checks["viewer.secret"].state == "wrong"
    assert "add `viewer " in checks["viewer.secret"].advice
    assert checks["learner.secret"].state == "ok"


def test_few_open_files_are_wrong():
    """Only the hard limit counts, which a process cannot raise again: so in one of its own."""
    code = """
import resource
from troupe.services.doctor import machine
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1024))
for hard in (1024, 512):
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    print(next(check for check in machine.limits() if check.looked_at == "open files").line)
"""
    enough, few = subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()
    assert enough.endswith("open files: 1,024 - ok")
    assert "open files: 512 - wrong: raise the hard limit (`ulimit -Hn " in few


def test_the_disk_is_measured_and_nothing_is_left_there(tmp_path):
    written, seconds = machine.write_speed(tmp_path)
    assert written >= 1 << 20
    assert seconds > 0
    assert list(tmp_path.iterdir()) == []


def test_replay_that_has_no_room_is_wrong(tmp_path):
    fields = {"replay.capacity_items": 1 << 30, "replay.max_bytes": 1 << 50}
    room = by_name(machine.disk(tmp_path, config(**fields)))["replay's room"]
    assert room.state == "wrong"
    assert "replay.max_bytes" in room.advice


def test_a_missing_engine_is_wrong_only_where_the_run_plays_it():
    missing = {name.split(":")[0] for name, check in packages(config()).items() if check.state != "ok"}
    assert "gym" not in missing
    family = machine.FAMILIES["gym"]
    machine.FAMILIES["gym"] = replace(family, packages=("no_such_engine",))
    try:
        here, elsewhere = packages(config()), packages(config(**{"env.id": "atari:pong"}))
    finally:
        machine.FAMILIES["gym"] = family
    assert (here["gym:ID"].state, elsewhere["gym:ID"].state) == ("wrong", "note")
    assert "no_such_engine" in here["gym:ID"].figure


def packages(config):
    return by_name(machine.packages(config))


def test_more_threads_than_cores_are_wrong():
    threads = by_name(machine.processor(config(**{"learner.torch_threads": 1024})))["learner.torch_threads"]
    assert threads.state == "wrong"
