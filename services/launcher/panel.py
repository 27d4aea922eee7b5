"""The live panel of the launcher."""

from __future__ import annotations

import contextlib
import os
import sys
import termios
from collections.abc import Iterator
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from troupe.common.errors import DISK_FULL
from troupe.common.runtime.metrics import EVALUATION_RETURN, TRAINING_RETURN
from troupe.common.stats.played import levels_missed
from troupe.services.launcher.curves import drawable, sparkline
from troupe.services.launcher.learning import first_fault
from troupe.services.launcher.progress import RunView, duration, gpu_line, verdict

_SPARKLINE_WIDTH = 22  # two of them fit into 80 columns
_STATE_STYLES = {"running": "green", "done": "cyan", "failed": "bold red", "stopped": "dim"}


@contextlib.contextmanager
def lost_terminal_tolerated() -> Iterator[None]:
    """Go on without output when the terminal, or the reader of a pipe, has gone, or the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            return  # later lines may find room
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):  # replaced for good: what is buffered would fail again when the process ends
            os.dup2(nowhere, stream)
        os.close(nowhere)


def can_draw() -> bool:
    """Whether there is a terminal, and one on which more than lines can be drawn."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


class LivePanel:
    """Draws snapshots in place. `say` prints a line above it."""

    def __init__(self, title: str, footer: str, console: Console | None = None) -> None:
        """Create; `title` heads the frame, `footer` (addresses, paths) stands under the table."""
        self._title, self.footer = title, footer
        self._console = console or Console()
        # Drawn when the launcher has something new, not by a thread: the CPU belongs to the training.
        self._terminal: list[Any] | None = None
        self._live = Live(console=self._console, auto_refresh=False, transient=False)

    def start(self) -> None:
        """Begin to draw."""
        self._terminal = _without_control_characters()
        with lost_terminal_tolerated():
            self._live.start()

    def show(self, view: RunView) -> None:
        """Draw a snapshot."""
        with lost_terminal_tolerated():
            self._live.update(render(view, self._title, self.footer), refresh=True)

    def say(self, line: str) -> None:
        """Print a line above the panel."""
        with lost_terminal_tolerated():
            # The terminal wraps: a command with a line break in it would be pasted as two.
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def stop(self) -> None:
        """Leave the last drawing on the screen."""
        with lost_terminal_tolerated():
            self._live.stop()
        _restore(self._terminal)


def _without_control_characters() -> list[Any] | None:
    """Keep the terminal from showing `^C`; the attributes that it had, None where there is none of ours.

    Behind the last line of a panel as wide as the screen that moves the cursor to a new line, and the next
    panel is drawn one line too low: the first line of the former one stays.
    """
    try:
        if os.tcgetpgrp(0) != os.getpgrp():  # in the background this would stop us
            return None
        attributes = termios.tcgetattr(0)
        changed = [*attributes[:3], attributes[3] & ~termios.ECHOCTL, *attributes[4:]]
        termios.tcsetattr(0, termios.TCSANOW, changed)
        return attributes
    except (OSError, termios.error):
        return None


def _restore(attributes: list[Any] | None) -> None:
    with contextlib.suppress(OSError, termios.error):
        if attributes is not None and os.tcgetpgrp(0) == os.getpgrp():
            termios.tcsetattr(0, termios.TCSANOW, attributes)


def render(view: RunView, title: str, footer: str) -> Panel:
    """Build the panel of one snapshot."""
    parts: list[RenderableType] = [_progress(view), Text(), _figures(view), Text(), _services(view), Text()]
    if returns := _returns(view):
        parts += [returns, Text()]
    if gpu := gpu_line(view.metrics):
        parts += [Text(gpu), Text()]
    if missed := levels_missed(view.metrics):
        parts.append(
            Text(f"the last evaluation played {missed}: raise evaluator.episodes to play all", style="yellow")
        )
    what, advice = verdict(view)
    parts.append(Text(f"{what}: {advice}" if advice else what, style="yellow"))
    if view.trouble:
        parts.append(Text(f"environments: {view.trouble}", style="bold yellow", overflow="fold"))
    parts.append(Text(footer, style="dim", overflow="fold"))
    if fault := first_fault(view):
        parts.append(Text(f"learning: {fault.what}; {fault.advice}", style="yellow", overflow="fold"))
    return Panel(Group(*parts), title=Text(title, style="bold"), title_align="left", border_style="blue")


def _progress(view: RunView) -> Table:
    eta = "--:--:--" if view.eta_s is None else duration(view.eta_s)
    counts = f"{view.steps:,} / {view.total_steps:,} steps  {view.share:.1%}  {view.frames:,} frames"
    table = Table.grid(expand=True)  # two rows: beside the text the bar has no room on 80 columns
    table.add_row(ProgressBar(total=1.0, completed=view.share))
    table.add_row(Text(f"{counts}  {duration(view.elapsed_s)} elapsed  {eta} left"))
    return table


def _figures(view: RunView) -> Table:
    metrics = view.metrics

    def value(name: str, form: str, unit: str = "") -> str:
        return f"{metrics[name]:{form}}{unit}" if name in metrics else "-"

    fill = f"{metrics.get('replay/items', 0.0):,.0f} / {view.capacity_items:,}"
    table = Table.grid(expand=True, padding=(0, 2))
    for _ in range(4):
        table.add_column(ratio=1)
    cells = [
        ("steps/s", value("speed/steps_per_s", ",.0f")),
        ("updates/s", value("speed/updates_per_s", ",.1f")),
        ("updates", f"{view.updates:,}"),
        ("replay", fill),
        ("train return", value("train/episode_return", ".2f")),
        ("eval return", value("eval/episode_return", ".2f")),
        ("human-normalised", value("eval/human_normalized", ".2f")),
        ("staleness", value("params/staleness", ".1f", " versions")),
    ]
    for row in (cells[:4], cells[4:]):
        table.add_row(*(Text.assemble((f"{label}  ", "dim"), (shown, "bold")) for label, shown in row))
    return table


def _returns(view: RunView) -> Text | None:
    """The curves so far; None where there are none."""
    if not drawable():
        return None
    text = Text(overflow="ellipsis", no_wrap=True)
    for label, name in (("eval", EVALUATION_RETURN), ("train", TRAINING_RETURN)):
        points = view.returns.get(name, ())
        if len(points) > 1:
            text.append(f"{label} returns  ", "dim").append(sparkline(points, _SPARKLINE_WIDTH), "green")
            text.append("   ")
    return text if text else None


def _services(view: RunView) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name, side in (("service", "left"), ("state", "left"), ("cpu", "right"), ("memory", "right")):
        table.add_column(name, justify="right" if side == "right" else "left", no_wrap=True)
    table.add_column("restarts", justify="right")
    for service in view.services:
        table.add_row(
            service.name,
            Text(service.state, style=_STATE_STYLES.get(service.state, "bold yellow")),
            f"{service.cpu:.0%}",
            f"{service.memory_bytes / 2**20:,.0f} MiB",
            str(service.restarts or ""),
        )
    return table
