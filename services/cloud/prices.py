"""The prices of `deploy/terraform/prices.json`, which Terraform's own estimate reads as well."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from troupe.common.errors import ConfigError

TERRAFORM = Path(__file__).parent / "terraform"
"""The Terraform configuration: in a checkout a link to deploy/terraform."""
HOURS_OF_MONTH = 730.0


@dataclass(frozen=True)
class Prices:
    """Prices in dollars.

    Attributes:
        date: of the list, such as 2026-11.
        region: of AWS.
        source: where they are from, in words.
        hourly: of machine types on demand, a NAT gateway, a public address; by name.
        monthly: of an encryption key, a DNS zone, a run's alarms, a GB of disk and of bucket; by name.
        gb: of traffic, by where it goes.
    """

    date: str
    region: str
    source: str
    hourly: Mapping[str, float]
    monthly: Mapping[str, float]
    gb: Mapping[str, float]

    def of(self, name: str) -> float:
        """Dollars an hour on demand.

        Raises:
            ConfigError: the list does not have it; a wrong sum would be worse than none.
        """
        if name not in self.hourly:
            raise ConfigError(
                f"the price of {name} is unknown: set --var 'hourly_prices_usd={{\"{name}\": DOLLARS}}'"
            )
        return self.hourly[name]

    def of_month(self, name: str) -> float:
        """Dollars an hour of what is paid by the month."""
        return self.monthly[name] / HOURS_OF_MONTH


def read_prices(replaced: Mapping[str, float]) -> Prices:
    """Return the list, with the prices an hour in `replaced` over its own.

    Raises:
        ConfigError: it is not installed.
    """
    file = TERRAFORM / "prices.json"
    try:
        found = json.loads(file.read_text("utf-8"))
    except OSError:  # as in an image, which has no use for it
        raise ConfigError(f"this installation has no {file}: use a checkout, or the package") from None
    return Prices(
        date=found["date"],
        region=found["region"],
        source=found["source"],
        hourly={**found["hourly_usd"], **replaced},
        monthly=found["monthly_usd"],
        gb=found["gb_usd"],
    )
