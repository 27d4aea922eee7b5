"""What a run in AWS will be, before anything of it is there: machines, dollars, what Terraform is told."""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from troupe.common.config import load_layers
from troupe.common.errors import ConfigError
from troupe.common.permits import VARIABLE, modules_of
from troupe.common.runtime.files import readable
from troupe.services.cloud.command import figure, machines, table
from troupe.services.cloud.goal import parse_goal
from troupe.services.cloud.layout import Layout, parse_variables
from troupe.services.cloud.prices import TERRAFORM
from troupe.services.cloud.record import Record
from troupe.services.cloud.run_file import run_file
from troupe.services.cloud.spending import Spending, lasting_s

_SHORTEST_S = 900.0
# Cheaper than the defaults of deploy/terraform, which a run of weeks may be better off with.
_CHEAP = {"nat_gateway": False, "flow_logs": False, "budget_usd_per_month": 0}


@dataclass(frozen=True)
class Plan:
    """A run that has not begun.

    Attributes:
        record: what will be known of it.
        run_file: what the machines learn from.
        variables: of Terraform, but for the places of files in the run directory.
        told: the estimate, in lines.
    """

    record: Record
    run_file: str
    variables: Mapping[str, Any]
    told: list[str]


def make_plan(options: argparse.Namespace, overrides: Mapping[str, Any]) -> Plan:
    """Return what the words of `troupe cloud train` come to.

    Raises:
        ConfigError: it cannot run, or not for this budget.
    """
    from troupe.services.launcher.training import check_environment

    variables = {**_CHEAP, **parse_variables(options.var)}
    loaded = load_layers(options.preset, options.sweep, overrides, os.environ)
    config = loaded.config
    # Without a look at learner.device: this computer may have no GPU.
    check_environment(loaded, play=False)
    layout, prices, lines = machines(options, config, variables)
    if options.until:
        parse_goal(options.until, evaluated=config.evaluator.enabled)
    hourly, once = sum(line.hourly_usd for line in lines), sum(line.once_usd for line in lines)
    lasting = lasting_s(Spending(0.0, 0.0, hourly), options.budget, once, hourly)
    told = table(lines, prices, lasting / 3600.0, None)
    if lasting < _SHORTEST_S:
        raise ConfigError(
            f"--budget {options.budget:g} lasts only {lasting / 60:.0f} minutes at {hourly:.2f} dollars an "
            "hour, after the cost of ending the run: raise it, or choose cheaper machines with --var"
        )
    actors = "1 actor" if layout.actors == 1 else f"{layout.actors} actors"
    told.append(f"the budget lasts {figure(lasting / 3600.0)} hours with {actors}")
    record = Record(
        run=aws_name(options.preset, time.strftime("%m%d%H%M%S")),
        preset=options.preset,
        region=os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "",
        budget_usd=options.budget,
        until=options.until,
        evaluated=config.evaluator.enabled,
        total_steps=config.run.total_steps,
        layout=layout,
        max_actors=_most_actors(layout, options.max_actors),
        bucket_gb=options.bucket_gb,
        prices=prices.date,
    )
    slots = max(config.total_slots, record.max_actors * layout.slots_per_actor)
    terraform = {
        **layout.model_dump(),
        **variables,
        **_images(variables),
        "run": record.run,
        "modules": list(filter(None, [*modules_of(config), *os.environ.get(VARIABLE, "").split(",")])),
        # Room for all that may come: they are spread over the ladder.
        "overrides": {"actor.total_slots": str(slots)},
        "max_actor_machines": record.max_actors // layout.actors_per_machine,
    }
    return Plan(record, run_file(config, options.preset), terraform, told)


def aws_name(preset: str, date: str) -> str:
    """A name for the run in AWS: 24 letters, digits and dashes at most, of which the date takes ten."""
    stem = re.sub(r"[^a-z0-9]+", "-", Path(preset).stem.lower()).strip("-")
    stem = stem if stem[:1].isalpha() else f"run-{stem}"
    return f"{stem[:13].strip('-')}-{date}"


def _most_actors(layout: Layout, asked: int | None) -> int:
    """Actor processes at most, in whole machines."""
    per_machine = layout.actors_per_machine
    return max(layout.actor_machines, -(-(asked or 4 * layout.actors) // per_machine)) * per_machine


def _images(variables: Mapping[str, Any]) -> dict[str, str]:
    """Where Terraform finds the machine images, as it is to be told.

    Raises:
        ConfigError: none are named, and Packer has built none in this checkout.
    """
    file = Path(variables.get("packer_manifest") or TERRAFORM.resolve().parent / "packer" / "manifest.json")
    with readable(file):
        if file.exists():
            return {"packer_manifest": str(file.absolute())}
    if "cpu_image_id" in variables and "packer_manifest" not in variables:
        return {}
    raise ConfigError(
        f"no images: {file} is not there. Build them (docs/aws.md), or name them: --var packer_manifest=FILE "
        "or --var cpu_image_id=ami-... and, for a learner with a GPU, --var gpu_image_id=ami-..."
    )
