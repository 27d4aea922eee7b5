"""What limits a run is seen in its timeline, and said under it in the words of the panel."""

import fcntl
import json
import subprocess
import sys

import pytest

from tests.launcher.plants import FOLDER
from tests.launcher.test_findings import NAMED, recorded
from troupe.common.runtime.files import read_status, write_status
from troupe.common.runtime.metrics import CSV_HEADER
from troupe.services.board import timeline
from troupe.services.board.timeline import COLUMNS, WINDOW_S, Limits, Moments, as_values, shares_of
from troupe.services.launcher.findings import findings

SEEN = {
    "slow-environment": [("actor-0", "emulator", 0.95), ("learner", "waiting for a batch", 0.9)],
    "one-torch-thread": [("learner", "update", 0.9), ("actor-0", "waiting for credit", 0.9)],
    "tiny-queue": [("learner", "waiting for a batch", 0.3), ("actor-0", "waiting for credit", 0.3)],
    "lagging-parameters": [("learner", "update", 0.9), ("actor-0", "waiting for credit", 0.9)],
    "full-disk": [("learner", "update", 0.9), ("actor-0", "inference", 0.5)],
    "noisy-neighbour": [("learner", "update", 0.9), ("actor-0", "waiting for credit", 0.9)],
    "small-batches": [("learner, inference", "inference", 0.5), ("learner", "waiting for a batch", 0.5)],
    "slow-link": [("learner", "waiting for a batch", 0.9), ("actor-0", "waiting for credit", 0.9)],
    "limiter": [
        ("replay-0", "waiting for the samples per insert", 0.8),
        ("learner", "waiting for a batch", 0.8),
    ],
    "evaluator": [("evaluator-2", "evaluation", 0.05), ("actor-0", "waiting for credit", 0.9)],
    "slow-actor": [("actor-3", "emulator", 0.95), ("learner", "waiting for a batch", 0.8)],
    "compression": [("learner", "update", 0.95)],
}
"""Of each planted bottleneck: rows, what they mostly show, and at least how much of it."""
SEEN_NOT = {
    "slow-link": [("replay-0", "waiting for the samples per insert"), ("replay-0", "waiting for items")],
    "limiter": [("actor-0", "waiting for credit"), ("learner", "update")],
    "slow-environment": [("actor-0", "waiting for credit"), ("actor-0", "inference")],
}


def planted(folder, name, moments=60):
    """A run directory as the recorded run left it, which said the same every ten seconds."""
    found = json.loads((FOLDER / f"{name}.json").read_text())
    status = found["status"] | {"wall_s": 10.0 * moments}
    folder.mkdir()
    (folder / "config.toml").write_text(found["config"])
    write_status(folder, status)
    of_learner = {
        metric: value
        for metric, value in status["metrics"].items()
        if metric.startswith(("learner/wait", "learner/unpack", "inference/"))
    }
    services = {**status["services"], "learner": status["services"]["learner"] | of_learner}
    lines = [CSV_HEADER]
    for moment in range(1, moments + 1):
        for source, metrics in services.items():
            lines += [f"{10 * moment}.0,1,1,1,{source},{metric},{value}" for metric, value in metrics.items()]
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    return folder


def rows_of(run):
    moments = Moments(run)
    moments.read()
    return {row["name"]: row for row in as_values(moments)["rows"]}


@pytest.mark.parametrize("name", sorted(NAMED))
def test_a_planted_bottleneck_is_read_off_the_timeline(tmp_path, name, monkeypatch):
    run = planted(tmp_path / "run", name)
    rows = rows_of(run)
    for row, kind, least in SEEN[name]:
        share = rows[row]["mean"].get(kind, 0.0)
        assert share >= least, (row, rows[row]["mean"])
        if least >= 0.5:  # it is what one sees there
            assert share == max(rows[row]["mean"].values())
        assert len(rows[row]["spans"]) == COLUMNS
    for row, kind in SEEN_NOT.get(name, []):
        assert rows[row]["mean"].get(kind, 0.0) < 0.15, rows[row]["mean"]
    if name == "slow-actor":
        emulator = {row: rows[row]["mean"]["emulator"] for row in rows if row.startswith("actor")}
        assert max(emulator, key=emulator.get) == "actor-3"
    monkeypatch.setattr("troupe.services.launcher.progress.usable_cores", lambda: recorded(name).cores)
    said = Limits().of(run)
    wanted = [f"{each.what}: {each.advice}" for each in findings(recorded(name))]
    assert [said["verdict"], *said["others"]] == wanted[:6]
    assert any(NAMED[name][1] in line for line in wanted[:6])


def test_shares_are_those_that_services_measure():
    actor = {"actor/env_share": 0.5, "actor/inference_share": 0.2, "actor/accumulate_share": 0.05}
    actor |= {"actor/pack_share": 0.05, "actor/insert_blocked_share": 0.1, "actor/env_ms": 1e9}
    (found,) = shares_of("actor-3", actor).values()
    assert found == pytest.approx(
        {"emulator": 0.5, "inference": 0.2, "packing": 0.1, "waiting for credit": 0.1}
    )
    learner = {"learner/wait_share": 0.3, "learner/update_share": 0.4, "learner/publish_share": 0.1}
    found = shares_of("learner", learner | {"learner/unpack_share": 0.7})
    assert found["learner"] == {"update": 0.4, "publish": 0.1, "waiting for a batch": 0.3}
    assert found["learner, unpacking"] == {"unpacking": 0.7}


def test_shares_never_exceed_the_time():
    wild = {"actor/env_share": 0.9, "actor/inference_share": 0.9, "actor/insert_blocked_share": 5.0}
    (found,) = shares_of("actor-0", wild).values()
    assert sum(found.values()) == pytest.approx(1.0)
    assert shares_of("stranger-0", {"actor/env_share": 1.0}) == {}


def test_idle_and_silent_times_are_white(tmp_path):
    lines = [CSV_HEADER]
    for wall_s in (*range(10, 110, 10), *range(400, 610, 10)):
        lines.append(f"{wall_s},1,1,1,replay-0,replay/cpu_cores,{0.25 if wall_s < 200 else 0.0}")
    (tmp_path / "metrics.csv").write_text("\n".join(lines) + "\n")
    row = rows_of(tmp_path)["replay-0"]
    columns = {int(10 * column[0] * WINDOW_S / COLUMNS / 10): column[1] for column in row["spans"]}
    assert not [second for second in columns if 150 <= second < 380]  # nobody knows what it did between
    assert columns[50][timeline.KINDS.index("serving")] == 0.25
    assert sum(columns[500]) == 0


def test_only_the_last_minutes_are_read_and_then_what_is_new(tmp_path, monkeypatch):
    monkeypatch.setattr(timeline, "_TAIL_BYTES", 2_000)
    lines = [f"{s}.5,1,1,1,learner,learner/wait_share,0.5" for s in range(0, 10_000, 10)]
    (tmp_path / "metrics.csv").write_text("\n".join([CSV_HEADER, *lines, ""]))
    moments = Moments(tmp_path)
    moments.read()
    now_s, rows = moments.rows()
    assert now_s == 9_990.5
    assert 30 < len(rows["learner"]) < 50
    version = moments.version
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("10000.5,1,1,1,learner,learner/wait_share,1.0\n")
    moments.read()
    assert moments.version != version
    began_s, ended_s, shares = moments.rows()[1]["learner"][-1]
    assert (began_s, ended_s, shares["waiting for a batch"]) == (9_990.5, 10_000.5, 1.0)


def test_two_pages_may_look_at_one_run(tmp_path, monkeypatch):
    file = tmp_path / "metrics.csv"
    row = "{}.5,1,1,1,learner,learner/wait_share,0.5\n"
    file.write_text(f"{CSV_HEADER}\n" + row.format(10) + row.format(20))
    moments = Moments(tmp_path)
    moments.read()
    shares_of = timeline.shares_of

    def meanwhile(source, metrics):
        with file.open("a") as more:
            more.write(row.format(30))
        moments.read()
        return shares_of(source, metrics)

    monkeypatch.setattr(timeline, "shares_of", meanwhile)
    assert moments.rows()[0] == 20.5


def test_the_page_asks_for_what_is_new(serve, tmp_path):
    planted(tmp_path / "run", "limiter")
    board = serve(tmp_path)
    run = board.runs(1)["run"]["id"]
    first = board.json(f"runs/{run}/timeline")
    assert {row["name"] for row in first["rows"]} >= {"actor-0", "replay-0", "learner"}
    again = board.json(f"runs/{run}/timeline", after=first["version"])
    assert "rows" not in again
    assert again["verdict"] == first["verdict"]


def test_of_a_complete_run_there_is_nothing_to_say(tmp_path):
    run = planted(tmp_path / "run", "limiter")
    status = read_status(run)
    write_status(run, status | {"steps": 10**9, "note": "the learner is finishing"})
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert Limits().of(run)["verdict"] == "the learner is finishing"
    assert Limits().of(run) == {"verdict": "complete", "others": []}


def test_a_verdict_on_an_algorithm_of_anybody_imports_nothing_of_it(tmp_path):
    run = planted(tmp_path / "run", "limiter")
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    text = (run / "config.toml").read_text()
    algorithm = next(line for line in text.splitlines() if line.startswith("algorithm = "))
    (run / "config.toml").write_text(text.replace(algorithm, 'algorithm = "evil"'))
    assert read_status(run)
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path; from troupe.services.board.timeline import Limits\n"
        "print(Limits().of(Path(sys.argv[1]) / 'run')['verdict']); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "samples" in done.stdout or "cores" in done.stdout
