import contextlib
import http.client
import json
import socket
import time
import tracemalloc

import pytest

from tests.experiments.folders import make_run
from tests.harness import hung_up, until
from troupe.services.board import notes
from troupe.services.board.access import POLICY

TOKEN = "a-token-of-its-own"


@pytest.fixture
def runs(tmp_path):
    """Three seeds of one setting, one of another, and one of another environment."""
    for seed in range(3):
        make_run(tmp_path / f"sweep/seed-{seed}", returns=[(100, seed), (20_000, seed + 10)], run__seed=seed)
    make_run(tmp_path / "fast", returns=[(100, 5), (20_000, 50)], steps=20_000, agent__learning_rate=0.01)
    make_run(tmp_path / "other", "pendulum-ppo", returns=[])
    return tmp_path


def test_all_runs_are_listed_with_what_they_differ_in(serve, runs):
    rows = serve(runs).runs(5)
    fast = rows["fast"]
    assert (fast["state"], fast["score"], fast["steps"], fast["minutes"]) == ("running", 50.0, 20_000, 1.0)
    assert (fast["algorithm"], fast["env"]) == ("policy_gradient", "gym:CartPole-v1")
    assert "learning_rate=0.01" in fast["differs"]
    assert rows["sweep/seed-1"]["state"] == "done"
    assert rows["other"]["score"] is None


def test_only_runs_that_changed_are_told_again(serve, runs):
    board = serve(runs)
    board.runs(5)
    version = board.json("runs")["version"]
    assert board.json("runs", after=version)["runs"] == []
    make_run(runs / "new")
    (runs / "fast/config.toml").rename(runs / "fast/config.old")
    gone = board.runs(5)  # four of those, and another
    assert "fast" in gone
    board.look_again()
    found = board.json("runs", after=version)
    assert "new" in [row["name"] for row in found["runs"]]
    assert found["gone"] == [gone["fast"]["id"]]


def test_a_chart_has_bands_over_seeds_and_only_what_is_new(serve, runs):
    board = serve(runs)
    rows = board.runs(5)
    ids = ",".join(row["id"] for name, row in rows.items() if name != "other")
    chart = board.json("chart", runs=ids, bands=1, columns=100)
    assert chart["metric"] == "eval/episode_return"
    assert chart["complete"]
    bands = {len(band["runs"]): band for band in chart["bands"]}
    assert sorted(bands) == [1, 3]
    assert bands[3]["y"][-1] == pytest.approx(11.0, abs=0.1)  # of 10, 11 and 12
    assert bands[3]["low"][-1] < bands[3]["y"][-1] < bands[3]["high"][-1]
    assert len(chart["curves"]) == 4
    again = board.json("chart", runs=ids, bands=1, columns=100, after=chart["state"])
    assert (again["curves"], len(again["kept"])) == ([], 4)
    with (runs / "fast/metrics.csv").open("a") as file:
        file.write("3000,20500,20500,9,evaluator,eval/episode_return,70\n")
    later = board.json("chart", runs=ids, bands=1, columns=100, after=again["state"])
    assert [curve["run"] for curve in later["curves"]] == [rows["fast"]["id"]]
    assert later["curves"][0]["y"] == [5.0, 50.0, 70.0]
    assert len(later["kept"]) == 3


def test_bands_of_several_environments_say_which(serve, tmp_path):
    for task in ("gym:CartPole-v1", "gym:Acrobot-v1"):
        for rate in (0.1, 0.2):
            make_run(tmp_path / f"{task}-{rate}", env__id=task, agent__learning_rate=rate)
    board = serve(tmp_path)
    chart = board.json("chart", runs=",".join(row["id"] for row in board.runs(4).values()), bands=1)
    assert sorted(band["label"] for band in chart["bands"])[0] == "learning_rate=0.1 gym:Acrobot-v1"


def test_axes_are_steps_minutes_and_updates(serve, runs):
    board = serve(runs)
    run = board.runs(5)["fast"]["id"]
    lasts = {axis: board.json("chart", runs=run, x=axis)["last"] for axis in ("steps", "minutes", "updates")}
    assert 20_000 < lasts["steps"] < 25_001
    assert 2_000 / 60 < lasts["minutes"] < 40
    assert 1 < lasts["updates"] < 1.3
    zoomed = board.json("chart", runs=run, **{"from": 50, "to": 150}, columns=10)
    assert zoomed["curves"][0]["at"] == [10]


def test_what_differs_is_a_table_of_fields(serve, runs):
    board = serve(runs)
    rows = board.runs(5)
    found = board.json("differences", runs=f"{rows['fast']['id']},{rows['sweep/seed-2']['id']}")
    values = {row["id"]: dict(zip(found["fields"], row["values"], strict=True)) for row in found["runs"]}
    assert values[rows["fast"]["id"]]["agent.learning_rate"] == "0.01"
    assert values[rows["sweep/seed-2"]["id"]]["run.seed"] == "2"


def test_a_run_has_its_configuration_evaluations_and_names(serve, runs):
    row = {
        "wall_s": 60,
        "steps": 7,
        "frames": 7,
        "updates": 1,
        "version": 3,
        "returns": [1.0, 3.0],
        "lengths": [9, 9],
    }
    (runs / "fast/evaluations.jsonl").write_text(json.dumps(row) + "\n")
    board = serve(runs)
    found = board.json(f"runs/{board.runs(5)['fast']['id']}")
    assert found["config"]["agent.learning_rate"] == "0.01"
    assert "speed/steps_per_s" in found["names"]
    assert found["evaluations"][0]["mean"] == 2.0


def test_an_event_tells_of_a_change(serve, runs):
    board = serve(runs)
    board.runs(5)
    version = board.json("runs")["version"]
    connection = http.client.HTTPConnection("127.0.0.1", board.port, timeout=60)
    connection.request("GET", f"/api/events?after={version}", headers={"Host": "localhost"})
    stream = connection.getresponse()
    assert stream.getheader("content-type").startswith("text/event-stream")
    assert stream.getheader("content-encoding") is None
    make_run(runs / "new")
    board.look_again()
    lines = iter(stream.readline, b"")
    assert next(line for line in lines if line.startswith(b"data:")) == b"data: %d\n" % board.library.version
    stream.close()
    connection.close()


ASKED_SLOWLY = {
    "nothing": (b"", b""),
    "headers": (b"GET / HTTP/1.1\r\n", b"x"),
    "body": (b"PUT /api/runs/x/note HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99\r\n\r\n", b"x"),
}


@pytest.mark.parametrize("asked", ASKED_SLOWLY)
def test_who_takes_too_long_to_ask_is_hung_up_on(serve, runs, monkeypatch, asked):
    board = serve(runs)
    board.runs(5)
    first, again = ASKED_SLOWLY[asked]
    watching = http.client.HTTPConnection("127.0.0.1", board.port, timeout=60)
    version = board.json("runs")["version"]
    monkeypatch.setattr("troupe.services.board.web.REQUEST_S", 0.5)

    def opened():
        with contextlib.suppress(ConnectionError):  # where no core is free, this asks too slowly as well
            watching.close()
            watching.request("GET", f"/api/events?after={version}", headers={"Host": "localhost"})
            return watching.getresponse()

    events = until(opened)
    with socket.create_connection(("127.0.0.1", board.port), 60) as slow:
        slow.sendall(first)
        assert hung_up(slow, again)
    make_run(runs / "sixth")
    board.look_again()
    told = any(line.startswith(b"data:") for line in iter(events.readline, b""))
    assert told, "a page that watches stays connected"
    events.close()
    watching.close()


def test_a_note_is_all_that_is_written(serve, runs):
    board = serve(runs)
    run = board.runs(5)["fast"]["id"]

    def files():
        return {path: path.stat().st_mtime_ns for path in runs.rglob("*") if path.is_file()}

    before = files()
    assert board.put_note(run, "# Seen\n<script>alert(1)</script> ü") == 200
    assert board.json(f"runs/{run}")["note"] == "# Seen\n<script>alert(1)</script> ü"
    board.look_again()
    assert board.runs(5)["fast"]["note"] == "Seen"
    changed = {path for path, time_ns in files().items() if before.get(path) != time_ns}
    assert changed == {runs / "fast/notes.md"}
    assert board.put_note(run, "x" * (notes.MAX_BYTES + 1)) == 400
    assert (
        board.ask(f"/api/runs/{run}/note", "PUT", b"[" * 2_000_000, content_type="application/json")[0] == 400
    )
    assert board.json(f"runs/{run}")["note"].startswith("# Seen")
    for body in (b"", b"[]", b'{"text": 3}', b'{"text": "\\ud800"}', b"[" * 100_000):
        assert board.ask(f"/api/runs/{run}/note", "PUT", body, content_type="application/json")[0] == 400
    assert board.put_note(run, "") == 200
    assert files().keys() == before.keys()


def test_another_site_can_write_nothing_and_read_nothing(serve, runs):
    board = serve(runs)
    run = board.runs(5)["fast"]["id"]
    assert board.put_note(run, "x", origin="https://evil.example") == 403
    assert board.put_note(run, "x", content_type="text/plain") == 403
    assert board.put_note(run, "x", origin=f"http://localhost:{board.port}") == 200
    assert board.ask("/api/runs", host="evil.example")[0] == 421
    assert board.ask("/api/runs", host="127.0.0.1:1234")[0] == 200  # forwarded by ssh
    assert board.ask("/api/runs", host="[::1]:1234")[0] == 200
    assert board.ask("/api/runs", host="[::1")[0] == 421
    assert board.put_note(run, "x", origin="http://[::1") == 403
    for method in ("POST", "DELETE", "PATCH"):
        assert board.ask(f"/api/runs/{run}", method, b"{}", content_type="application/json")[0] == 405


def test_a_token_is_needed_where_there_is_one(serve, runs):
    board = serve(runs, token=TOKEN)
    for path in ("/", "/api/runs", "/static/main.js", "/?token=another", "/api/events"):
        assert board.ask(path)[0] == 401
    assert board.ask("/", host="[::1")[0] == 401
    assert board.ask("/api/runs", cookie=f"troupe-board-{board.port}=another")[0] == 401
    status, headers, _ = board.ask(f"/?token={TOKEN}")
    assert (status, headers["location"]) == (303, "./")
    assert "HttpOnly" in headers["set-cookie"]
    cookie = headers["set-cookie"].partition(";")[0]
    assert board.ask("/api/runs", cookie=cookie)[0] == 200
    assert board.ask("/api/runs", authorization=f"Bearer {TOKEN}", host="far.example")[0] == 200


def test_every_answer_keeps_the_page_to_itself(serve, runs):
    board = serve(runs)
    for path in ("/", "/api/runs", "/static/main.js", "/nothing", "/api/chart?x=none", "/api/runs/none"):
        headers = board.ask(path)[1]
        assert headers["content-security-policy"] == POLICY
        assert headers["x-content-type-options"] == "nosniff"
    assert board.ask("/", host="evil.example")[1]["content-security-policy"] == POLICY


@pytest.mark.parametrize(
    "path",
    [
        "/api/chart?runs=&metric=<b>",
        "/api/chart?columns=nan",
        "/api/chart?smooth=inf",
        "/api/chart?after=%00",
        "/api/chart?columns=1e99",
        "/api/chart?x=../",
        "/api/runs?after=x",
        "/api/events?after=x",
        "/api/runs/../../etc/passwd",
        "/api/runs/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/static/..%2fapp.py",
        "/static/vendor/../../app.py",
        f"/api/chart?runs={','.join(map(str, range(500)))}",
    ],
)
def test_a_strange_question_is_refused_and_the_next_one_answered(serve, runs, path):
    board = serve(runs)
    status, _, body = board.ask(path)
    assert status in (200, 400, 404), body
    assert b"root:" not in body
    assert b"import " not in body
    assert board.ask("/api/runs")[0] == 200


def test_nobody_looks_and_nothing_is_read(serve, runs, monkeypatch):
    board = serve(runs)
    board.runs(5)
    looks = []
    monkeypatch.setattr(board.library, "refresh", lambda: looks.append(1))
    monkeypatch.setattr(board.watch, "_asked_s", -1e9)
    board.watch._wake.set()
    until(lambda: looks)
    assert not board.watch._wake.is_set()
    board.ask("/api/runs")
    until(lambda: len(looks) > 1)


def test_the_first_answer_after_a_while_is_of_now(serve, runs, monkeypatch):
    board = serve(runs)
    board.runs(5)
    monkeypatch.setattr(board.watch, "_asked_s", -1e9)
    board.watch._wake.set()
    until(lambda: not board.watch._fresh.is_set())
    refresh = board.library.refresh
    monkeypatch.setattr(board.library, "refresh", lambda: time.sleep(0.3) or refresh())
    monkeypatch.setattr(board.library, "_searched_s", -1e9)
    make_run(runs / "new")
    assert "new" in [row["name"] for row in board.json("runs")["runs"]]


def test_films_are_those_of_the_run_and_players_may_ask_for_parts(serve, runs):
    folder = runs / "fast/videos"
    folder.mkdir()
    for steps in (100, 200):
        (folder / f"eval-video-{steps:012d}.mp4").write_bytes(bytes(range(200)) * steps)
    (folder / "notes.txt").write_text("none")
    (folder / "eval-video-000000000300.mp4").symlink_to("/etc/passwd")
    moment = {"wall_s": 60, "frames": 7, "updates": 1, "version": 3}
    games = {"returns": [1.0, 3.0], "lengths": [9, 7], "level_of_game": ["one", "two"]}
    (runs / "fast/evaluations.jsonl").write_text(json.dumps({**moment, "steps": 200, **games}) + "\n")
    board = serve(runs)
    run = board.runs(5)["fast"]["id"]
    films = board.json(f"runs/{run}")["films"]
    assert {film["steps"]: film.get("games") for film in films} == {
        100: None,
        200: {"returns": [1.0, 3.0], "lengths": [9, 7], "levels": ["one", "two"]},
    }
    status, headers, body = board.ask(f"/api/runs/{run}/films/eval-video-000000000100.mp4")
    assert (status, headers["content-type"], len(body)) == (200, "video/mp4", 20_000)
    status, headers, body = board.ask(f"/api/runs/{run}/films/eval-video-000000000100.mp4", range="bytes=5-9")
    assert (status, headers["content-range"], list(body)) == (206, "bytes 5-9/20000", [5, 6, 7, 8, 9])
    for name in (
        "eval-video-000000000300.mp4",
        "notes.txt",
        "..%2fconfig.toml",
        "eval-video-000000000999.mp4",
    ):
        assert board.ask(f"/api/runs/{run}/films/{name}")[0] == 404


def test_a_film_is_not_read_whole_for_a_part_of_it(serve, runs):
    folder = runs / "fast/videos"
    folder.mkdir()
    name = "eval-video-000000000100.mp4"
    with (folder / name).open("wb") as film:
        film.write(bytes(range(200)))
        film.truncate(24 << 20)
    board = serve(runs)
    address = f"/api/runs/{board.runs(5)['fast']['id']}/films/{name}"
    tracemalloc.start()
    try:
        status, headers, body = board.ask(address, range="bytes=150-249")
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (status, headers["content-length"], body) == (206, "100", bytes(range(150, 200)) + bytes(50))
    assert most < 4 << 20
    status, headers, body = board.ask(address, range="bytes=9-5")  # no range at all
    assert (status, headers["content-length"], len(body)) == (200, str(24 << 20), 24 << 20)


def test_services_are_told_with_what_they_use(serve, runs):
    peer = {
        "role": "actor",
        "name": "actor-0",
        "slots": [0, 1],
        "seen_s_ago": 12.5,
        "host": "<b>far</b>",
        "error": "",
        "restarts": 2,
    }
    numbers = {
        "actor/cpu_cores": 0.5,
        "actor/memory_bytes": 2.0**28,
        "actor/memory_share": 0.25,
        "params/staleness": 3,
    }
    status = {
        "steps": 20_000,
        "restarts": 1,
        "host": "here",
        "peers": [peer, {**peer, "role": "viewer"}],
        "services": {"actor-0": numbers},
    }
    (runs / "fast/status.json").write_text(json.dumps(status))
    board = serve(runs)
    learner, actor = board.json(f"runs/{board.runs(5)['fast']['id']}")["services"]
    assert (learner["name"], learner["host"], learner["restarts"]) == ("learner", "here", 1)
    assert actor == {
        **{
            "name": "actor-0",
            "role": "actor",
            "host": "<b>far</b>",
            "error": "",
            "slots": 2,
            "seen_s_ago": 12.5,
            "silent": 1,
            "restarts": 2,
        },
        **{"cores": 0.5, "memory_bytes": 2.68435e8, "memory_share": 0.25, "behind": 3},
    }
