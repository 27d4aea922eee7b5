"""Keys in files: what is made, what is refused, and the allow-list that follows its file."""

import os
import resource
import stat
from concurrent import futures
from pathlib import Path

import pytest
import zmq

from troupe.common.errors import AuthError, ConfigError
from troupe.common.runtime.files import lock_file
from troupe.common.wire.security.keys import KEY_ROLES, AllowList, check_set, load_keys, make_keys


@pytest.fixture
def folder(tmp_path):
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


def test_every_role_gets_a_pair_of_its_own_that_fits(folder):
    pairs = {role: load_keys(folder, role) for role in KEY_ROLES}
    assert set(pairs) == {"learner", "replay", "actor", "evaluator", "viewer"}
    assert len({keys.secret for keys in pairs.values()}) == len(pairs)
    for role, keys in pairs.items():
        assert zmq.curve_public(keys.secret) == keys.public
        assert (folder / f"{role}.public").read_bytes().strip() == keys.public
        assert AllowList(folder / "allowed").role_of(keys.public) == role
    assert pairs["actor"].servers == {"learner": pairs["learner"].public, "replay": pairs["replay"].public}
    # A learner that shares the batches of another connects to that one.
    assert pairs["learner"].servers == pairs["actor"].servers


def test_nobody_else_may_read_what_is_made_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        files = make_keys(tmp_path / "keys")
    finally:
        os.umask(before)
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700


def test_keys_that_are_in_use_are_not_replaced(folder):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ConfigError, match="holds keys already"):
        make_keys(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_full_disk_leaves_no_part_of_a_set(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # keys fit, the list of all does not
    try:
        with pytest.raises(ConfigError, match="cannot make keys"):
            make_keys(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    make_keys(tmp_path)
    check_set(tmp_path)


@pytest.mark.parametrize("at", range(1, len(KEY_ROLES) * 2 + 2))
def test_a_set_that_was_interrupted_is_made_by_the_next_call(tmp_path, monkeypatch, at):
    class Stopped(BaseException):
        pass

    def stopping(descriptor):
        nonlocal left
        left -= 1
        if not left:
            raise Stopped

    left = at
    monkeypatch.setattr(os, "fsync", stopping)
    with pytest.raises(Stopped):
        make_keys(tmp_path)
    assert not list(tmp_path.iterdir())
    # After SIGTERM, which `troupe keys` does not catch, or `kill -9`, nothing is removed.
    left = at
    with monkeypatch.context() as killed:
        killed.setattr(Path, "unlink", lambda path, missing_ok=False: None)
        with pytest.raises(Stopped):
            make_keys(tmp_path)
    assert len(list(tmp_path.iterdir())) == at + 1
    if not (tmp_path / "allowed").exists():
        make_keys(tmp_path)
    check_set(tmp_path)
    with pytest.raises(ConfigError, match="holds keys already"):
        make_keys(tmp_path)


def test_what_another_process_makes_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("troupe.common.wire.security.keys._OTHERS_S", 0.2)
    with lock_file(tmp_path / ".unfinished", "held"):
        (tmp_path / "learner.secret").write_text("its own")
        with pytest.raises(ConfigError, match="another process is making keys"):
            make_keys(tmp_path)
    assert (tmp_path / "learner.secret").read_text() == "its own"


def test_who_refuses_somebody_s_keys_does_not_mark_them_as_left_half_way(tmp_path, monkeypatch):
    """Of two processes at once the other one would replace them."""

    def lock(path, refusal, **options):
        raise AssertionError("it is made with the lock")

    monkeypatch.setattr("troupe.common.wire.security.keys.lock_file", lock)
    (tmp_path / "actor.secret").write_text("of this machine alone")
    with pytest.raises(ConfigError, match=r"holds keys already \(actor\.secret\)"):
        make_keys(tmp_path)


def test_keys_that_another_process_is_making_are_waited_for(tmp_path):
    with futures.ThreadPoolExecutor(1) as thread, lock_file(tmp_path / ".unfinished", "held"):
        second = thread.submit(make_keys, tmp_path)
        assert not futures.wait([second], 0.5).done
        (tmp_path / "allowed").touch()
    with pytest.raises(ConfigError, match=r"holds keys already \(allowed\)"):
        second.result()
    assert [path.name for path in tmp_path.iterdir()] == ["allowed"]


def test_a_secret_does_not_show_itself(folder):
    keys = load_keys(folder, "actor")
    assert keys.secret.decode() not in repr(keys)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o620])
@pytest.mark.parametrize("name", ["actor.secret", "learner.public", "allowed"])
def test_a_file_that_others_may_read_or_write_is_refused(folder, name, mode):
    (folder / name).chmod(mode)
    with pytest.raises(AuthError, match=f"{name}.*chmod 600"):
        check_set(folder)


def test_a_folder_that_others_may_write_is_refused(folder):
    folder.chmod(0o770)
    with pytest.raises(AuthError, match="chmod 700"):
        load_keys(folder, "actor")


def test_a_machine_needs_only_what_its_role_uses(folder):
    for path in folder.iterdir():
        if path.name not in ("actor.secret", "learner.public", "replay.public"):
            path.unlink()
    load_keys(folder, "actor")
    with pytest.raises(AuthError, match=r"learner\.secret: No such file"):
        load_keys(folder, "learner")


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 41, b"\xff" * 40, b"a" * 39 + b"~", b"#" * 40])
def test_what_is_no_key_is_one_line_that_does_not_show_it(folder, content):
    (folder / "actor.secret").write_bytes(content)
    with pytest.raises(AuthError, match=r"actor\.secret does not hold a key") as caught:
        load_keys(folder, "actor")
    assert "\n" not in str(caught.value)
    assert not content or content.decode("latin1") not in str(caught.value)


def test_a_missing_directory_is_one_line(tmp_path):
    with pytest.raises(AuthError, match="nowhere: No such file"):
        load_keys(tmp_path / "nowhere", "actor")


def test_the_list_follows_its_file(folder):
    allowed = AllowList(folder / "allowed")
    new, _ = zmq.curve_keypair()
    actor = load_keys(folder, "actor").public
    assert allowed.role_of(new) == ""
    with (folder / "allowed").open("ab") as file:
        file.write(b"\n  # the second machine\nactor " + new + b" box-7\n")
    assert allowed.role_of(new) == "actor"
    lines = (folder / "allowed").read_bytes().splitlines(keepends=True)
    (folder / "allowed").write_bytes(b"".join(line for line in lines if actor not in line))
    assert allowed.role_of(actor) == ""
    assert allowed.role_of(new) == "actor"


@pytest.mark.parametrize("damage", ["gone", "open", "nonsense", "role"])
def test_a_list_that_becomes_unusable_leaves_the_former_one_in_force(folder, damage, caplog):
    allowed = AllowList(folder / "allowed")
    actor, stranger = load_keys(folder, "actor").public, zmq.curve_keypair()[0]
    path = folder / "allowed"
    if damage == "gone":
        path.unlink()
    elif damage == "open":
        path.write_bytes(b"actor " + stranger)
        path.chmod(0o644)
    else:
        path.write_bytes((b"actor nonsense" if damage == "nonsense" else b"king " + stranger) + b"\n")
    assert allowed.role_of(actor) == "actor"
    assert allowed.role_of(stranger) == ""
    assert caplog.text.count("the previous list stays in force") == 1
    with pytest.raises(AuthError):
        AllowList(path)
