"""Task files through SkyPilot itself, without a network: `python sky_offline.py FILE...` prints JSON.

It runs in a Python that has SkyPilot. HOME must be an empty folder: SkyPilot's catalogues are written
there, with invented prices, because the wheel has none and downloads them.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

PRICES = {"lambda": 3.2, "runpod": 3.0, "vast": 2.5, "nebius": 3.5, "primeintellect": 2.0}
"""Invented, in dollars per GPU and hour. PrimeIntellect cannot take itself down; Nebius is the dearest,
because its dry run needs its SDK."""
GPUS = {"H100": 1.0, "H200": 1.3, "B200": 2.0}


def write_catalogs(home: Path) -> None:
    root = home / ".sky" / "catalogs" / "v8"
    (root / "common").mkdir(parents=True)
    clouds = ",".join(PRICES)
    rows = [f'{name},"{clouds}"' for name in [*GPUS, *(f"{gpu}-SXM" for gpu in GPUS)]]
    (root / "common" / "accelerators.csv").write_text(
        "AcceleratorName,Clouds\n" + "\n".join(rows) + "\n"
    )
    for cloud, price in PRICES.items():
        (root / cloud).mkdir()
        (root / cloud / "vms.csv").write_text(_catalog(cloud, price))


def _catalog(cloud: str, price: float) -> str:
    # An empty AvailabilityZone drops every row, so only the clouds that need the column have it.
    zone = cloud in ("runpod", "primeintellect")
    header = "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,Region,GpuInfo,SpotPrice"
    lines = [header + (",AvailabilityZone" if zone else "")]
    for gpu, factor in GPUS.items():
        name = f"{gpu}-SXM" if cloud == "runpod" and gpu != "B200" else gpu
        for count in (1, 2, 4, 8):
            cost = price * factor * count
            info = f"{{'Gpus': [{{'Name': '{name}', 'MemoryInfo': {{'SizeInMiB': 81920}}}}]}}"
            instance = f"{count}x_{name}"
            if cloud == "nebius":  # SkyPilot chooses the image by this name
                instance = f"gpu-{gpu.lower()}-sxm_{count}gpu-{16 * count}vcpu-{200 * count}gb"
            row = f'{instance},{name},{count},{16 * count},{200 * count},{cost},r1,"{info}",{cost / 2}'
            lines.append(row + (",A" if zone else ""))
    return "\n".join(lines) + "\n"


def check(path: Path) -> dict[str, Any]:
    """Parse, validate, optimize and launch (dry run) one task file."""
    import sky
    from sky import execution
    from sky.utils import registry

    from skyfleet.launch.sky import parse_task

    text = path.read_text(encoding="utf-8")
    plain = sky.Task.from_yaml_config(
        _load(text),
        env_overrides=[
            ("FLEET_API_KEY", "fleet-value"),
            ("WANDB_API_KEY", "wandb-value"),
            ("MODALITY", "computer_use"),
        ],
    )
    secrets = {
        "FLEET_API_KEY": "fleet-value",
        "WANDB_API_KEY": "wandb-value",
        "HF_TOKEN": "hf-value",
    }
    task = parse_task(text, secrets)
    enabled = [registry.CLOUD_REGISTRY.from_str(name) for name in PRICES]
    with (
        patch("sky.check.get_cached_enabled_clouds_or_refresh", return_value=enabled),
        patch("sky.backends.backend_utils.check_rsync_installed"),
    ):
        task.validate()
        with sky.Dag() as dag:
            dag.add(task)
        sky.optimizer.Optimizer.optimize(dag, quiet=True)
        best = task.best_resources
        dry_run = execution.launch(task, cluster_name="c1", dryrun=True)
    unsupported = {
        name: sorted(
            feature.value
            for feature in registry.CLOUD_REGISTRY.from_str(
                name
            )._unsupported_features_for_resources(sky.Resources())
        )
        for name in ("lambda", "runpod", "vast", "primeintellect", "nebius")
    }
    return {
        "plain_envs": plain.envs,
        "secret_names": sorted(task.secrets),
        "shown": json.dumps(task.to_yaml_config(use_user_specified_yaml=True), default=str),
        "clouds": sorted(str(resources.cloud).lower() for resources in task.resources),
        "best": str(best.cloud).lower(),
        "hourly": best.get_cost(3600) * task.num_nodes,
        "dry_run": list(dry_run),
        "hooks": next(iter(task.resources)).hooks,
        "job_recovery": next(iter(task.resources)).job_recovery,
        "unsupported": unsupported,
        "num_nodes": task.num_nodes,
    }


def list_hourly(gpus: str) -> list[tuple[str, float]]:
    from skyfleet.launch.prices import list_prices
    from skyfleet.launch.resources import parse_gpus

    return [(price.cloud, price.dollars_per_hour) for price in list_prices(parse_gpus(gpus))]


def list_rates(gpus: str, *, num_nodes: int) -> str:
    from skyfleet.launch.prices import format_prices
    from skyfleet.launch.resources import parse_gpus

    return format_prices(parse_gpus(gpus), num_nodes=num_nodes, spot=False)


def _load(text: str) -> dict[str, Any]:
    import yaml

    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


if __name__ == "__main__":
    write_catalogs(Path(os.environ["HOME"]))
    results = {name: check(Path(name)) for name in sys.argv[1:]}
    results["prices"] = {gpus: list_hourly(gpus) for gpus in ("H200:1", "H100:8")}
    results["rates"] = {"H200:1": list_rates("H200:1", num_nodes=2)}
    sys.stdout.write("\nRESULT " + json.dumps(results) + "\n")
