"""Resources: which clouds and GPUs a task may use, and how much disk and memory it needs."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from skyfleet.config.root import RunConfig
from skyfleet.errors import ConfigError

GPUS = (
    *("B200", "H200", "GH200", "H100", "A100-80GB", "A100", "L40S", "A6000", "RTX6000-Ada"),
    *("A10", "A10G", "L4", "RTX4090", "RTX5090"),
)
"""The GPUs that are accepted. SkyPilot's parser accepts any name, and fails after provisioning."""

GPU_GB = {
    "B200": 192,
    "H200": 141,
    "GH200": 96,
    "H100": 80,
    "A100-80GB": 80,
    "A100": 40,
    "L40S": 48,
    "A6000": 48,
    "RTX6000-Ada": 48,
    "A10": 24,
    "A10G": 24,
    "L4": 24,
    "RTX4090": 24,
    "RTX5090": 32,
}
"""Memory of one GPU, in 10^9 bytes."""
_ADAPTED = 0.7
"""Share of a model's weights that LoRA adapts, at least: the rest is the embedding."""

CLOUDS = (
    "lambda",
    "runpod",
    "vast",
    "primeintellect",
    "nebius",
    "gcp",
    "aws",
    "kubernetes",
    "slurm",
)
CLOUDS_WITHOUT_SPOT = frozenset({"lambda", "kubernetes", "slurm"})
CLOUDS_WITHOUT_NODES = frozenset({"runpod", "vast", "primeintellect"})
CLOUDS_WITHOUT_AUTODOWN = frozenset({"primeintellect"})
IDLE_MINUTES = 10
"""How long a machine without a job stays up."""

_RUNPOD_NAMES = {"H200": "H200-SXM", "H100": "H100-SXM", "A100-80GB": "A100-80GB-SXM"}
"""RunPod's catalogue has other names for the same GPUs."""

_SYSTEM_GB = 40
"""The image, the packages with CUDA, and SkyPilot's own environment."""
_OUTPUT_GB = 30
"""Trajectories, evaluation dumps, logs and the dataset."""
_UNBOUNDED_CHECKPOINTS = 10
"""How many are planned for if nothing bounds their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    name: str
    count: int

    def __str__(self) -> str:
        return f"{self.name}:{self.count}"


def parse_gpus(text: str) -> Gpus:
    """`H200:8` or `H200`."""
    name, colon, count = text.partition(":")
    names = {known.lower(): known for known in GPUS}
    if name.lower() not in names:
        raise ConfigError(f"--gpus {text}: {name!r} is unknown; use one of {', '.join(GPUS)}")
    if colon and not (count.isdecimal() and 1 <= int(count) <= 16):
        raise ConfigError(f"--gpus {text}: {count!r} is not a number of GPUs; write {name}:8")
    return Gpus(name=names[name.lower()], count=int(count or 1))


def choose_clouds(text: str, *, spot: bool, num_nodes: int) -> tuple[str, ...]:
    """`any`, or names separated by commas; those that cannot run the task are left out of `any`."""
    lacking = {
        **{name: "--nodes" for name in CLOUDS_WITHOUT_NODES if num_nodes > 1},
        **{name: "--spot" for name in CLOUDS_WITHOUT_SPOT if spot},
    }
    if text == "any":
        return tuple(name for name in CLOUDS if name not in lacking)
    chosen = tuple(name.strip().lower() for name in text.split(",") if name.strip())
    if unknown := [name for name in chosen if name not in CLOUDS]:
        raise ConfigError(
            f"--cloud {text}: {unknown[0]!r} is unknown; use any, or some of {', '.join(CLOUDS)}"
        )
    for name in chosen:
        if name in lacking:
            raise ConfigError(
                f"--cloud {name} does not support {lacking[name]} in SkyPilot; leave one of them out"
            )
    if not chosen:
        raise ConfigError(
            f"--cloud {text!r} names no cloud; use any, or some of {', '.join(CLOUDS)}"
        )
    return chosen


def build_resources(
    clouds: Sequence[str], gpus: Gpus, *, spot: bool, disk_gb: int, memory_gb: int
) -> dict[str, Any]:
    """The `resources` of a task file: SkyPilot takes the cheapest of the clouds it has access to."""
    common: dict[str, Any] = {"disk_size": disk_gb, "memory": f"{memory_gb}+"}
    if takes_itself_down(clouds):
        common["autostop"] = {"idle_minutes": IDLE_MINUTES, "down": True}
    if spot:
        common["use_spot"] = True
    return {**common, "any_of": [_on_cloud(cloud, gpus) for cloud in clouds]}


def takes_itself_down(clouds: Sequence[str]) -> bool:
    """Whether one of the clouds can; SkyPilot skips the others while it looks for a machine."""
    return not set(clouds) <= CLOUDS_WITHOUT_AUTODOWN


def _on_cloud(cloud: str, gpus: Gpus) -> dict[str, Any]:
    return {"infra": cloud, "accelerators": f"{name_on_cloud(cloud, gpus)}:{gpus.count}"}


def name_on_cloud(cloud: str, gpus: Gpus) -> str:
    """What the cloud's catalogue calls these GPUs."""
    return _RUNPOD_NAMES.get(gpus.name, gpus.name) if cloud == "runpod" else gpus.name


def estimate_disk_gb(config: RunConfig, *, uploads: bool) -> int:
    """Weights, the checkpoints that are on the disk at once, packages and outputs, plus a quarter."""
    model = config.trainer.policy.model
    billions = read_parameters(model.path) / 1e9
    trained = billions if model.lora.rank == 0 else 0.02 * billions
    # Weights in bfloat16, and Adam's two moments and the master weights in float32.
    checkpoint_gb = 2 * billions + 12 * trained
    kept = config.trainer.count_kept_checkpoints(uploads=uploads) or _UNBOUNDED_CHECKPOINTS
    total_gb = _SYSTEM_GB + _OUTPUT_GB + 2 * billions + (kept + 1) * checkpoint_gb
    return max(100, 50 * math.ceil(1.25 * total_gb / 50))


def estimate_memory_gb(config: RunConfig) -> int:
    """Main memory: three copies of the weights in bfloat16 while they are loaded and saved."""
    billions = read_parameters(config.trainer.policy.model.path) / 1e9
    return max(32, 32 * math.ceil(6 * billions / 32))


def check_gpu_memory(config: RunConfig, gpus: Gpus) -> None:
    """Raise if not even the weights, gradients and optimizer of the policy fit on one GPU.

    Less than the memory plan counts, which needs the model's shape; a model of unknown size passes.
    """
    policy = config.trainer.policy
    try:
        billions = read_parameters(policy.model.path) / 1e9
    except ConfigError:
        return
    if policy.model.lora.rank == 0:
        # Weights and gradients in bfloat16, Adam's moments and master weights in float32.
        needed_gb, what = (2 + 2 + 12) * billions, "weights, gradients, optimizer"
        remedy = "trainer.policy.model.lora.rank=32"
    else:
        # Merged and base weights of the adapted layers, which are most of a model.
        needed_gb, what = (2 + 2 * _ADAPTED) * billions, "weights, and their base"
        remedy = "a smaller model"
    if needed_gb > GPU_GB[gpus.name]:
        raise ConfigError(
            f"--gpus {gpus.name}: {policy.model.path} needs {needed_gb:.0f} GB at least on one GPU "
            f"({what}), and it has {GPU_GB[gpus.name]} GB; use a larger one, or {remedy}"
        )


def check_disk_gb(config: RunConfig, disk_gb: int) -> None:
    """Raise if the packages, the weights and one checkpoint do not fit; 0 is an estimate."""
    if not disk_gb:
        return
    least_gb = float(_SYSTEM_GB)
    with suppress(ConfigError):
        least_gb += 2 * _count_weight_gb(config)
    if disk_gb < least_gb:
        raise ConfigError(
            f"--disk-gb {disk_gb} is too small: the packages, the weights and one checkpoint take "
            f"{math.ceil(least_gb)} GB; use more, or leave it out for an estimate"
        )


def _count_weight_gb(config: RunConfig) -> float:
    """In bfloat16."""
    return 2 * read_parameters(config.trainer.policy.model.path) / 1e9


def read_parameters(path: str) -> float:
    """The number of parameters in a model's name: `Qwen/Qwen3-8B` has 8e9."""
    if path == "tiny":
        return 5e5
    if path == "smollm2":
        return 1.35e8
    found = re.search(
        r"(?i)(?<![a-z0-9.])(\d+(?:\.\d+)?)([BM])(?![a-z0-9])", path.rsplit("/", 1)[-1]
    )
    if found is None:
        raise ConfigError(
            f"trainer.policy.model.path={path!r} does not say how large the model is; "
            "set the disk with --disk-gb and the memory with --memory-gb"
        )
    return float(found[1]) * (1e9 if found[2].upper() == "B" else 1e6)
