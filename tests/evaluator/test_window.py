"""The window of `troupe eval --render`, drawn by the real pygame into memory."""

import os
import subprocess
import sys
import time

import numpy as np
import pytest

from common.errors import ConfigError
from services.evaluator import games
from services.evaluator.window import Window
from tests.evaluator.test_games import FakeAgent, FakeVector, run

pygame = pytest.importorskip("pygame")


class QuickVector(FakeVector):
    steps_per_s = 60.0


@pytest.fixture
def window(monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.setattr(games, "make_vector", QuickVector)
    shown = Window("a game")
    yield shown
    shown.close()


def test_every_game_of_the_first_slot_is_shown_enlarged_and_on_time(window, monkeypatch):
    seen = []
    flip = pygame.display.flip

    def flipped():
        flip()
        screen = pygame.display.get_surface()
        seen.append((screen.get_size(), screen.get_at((0, 0))[0], screen.get_at((479, 479))[0]))

    monkeypatch.setattr(pygame.display, "flip", flipped)
    began = time.monotonic()
    assert run(FakeAgent(), window=window).returns == [3.0, 6.0, 3.0, 6.0]
    assert time.monotonic() - began >= 11 / 60  # the first frame need not wait
    assert seen == [((480, 480), step, step) for step in range(12)]
    assert window.missing == ""


def test_of_a_fast_game_not_every_step_is_drawn(window):
    window.begin(150.0)
    assert [window.due() for _ in range(7)] == [True, False, False, True, False, False, True]


@pytest.mark.parametrize(
    "event",
    [
        pygame.event.Event(pygame.QUIT),
        pygame.event.Event(pygame.KEYDOWN, key=pygame.K_ESCAPE),
        pygame.event.Event(pygame.KEYDOWN, key=pygame.K_q),
    ],
)
def test_who_closes_it_does_not_end_the_games(window, event):
    window.begin(60.0)
    window.add(np.zeros((10, 10, 3), np.uint8))
    pygame.event.post(pygame.event.Event(pygame.KEYDOWN, key=pygame.K_a))  # means nothing
    window.add(np.zeros((10, 10, 3), np.uint8))
    assert window.due()
    pygame.event.post(event)
    assert run(FakeAgent(), window=window).returns == [3.0, 6.0, 3.0, 6.0]
    assert not window.due()
    assert not pygame.display.get_init()


def test_an_environment_that_ends_pygame_does_not_end_the_games(window):
    window.begin(60.0)
    pygame.quit()
    window.add(np.zeros((10, 10, 3), np.uint8))
    assert not window.due()


def test_film_and_window_of_the_same_games(window):
    from common.runtime.video import Recorder

    recorder = Recorder()
    run(FakeAgent(), window=window, recorder=recorder)
    assert len(recorder) == 2  # of the first game's three steps, at 30 frames a second


def test_why_there_is_nothing_to_see(window, monkeypatch):
    def nothing(self, slot):
        raise games.NoPictureError("it draws nothing")

    monkeypatch.setattr(QuickVector, "render_frame", nothing)
    assert run(FakeAgent(), window=window).returns == [3.0, 6.0, 3.0, 6.0]
    assert window.missing == "it draws nothing"


@pytest.mark.parametrize("driver", ["x11", ""])
def test_without_a_screen_it_says_what_to_do(driver):
    code = """
from common.errors import ConfigError
from services.evaluator.window import Window
try:
    Window("a game")
except ConfigError as error:
    print(error)
"""
    hidden = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER", "XDG_RUNTIME_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"SDL_VIDEODRIVER": driver} if driver else {}
    said = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert "--render: no window can be opened here" in said
    assert "give --video FILE" in said


def test_without_pygame_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pygame", None)
    with pytest.raises(ConfigError, match=r"--render needs the package pygame: pip install"):
        Window("a game")
