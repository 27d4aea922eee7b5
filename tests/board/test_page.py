"""The page in a real browser, against a real server."""

import json
import os
import re

import numpy as np
import pytest

from tests.board.browser import Browser, chromium
from tests.board.test_sweeps import SEARCH, by_rate
from tests.board.test_timeline import planted
from tests.experiments.folders import make_run, make_sweep
from troupe.common.runtime.files import read_status, write_status
from troupe.services.board.command import board as board_command
from troupe.services.evaluator.video import encode_mp4

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        chromium() is None, reason="NOT TESTED: chromium is not installed (apt-get install chromium)"
    ),
]
NAME = "<img src=x onerror=alert(1)>"
LINKS = "[bad](javascript:alert(1)) [good](https://example.org/)"
NOTE = f"# Seen\n<b>bold</b> **strong** `code` {LINKS}\n- one\n- two"
MAX_BYTES = 150_000
# Labels of the lines whose boxes lie over one another.
OVERLAPS = """[...document.querySelectorAll('.parallel text')]
  .map(each => [each.textContent, each.getBoundingClientRect()])
  .flatMap(([text, a], at, all) => all.slice(at + 1)
    .filter(([, b]) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1)
    .filter(([, b]) => Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3)
    .map(([other]) => [text, other]))"""
FOCUSED = "document.activeElement"
DRAWN = "document.querySelector('.plot')?.dataset.curves > 0"


@pytest.fixture
def runs(tmp_path):
    for seed in range(3):
        returns = [(at * 1_000, at + seed) for at in range(1, 100)]
        make_run(tmp_path / "runs" / f"seed-{seed}", returns=returns, run__seed=seed)
    make_run(tmp_path / "runs" / NAME, returns=[(50_000, 2.0)], agent__learning_rate=0.1)
    (tmp_path / "runs/seed-0/notes.md").write_text(NOTE)
    return tmp_path / "runs"


def filmed(run):
    """Give a run two films, and the evaluations that they are from."""
    (run / "videos").mkdir()
    rows = []
    for steps, returns, lengths in ((100, [3.0], [10]), (200, [7.0, -1.5], [30, 40])):
        frames = [np.full((64, 64, 3), shade, np.uint8) for shade in range(9)]
        film = run / f"videos/eval-video-{steps:012d}.mp4"
        film.write_bytes(encode_mp4(frames))
        os.utime(film, (steps, steps))
        moment = {"wall_s": 1, "steps": steps, "frames": 1, "updates": 1, "version": 1}
        rows.append(json.dumps({**moment, "returns": returns, "lengths": lengths}) + "\n")
    (run / "evaluations.jsonl").write_text("".join(rows))


def crowded(run):
    """Have a run's status tell of restarts, and of memory that is nearly used up."""
    status = read_status(run)
    peers = [
        peer | {"host": "node-1", "restarts": 2 * (peer["name"] == "actor-1")} for peer in status["peers"]
    ]
    services = status["services"]
    services["learner"] |= {"learner/memory_bytes": 2.0**31, "learner/memory_share": 0.95}
    services["actor-1"] |= {"actor/memory_bytes": 1.5 * 2**30, "actor/memory_share": 0.8}
    write_status(run, status | {"peers": peers, "restarts": 1, "host": "node-1"})


@pytest.fixture
def browser(tmp_path):
    opened = Browser(tmp_path / "profile")
    yield opened
    opened.close()


def test_the_page_draws_runs_without_another_host_and_in_few_bytes(serve, runs, browser):
    board = serve(runs)
    board.runs(4)
    browser.open(f"{board.address}/")
    browser.until(DRAWN)
    browser.until("document.querySelectorAll('.runs tbody tr').length === 4")
    assert browser.problems == []
    assert browser.received_bytes < MAX_BYTES
    others = [address for address in browser.requests if not address.startswith(f"{board.address}/")]
    assert set(others) <= {"about:blank"}
    # The name is text: no element came of it.
    assert browser.value("document.querySelectorAll('img').length") == 0
    assert NAME in browser.value("document.querySelector('.runs').innerText")
    legend = browser.value("document.querySelector('.legend').innerText")
    assert "(3 runs)" in legend
    assert browser.value("document.querySelector('.differences').innerText.includes('agent.learning_rate')")


def test_what_happens_in_a_run_appears_by_itself(serve, runs, browser):
    board = serve(runs)
    board.runs(4)
    browser.open(f"{board.address}/")
    browser.until(DRAWN)
    make_run(runs / "new", returns=[(50_000, 77.5)], agent__learning_rate=0.2)
    board.look_again()
    browser.until("document.querySelector('.runs').innerText.includes('77.5')")
    browser.until("document.querySelector('.legend').innerText.includes('0.2')")
    assert browser.problems == []


def test_a_run_has_a_page_where_its_note_is_text_and_can_be_changed(serve, runs, browser):
    board = serve(runs)
    run = board.runs(4)["seed-0"]["id"]
    browser.open(f"{board.address}/#/run/{run}")
    browser.until(DRAWN)
    browser.until("document.querySelector('.note strong')?.innerText === 'strong'")
    assert browser.value(
        "[...document.querySelectorAll('.note a')].map(each => each.getAttribute('href'))"
    ) == ["https://example.org/"]
    assert browser.value("document.querySelectorAll('.note b').length") == 0
    assert "<b>bold</b>" in browser.value("document.querySelector('.note').innerText")
    assert browser.value("document.querySelectorAll('.note li').length") == 2
    browser.value("document.querySelector('.note button').focus()")
    browser.key("Enter", "\r")
    browser.until("!!document.querySelector('textarea')")
    browser.value("document.querySelector('textarea').focus()")
    browser.call("Input.insertText", text="first: ")
    browser.value(
        "[...document.querySelectorAll('.note button')].find(each => each.innerText === 'Save').focus()"
    )
    browser.key("Enter", "\r")
    browser.until("!document.querySelector('textarea')")
    assert "first: " in (runs / "seed-0/notes.md").read_text()
    assert browser.problems == []


def test_it_is_used_by_keyboard(serve, runs, browser):
    board = serve(runs)
    board.runs(4)
    browser.open(f"{board.address}/")
    browser.until(DRAWN)
    reached = []
    for _ in range(60):
        browser.key("Tab")
        reached.append(
            browser.value(f"`${{{FOCUSED}.tagName}} ${{{FOCUSED}.className}} ${{{FOCUSED}.ariaLabel ?? ''}}`")
        )
    for wanted in ("INPUT", "plot", "BUTTON sort", "show seed-1", "A "):
        assert any(wanted in each for each in reached), (wanted, reached)
    browser.value("document.querySelector('.plot').focus()")
    browser.key("ArrowRight")
    browser.until(r"/\d+ k: [\d.]+/.test(document.querySelector('.reading').innerText)")
    before = browser.value("document.querySelector('.reading').innerText")
    for _ in range(5):
        browser.key("ArrowLeft")
    browser.until(f"document.querySelector('.reading').innerText !== {before!r}")
    browser.key("+", "+")
    browser.until("[...document.querySelectorAll('button')].some(each => each.innerText === 'Show all')")
    # A run is taken away with the space bar.
    browser.value("document.querySelector('[aria-label=\"show seed-1\"]').focus()")
    browser.key(" ", " ")
    browser.until("document.querySelector('.legend').innerText.includes('(2 runs)')")
    assert browser.problems == []


def test_the_timeline_shows_who_waits_for_whom(serve, runs, browser):
    planted(runs / "planted", "limiter")
    board = serve(runs)
    run = board.runs(5)["planted"]["id"]
    browser.open(f"{board.address}/#/run/{run}")
    browser.until(
        "document.querySelector('#timeline')?.parentElement.innerText.includes('--replay.samples_per_insert')"
    )
    assert browser.value("document.querySelector('.verdict').innerText").startswith("bottleneck: ")
    said = browser.value("[...document.querySelectorAll('.timeline canvas')].map(each => each.ariaLabel)")
    assert any(re.match(r"learner: waiting for a batch 8\d %", each) for each in said), said
    # The middle of the row of the actor, which does not wait, is filled to its share; above that it is idle.
    browser.until(  # it is drawn after it has its label
        "canvas = [...document.querySelectorAll('.timeline canvas')]"
        ".find(each => each.ariaLabel.startsWith('actor-0')),"
        "column = canvas.getContext('2d').getImageData(canvas.width / 2, 0, 1, canvas.height).data,"
        "column.some(each => each > 0)"
    )
    filled = browser.value("column.filter((each, at) => at % 4 === 3 && each > 0).length / canvas.height")
    assert 0.5 < filled < 0.75  # emulator, inference and packing
    assert browser.problems == []


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1200, False)])
def test_a_sweep_shows_its_history_and_what_decides(serve, browser, tmp_path, width, dark):
    make_sweep(tmp_path / "sweep-lr", {"search": SEARCH, "trials": 22}, by_rate, ["failed", "pruned"])
    board = serve(tmp_path)
    board.runs(21)
    browser.size(width, 844, dark=dark, mobile=width < 600)
    browser.open(f"{board.address}/")
    browser.until("!!document.querySelector('.sweeps a')")
    browser.value("document.querySelector('.sweeps a').click()")
    browser.until("document.querySelector('.history')?.dataset.points === '21'")  # one has failed
    assert browser.value("document.querySelectorAll('.parallel path').length") == 21
    assert browser.value("document.querySelector('.importances th').innerText") == "learning_rate"
    assert "20 completed trials" in browser.value(
        "document.querySelector('#importances').parentElement.innerText"
    )
    # By keyboard: a trial of the chart is the one that is marked in the table and among the lines.
    browser.value("document.querySelector('.history').focus()")
    browser.key("ArrowRight")
    browser.key("ArrowRight")
    browser.until("document.querySelector('.reading').innerText.startsWith('Trial 2: ')")
    assert browser.value("document.querySelector('.trials tr.chosen button').ariaLabel") == "trial 2"
    assert browser.value("document.querySelectorAll('.parallel path.chosen').length") == 1
    browser.value("document.querySelector('[aria-label=\"trial 5\"]').focus()")
    browser.key("Enter", "\r")
    browser.until("document.querySelector('.reading').innerText.startsWith('Trial 5: ')")
    # The filter leaves the best.
    browser.value(
        "slider = document.querySelector('#parallel ~ .controls input'), slider.value = 10, "
        "slider.dispatchEvent(new Event('input', {bubbles: true}))"
    )
    browser.until("document.querySelectorAll('.parallel path:not(.faint)').length === 3")
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert browser.value(OVERLAPS) == []
    browser.value(
        "[...document.querySelectorAll('button')].find(each => each.innerText.includes('curves')).click()"
    )
    browser.until(DRAWN)
    assert browser.value("document.querySelectorAll('.runs input:checked').length") >= 21
    assert browser.problems == []


def test_services_and_the_newest_film_are_read_by_row(serve, browser, tmp_path):
    run = planted(tmp_path / "planted", "slow-actor")
    crowded(run)
    filmed(run)
    board = serve(tmp_path)
    browser.open(f"{board.address}/#/run/{board.runs(1)['planted']['id']}")
    browser.until("!!document.querySelector('.services')")
    rows = browser.value(
        "[...document.querySelectorAll('.services tr')]"
        ".map(row => [...row.cells].map(cell => cell.innerText))"
    )
    told = {row[0]: dict(zip(rows[0], row, strict=True)) for row in rows[1:]}
    assert (told["learner"]["Restarts"], told["actor-1"]["Restarts"]) == ("1", "2")
    assert (told["actor-1"]["Slots"], told["actor-1"]["Host"]) == ("4", "node-1")
    assert told["actor-1"]["Memory"].split() == ["1.5", "GiB", "80", "%"]
    marks = browser.value("[...document.querySelectorAll('.services .share')].map(each => each.className)")
    assert marks == ["share error", "share warn"]  # of the learner, at 95 %, and of actor-1
    # The newest film, and the episodes of its evaluation; then the one before.
    browser.until("document.querySelector('video')?.src.endsWith('000000000200.mp4')")
    browser.until("document.querySelector('video').readyState > 0")
    episodes = (
        "[...document.querySelectorAll('.episodes tbody tr')].map(row => row.innerText.trim().split(/\\s+/))"
    )
    assert browser.value(episodes) == [["▶", "1", "7", "30"], ["2", "-1.5", "40"]]
    browser.value("[...document.querySelectorAll('button')].find(each => each.innerText === 'Older').focus()")
    browser.key("Enter", "\r")
    browser.until("document.querySelector('video').src.endsWith('000000000100.mp4')")
    assert browser.value(episodes) == [["▶", "1", "3", "10"]]
    assert browser.problems == []


@pytest.mark.parametrize(("width", "dark"), [(390, False), (390, True), (1200, True)])
def test_it_fits_a_phone_and_the_dark(serve, runs, browser, width, dark, tmp_path):
    board = serve(runs)
    board.runs(4)
    browser.size(width, 844, dark=dark, mobile=width < 600)
    browser.open(f"{board.address}/")
    browser.until(DRAWN)
    assert browser.value("document.documentElement.scrollWidth") <= width
    red, green, blue = re.findall(r"\d+", browser.value("getComputedStyle(document.body).backgroundColor"))[
        :3
    ]
    assert (int(red) + int(green) + int(blue) < 200) == dark
    browser.picture(tmp_path / "page.png")
    assert os.path.getsize(tmp_path / "page.png") > 10_000
    assert browser.problems == []


def test_an_exported_page_is_one_file_that_asks_for_nothing(runs, browser, tmp_path):
    filmed(planted(runs / "planted", "limiter"))
    make_sweep(runs / "sweep-lr", {"search": SEARCH, "trials": 7}, by_rate)
    page = tmp_path / "page.html"
    board_command([str(runs), "--export", str(page)])
    assert page.stat().st_size < 3_000_000
    browser.open(page.as_uri())
    browser.until(DRAWN)
    browser.until("document.querySelectorAll('.runs tbody tr').length === 12")
    assert "(3 runs)" in browser.value("document.querySelector('.legend').innerText")
    assert NAME in browser.value("document.querySelector('.runs').innerText")
    browser.value("[...document.querySelectorAll('input[type=radio]')][1].click()")
    browser.until("document.querySelector('.plot').ariaLabel.includes('minutes')")
    browser.value(
        "[...document.querySelectorAll('.runs a')].find(each => each.innerText === 'planted').click()"
    )
    browser.until("!!document.querySelector('.verdict')")
    browser.until("document.querySelectorAll('.timeline canvas').length > 3")
    assert browser.value("document.querySelector('.note button')") is None
    browser.until("document.querySelector('video').readyState > 0")  # the newest one is in the file
    browser.value("location.hash = '#/'")
    browser.until("!!document.querySelector('.sweeps a')")
    browser.value("document.querySelector('.sweeps a').click()")
    browser.until("document.querySelectorAll('.parallel path').length === 7")
    asked = {address.partition("#")[0] for address in browser.requests if not address.startswith("data:")}
    assert asked <= {page.as_uri(), "about:blank"}
    assert browser.problems == []
