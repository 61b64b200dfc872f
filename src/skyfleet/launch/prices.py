"""Prices of a machine per cloud, from SkyPilot's catalogue."""

from __future__ import annotations

import re
from dataclasses import dataclass

from skyfleet.launch.resources import CLOUDS, GPUS, Gpus, name_on_cloud
from skyfleet.launch.sky import LaunchError, import_sky

_OWN_MACHINES = ("kubernetes", "slurm")
"""Clusters that somebody has paid for already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudPrice:
    cloud: str
    instance: str
    dollars_per_hour: float
    spot_dollars_per_hour: float | None


def find_gpu(device_name: str) -> str | None:
    """The name in a task file of the GPU that torch calls so: `NVIDIA H200` is H200."""
    joined = device_name.upper().replace("RTX ", "RTX")
    words = re.split(r"[\s-]+", joined)
    found = [name for name in GPUS if all(part in words for part in name.upper().split("-"))]
    return max(found, key=len, default=None)


def list_prices(gpus: Gpus) -> list[CloudPrice]:
    """The cheapest machine of each cloud with exactly these GPUs, cheapest first.

    MissingExtraError without SkyPilot; LaunchError if it has no catalogue.
    """
    import_sky()
    from sky import catalog

    prices, problems = [], []
    for cloud in CLOUDS:
        if cloud in _OWN_MACHINES:
            continue
        name = name_on_cloud(cloud, gpus)
        try:
            offers = catalog.list_accelerators(
                gpus_only=True,
                name_filter=f"^{re.escape(name)}$",
                quantity_filter=gpus.count,
                clouds=cloud,
                case_sensitive=False,
            )
        except Exception as error:  # a cloud without a catalogue raises many types
            problems.append(f"{cloud}: {type(error).__name__}")
            continue
        priced = [one for found in offers.values() for one in found if one.price > 0]
        if priced:
            cheapest = min(priced, key=lambda one: one.price)
            spot = cheapest.spot_price
            prices.append(
                CloudPrice(
                    cloud=cloud,
                    instance=str(cheapest.instance_type),
                    dollars_per_hour=float(cheapest.price),
                    spot_dollars_per_hour=float(spot) if spot and spot > 0 else None,
                )
            )
    if not prices:
        why = f" ({'; '.join(problems)})" if problems else ""
        raise LaunchError(f"SkyPilot's catalogue has no price for {gpus}{why}")
    return sorted(prices, key=lambda price: price.dollars_per_hour)


def format_prices(gpus: Gpus, *, num_nodes: int, spot: bool) -> str:
    """DOLLARS_PER_HOUR of a task: `lambda=2.99,runpod=3.59`, for all its machines; empty if unknown."""
    try:
        prices = list_prices(gpus)
    except LaunchError:
        return ""
    rates = {
        price.cloud: price.spot_dollars_per_hour if spot else price.dollars_per_hour
        for price in prices
    }
    return ",".join(f"{cloud}={num_nodes * rate:g}" for cloud, rate in rates.items() if rate)
