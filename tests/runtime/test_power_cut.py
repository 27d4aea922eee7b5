"""Checkpoints, LATEST and the record of a run after a power cut at any moment."""

import json

import numpy as np
import pytest

from tests.runtime.power import Disk
from troupe.common.errors import CheckpointError
from troupe.common.runtime.checkpoint import load_newest, save_checkpoint
from troupe.common.runtime.metrics import CSV_FILE, EVALUATIONS_FILE, MetricsWriter, read_rows

PAGE = 4096


def test_a_checkpoint_that_was_written_is_there_after_a_power_cut(tmp_path, monkeypatch):
    """Or a newer one, whole. Whatever else the disk has kept of names and contents."""
    disk = Disk(tmp_path / "checkpoints")
    written = [(0, 0)]  # events, and the steps of what is certain after them
    with monkeypatch.context() as patch:
        disk.watch(patch)
        for steps in range(100, 700, 100):
            save_checkpoint(disk.root, {"weights": np.full(2000, float(steps))}, {"steps": steps}, keep=2)
            written.append((len(disk.events), steps))
    rng = np.random.default_rng(0)
    for count in range(len(disk.events) + 1):
        for trial in range(3):
            place = tmp_path / f"cut-{count}-{trial}"
            disk.cut(count, place, lambda n: int(rng.integers(n)))
            certain = max(steps for events, steps in written if events <= count)
            try:
                found = load_newest(place)
            except CheckpointError:
                assert certain == 0, f"no checkpoint after {count} events"
                continue
            assert found.meta["steps"] >= certain
            assert np.all(found.arrays["weights"] == found.meta["steps"])


def cut(content, rng, trial):
    """What the disk may have of a file that is only written at its end."""
    torn = bytearray(content[: int(rng.integers(len(content) + 1))])
    lost = rng.random(len(torn) // PAGE + 1) < rng.choice([0.1, 0.9])
    if trial % 3 == 0:  # the length was written, and none of the last pages
        lost[len(lost) // 4 :] = True
    for page in np.flatnonzero(lost).tolist():
        torn[page * PAGE : (page + 1) * PAGE] = bytes(len(torn[page * PAGE : (page + 1) * PAGE]))
    return bytes(torn)


@pytest.mark.parametrize("trial", range(30))
def test_evaluations_that_are_whole_stay_and_new_ones_follow(tmp_path, trial):
    rng = np.random.default_rng(trial)
    writer = MetricsWriter(tmp_path)

    def evaluate(version):
        writer.add_evaluation(version, [(1.0, 9)] * 20, steps=version, frames=version, updates=version)

    for version in range(100):
        evaluate(version)
    path = tmp_path / EVALUATIONS_FILE
    before = path.read_bytes().split(b"\n")[:-1]
    torn = cut(path.read_bytes(), rng, trial)
    path.write_bytes(torn)
    evaluate(1000)
    writer.close()
    after = path.read_bytes().split(b"\n")[:-1]
    assert json.loads(after[-1])["version"] == 1000
    assert [line for line in torn.split(b"\n")[:-1] if line in before] == [
        line for line in after[:-1] if line in before
    ]


@pytest.mark.parametrize("trial", range(30))
def test_rows_that_are_whole_are_read_after_a_power_cut_and_new_ones_follow(tmp_path, trial):
    """The record is not forced to the disk: any pages may be missing, and the end."""
    rng = np.random.default_rng(trial)
    writer = MetricsWriter(tmp_path)
    for steps in range(5000):
        writer.add("learner", {"loss": steps / 7}, steps=steps, frames=steps, updates=steps)
    writer.close()
    path = tmp_path / CSV_FILE
    lines = path.read_bytes()
    torn = cut(lines, rng, trial)
    path.write_bytes(torn)
    whole = {line for line in bytes(torn).split(b"\n")[:-1] if b"\0" not in line}
    writer = MetricsWriter(tmp_path)
    writer.add("learner", {"after": 1.0}, steps=9000, frames=0, updates=0)
    writer.close()
    rows = list(read_rows(path))
    assert rows[-1].name == "after"
    assert {row.steps for row in rows[:-1]} <= set(range(5000))
    assert len(rows) - 1 >= len(whole & set(lines.split(b"\n"))) - 1  # but for the header
