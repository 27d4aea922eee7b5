"""The status of a shard as a table for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

MAX_PEERS_SHOWN = 5
"""Peers that sent bad messages, and have a line each."""


def print_page(endpoint: str, status: dict[str, Any], console: Console | None = None) -> None:
    """Print `status`, an answer to STATUS."""
    console = console or Console(highlight=False)
    console.print(f"replay at {endpoint}", markup=False)
    console.print(
        f"up {_duration(status['uptime_s'])}, CPU {_duration(status['cpu_s'])}, {status['chunks']:,} chunks, "
        f"{_size(status['bytes'])} of {_size(status['bytes_limit'])}",
        markup=False,
    )
    tables = status["tables"]
    for page in _side_by_side({name: _column(table) for name, table in tables.items()}, console.width):
        console.print(page)
    for name, table in tables.items():
        for key, who in (("sampling_blocked", "samples"), ("insert_blocked", "inserts")):
            if table[key]:
                console.print(f"{name}: {who} wait ({table[key]})", markup=False)
    counts = {name: status[name] for name in _COUNTS if status.get(name)}
    counts |= {f"rejected {kind}": count for kind, count in sorted(status["rejected"].items())}
    if counts:
        text = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in counts.items())
        console.print(f"counted: {text}", markup=False)
    by_peer = sorted(status["rejected_by_peer"].items(), key=lambda each: -sum(each[1].values()))
    for peer, kinds in by_peer[:MAX_PEERS_SHOWN]:
        text = ", ".join(f"{kind.replace('_', ' ')} {count:,}" for kind, count in sorted(kinds.items()))
        console.print(f"rejected from {peer}: {text}", markup=False)
    if len(by_peer) > MAX_PEERS_SHOWN:
        console.print(f"and from {len(by_peer) - MAX_PEERS_SHOWN} other peers", markup=False)


_COUNTS = (
    "restored_items",
    "held_inserts",
    "parked_samples",
    "waits",
    "damaged_chunks",
    "damaged_items",
    "duplicate_inserts",
    "evicted_early_items",
    "unknown_priorities",
    "invalid_priorities",
    "unsent_answers",
    "failed_handshakes",
)


def _side_by_side(columns: dict[str, dict[str, str]], width: int) -> list[Table]:
    """As many columns beside each other as `width` permits, and the others below."""
    pages: list[dict[str, dict[str, str]]] = []
    left = 0
    for name, column in columns.items():
        needs = 2 + max(len(name), *map(len, column.values()))
        if not pages or needs > left:
            pages.append({})
            left = width - max(map(len, column))
        pages[-1][name] = column
        left -= needs
    return [_page(page) for page in pages]


def _page(columns: dict[str, dict[str, str]]) -> Table:
    page = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    page.add_column("")
    for name in columns:
        page.add_column(name, justify="right")
    for label in next(iter(columns.values())):
        page.add_row(label, *(column[label] for column in columns.values()))
    return page


def _column(table: dict[str, Any]) -> dict[str, str]:
    """What is said about one table, by the label of the row."""
    often = f", {table['max_times_sampled']} times" if table["max_times_sampled"] else ""
    target = f" of {table['samples_per_insert']:g}" if table["samples_per_insert"] else ""
    quantiles = table["quantiles"]
    return {
        "items": f"{table['items']:,} of {table['capacity']:,}",
        "sampler": table["sampler"] + often,
        "remover": "none" if table["limiter"] == "queue" else table["remover"],
        "limiter": "queue" if table["limiter"] == "queue" else f"from {table['min_items']:,} items",
        "inserted": f"{table['inserted_total']:,} ({table['inserts_per_s']:,.0f}/s)",
        "sampled": f"{table['sampled_total']:,} ({table['samples_per_s']:,.0f}/s)",
        "samples per insert": f"{table['current_samples_per_insert']:.3g}{target}",
        "inserts blocked": _duration(table["insert_blocked_s"]),
        "priority 10/50/90 %": _spread(quantiles.get("priority", {}), "{:.3g}"),
        "age 10/50/90 %": _ages(quantiles.get("age_s", {})),
        "staleness 10/50/90 %": _spread(quantiles.get("staleness", {}), "{:.0f}"),
    }


def _spread(quantiles: dict[str, float], form: str, size: float = 1.0) -> str:
    if not quantiles:
        return "-"
    return " / ".join(form.format(quantiles[q] / size) for q in ("0.1", "0.5", "0.9"))


def _ages(quantiles: dict[str, float]) -> str:
    """Three durations in the unit of the longest."""
    unit, size = _unit(quantiles.get("0.9", 0.0))
    return _spread(quantiles, "{:.1f}", size) + (f" {unit}" if quantiles else "")


def _duration(seconds: float) -> str:
    unit, size = _unit(seconds)
    return f"{seconds / size:.1f} {unit}"


def _unit(seconds: float) -> tuple[str, float]:
    """The unit to tell a duration in, and its seconds."""
    units = (("d", 86400.0), ("h", 3600.0), ("min", 60.0))
    return next((each for each in units if seconds >= 2 * each[1]), ("s", 1.0))


def _size(count: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1024:.0f} KiB"
