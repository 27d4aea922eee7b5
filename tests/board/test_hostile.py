"""Run directories that may be anybody's: none keeps the board from the others."""

import json
import os

import pytest

from tests.experiments.folders import make_run
from tests.harness import until

SECRET = "the-secret-of-another-file"


def pipe(run, name):
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)


def device(run, name):
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to("/dev/zero")


def folder(run, name):
    (run / name).unlink(missing_ok=True)
    (run / name).mkdir()


def noise(run, name):
    (run / name).write_bytes(os.urandom(100_000))


def huge(run, name):
    with (run / name).open("wb") as file:
        file.truncate(1 << 36)


def nested(run, name):
    (run / name).write_text('{"metrics":' * 100_000)


FILES = (
    "config.toml",
    "status.json",
    "metrics.csv",
    "episodes.csv",
    "evaluations.jsonl",
    "notes.md",
    ".lock",
)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [pipe, device, folder, noise, huge, nested])
def test_a_damaged_file_is_that_runs_matter(serve, tmp_path, damage, name):
    make_run(tmp_path / "sound", returns=[(100, 7.0)])
    damage(make_run(tmp_path / "damaged"), name)
    board = serve(tmp_path)

    def listed():
        found = board.json("runs")
        return found["complete"] and {row["name"]: row for row in found["runs"]}

    rows = until(listed)
    assert rows["sound"]["score"] == 7.0
    for run in rows.values():
        assert board.ask(f"/api/runs/{run['id']}")[0] == 200
        for metric in ("", "episodes/return"):
            board.json("chart", runs=run["id"], metric=metric)
    ids = ",".join(row["id"] for row in rows.values())
    chart = board.json("chart", runs=ids, bands=1)
    assert rows["sound"]["id"] in [curve["run"] for curve in chart["curves"]]


@pytest.mark.parametrize(
    "name", ["config.toml", "status.json", "metrics.csv", "notes.md", "evaluations.jsonl"]
)
def test_a_link_shows_nothing_of_another_place(serve, tmp_path, name):
    secret = tmp_path / "secret"
    secret.write_text(
        f'[run]\ntotal_steps = 1\nname = "{SECRET}"\n1,1,1,1,{SECRET},eval/episode_return,1\n{SECRET}'
    )
    run = make_run(tmp_path / "runs/run")
    make_run(tmp_path / "runs/sound")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(secret)
    board = serve(tmp_path / "runs")
    until(lambda: board.json("runs")["complete"])
    for row in board.json("runs")["runs"]:
        for path in (f"/api/runs/{row['id']}", "/api/runs", f"/api/chart?runs={row['id']}"):
            assert SECRET.encode() not in board.ask(path)[2]


@pytest.mark.parametrize(
    "status",
    [
        {"services": {"actor-0": {"actor/cpu_cores": "many", "actor/memory_bytes": 1e400}}},
        {
            "peers": [
                {"role": "actor", "name": "actor-0", "slots": [[]], "host": {"a": []}, "seen_s_ago": 1e308}
            ]
        },
        {"environments": {"failures": [], "hangs": "<b>", "last": {"a": 1}}},
        {"metrics": {"replay/items": 1e308, "learner/wait_share": -1e308, "speed/updates_per_s": 1e-320}},
        {"steps": 10**30, "wall_s": 1e300, "version": -(10**40), "note": "x" * 100_000},
        {"metrics": {"eval/episode_return": 10**400}, "wall_s": 10**400, "restarts": 10**400},
        {"peers": [{"role": "actor", "name": "actor-0", "restarts": 10**400, "seen_s_ago": 10**400}]},
    ],
    ids=str,
)
def test_a_strange_status_is_that_runs_matter(serve, tmp_path, status):
    run = make_run(tmp_path / "strange", "cartpole-apex")
    peers = [{"role": "actor", "name": "actor-0"}]
    (run / "status.json").write_text(json.dumps({"steps": 100, "peers": peers, **status}))
    board = serve(tmp_path)
    row = board.runs(1)["strange"]
    assert board.ask(f"/api/runs/{row['id']}")[0] == 200
    assert board.ask(f"/api/runs/{row['id']}/timeline")[0] in (200, 400)
    assert board.ask(f"/api/chart?runs={row['id']}")[0] == 200


def test_a_note_goes_through_no_link(serve, tmp_path):
    run = make_run(tmp_path / "runs/run")
    target = tmp_path / "target"
    target.write_text("as it was")
    (run / "notes.md").symlink_to(target)
    board = serve(tmp_path / "runs")
    assert board.put_note(board.runs(1)["run"]["id"], "new") == 200
    assert target.read_text() == "as it was"
    assert (run / "notes.md").read_text() == "new"


def test_runs_outside_the_roots_are_not_shown(serve, tmp_path):
    make_run(tmp_path / "elsewhere/run")
    make_run(tmp_path / "runs/own")
    (tmp_path / "runs/link").symlink_to(tmp_path / "elsewhere/run")
    (tmp_path / "runs/links").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "runs/loop").symlink_to(tmp_path / "runs")
    assert list(serve(tmp_path / "runs").runs(1)) == ["own"]


def test_a_run_that_becomes_a_link_is_shown_no_more(serve, tmp_path):
    make_run(tmp_path / "elsewhere/run", run__name=SECRET)
    make_run(tmp_path / "runs/own")
    board = serve(tmp_path / "runs")
    run = board.runs(1)["own"]["id"]
    (tmp_path / "runs/own").rename(tmp_path / "was")
    (tmp_path / "runs/own").symlink_to(tmp_path / "elsewhere/run")
    board.look_again()
    assert board.ask(f"/api/runs/{run}")[0] == 404
    assert board.json("runs")["runs"] == []


def test_names_are_only_ever_text(serve, tmp_path):
    names = ["<img src=x onerror=alert(1)>", "line\nbreak\x1b[31m", "ü 漢字", "'\"&;"]
    for name in names:
        make_run(tmp_path / name, agent__learning_rate=0.1 / (1 + len(name)))
    strange = os.path.join(os.fsencode(tmp_path), b"not-utf8-\xff")
    os.rename(make_run(tmp_path / "renamed"), strange)
    board = serve(tmp_path)
    rows = board.runs(5)
    assert all(name.isprintable() for name in rows)
    assert names[0] in rows
    for row in rows.values():
        assert board.ask(f"/api/runs/{row['id']}")[0] == 200
        assert board.put_note(row["id"], "seen") == 200
    assert "not-utf8-\ufffd" in rows
