"""The live panel of the launcher."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from services.progress import Snapshot, duration, verdict

_STATE_STYLES = {"running": "green", "done": "cyan", "failed": "bold red", "stopped": "dim"}


@contextlib.contextmanager
def lost_terminal_tolerated() -> Iterator[None]:
    """Go on without output when the terminal, or the reader of a pipe, has gone."""
    try:
        yield
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):  # replaced for good: what is buffered would fail again when the process ends
            os.dup2(nowhere, stream)
        os.close(nowhere)


class LivePanel:
    """Draws snapshots in place. `say` prints a line above it."""

    def __init__(self, title: str, footer: str, console: Console | None = None) -> None:
        """Create; `title` heads the frame, `footer` (addresses, paths) stays under the table."""
        self._title, self._footer = title, footer
        self._console = console or Console()
        # Drawn when the launcher has something new, not by a thread: the CPU belongs to the training.
        self._live = Live(console=self._console, auto_refresh=False, transient=False)

    def start(self) -> None:
        """Begin to draw."""
        with lost_terminal_tolerated():
            self._live.start()

    def show(self, view: Snapshot) -> None:
        """Draw a snapshot."""
        with lost_terminal_tolerated():
            self._live.update(render(view, self._title, self._footer), refresh=True)

    def say(self, line: str) -> None:
        """Print a line above the panel."""
        with lost_terminal_tolerated():
            self._console.print(line, highlight=False, markup=False)

    def stop(self) -> None:
        """Leave the last drawing on the screen."""
        with lost_terminal_tolerated():
            self._live.stop()


def render(view: Snapshot, title: str, footer: str) -> Panel:
    """Build the panel of one snapshot."""
    parts: list[RenderableType] = [_progress(view), Text(), _figures(view), Text(), _services(view), Text()]
    what, advice = verdict(view)
    parts.append(Text(f"{what}: {advice}" if advice else what, style="yellow"))
    parts.append(Text(footer, style="dim", overflow="fold"))
    return Panel(Group(*parts), title=Text(title, style="bold"), title_align="left", border_style="blue")


def _progress(view: Snapshot) -> Table:
    eta = "--:--:--" if view.eta_s is None else duration(view.eta_s)
    counts = f"{view.steps:,} / {view.total_steps:,} steps  {view.share:.1%}  {view.frames:,} frames"
    table = Table.grid(expand=True)  # two rows: beside the text the bar has no room on 80 columns
    table.add_row(ProgressBar(total=1.0, completed=view.share))
    table.add_row(Text(f"{counts}  {duration(view.elapsed_s)} elapsed  {eta} left"))
    return table


def _figures(view: Snapshot) -> Table:
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


def _services(view: Snapshot) -> Table:
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
