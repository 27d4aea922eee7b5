"""What a run costs: a line for each kind of machine and for what is around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from troupe.services.cloud.layout import Layout
from troupe.services.cloud.prices import Prices


@dataclass(frozen=True)
class Line:
    """One kind of thing to pay for.

    Attributes:
        part: its name.
        what: how many of what.
        hourly_usd: dollars an hour.
        on_demand_usd: the same if its machines were not spot machines.
        once_usd: dollars, however long the run takes.
    """

    part: str
    what: str
    hourly_usd: float
    on_demand_usd: float
    once_usd: float = 0.0


def estimate(
    layout: Layout,
    prices: Prices,
    *,
    bucket_gb: float,
    zone_gb_per_hour: float = 0.0,
    counts: Mapping[str, int] | None = None,
) -> list[Line]:
    """Return the lines of a run. Logs, and what passes through the NAT gateway, are not counted.

    Args:
        layout: its machines.
        prices: dollars.
        bucket_gb: of checkpoints and record, kept in the bucket while it runs and fetched at the end.
        zone_gb_per_hour: that the machines send each other from zone to zone, where they are in several.
        counts: how many machines each role has; by default those of the layout.

    Raises:
        ConfigError: the price of a machine is not known.
    """
    counts = layout.counts if counts is None else counts
    lines = [
        *_machines(layout, prices, counts),
        _disks(layout, prices, counts),
        _network(layout, prices, sum(counts.values())),
    ]
    bucket_usd = bucket_gb * prices.of_month("s3_gb")
    lines.append(Line("bucket", f"{bucket_gb:g} GB", bucket_usd, bucket_usd))
    zones = len(layout.availability_zones) or 1
    between_usd = zone_gb_per_hour * prices.gb["between_zones"]
    between = f"{zone_gb_per_hour:g} GB an hour between zones" if zones > 1 else "free within the zone"
    traffic = f"{between}; {bucket_gb:g} GB fetched at the end"
    lines.append(Line("traffic", traffic, between_usd, between_usd, bucket_gb * prices.gb["out_of_aws"]))
    fixed_usd = sum(map(prices.of_month, ("encryption_key", "dns_zone", "alarms")))
    lines.append(Line("fixed", "encryption key, DNS zone, alarms", fixed_usd, fixed_usd))
    return lines


def hourly_usd(lines: Sequence[Line], *, on_demand: bool = False) -> float:
    """Dollars an hour."""
    return sum(line.on_demand_usd if on_demand else line.hourly_usd for line in lines)


def total_usd(lines: Sequence[Line], hours: float, *, on_demand: bool = False) -> float:
    """Dollars of a run that takes so many hours."""
    return hours * hourly_usd(lines, on_demand=on_demand) + sum(line.once_usd for line in lines)


def million_steps_usd(lines: Sequence[Line], steps_per_s: float) -> float:
    """Dollars per million steps while it runs."""
    return hourly_usd(lines) / (steps_per_s * 3600.0) * 1e6


def _machines(layout: Layout, prices: Prices, counts: Mapping[str, int]) -> list[Line]:
    kinds = [
        ("learner", "learner", [layout.learner_instance_type], False),
        ("learner-peer", "learner-peer", [layout.learner_instance_type], layout.learner_peer_spot),
        ("replay", "replay", [layout.replay_instance_type], False),
        ("actor", "actors", layout.actor_instance_types, layout.actor_spot),
        ("evaluator", "evaluator", layout.evaluator_instance_types, layout.evaluator_spot),
    ]
    lines = []
    for role, part, types, spot in kinds:
        count = counts.get(role, 0)
        if not count:
            continue
        dearest = max(types, key=prices.of)  # AWS chooses: at most this
        full_usd = count * prices.of(dearest)
        share = layout.spot_price_share if spot else 1.0
        kind = f"spot at {share:.0%}" if spot else "on demand"
        lines.append(Line(part, f"{count} x {dearest}, {kind}", share * full_usd, full_usd))
    return lines


def _disks(layout: Layout, prices: Prices, counts: Mapping[str, int]) -> Line:
    disk_gb = dict.fromkeys(("learner", "learner-peer"), layout.learner_disk_gb)
    disk_gb["replay"] = layout.replay_disk_gb
    gb = sum(count * disk_gb.get(role, layout.actor_disk_gb) for role, count in counts.items())
    gb += layout.replay_shards * layout.replay_volume_gb  # which stay when machines go
    usd = gb * prices.of_month("gp3_gb")
    return Line("disks", f"{gb:,} GB", usd, usd)


def _network(layout: Layout, prices: Prices, machines: int) -> Line:
    addresses = (1 if layout.nat_gateway else machines) + bool(layout.tensorboard_cidrs)
    gateway_usd = prices.of("nat_gateway") if layout.nat_gateway else 0.0
    usd = gateway_usd + addresses * prices.of("public_ip")
    named = f"{addresses} public address{'es' if addresses != 1 else ''}"
    return Line("network", f"NAT gateway, {named}" if layout.nat_gateway else named, usd, usd)
