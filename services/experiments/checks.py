"""What of a sweep is checked before its first run begins."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from troupe.common.config import load_layers
from troupe.common.config.presets import preset_id
from troupe.common.errors import ConfigError, TroupeError
from troupe.common.machine import temporary_prefix
from troupe.services.experiments import population, search
from troupe.services.experiments.halving import check_enough
from troupe.services.experiments.plan import Planned, Sweep, values_file
from troupe.services.experiments.space import ends
from troupe.services.launcher.training import check_one_process, check_repeatable, check_runnable

if TYPE_CHECKING:
    from troupe.common.config import Loaded


def check(sweep: Sweep, *, at_once: int = 1) -> dict[str, int]:
    """Refuse runs that could not begin, before any does; returns each run's total steps.

    Of a study there are no runs yet: the extreme values of its space are checked, as are those that a
    population may come to. Every environment is made once, and every network, but not each with each.

    Args:
        sweep: of the runs.
        at_once: runs at a time on one machine.

    Raises:
        ConfigError: names the field, and the file that it is from.
    """
    totals: dict[str, int] = {}
    ports: dict[int, str] = {}
    seen: set[str] = set()
    planned, extremes = sweep.runs(), list[Planned]()
    if sweep.is_study:
        search.check_installed()
    if sweep.is_study or sweep.section.population:
        if not sweep.space:
            raise ConfigError(f"{sweep.source}: the command line leaves nothing to search")
        extremes = [sweep.with_fields(f"end-{i}", each) for i, each in enumerate(ends(sweep.space))]
    with tempfile.TemporaryDirectory(prefix=temporary_prefix()) as folder:
        values = Path(folder) / "values.toml"
        for run in [*planned, *extremes]:
            loaded = _loaded(sweep, run, values)
            config = loaded.config
            if sweep.section.population and not totals:
                interval_steps = sweep.section.population.interval_steps
                population.check(sweep.source, sweep.space, config, len(planned), interval_steps)
            if sweep.section.deterministic:
                check_one_process(config)
                check_repeatable(config)
            totals[run.name] = config.run.total_steps
            port = config.net.metrics_port
            if at_once > 1 and port and ports.setdefault(port, run.name) != run.name:
                raise ConfigError(
                    f"{at_once} runs at a time would use the same ports: set net.metrics_port to 0 "
                    f"instead of {port}, or run one at a time (--parallel 1)"
                )
            # Making an environment or a network takes up to seconds. Runs that differ in neither, such as
            # those of further seeds, need no second look.
            parts = {repr(config.env), repr(config.agent)}
            if not parts <= seen:
                seen |= parts
                try:
                    check_runnable(loaded, play=False)
                except TroupeError as error:
                    raise type(error)(f"{run.name}: {error}") from None
    if not sweep.is_study:
        totals = {run.name: totals[run.name] for run in planned}
    _check_halving(sweep, totals)
    return totals


def _loaded(sweep: Sweep, run: Planned, values: Path) -> Loaded:
    """Merge a run's layers as its own process will, from a file of the same text.

    What would be refused there is refused here, hours earlier.
    """
    values.write_text(values_file(run.fields), "utf-8")
    try:
        return load_layers(sweep.preset, values, sweep.overrides, os.environ)
    except ConfigError as error:
        # The user wrote the sweep's file, or options over a preset, and never saw the file in the temporary
        # folder.
        wrote = "command line" if preset_id(sweep.source) == sweep.preset else f"file {sweep.source}"
        raise ConfigError(str(error).replace(f"file {values}", wrote)) from None


def _check_halving(sweep: Sweep, totals: Mapping[str, int]) -> None:
    """Refuse trials that cannot be compared at the same steps, and too few of them."""
    halving = sweep.section.halving
    if halving is None:
        return
    if len(set(totals.values())) > 1:
        raise ConfigError(f"{sweep.source}: halving needs runs of the same run.total_steps")
    check_enough(len(totals), halving.first_steps, halving.eta, next(iter(totals.values())))
