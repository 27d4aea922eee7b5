"""The window of `troupe eval --render`: the real one, drawn by pygame into memory."""

import io
import math
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.evaluator.fakes import FakeAgent, FakeVector, run
from troupe.common.errors import ConfigError
from troupe.services.evaluator import games, window
from troupe.services.evaluator.video import Recorder
from troupe.services.evaluator.window import Window

pygame = pytest.importorskip("pygame")

BLACK = np.zeros((10, 10, 3), np.uint8)


class QuickVector(FakeVector):
    steps_per_s = 60.0


@pytest.fixture
def opened(monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.setattr(games, "make_vector", QuickVector)
    shown = Window("a game")
    yield shown
    shown.close()


@pytest.fixture
def drawn(monkeypatch):
    """What the window's process draws, run here: sizes, and the colour in the middle and in a corner."""
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    seen, flip = [], pygame.display.flip

    def flipped():
        flip()
        screen = pygame.display.get_surface()
        width, height = screen.get_size()
        seen.append(((width, height), screen.get_at((width // 2, height // 2))[0], screen.get_at((0, 0))[0]))

    monkeypatch.setattr(pygame.display, "flip", flipped)
    yield seen
    pygame.display.quit()


def sent(*frames):
    heads = [window._HEAD.pack(*frame.shape[:2]) for frame in frames]
    return io.BytesIO(b"".join(head + frame.tobytes() for head, frame in zip(heads, frames, strict=True)))


def full(height, width, grey):
    return np.full((height, width, 3), grey, np.uint8)


def test_frames_are_drawn_one_after_the_other_and_enlarged(drawn, capfd):
    window.show("a game", sent(full(10, 10, 7), full(10, 10, 8)))
    assert drawn == [((480, 480), 7, 7), ((480, 480), 8, 8)]
    assert capfd.readouterr().out == "ready\n"


def test_another_shape_keeps_its_proportions(drawn):
    window.show("a game", sent(full(10, 10, 7), full(10, 5, 8)))
    assert drawn == [((480, 480), 7, 7), ((480, 480), 8, 0)]


def test_a_huge_picture_fits_a_screen(drawn):
    window.show("a game", sent(full(2000, 4000, 7)))
    assert drawn == [((1000, 500), 7, 7)]


@pytest.mark.parametrize(
    ("event", "ends"),
    [
        (pygame.event.Event(pygame.QUIT), True),
        (pygame.event.Event(pygame.KEYDOWN, key=pygame.K_ESCAPE), True),
        (pygame.event.Event(pygame.KEYDOWN, key=pygame.K_q), True),
        (pygame.event.Event(pygame.KEYDOWN, key=pygame.K_a), False),
    ],
)
def test_who_closes_it_ends_it(drawn, monkeypatch, event, ends):
    get, posted = pygame.event.get, []

    def once():
        if drawn and not posted:
            posted.append(pygame.event.post(event))
        return get()

    monkeypatch.setattr(pygame.event, "get", once)
    window.show("a game", sent(full(10, 10, 7), full(10, 10, 8)))
    assert len(drawn) == (1 if ends else 2)


def test_every_game_of_the_first_slot_that_counts_is_shown_in_time(opened):
    """Two of three steps; then it is stepped without a policy until the other has played its two of six."""
    began = time.monotonic()
    assert run(FakeAgent(), window=opened).returns == [3.0, 6.0, 3.0, 6.0]
    assert time.monotonic() - began >= 5 / 60  # the first frame need not wait
    assert opened.shown == 6
    assert opened.missing == ""


def test_one_window_for_several_checkpoints_though_environments_end_pygame(opened, monkeypatch):
    def close(self):
        pygame.init()
        pygame.quit()

    monkeypatch.setattr(QuickVector, "close", close)
    for times in (1, 2):
        run(FakeAgent(), window=opened)
        assert opened.shown == 6 * times


def test_of_a_fast_game_not_every_step_is_drawn(opened):
    opened.begin(150.0)
    assert [opened.due() for _ in range(7)] == [True, False, False, True, False, False, True]


@pytest.mark.parametrize("rate", [0.0, -1.0, 1e-9, math.inf, math.nan])
def test_no_rate_makes_it_wait_for_long(opened, rate):
    opened.begin(rate)
    for _ in range(2):  # else it would run into its limit
        assert opened.due()
        opened.add(BLACK)


def test_games_go_on_without_a_window_that_was_closed(opened):
    opened.begin(60.0)
    opened.add(BLACK)
    opened._process.kill()
    opened._process.wait()
    assert run(FakeAgent(), window=opened).returns == [3.0, 6.0, 3.0, 6.0]
    assert not opened.due()


def test_games_go_on_without_a_window_that_hangs(opened, monkeypatch):
    monkeypatch.setattr(window, "_STUCK_S", 0.2)
    os.kill(opened._process.pid, signal.SIGSTOP)
    monkeypatch.setattr(QuickVector, "render_frame", lambda self, slot: full(300, 300, 0))
    assert run(FakeAgent(), window=opened).returns == [3.0, 6.0, 3.0, 6.0]
    assert not opened.due()


def test_film_and_window_of_the_same_games(opened):
    recorder = Recorder()
    run(FakeAgent(), window=opened, recorder=recorder)
    assert len(recorder) == 2  # of the first game's three steps, at 30 frames a second
    assert opened.shown == 6


def test_why_there_is_nothing_to_see(opened, monkeypatch):
    def nothing(self, slot):
        raise games.NoPictureError("it draws nothing")

    monkeypatch.setattr(QuickVector, "render_frame", nothing)
    assert run(FakeAgent(), window=opened).returns == [3.0, 6.0, 3.0, 6.0]
    assert (opened.missing, opened.shown) == ("it draws nothing", 0)


@pytest.mark.parametrize("driver", ["nonsense", ""])
def test_without_a_screen_it_says_what_to_do(driver):
    code = """
from troupe.common.errors import ConfigError
from troupe.services.evaluator.window import Window
try:
    Window("a game")
except ConfigError as error:
    print(error)
"""
    hidden = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"SDL_VIDEODRIVER": driver} if driver else {}
    said = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert "--render: no window can be opened here" in said.stdout
    assert "give --video FILE" in said.stdout
    assert ("SDL_VIDEODRIVER is nonsense" in said.stdout) is bool(driver)
    assert said.stderr == ""


def test_without_pygame_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(window.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--render needs the package pygame: pip install"):
        Window("a game")
