"""`troupe cloud estimate`: what a run in AWS costs, without an account and without Terraform."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from troupe.common.config import Config, load_config
from troupe.common.config.field_options import field_parser, parse_with_fields
from troupe.common.errors import ConfigError
from troupe.common.runtime.files import read_status, readable
from troupe.common.runtime.parser import real
from troupe.services.cloud.estimate import (
    Line,
    hourly_usd,
    million_steps_usd,
    total_usd,
)
from troupe.services.cloud.estimate import (
    estimate as lines_of,
)
from troupe.services.cloud.layout import Layout, layout_of, parse_variables
from troupe.services.cloud.prices import Prices, read_prices


def add_machines(parser: argparse.ArgumentParser) -> None:
    """Add the options from which the machines of a run, and their price, follow."""
    parser.add_argument("preset", metavar="PRESET", help="a name from `troupe presets`, or a TOML file")
    parser.add_argument(
        "--var",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="a variable of deploy/terraform, such as --var actors=64, "
        "--var 'actor_instance_types=[\"c7i.xlarge\"]' or --var spot_price_share=0.35; may be repeated",
    )
    parser.add_argument(
        "--bucket-gb",
        type=real(0.0),
        default=1.0,
        metavar="GB",
        help="size of checkpoints and record, stored during the run and downloaded at the end (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--zone-gb-per-hour",
        type=real(0.0),
        metavar="GB",
        help="traffic between zones, if --var availability_zones names several",
    )


def machines(
    options: argparse.Namespace, config: Config, variables: Mapping[str, Any]
) -> tuple[Layout, Prices, list[Line]]:
    """The machines, the prices and the lines for what `add_machines` was given, and these variables.

    Raises:
        ConfigError: a variable is wrong, a price is unknown, or nothing says how much goes between zones.
    """
    layout = layout_of(config, variables)
    if len(layout.availability_zones) > 1 and options.zone_gb_per_hour is None:
        raise ConfigError(
            "machines in several zones pay for traffic between them: --zone-gb-per-hour says how much"
        )
    prices = read_prices(layout.hourly_prices_usd)
    zone_gb = options.zone_gb_per_hour or 0.0
    return layout, prices, lines_of(layout, prices, bucket_gb=options.bucket_gb, zone_gb_per_hour=zone_gb)


def estimate_parser() -> argparse.ArgumentParser:
    """Return the parser of `troupe cloud estimate`."""
    parser = field_parser(
        "cloud estimate",
        "PRESET (--hours H | --steps-per-second S | --like RUN) [OPTION ...]",
        "Estimate what a run in AWS costs: one line for each kind of machine, for disks, network and\n"
        "traffic. Uses the dated prices in deploy/terraform; needs neither an account nor Terraform.",
    )
    add_machines(parser)
    parser.add_argument(
        "--hours",
        type=real(0.0),
        metavar="H",
        help="duration (default: the time that run.total_steps takes, at a speed given as below)",
    )
    rate = parser.add_mutually_exclusive_group()
    rate.add_argument(
        "--steps-per-second",
        type=real(1e-3),
        metavar="S",
        help="speed of the run; adds dollars per million steps",
    )
    rate.add_argument("--like", metavar="RUN", type=Path, help="use the last speed of this run")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def estimate(words: Sequence[str]) -> int:
    """Print what a run costs."""
    options, overrides = parse_with_fields(estimate_parser(), words)
    config = load_config(options.preset, options.sweep, overrides, os.environ)
    _, prices, lines = machines(options, config, parse_variables(options.var))
    rate = rate_of(options.like) if options.like else options.steps_per_second
    if options.hours is None and rate is None:
        raise ConfigError("give the duration: --hours, or --steps-per-second for all of run.total_steps")
    hours = options.hours if options.hours is not None else config.run.total_steps / rate / 3600.0
    if options.json:
        print(json.dumps(_values(lines, prices, hours, rate)))
    else:
        print("\n".join(table(lines, prices, hours, rate)))
    return 0


def rate_of(run_dir: Path) -> float:
    """Steps a second that a run had at last.

    Raises:
        ConfigError: its directory does not tell.
    """
    with readable(run_dir):
        rate = read_status(run_dir).get("metrics", {}).get("speed/steps_per_s")
    if not isinstance(rate, int | float) or rate <= 0:
        raise ConfigError(f"{run_dir} does not record its steps per second: use --steps-per-second")
    return float(rate)


def table(lines: Sequence[Line], prices: Prices, hours: float, rate: float | None) -> list[str]:
    """The estimate as lines of text."""
    width = max(len(line.what) for line in lines)
    shown = [f"prices of {prices.date}, {prices.region}: {prices.source}", ""]
    shown.append(f"{'dollars':<{12 + width}}{'an hour':>9}{f'{figure(hours)} h':>11}{'on demand':>11}")

    def row(part: str, what: str, hourly: float, total: float, on_demand: float) -> str:
        return f"{part:<11} {what:<{width}}{hourly:9.3f}{total:11.3f}{on_demand:11.3f}"

    for line in lines:
        total, on_demand = total_usd([line], hours), total_usd([line], hours, on_demand=True)
        shown.append(row(line.part, line.what, line.hourly_usd, total, on_demand))
    total, on_demand = total_usd(lines, hours), total_usd(lines, hours, on_demand=True)
    shown.append(row("total", "", hourly_usd(lines), total, on_demand))
    if rate is not None:
        million = million_steps_usd(lines, rate)
        steps = rate * hours * 3600.0
        shown += [
            "",
            f"per million steps {million:.3g}: {figure(steps / 1e6)} million at {rate:,.0f} a second",
        ]
    return [*shown, "not counted: logs, requests, and what passes through the NAT gateway"]


def figure(value: float) -> str:
    """Three digits, and as many as it has before the point: never 2e+03."""
    return f"{value:,.0f}" if value >= 100.0 else f"{value:.3g}"


def _values(lines: Sequence[Line], prices: Prices, hours: float, rate: float | None) -> dict[str, object]:
    return {
        "date": prices.date,
        "region": prices.region,
        "hours": hours,
        "parts": {
            line.part: {"what": line.what, "hourly_usd": line.hourly_usd, "usd": total_usd([line], hours)}
            for line in lines
        },
        "hourly_usd": hourly_usd(lines),
        "total_usd": total_usd(lines, hours),
        "on_demand_usd": total_usd(lines, hours, on_demand=True),
        "million_steps_usd": None if rate is None else million_steps_usd(lines, rate),
    }
