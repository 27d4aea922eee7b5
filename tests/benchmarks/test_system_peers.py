"""What other frameworks print is understood, and one that is not there is left out."""

import contextlib
import itertools
import signal
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks import system_peers
from benchmarks.system_peers import (
    LeftOutError,
    Peer,
    cleanrl_steps,
    peer_rate,
    rate,
    ratios,
    sample_factory_steps,
    starts_with,
    troupe_rates,
)

FPS = (
    "\x1b[36m[2026-11-01 10:00:05,123][00917] Fps is (10 sec: 3276.8, 60 sec: 3276.8, 300 sec: 3276.8). "
    "Total num frames: 24576. Throughput: 0: 850.1. Samples: 6656. "
    "Policy #0 lag: (min: 0.0, avg: 0.0, max: 0.0)\x1b[0m\n"
)


def test_an_update_of_cleanrl_is_a_batch():
    assert cleanrl_steps("SPS: 273\n", 2048.0) == 3072.0
    assert cleanrl_steps("global_step=824, episodic_return=[-21.]\n", 2048.0) is None


def test_frames_of_sample_factory_are_four_a_step():
    assert sample_factory_steps(FPS, 0.0) == 24576 / 4
    assert (
        sample_factory_steps("[2026-11-01 10:00:05,123][00917] Avg episode reward: [(0, '-20.9')]\n", 0.0)
        is None
    )


def test_a_rate_is_between_lines_that_tell_new_steps():
    # Seconds and frames: learning begins at 5, the window lasts from 15 to 35.
    told = [(0, 0), (5, 4000), (10, 8000), (14, 12000), (15, 20000), (20, 20000), (34, 60000), (35, 100000)]
    lines = [FPS.replace("24576", str(frames)) for _, frames in told]
    # The clock is asked where steps are new.
    clock = iter([seconds for seconds, _ in told if seconds not in (0, 20)])
    found = rate(lines, sample_factory_steps, 20.0, 10.0, clock=lambda: float(next(clock)))
    assert found == (100000 - 20000) / 4 / 20


def test_a_training_that_ends_early_has_no_rate():
    clock = itertools.count()
    assert rate(["SPS: 1\n"] * 9, cleanrl_steps, 20.0, 1.0, clock=lambda: float(next(clock))) is None


def test_whoever_is_not_installed_is_left_out_with_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["system_peers", str(tmp_path), "--only", "cleanrl", "sample_factory"])
    system_peers.main()
    said = capsys.readouterr()
    lines = said.err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["cleanrl", "sample_factory"]
    assert all(f"python -m benchmarks.system_peers {tmp_path} --install" in line for line in lines)
    assert "steps_per_s" not in said.out


def as_peer(folder, monkeypatch, program):
    """Make `cleanrl` this program, in what looks like a virtual environment."""
    monkeypatch.setitem(system_peers.PEERS, "cleanrl", Peer("own", ("-c", program), cleanrl_steps))
    monkeypatch.setattr(system_peers, "SETTLE_S", 0.0)
    (folder / "own" / "bin").mkdir(parents=True)
    (folder / "own" / "bin" / "python").symlink_to(sys.executable)
    starts_with(folder / "own").parent.mkdir(parents=True)
    starts_with(folder / "own").touch()


def test_a_peer_is_run_and_ended_with_its_processes(tmp_path, monkeypatch):
    program = f"""
import pathlib, subprocess, time
pathlib.Path({str(tmp_path / "child")!r}).write_text(str(subprocess.Popen(["sleep", "600"]).pid))
while True:
    print("SPS: 5", flush=True)
    time.sleep(0.01)
"""
    as_peer(tmp_path, monkeypatch, program)
    assert peer_rate("cleanrl", tmp_path, 0.1) > 0
    ends(tmp_path / "child")


def test_a_training_of_troupe_does_not_outlive_the_measurement(tmp_path, monkeypatch):
    program = tmp_path / "python"
    child = tmp_path / "child"
    program.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {child}\nsleep 0.5\nkill -TERM $PPID\nwait\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with pytest.raises(SystemExit):
            troupe_rates("ppo", 1.0)
    finally:
        signal.signal(signal.SIGTERM, before)
    ends(child)


def ends(number):
    """Wait until the process ends whose number is in this file."""
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(number.read_text())).wait(60)


def test_a_peer_that_fails_shows_its_last_lines(tmp_path, monkeypatch, capfd):
    as_peer(tmp_path, monkeypatch, "import no_such_module")
    with pytest.raises(LeftOutError):
        peer_rate("cleanrl", tmp_path, 0.1)
    assert "no_such_module" in capfd.readouterr().err


def test_ratios_are_of_those_who_were_measured():
    assert ratios(
        {"appo_steps_per_s": 900.0, "sample_factory_steps_per_s": 400.0, "cleanrl_steps_per_s": 200.0}
    ) == {"appo_vs_sample_factory": 2.25}


def test_the_document_has_the_commands():
    document = " ".join(
        (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text("utf-8").replace("\\\n", "").split()
    )
    for peer in system_peers.PEERS.values():
        assert " ".join(("VENV/bin/python", *peer.words)).format(venv="VENV") in document
    assert " ".join(system_peers.AS_CLEANRL) in document
