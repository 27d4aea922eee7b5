"""Checkpoints are whole or absent, and loading finds the newest whole one."""

import errno
import itertools
import json
import os
import resource
import sys
import threading

import numpy as np
import pytest

from troupe.common.errors import CheckpointError
from troupe.common.runtime import checkpoint
from troupe.common.runtime.checkpoint import (
    LATEST,
    CheckpointWriter,
    load_checkpoint,
    load_newest,
    newest_first,
    save_checkpoint,
    steps_of,
)

OLD = {"weights": np.arange(6, dtype=np.float32).reshape(2, 3), "count": np.array(7, np.int64)}
NEW = {"weights": np.full((2, 3), 9, np.float32), "count": np.array(8, np.int64)}


def save(directory, arrays, steps, **options):
    return save_checkpoint(directory, arrays, {"steps": steps, "note": "é"}, **options)


@pytest.mark.parametrize("steps", [-5, "many", None, 1.5])
def test_steps_that_no_run_has_made_are_damage(steps, tmp_path):
    path = save_checkpoint(tmp_path, OLD, {"steps": 1})
    meta = path / "meta.json"
    meta.write_text(json.dumps({"steps": steps}))
    manifest = json.loads((path / "MANIFEST.json").read_text())
    manifest["files"]["meta.json"] = checkpoint._fingerprint(meta)
    (path / "MANIFEST.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"meta.json holds .* steps"):
        load_checkpoint(path)


@pytest.mark.parametrize("name", ["MANIFEST.json", "LATEST"])
def test_a_pipe_or_a_device_in_a_run_directory_is_no_file_to_wait_for(name, tmp_path):
    path = save_checkpoint(tmp_path, OLD, {"steps": 1})
    file = path / name if name == "MANIFEST.json" else tmp_path / name
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    if name == "LATEST":  # only a hint
        assert load_newest(tmp_path).path == path
        return
    with pytest.raises(CheckpointError, match=r"MANIFEST.json cannot be read"):
        checkpoint.check(path)
    file.unlink()
    file.symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=r"MANIFEST.json cannot be read"):
        checkpoint.check(path)


def test_round_trip_keeps_values_dtypes_and_meta(tmp_path):
    arrays = {**OLD, "transposed": np.arange(6).reshape(2, 3).T, "empty": np.zeros((0, 4), np.uint8)}
    path = save(tmp_path, arrays, 123)
    loaded = load_newest(tmp_path)
    assert loaded.path == path
    assert path.name == "step-000000000123"
    assert loaded.meta == {"steps": 123, "note": "é"}
    for name, array in arrays.items():
        np.testing.assert_array_equal(loaded.arrays[name], array)
        assert loaded.arrays[name].dtype == array.dtype
    assert (tmp_path / LATEST).read_text().strip() == path.name


def test_whoever_may_read_one_file_may_read_all(tmp_path):
    """What copies a run is another user than the learner."""
    before = os.umask(0o027)
    try:
        path = save(tmp_path, OLD, 1)
    finally:
        os.umask(before)
    assert {file.name: oct(file.stat().st_mode & 0o777) for file in path.iterdir()} == {
        "arrays.safetensors": "0o640",
        "meta.json": "0o640",
        "MANIFEST.json": "0o640",
    }


def test_keeps_the_newest_and_orders_them(tmp_path):
    for steps in (10, 200, 30_000):
        save(tmp_path, OLD, steps, keep=2)
    assert [p.name for p in newest_first(tmp_path)] == ["step-000000030000", "step-000000000200"]


def test_the_same_step_again_is_a_new_checkpoint(tmp_path):
    save(tmp_path, OLD, 5)
    again = save(tmp_path, NEW, 5)
    assert again.name == "step-000000000005.1"
    assert load_newest(tmp_path).arrays["count"] == 8


def test_a_run_that_went_back_resumes_from_what_it_wrote_last(tmp_path):
    save(tmp_path, OLD, 900)
    save(tmp_path, NEW, 100)
    assert load_newest(tmp_path).arrays["count"] == 8
    (tmp_path / LATEST).unlink()  # without the hint the largest step wins
    assert load_newest(tmp_path).arrays["count"] == 7


def test_a_run_that_went_back_keeps_what_is_whole_rather_than_what_is_damaged(tmp_path):
    for steps in (100, 200, 300):
        save(tmp_path, OLD, steps, keep=3)
    for path in list(newest_first(tmp_path))[:2]:
        (path / "arrays.safetensors").write_bytes(b"")
    for steps in (110, 120):
        newest = save(tmp_path, NEW, steps, keep=3)
    assert [steps_of(path) for path in newest_first(tmp_path)] == [120, 110, 100]
    (newest / "meta.json").unlink()
    assert load_newest(tmp_path).path.name == "step-000000000110"


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *itertools.product(["arrays.safetensors", "meta.json"], ["truncate", "empty", "flip", "remove"]),
        *itertools.product(["MANIFEST.json"], ["truncate", "empty", "remove"]),
    ],
)
def test_damage_is_found_and_the_one_before_is_used(tmp_path, caplog, name, damage):
    good = save(tmp_path, OLD, 1)
    bad = save(tmp_path, NEW, 2)
    file = bad / name
    data = bytearray(file.read_bytes())
    if damage == "remove":
        file.unlink()
    else:
        data[len(data) // 2] ^= 0x10
        file.write_bytes({"truncate": data[: len(data) // 2], "empty": b"", "flip": data}[damage])
    with pytest.raises(CheckpointError, match="step-000000000002"):
        load_checkpoint(bad)
    loaded = load_newest(tmp_path)
    assert loaded.path == good
    np.testing.assert_array_equal(loaded.arrays["weights"], OLD["weights"])
    assert f"{good.name} is used instead" in caplog.text
    assert "step-000000000002" in caplog.text


def test_errors_are_one_line_and_say_what_is_wrong(tmp_path):
    with pytest.raises(CheckpointError, match="there is no checkpoint") as absent:
        load_newest(tmp_path / "nowhere")
    path = save(tmp_path, OLD, 1)
    (path / "arrays.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="all 1 checkpoints are damaged") as damaged:
        load_newest(tmp_path)
    manifest = json.loads((path / "MANIFEST.json").read_text())
    (path / "MANIFEST.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        load_checkpoint(path)
    assert absent.value.exit_code == damaged.value.exit_code == 5
    assert "\n" not in f"{absent.value}{damaged.value}"


def test_a_full_disk_leaves_the_old_one_and_a_clear_error(tmp_path, monkeypatch):
    save(tmp_path, OLD, 1)

    def full(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "fsync_path", full)
        with pytest.raises(CheckpointError, match="No space left on device"):
            save(tmp_path, NEW, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [LATEST, "step-000000000001"]
    save(tmp_path, NEW, 2)
    assert load_newest(tmp_path).arrays["count"] == 8


def test_no_room_for_the_arrays_is_the_same_clear_error(tmp_path):
    """The library that writes them has errors of its own, which are no OSError."""
    save(tmp_path, OLD, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"cannot write a checkpoint into .*File too large"):
            save(tmp_path, {"weights": np.zeros(1 << 16)}, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(p.name for p in tmp_path.iterdir()) == [LATEST, "step-000000000001"]


def test_a_writer_writes_one_at_a_time_beside_its_caller(tmp_path, monkeypatch):
    disk, written = threading.Event(), []
    fsync = checkpoint.fsync_path

    def slow(path):
        assert disk.wait(60)
        fsync(path)

    monkeypatch.setattr(checkpoint, "fsync_path", slow)
    writer = CheckpointWriter(tmp_path, keep=1)
    assert writer.wait(0.0)
    writer.begin(OLD, {"steps": 1}, written.append)
    assert not writer.wait(0.05)
    with pytest.raises(RuntimeError, match="already"):
        writer.begin(NEW, {"steps": 2}, written.append)
    disk.set()
    assert writer.wait(60.0)
    writer.begin(NEW, {"steps": 2}, written.append)
    assert writer.wait(60.0)
    assert [path.name for path in written] == ["step-000000000001", "step-000000000002"]
    assert [path.name for path in newest_first(tmp_path)] == ["step-000000000002"]
    assert load_newest(tmp_path).arrays["count"] == 8


def test_a_writer_says_what_went_wrong_and_goes_on(tmp_path, caplog):
    written = []
    (tmp_path / "checkpoints").write_text("in the way")
    writer = CheckpointWriter(tmp_path / "checkpoints")
    writer.begin(OLD, {"steps": 1}, written.append)
    assert writer.wait(60.0)
    assert "cannot write a checkpoint into" in caplog.text
    (tmp_path / "checkpoints").unlink()
    writer.begin(OLD, {"steps": object()}, written.append)  # a defect of the caller, not of the disk
    with pytest.raises(TypeError):
        writer.wait(60.0)
    writer.begin(OLD, {"steps": 1}, written.append)
    assert writer.wait(60.0)
    assert [path.name for path in written] == ["step-000000000001"]


def test_a_run_directory_that_is_renamed_is_not_made_again(tmp_path, caplog):
    written = []
    run = tmp_path / "run"
    run.mkdir()
    writer = CheckpointWriter(run / "checkpoints")
    run.rename(tmp_path / "other")
    writer.begin(OLD, {"steps": 1}, written.append)
    assert writer.wait(60.0)
    assert f"cannot write a checkpoint: {run} was removed or renamed; put it back" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    (tmp_path / "other").rename(run)
    writer.begin(OLD, {"steps": 1}, written.append)
    assert writer.wait(60.0)
    assert [path.name for path in written] == ["step-000000000001"]


def test_a_damaged_pointer_to_the_newest_is_passed_over(tmp_path):
    save(tmp_path, OLD, 1)
    save(tmp_path, NEW, 2)
    (tmp_path / LATEST).write_bytes(b"\xff\xfe\x00")
    assert load_newest(tmp_path).arrays["count"] == 8


def test_killed_at_every_operation(tmp_path):
    """Killed before its n-th file operation, for every n, a process leaves the old or the new state."""
    import safetensors.numpy  # noqa: F401  (in the parent, so that importing it is no operation of the child)

    save(tmp_path, OLD, 1)
    outcomes = []
    for limit in range(1, 500):
        child = os.fork()
        if child == 0:
            _die_at_operation(limit)
            save(tmp_path, NEW, 2, keep=1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        loaded = load_newest(tmp_path)
        expected = NEW if loaded.meta["steps"] == 2 else OLD
        np.testing.assert_array_equal(loaded.arrays["weights"], expected["weights"])
        outcomes.append(loaded.meta["steps"])
        if os.waitstatus_to_exitcode(status) == 0:
            break
        if loaded.meta["steps"] == 2:  # begin the next round from the old state again
            for path in newest_first(tmp_path):
                for file in path.iterdir():
                    file.unlink()
                path.rmdir()
            save(tmp_path, OLD, 1)
    assert len(outcomes) > 15, "the faults were not injected"
    assert outcomes[0] == 1
    assert outcomes[-1] == 2
    assert [p.name for p in newest_first(tmp_path)] == ["step-000000000002"]
    assert not list(tmp_path.glob(".tmp-*"))


def _die_at_operation(limit):
    operations = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.fsync"}
    count = [0]

    def hook(event, _arguments):
        if event in operations:
            count[0] += 1
            if count[0] == limit:
                os._exit(9)

    fsync = os.fsync

    def audited_fsync(descriptor):
        hook("os.fsync", ())
        fsync(descriptor)

    os.fsync = audited_fsync
    sys.addaudithook(hook)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("meta.json", "[" * 100_000),
        ("meta.json", "[1]"),
        ("MANIFEST.json", "[" * 100_000),
        ("MANIFEST.json", "[1]"),
        ("MANIFEST.json", '{"format": 1, "files": {"meta.json": 3}}'),
        ("MANIFEST.json", '{"format": 1, "files": [1]}'),
    ],
    ids=["deep meta", "list", "deep manifest", "list of files", "no sums", "files without names"],
)
def test_crafted_files_are_refused_in_one_line(tmp_path, name, text):
    """Whoever can craft a checkpoint can make its sums fit."""
    path = save(tmp_path, {"a": np.zeros(2)}, 1)
    (path / name).write_text(text)
    if name == "meta.json":
        manifest = json.loads((path / "MANIFEST.json").read_text())
        manifest["files"][name] = checkpoint._fingerprint(path / name)
        (path / "MANIFEST.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(path)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("word", ["NaN", "-Infinity"])
def test_counters_that_are_no_numbers_are_damage(tmp_path, word):
    path = save_checkpoint(
        tmp_path, {"w": np.zeros(1, np.float32)}, {"steps": 1, "updates": float(word.lower())}
    )
    with pytest.raises(CheckpointError, match=f"{word}, which is no number"):
        load_checkpoint(path)
