"""A window in which a game is seen while it is played: `troupe eval --render`."""

from __future__ import annotations

import math
import os
import time
from typing import TYPE_CHECKING

import numpy as np

from common.errors import ConfigError
from common.installation import install_command

if TYPE_CHECKING:
    import pygame

_MAX_FRAMES_PER_S = 60.0
_SIDE = 480
"""Smaller pictures are enlarged by a whole factor until their longer side would be more."""
_INVISIBLE = ("dummy", "offscreen")


class Window:
    """Shows frames at the speed of the game, until somebody closes it.

    Attributes:
        missing: why there is nothing to see; empty where there is, or where nothing was tried.

    Raises:
        ConfigError: pygame is not installed, or there is no display.
    """

    def __init__(self, title: str) -> None:
        os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
        try:
            import pygame
        except ImportError as error:
            raise ConfigError(f"--render needs the package pygame: {install_command('evaluator')}") from error
        self._pygame = pygame
        self._open = True
        self._screen: pygame.Surface | None = None
        self._every, self._seconds = 1, 1 / 15
        self._seen = 0
        self._due_at = 0.0
        self.missing = ""
        wanted = os.environ.get("SDL_VIDEODRIVER")
        try:
            pygame.display.init()
        except pygame.error as error:
            raise _no_window(str(error)) from error
        # Without a screen it draws into memory, where nobody looks; tests want that, and say so.
        if not wanted and pygame.display.get_driver() in _INVISIBLE:
            raise _no_window("there is no screen")
        pygame.display.set_caption(title)

    def begin(self, steps_per_s: float) -> None:
        """Say how many steps of the game make a second; of more than 60, not every one is shown."""
        self._every = max(1, math.ceil(steps_per_s / _MAX_FRAMES_PER_S))
        self._seconds = self._every / steps_per_s

    def due(self) -> bool:
        """Count a step, and say whether its frame would be shown (to draw none in vain)."""
        self._seen += 1
        return self._open and (self._seen - 1) % self._every == 0

    def add(self, frame: np.ndarray) -> None:
        """Show a frame, uint8 `[H, W, 3]`, when its time has come.

        The first one says how large the window is; it may be made larger or smaller by hand.
        """
        pygame = self._pygame
        if not pygame.display.get_init() or any(self._ends(event) for event in pygame.event.get()):
            self.close()
            return
        height, width = frame.shape[:2]
        if self._screen is None:
            factor = max(1, _SIDE // max(height, width))
            self._screen = pygame.display.set_mode((width * factor, height * factor), pygame.RESIZABLE)
        picture = pygame.image.frombuffer(np.ascontiguousarray(frame).tobytes(), (width, height), "RGB")
        self._screen.blit(pygame.transform.scale(picture, self._screen.get_size()), (0, 0))
        now = time.monotonic()
        time.sleep(max(0.0, self._due_at - now))
        pygame.display.flip()
        # A game that is slower than that does not hurry afterwards.
        self._due_at = max(self._due_at, now) + self._seconds

    def close(self) -> None:
        """Take it away; the games go on without."""
        self._open, self._screen = False, None
        if self._pygame.display.get_init():
            self._pygame.display.quit()

    def _ends(self, event: pygame.event.Event) -> bool:
        """Whether somebody has closed the window, or pressed Escape or q."""
        pygame = self._pygame
        pressed = event.type == pygame.KEYDOWN and event.key in (pygame.K_ESCAPE, pygame.K_q)
        return event.type == pygame.QUIT or pressed


def _no_window(cause: str) -> ConfigError:
    return ConfigError(
        f"--render: no window can be opened here ({cause}): give --video FILE, or run it where DISPLAY or "
        "WAYLAND_DISPLAY names a screen"
    )
