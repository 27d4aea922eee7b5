"""What is wrong with a run directory, and with a run whose learner is asked."""

import json
import os
import time

import pytest

from tests.harness import until
from troupe.common.config import load_config, to_toml
from troupe.common.installation import version
from troupe.common.runtime.checkpoint import save_checkpoint
from troupe.common.runtime.files import atomic_write, write_status
from troupe.common.wire import messages
from troupe.common.wire.link import Link
from troupe.common.wire.security.key_options import make_security
from troupe.common.wire.security.keys import make_keys
from troupe.common.wire.sockets import Security
from troupe.services.doctor import command, peers, run
from troupe.services.doctor.checks import Check, guarded
from troupe.services.learner.control.roster import Peer

STATUS = {
    "steps": 5000,
    "updates": 900,
    "version": 30,
    "wall_s": 120.0,
    "note": "",
    "metrics": {
        "speed/updates_per_s": 9.0,
        "replay/items": 4000,
        "learner/wait_share": 0.9,
        "actor/env_ms": 800.0,
    },
    "services": {"actor-0": {"actor/cpu_cores": 0.1, "actor/env_ms": 800.0, "actor/slots": 16.0}},
    "environments": {"failures": 0, "hangs": 0, "last": ""},
    "peers": [
        {"role": "actor", "name": "actor-0", "host": "far", "seen_s_ago": 0.4, "clock_s": 0.01, "error": ""},
        {"role": "replay", "name": "replay-0", "host": "near", "seen_s_ago": 12.0, "clock_s": -40.0},
        {"role": "actor", "name": "actor-1", "host": "far", "seen_s_ago": 12.0, "heartbeat_s": 8.0},
        {"role": "viewer", "name": "someone", "host": "", "seen_s_ago": 99.0, "clock_s": None},
    ],
}


@pytest.fixture
def config():
    return load_config("cartpole-apex", None, {}, {})


@pytest.fixture
def folder(tmp_path, config):
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    (folder / "checkpoints").mkdir()
    atomic_write(folder / "config.toml", to_toml(config).encode())
    write_status(folder, STATUS)
    return folder


def looked(checks):
    return {check.looked_at: check for check in checks}


def test_a_run_names_who_is_silent_whose_clock_is_off_and_what_limits_it(folder, config):
    checks = list(run.run_directory(folder, config))
    lines = [check.line for check in checks]
    silent = [line for line in lines if "replay-0 on near: silent for 12 s" in line]
    assert silent
    assert [line for line in lines if "actor-1 on far: last heard 12.0 s ago" in line], (
        "which is not long for it"
    )
    assert [line for line in lines if "replay-0 on near: 40.00 s behind the learner's - wrong" in line]
    assert [line for line in lines if "actor-0 on far: 0.01 s ahead of the learner's - ok" in line]
    assert not [line for line in lines if "someone" in line]  # it only looks
    limits = [check for check in checks if check.area == "bottleneck"]
    assert limits[0].figure == "the environment takes 50 ms a step"
    assert "--actor.env_threads" in limits[0].advice


def test_of_a_run_that_has_ended_nobody_is_silent(folder, config):
    old = time.time() - 3600
    os.utime(folder / "status.json", (old, old))
    checks = list(run.run_directory(folder, config))
    assert not [check for check in checks if check.area in ("members", "clocks")]
    assert "3,600 s ago" in looked(checks)["steps"].figure


@pytest.mark.parametrize("steps", [0, 10**9], ids=["one process", "complete"])
def test_nobody_is_missed_where_nobody_has_to_join(folder, config, steps):
    """A run in one process has no members, and from one that is complete they have gone."""
    status = {name: value for name, value in STATUS.items() if name != "peers" or steps}
    write_status(folder, status | {"steps": steps} | ({"peers": []} if steps else {}))
    checks = list(run.run_directory(folder, config))
    assert not [check for check in checks if check.area == "members"]


def test_what_an_ended_learner_said_last_is_no_state_of_the_run(folder, config):
    write_status(folder, STATUS | {"note": "writing what is left"})
    assert "(writing" in looked(run.run_directory(folder, config))["steps"].figure
    an_hour_ago = time.time() - 3600
    os.utime(folder / "status.json", (an_hour_ago, an_hour_ago))
    checks = list(run.run_directory(folder, config))
    assert "(writing" not in looked(checks)["steps"].figure
    limits = [check for check in checks if check.area == "bottleneck"]
    assert limits[0].figure == "the environment takes 50 ms a step"


ODD = ["x", None, [], {}, -1, True, [1], [None], {"a": 1}, {"actor-0": 3}, float("inf"), [{"name": 5}]]


@pytest.mark.parametrize("name", [*STATUS, "frames"])
@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_a_status_of_other_kinds_is_no_trace(folder, config, name, odd):
    write_status(folder, STATUS | {name: odd})
    assert looked(run.run_directory(folder, config))


def test_a_status_too_deep_to_read_is_none(folder, config):
    (folder / "status.json").write_text("[" * 100_000)
    assert looked(run.run_directory(folder, config))["status.json"].state == "note"


def test_a_log_that_cannot_be_read_hides_nobody(folder, config):
    os.mkfifo(folder / "logs" / "learner.log")
    (folder / "logs" / "replay.log").mkdir()
    found = looked(run.run_directory(folder, config))
    assert found["learner.log"].figure == "cannot be read (it is not a regular file)"
    assert found["replay.log"].figure.startswith("cannot be read")
    assert found["replay-0 on near"].state == "wrong"


def test_damaged_checkpoints_failed_writes_and_last_errors_are_wrong(folder, config):
    import numpy as np

    for steps in (100, 200):
        save_checkpoint(folder / "checkpoints", {"w": np.zeros(4)}, {"steps": steps})
    newest = folder / "checkpoints" / "step-000000000200" / "meta.json"
    newest.write_text(newest.read_text().replace("200", "201"))
    write_status(folder, STATUS | {"metrics": {**STATUS["metrics"], "learner/failed_writes_total": 3.0}})
    log = folder / "logs"
    log.joinpath("actor-0.log").write_text("2026 INFO x: begins\ntroupe: error: no environment\n")
    log.joinpath("learner.log").write_text("2026 ERROR x: disk full\n2026 INFO x: goes on\n")
    checks = looked(run.run_directory(folder, config))
    assert checks["step-000000000200"].state == "wrong"
    assert "sha256" in checks["step-000000000200"].figure
    assert checks["step-000000000100"].state == "ok"
    assert checks["writes"].state == "wrong"
    assert (checks["actor-0.log"].state, checks["actor-0.log"].figure) == (
        "wrong",
        "troupe: error: no environment",
    )
    assert checks["learner.log"].state == "note"


def test_a_learner_is_asked_for_members_clocks_and_versions(serve, connect, config):
    server = serve(config=config.to_dict())
    actor = connect(server, "actor-0", slots_wanted=2)
    actor.join()
    until(lambda: server.peers()[0]["clock_s"] is not None)
    server.tell(STATUS | {"peers": server.peers()})
    checks = list(peers.address(server.control_endpoint, "", 30.0))
    assert {check.state for check in checks if check.area in ("learner", "clocks", "members")} == {"ok"}
    seen = looked(check for check in checks if check.area == "clocks")
    assert any(name.startswith("actor-0 on ") for name in seen)
    assert "the learner" in seen
    assert not [check for check in checks if check.area == "versions"]


def test_a_clock_is_told_by_heartbeats_of_which_the_quickest_counts(serve, connect):
    peer = Peer(b"1", "actor", "actor-0", 1)
    for says_s, comes_s in ((1000.0, 1502.0), (1010.0, 1510.1), (1020.0, 1525.0)):
        peer.take_clock(says_s, comes_s)
    assert -501.0 < peer.clock_s < -500.0
    server = serve()
    connect(server, "actor-0", slots_wanted=1).join()
    (shown,) = until(lambda: [peer for peer in server.peers() if peer["clock_s"] is not None])
    assert shown["software"] == f"troupe {version()}"


def test_an_old_peer_says_no_clock_and_is_none_the_worse():
    from troupe.common.wire.codec import Message

    old = messages.Heartbeat.of(Message("HEARTBEAT", {"version": 3}, {}, 1))
    assert old.clock_s == 0.0


def test_a_status_for_others_names_no_process_and_fits(serve, connect):
    server = serve()
    connect(server, "actor-0", slots_wanted=2).join()
    many = {f"actor-{n}": {f"actor/{m}": 0.5 for m in range(50)} for n in range(5000)}
    server.tell({"steps": 7, "returns": {"x": [[0, 1]]}, "services": many, "peers": server.peers()})
    security = Security(False, None)
    values, _ = peers.ask_status(server._ctx, server.control_endpoint, security, 30.0)
    assert values["steps"] == 7
    assert values["services"] == {}
    (peer,) = values["peers"]
    assert not {"incarnation", "pid"} & peer.keys()
    assert "returns" not in values


def test_nobody_at_an_address_is_one_line_in_time():
    (check,) = peers.address("tcp://127.0.0.1:9", "", 0.5)
    assert check.state == "wrong"
    assert "could not join the learner at tcp://127.0.0.1:9 within 0 s" in check.advice


def test_keys_open_an_address_or_not(tmp_path, serve, config):
    make_keys(tmp_path / "right")
    make_keys(tmp_path / "wrong")
    security = make_security(str(tmp_path / "right"), "learner")
    server = serve("tcp://127.0.0.1:*", config=config.to_dict(), security=security)
    first = next(iter(peers.address(server.control_endpoint, str(tmp_path / "right"), 30.0)))
    assert first.figure.endswith("with the keys of the viewer")
    (check,) = peers.address(server.control_endpoint, str(tmp_path / "wrong"), 30.0)
    assert check.state == "wrong"


def test_one_key_may_not_ask_a_learner_all_the_time(tmp_path, serve, ctx):
    make_keys(tmp_path / "keys")
    server = serve("tcp://127.0.0.1:*", security=make_security(str(tmp_path / "keys"), "learner"))
    link = Link(
        ctx,
        server.control_endpoint,
        "learner",
        name="doctor",
        incarnation=1,
        liveness_s=60.0,
        security=make_security(str(tmp_path / "keys"), "viewer"),
    )
    link.connect()
    asked, kinds = 0, []
    while len(kinds) < 500 and "too_many" not in kinds:
        if asked < 500:
            asked += link.send(messages.Status(), asked + 1)
        link.wait(10)
        for message in link.receive():
            kinds.append(message.fields.get("kind", message.type))
    assert "STATUS_OK" in kinds
    assert "too_many" in kinds
    link.close(0)


def test_the_command_prints_lines_or_json_and_its_exit_code_says_whether_anything_is_wrong(folder, capsys):
    assert command.doctor([str(folder)]) == command.FOUND
    printed = capsys.readouterr().out
    assert "replay-0 on near: silent for 12 s - wrong" in printed
    assert printed.splitlines()[-1].endswith(" wrong")
    write_status(folder, STATUS | {"peers": STATUS["peers"][:1]})
    assert command.doctor([str(folder), "--json"]) in (
        0,
        command.FOUND,
    )  # a port may be taken on this machine
    checks = json.loads(capsys.readouterr().out)
    assert {"area", "looked_at", "figure", "state", "advice"} == set(checks[0])
    assert not [check for check in checks if check["area"] == "members" and check["state"] == "wrong"]


def test_what_cannot_be_looked_at_is_a_line_and_not_the_end():
    def checks():
        yield Check("gpu", "cuda:0", "there")
        raise OSError(5, "broken")

    found = list(guarded("gpu", checks()))
    assert [check.state for check in found] == ["ok", "note"]
