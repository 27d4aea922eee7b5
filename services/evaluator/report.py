"""What `troupe eval` says of the games: for people, and as JSON, CSV and Markdown."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from troupe.common.config import Config
from troupe.common.runtime.checkpoint import ARCHIVE, BEST, Checkpoint
from troupe.common.stats.intervals import ci95
from troupe.services.evaluator.games import Result

Report = dict[str, Any]
"""What `--json` prints of one checkpoint."""


def summary(
    result: Result, config: Config, checkpoint: Checkpoint, *, seed: int, epsilon: float, slots: int
) -> Report:
    """The report of one checkpoint."""
    low, high = ci95(result.returns)
    return {
        "mean_return": result.mean_return,
        "ci95": [low, high],
        "human_normalized": None,
        **result.human_normalized(config.env.id),
        **(
            {"tasks": result.by_task(), "levels_played": len(result.by_task()), "levels": result.levels}
            if result.tasks
            else {}
        ),
        **({"info": dict(result.told)} if result.told else {}),
        "returns": result.returns,
        "mean_length": result.mean_steps,
        "episodes": len(result.returns),
        "failed_episodes": result.failures,
        **({"first_failure": result.first_failure} if result.failures else {}),
        "env": config.env.id,
        "env_fields": env_fields(config, checkpoint),
        "steps": int(checkpoint.meta.get("steps", 0)),
        "updates": int(checkpoint.meta.get("updates", 0)),
        "checkpoint": str(checkpoint.path),
        "seed": seed,
        "epsilon": epsilon,
        "slots": slots,
    }


def env_fields(config: Config, checkpoint: Checkpoint) -> dict[str, Any]:
    """The fields of `[env]`, apart from the id, that are others than in training."""
    trained = checkpoint.meta["config"].get("env", {})
    default = type(config.env)().model_dump(mode="json")
    return {
        name: value
        for name, value in config.to_dict()["env"].items()
        # A field that the checkpoint does not have is newer than it, and had its default.
        if name != "id" and value != trained.get(name, default[name])
    }


def table(report: Report) -> str:
    """Of one checkpoint, for people."""
    low, high = report["ci95"]
    normalised = report["human_normalized"]
    interval = f"  (95 % interval {low:.2f} to {high:.2f})" if report["episodes"] > 1 else ""
    rows = [
        (
            "trained for",
            f"{report['steps']:,} steps, {report['updates']:,} update{'s'[: report['updates'] != 1]}",
        ),
        ("mean return", f"{report['mean_return']:.2f}{interval}"),
        *([] if normalised is None else [("human-normalised", f"{normalised:.3f}")]),
        ("best, worst", f"{max(report['returns']):g}, {min(report['returns']):g}"),
        ("mean length", f"{report['mean_length']:.0f} steps"),
    ]
    if missed := _missed(report):
        rows.insert(2, ("played", f"{missed}: give --episodes {report['levels']} for all"))
    rows += [(name, f"{mean:.6g}") for name, mean in report.get("info", {}).items()]
    rows += [(task, f"{mean:.2f}") for task, mean in report.get("tasks", {}).items()]
    if "human_normalized_capped" in report:
        rows.append(("capped at 1", f"{report['human_normalized_capped']:.3f}"))
    return "\n".join(f"{label:<17} {value}" for label, value in rows)


def _missed(report: Report) -> str:
    """`12 of 30 levels`, where some had no game."""
    played, levels = report.get("levels_played", 0), report.get("levels", 0)
    return f"{played} of {levels} levels" if played < levels else ""


_COLUMNS: dict[str, Callable[[Report], str]] = {
    "steps": lambda report: str(report["steps"]),
    "updates": lambda report: str(report["updates"]),
    "mean_return": lambda report: f"{report['mean_return']:.6g}",
    "ci95_low": lambda report: f"{report['ci95'][0]:.6g}",
    "ci95_high": lambda report: f"{report['ci95'][1]:.6g}",
    "human_normalized": lambda report: (
        "" if report["human_normalized"] is None else f"{report['human_normalized']:.6g}"
    ),
    "mean_length": lambda report: f"{report['mean_length']:.6g}",
    "episodes": lambda report: str(report["episodes"]),
    "failed_episodes": lambda report: str(report["failed_episodes"]),
    "first_failure": lambda report: report.get("first_failure", ""),
    "levels_played": lambda report: str(report.get("levels_played", "")),
    "levels": lambda report: str(report.get("levels", "")),
    "env": lambda report: report["env"],
    "checkpoint": lambda report: report["checkpoint"],
    "env_fields": lambda report: json.dumps(report["env_fields"]) if report["env_fields"] else "",
    "seed": lambda report: str(report["seed"]),
    "epsilon": lambda report: f"{report['epsilon']:g}",
    "slots": lambda report: str(report["slots"]),
}


def _csv(reports: Sequence[Report]) -> str:
    """A line for each checkpoint."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(_COLUMNS)
    lines.writerows([column(report) for column in _COLUMNS.values()] for report in reports)
    return text.getvalue()


def markdown(reports: Sequence[Report]) -> str:
    """A table with a row for each checkpoint: the curve of a run; of several runs it names them."""
    several = len({_folder(report) for report in reports}) > 1
    scored = any(report["human_normalized"] is not None for report in reports)
    lines = ["| steps | mean return | 95 % interval |", "|--:|--:|--:|"]
    for title in (["human-normalised"] if scored else []) + ["episodes"]:
        lines = [lines[0] + f" {title} |", lines[1] + "--:|"]
    if several:
        lines = ["| checkpoint " + lines[0], "|:--" + lines[1]]
    for report in reports:
        low, high = report["ci95"]
        normalised = report["human_normalized"]
        shown = "" if normalised is None else f"{normalised:.3f}"
        score = f" {shown} |" if scored else ""
        mean = f"{report['mean_return']:.2f}"
        failed = f"{report['failed_episodes']} more failed" if report["failed_episodes"] else ""
        notes = ", ".join(filter(None, (_missed(report), failed)))
        games = f"{report['episodes']}" + (f" ({notes})" if notes else "")
        interval = f"{low:.2f} to {high:.2f}" if report["episodes"] > 1 else ""
        lines.append(
            (f"| {report['checkpoint']} " if several else "")
            + f"| {report['steps']:,} | {mean} | {interval} |{score} {games} |"
        )
    return "\n".join(lines) + "\n"


def _folder(report: Report) -> Path:
    """Where the checkpoints of one run are."""
    folder = Path(report["checkpoint"]).parent
    return folder.parent if folder.name in (ARCHIVE, BEST) else folder


FORMATS: dict[str, Callable[[Sequence[Report]], str]] = {
    ".json": lambda reports: json.dumps(reports, indent=1) + "\n",
    ".csv": _csv,
    ".md": markdown,
}
