"""A window in which games are seen while they are played: `troupe eval --render`.

It is a process of its own, `python -m troupe.services.evaluator.window TITLE`, which reads frames from its
standard input: many environments draw with pygame too, into memory, and end it when they are closed.
"""

from __future__ import annotations

import importlib.util
import os
import queue
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from typing import BinaryIO

import numpy as np

from troupe.common.errors import ConfigError
from troupe.common.installation import install_command
from troupe.services.evaluator.video import thinned

_MAX_FRAMES_PER_S = 60.0
_START_S = 30.0
# A window that takes no frame for so long is given up: games are worth more than their picture.
_STUCK_S = 5.0
_SIDE, _MAX_SIDE = 480, 1000
"""Pictures are enlarged by a whole factor up to the first, in pixels, and made smaller down to the second."""
_HEAD = struct.Struct("<II")
_READY = b"ready\n"
_INVISIBLE = ("dummy", "offscreen")


class Window:
    """Shows frames at the speed of the game, until somebody closes it.

    Attributes:
        missing: why there is nothing to see; empty where there is, or where nothing was tried.
        shown: frames so far.

    Raises:
        ConfigError: pygame is not installed, or there is no screen.
    """

    def __init__(self, title: str) -> None:
        self.missing = ""
        self.shown = 0
        self._every, self._seconds = 1, 0.0
        self._seen = 0
        self._due_at = 0.0
        if importlib.util.find_spec("pygame") is None:
            raise ConfigError(f"--render needs the package pygame: {install_command('evaluator')}")
        driver = os.environ.get("SDL_VIDEODRIVER")
        if not driver and sys.platform == "linux" and not _screen_is_named():
            raise _no_window("there is no screen")
        self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
            [sys.executable, "-P", "-m", "troupe.services.evaluator.window", title],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        said = self._first_line()
        if said != _READY:
            self.close()
            cause = said.decode(errors="replace").strip() or "pygame does not start"
            raise _no_window(f"{cause}; SDL_VIDEODRIVER is {driver}" if driver else cause)

    def begin(self, steps_per_s: float) -> None:
        """Say how many steps of the game make a second; of more than 60, not every one is shown."""
        self._every, frames_per_s = thinned(steps_per_s, _MAX_FRAMES_PER_S)
        self._seconds = min(1.0, 1.0 / frames_per_s)
        self._seen, self._due_at, self.missing = 0, 0.0, ""

    def due(self) -> bool:
        """Count a step, and say whether its frame would be shown (to draw none in vain)."""
        self._seen += 1
        return self._process is not None and (self._seen - 1) % self._every == 0

    def add(self, frame: np.ndarray) -> None:
        """Show a frame, uint8 `[H, W, 3]`, when its time has come. The first says how large the window is."""
        now = time.monotonic()
        time.sleep(max(0.0, self._due_at - now))
        # A game that is slower than that does not hurry afterwards.
        self._due_at = max(self._due_at, now) + self._seconds
        height, width = frame.shape[:2]
        if self._sent(_HEAD.pack(height, width) + np.ascontiguousarray(frame).tobytes()):
            self.shown += 1
        else:
            self.close()

    def close(self) -> None:
        """Take it away; the games go on without."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()  # it holds nothing
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()

    def _first_line(self) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], _START_S)
        return self._process.stdout.readline() if readable else b""

    def _sent(self, data: bytes) -> bool:
        """Whether the window, which is open, has taken all of it."""
        assert self._process is not None
        assert self._process.stdin is not None
        pipe = self._process.stdin.fileno()
        # A window that hangs must not hang the games: a blocking write would wait for as long as it does.
        os.set_blocking(pipe, False)
        rest = memoryview(data)
        while len(rest):
            _, writable, _ = select.select([], [pipe], [], _STUCK_S)
            if not writable:
                return False
            try:
                rest = rest[os.write(pipe, rest) :]
            except BrokenPipeError:  # somebody has closed it
                return False
        return True


def _screen_is_named() -> bool:
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _no_window(cause: str) -> ConfigError:
    return ConfigError(
        f"--render: no window can be opened here ({cause}): give --video FILE, or run it where DISPLAY or "
        "WAYLAND_DISPLAY names a screen"
    )


# ---------------------------------------------------------------- the window's own process


def show(title: str, stream: BinaryIO) -> None:
    """Draw frames from `stream` until it ends, or somebody closes the window, or presses Escape or q.

    Raises:
        pygame.error: there is no screen.
    """
    import pygame

    pygame.display.init()
    # Without a screen it draws into memory, where nobody looks; tests want that, and say so.
    if not os.environ.get("SDL_VIDEODRIVER") and pygame.display.get_driver() in _INVISIBLE:
        raise pygame.error("there is no screen")
    pygame.display.set_caption(title)
    print(_READY.decode(), end="", flush=True)
    # One frame: the pipe fills behind it, and the player's clock is the one that counts.
    frames: queue.Queue[tuple[bytes, tuple[int, int]] | None] = queue.Queue(1)
    # Events have to be read all the time, or the desktop offers to end a window that does not answer.
    threading.Thread(target=_read, args=(stream, frames), daemon=True).start()
    while not any(_closes(event) for event in pygame.event.get()):
        try:
            frame = frames.get(timeout=1 / _MAX_FRAMES_PER_S)
        except queue.Empty:
            continue
        if frame is None:
            return
        picture = pygame.image.frombuffer(*frame, "RGB")
        screen = pygame.display.get_surface() or pygame.display.set_mode(
            _scaled(picture.get_size(), _first_factor(picture.get_size())), pygame.RESIZABLE
        )
        # It may have been made larger or smaller by hand, and the picture may have another shape than before.
        factor = min(whole / part for whole, part in zip(screen.get_size(), picture.get_size(), strict=True))
        picture = pygame.transform.scale(picture, _scaled(picture.get_size(), factor))
        screen.fill(0)
        screen.blit(picture, picture.get_rect(center=screen.get_rect().center))
        pygame.display.flip()


def _read(stream: BinaryIO, frames: queue.Queue[tuple[bytes, tuple[int, int]] | None]) -> None:
    """Put each frame of `stream` as `(bytes, (width, height))` into the queue, and None at the end."""
    while len(head := stream.read(_HEAD.size)) == _HEAD.size:
        height, width = _HEAD.unpack(head)
        frames.put((stream.read(height * width * 3), (width, height)))
    frames.put(None)


def _first_factor(size: tuple[int, int]) -> float:
    return min(max(1, _SIDE // max(size)), _MAX_SIDE / max(size))


def _scaled(size: tuple[int, int], factor: float) -> tuple[int, int]:
    width, height = (max(1, round(side * factor)) for side in size)
    return width, height


def _closes(event: object) -> bool:
    import pygame

    kind = getattr(event, "type", None)
    return kind == pygame.QUIT or (
        kind == pygame.KEYDOWN and getattr(event, "key", None) in (pygame.K_ESCAPE, pygame.K_q)
    )


def main() -> int:
    """Of the window's process; what it cannot do it says in one line."""
    import pygame

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the player ends it
    try:
        show(sys.argv[1], sys.stdin.buffer)
    except pygame.error as error:
        print(str(error), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    sys.exit(main())
