"""What a plan costs, at the catalogue's prices. Integers: thousandths of a dollar where cents would round too much."""

from __future__ import annotations

from dataclasses import dataclass

from millstream_operator.catalog.gpu import GpuPart

HOURS_PER_MONTH = 730


@dataclass(frozen=True, slots=True)
class Cost:
    """Of all replicas together. A million output tokens cost this when every replica is saturated."""

    hourly_milli_usd: int
    monthly_usd: int
    per_million_tokens_milli_usd: int | None

    def as_dict(self) -> dict[str, int]:
        found = {
            "hourlyMilliUSD": self.hourly_milli_usd,
            "monthlyUSD": self.monthly_usd,
            "perMillionTokensMilliUSD": self.per_million_tokens_milli_usd,
        }
        return {name: value for name, value in found.items() if value is not None}


def cost_of(part: GpuPart, gpus_per_replica: int, replicas: int, tokens_per_second: int) -> Cost:
    """`tokens_per_second`: output of one saturated replica."""
    replica = part.hourly_milli_usd * gpus_per_replica
    hourly = replica * replicas
    tokens_per_hour = tokens_per_second * 3600
    per_million = round(replica * 1_000_000 / tokens_per_hour) if tokens_per_hour else None
    return Cost(hourly, monthly_usd(replica, replicas), per_million)


def monthly_usd(replica_hourly_milli_usd: float, replicas: int) -> int:
    """US dollars per month for a number of replicas."""
    return round(replica_hourly_milli_usd * replicas * HOURS_PER_MONTH / 1000)


def price_caveat(part: GpuPart) -> str:
    """A sentence about a price that is no list price, after a space; "" for a list price."""
    if part.price_basis == "list":
        return ""
    date = f" of {part.price_date}" if part.price_date is not None else ""
    source = f" ({part.price_source})" if part.price_source is not None else ""
    kind = "a spot price" if part.price_basis == "spot" else "estimated"
    return (
        f" The price of {part.name}{date} is {kind}{source}: where you know it, set listPriceUSDPerHour of "
        f"{part.name} in the chart's value catalog.gpus."
    )
