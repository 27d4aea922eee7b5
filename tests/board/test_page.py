"""The page in a real browser, against a real server."""

import os
import re

import pytest

from tests.board.browser import Browser, chromium
from tests.board.test_timeline import planted
from tests.experiments.folders import make_run
from troupe.services.board.command import board as board_command

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
    browser.value(
        "canvas = [...document.querySelectorAll('.timeline canvas')]"
        ".find(each => each.ariaLabel.startsWith('actor-0')),"
        "column = canvas.getContext('2d').getImageData(canvas.width / 2, 0, 1, canvas.height).data, true"
    )
    filled = browser.value("column.filter((each, at) => at % 4 === 3 && each > 0).length / canvas.height")
    assert 0.5 < filled < 0.75  # emulator, inference and packing
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
    planted(runs / "planted", "limiter")
    page = tmp_path / "page.html"
    board_command([str(runs), "--export", str(page)])
    assert page.stat().st_size < 3_000_000
    browser.open(page.as_uri())
    browser.until(DRAWN)
    browser.until("document.querySelectorAll('.runs tbody tr').length === 5")
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
    assert {address.partition("#")[0] for address in browser.requests} <= {page.as_uri(), "about:blank"}
    assert browser.problems == []
