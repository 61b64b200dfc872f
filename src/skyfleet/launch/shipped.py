"""The task files in `tasks/`: rendered from their presets. `python -m skyfleet.launch.shipped` writes them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from skyfleet.config.loading import load_config_file
from skyfleet.launch.resources import (
    CLOUDS,
    build_resources,
    estimate_disk_gb,
    estimate_memory_gb,
    parse_gpus,
)
from skyfleet.launch.secrets import find_secret_names
from skyfleet.launch.task_file import LaunchTask, build_task, render_task


@dataclass(frozen=True, slots=True, kw_only=True)
class ShippedTask:
    name: str
    title: str
    preset: str
    modality: str
    config: str = ""
    """The variable CONFIG; empty follows MODALITY."""
    gpus: str


SHIPPED_TASKS = (
    ShippedTask(
        name="openenv-fleet-grpo",
        title="GRPO with Qwen2.5-1.5B-Instruct on Fleet's tool-use tasks",
        preset="fleet_tool_use",
        modality="tool_use",
        gpus="H100:1",
    ),
    ShippedTask(
        name="openenv-fleet-grpo-computer-use",
        title="GRPO with Qwen2.5-1.5B-Instruct on Fleet's computer-use tasks",
        preset="fleet_computer_use",
        modality="computer_use",
        gpus="H100:1",
    ),
    ShippedTask(
        name="openenv-fleet-grpo-both",
        title="GRPO with Qwen2.5-1.5B-Instruct on Fleet's tool-use and computer-use tasks",
        preset="fleet_both",
        modality="both",
        gpus="H100:1",
    ),
    ShippedTask(
        name="openenv-fleet-grpo-qwen3-8b",
        title="GRPO with Qwen3-8B (YaRN, 65k tokens) on Fleet's tool-use tasks",
        preset="fleet_qwen3_8b",
        modality="tool_use",
        config="fleet_qwen3_8b",
        gpus="H200:1",
    ),
)


def render_shipped_task(shipped: ShippedTask) -> str:
    config = load_config_file(shipped.preset)
    task = LaunchTask(
        resources=build_resources(
            CLOUDS,
            parse_gpus(shipped.gpus),
            spot=False,
            disk_gb=estimate_disk_gb(config, uploads=True),
            memory_gb=estimate_memory_gb(config),
        ),
        secret_names=find_secret_names(config, wandb=True),
        variables={"MODALITY": shipped.modality, "CONFIG": shipped.config},
    )
    return render_task(build_task(task), shipped.title)


def write_shipped_tasks(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for shipped in SHIPPED_TASKS:
        text = render_shipped_task(shipped)
        (folder / f"{shipped.name}.yaml").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_shipped_tasks(Path("tasks"))
