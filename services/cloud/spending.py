"""What a run has cost so far, and until when its budget lasts: arithmetic, without a clock or a network."""

from __future__ import annotations

from dataclasses import dataclass

ENDING_S = 900.0
"""From the decision to end until nothing costs anything: the last checkpoint, its copy, `destroy`."""
MARGIN_S = 120.0
"""How much later than this program AWS itself ends the machines."""
LONGEST_S = 30 * 86400.0
"""AWS takes no later time for what it is to do by itself."""


@dataclass(frozen=True)
class Spending:
    """Dollars up to a moment.

    Attributes:
        usd: spent until then.
        until_s: the moment, in seconds since 1970.
        hourly_usd: what an hour costs from then on.
    """

    usd: float
    until_s: float
    hourly_usd: float

    def counted(self, now_s: float, hourly_usd: float) -> Spending:
        """Return the same up to now; between two looks the dearer of what they saw counts."""
        hours = max(0.0, now_s - self.until_s) / 3600.0
        usd = self.usd + hours * max(self.hourly_usd, hourly_usd)
        return Spending(usd, max(now_s, self.until_s), hourly_usd)


def reserve_usd(hourly_usd: float, once_usd: float) -> float:
    """What ending takes: the machines go on until the last checkpoint is copied, and copying costs, too."""
    return hourly_usd * ENDING_S / 3600.0 + once_usd


def is_used_up(spending: Spending, budget_usd: float, once_usd: float) -> bool:
    """Whether to end now, so that the budget is not exceeded."""
    return spending.usd + reserve_usd(spending.hourly_usd, once_usd) >= budget_usd


def end_s(spending: Spending, budget_usd: float, once_usd: float, hourly_usd: float) -> float:
    """When AWS itself has to end the machines, which cost `hourly_usd` from now on, if nobody else does."""
    left_usd = budget_usd - spending.usd - reserve_usd(hourly_usd, once_usd)
    lasting_s = left_usd / hourly_usd * 3600.0 if hourly_usd > 0 else LONGEST_S
    return spending.until_s + min(LONGEST_S, max(0.0, lasting_s)) + MARGIN_S


def lasting_s(spending: Spending, budget_usd: float, once_usd: float, hourly_usd: float) -> float:
    """How long it can go on at `hourly_usd`."""
    return max(0.0, end_s(spending, budget_usd, once_usd, hourly_usd) - MARGIN_S - spending.until_s)
