"""A run in AWS as this computer sees it: its record, its Terraform, its machines, and what they cost."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from troupe.common.runtime import StopSignal
from troupe.common.runtime.files import make_directory
from troupe.services.cloud.estimate import Line, estimate, hourly_usd, total_usd
from troupe.services.cloud.layout import Layout
from troupe.services.cloud.prices import Prices, read_prices
from troupe.services.cloud.record import FOLDER, Record
from troupe.services.cloud.spending import end_s
from troupe.services.cloud.tools import Aws, GivenUpError, Terraform, Tools
from troupe.services.launcher.workspace import own_command, shell_path


class Costs:
    """What an hour of a run costs, by its prices."""

    def __init__(self, record: Record, prices: Prices) -> None:
        """Create, for the run of this record."""
        self._record, self._prices = record, prices

    def lines(self, layout: Layout, counts: Mapping[str, int] | None = None) -> list[Line]:
        """The lines of the estimate, with so many machines of each role, or those of the layout."""
        return estimate(layout, self._prices, bucket_gb=self._record.bucket_gb, counts=counts)

    def with_actors(self, actors: int) -> float:
        """Dollars an hour with so many actor processes."""
        return hourly_usd(self.lines(self._record.layout.model_copy(update={"actors": actors})))

    def of(self, counts: Mapping[str, int]) -> float:
        """Dollars an hour with these machines."""
        return hourly_usd(self.lines(self._record.layout, counts))

    @property
    def once_usd(self) -> float:
        """Dollars for fetching the run's files, however long it took."""
        return total_usd(self.lines(self._record.layout), 0.0)


class CloudRun:
    """A run in AWS.

    Attributes:
        run_dir: its directory on this computer.
        record: what is known of it.
        stop: how often the user has asked for an end.
        costs: what it costs.
        terraform: its configuration.
        aws: its machines and its bucket.
    """

    def __init__(self, run_dir: Path, record: Record, stop: StopSignal) -> None:
        """Create; makes the folder."""
        folder = make_directory(run_dir / FOLDER, "folder of the cloud's files")
        folder.chmod(0o700)  # Terraform's state and its plans tell much, if no key
        tools = Tools(folder, record.region, stop)
        self.run_dir, self.record, self.stop = run_dir, record, stop
        self.costs = Costs(record, read_prices(record.layout.hourly_prices_usd))
        self.terraform = Terraform(folder / "terraform", tools)
        self.aws = Aws(tools, record.run)

    def say(self, text: str) -> None:
        """Tell the user, and the log."""
        line = f"{time.strftime('%H:%M:%S')} {text}"
        with (self.run_dir / FOLDER / "log").open("a") as log:
            log.write(f"{time.strftime('%F')} {line}\n")
        with contextlib.suppress(OSError):  # a terminal that has gone shall not keep machines running
            print(line, flush=True)

    def save(self) -> None:
        """Write the record."""
        self.record.write(self.run_dir)

    def pause(self, seconds: float, until: Callable[[], object] = lambda: False) -> None:
        """Wait, or until it is so.

        Raises:
            GivenUpError: the user asks a second time for an end.
        """
        deadline_s = time.monotonic() + seconds
        while time.monotonic() < deadline_s and not until():
            self.check_given_up()
            time.sleep(0.2)
        self.check_given_up()

    def check_given_up(self) -> None:
        """Raise where the user has asked a second time for an end."""
        if self.stop.signals > 1:
            raise GivenUpError("given up")

    def look_at_spending(self, machines: Mapping[str, int] | None) -> None:
        """Count what has been spent since the last look, with these machines; None: AWS did not say which."""
        record = self.record
        if machines is None:
            hourly = max(record.hourly_usd, self.costs.with_actors(record.layout.actors))
        else:
            hourly = self.costs.of(machines)
        record.spent(record.spending.counted(time.time(), hourly))
        self.save()

    def tell_aws_when_to_end(self, at_s: float) -> None:
        """Have AWS end all machines at a time, whatever becomes of this computer; 0: never."""
        self.terraform.apply(stop_at=utc(at_s) if at_s else "")
        self.record.stop_s = at_s
        self.save()

    def end_of_budget(self, hourly: float) -> float:
        """When AWS is to end the machines if an hour costs so much."""
        record = self.record
        return math.floor(end_s(record.spending, record.budget_usd, self.costs.once_usd, hourly))

    @property
    def advice(self) -> str:
        """What still costs, and how it ends."""
        text = (
            f"`{own_command()} cloud stop {shell_path(self.run_dir)}` fetches the run and destroys the rest"
        )
        if self.record.stop_s > time.time():
            text = f"AWS ends the machines at {utc(self.record.stop_s)} at the latest; {text}"
        return text


def utc(at_s: float) -> str:
    """A moment in the form that Terraform and people read."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at_s))
