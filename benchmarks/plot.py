"""Draws the learning curves of runs: `python -m benchmarks.plot RUN_DIR... --out docs/images/NAME.png`."""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

CURVES = {"train/episode_return": "training (all exploration rates)", "eval/episode_return": "evaluation"}


def read_curve(run_dir: Path, name: str, x: str) -> tuple[list[float], list[float]]:
    """The values of one metric against a column of `metrics.csv`, such as `steps` or `wall_s`."""
    with (run_dir / "metrics.csv").open() as file:
        rows = [(float(row[x]), float(row["value"])) for row in csv.DictReader(file) if row["name"] == name]
    return [row[0] for row in rows], [row[1] for row in rows]


def draw(run_dirs: list[Path], out: Path, title: str) -> None:
    """Draw return against environment steps and against wall-clock minutes, one colour per run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True)
    for axis, (x, label, scale) in zip(
        axes, (("steps", "environment steps", 1.0), ("wall_s", "wall clock, minutes", 1 / 60)), strict=True
    ):
        for index, run_dir in enumerate(run_dirs):
            for name, meaning in CURVES.items():
                places, values = read_curve(run_dir, name, x)
                evaluation = name.startswith("eval")
                axis.plot(
                    [place * scale for place in places],
                    values,
                    color=f"C{index}",
                    alpha=1.0 if evaluation else 0.35,
                    marker="o" if evaluation else None,
                    markersize=3,
                    linewidth=1.2,
                    label=f"{run_dir.name}: {meaning}",
                )
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("return per game")
    axes[0].legend(fontsize=7)
    figure.suptitle(title)
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR")
    parser.add_argument("--out", type=Path, required=True, help="picture to write")
    parser.add_argument("--title", default="")
    args = parser.parse_args()
    draw(args.run_dirs, args.out, args.title)


if __name__ == "__main__":
    main()
