"""Plan: from a configuration, or a task file, and the options of `skyfleet launch` to a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyfleet.config.loading import load_config_file, preset_names
from skyfleet.config.root import RunConfig
from skyfleet.envs.registry import uses_fleet
from skyfleet.errors import ConfigError
from skyfleet.launch.resources import (
    build_resources,
    choose_clouds,
    estimate_disk_gb,
    estimate_memory_gb,
    parse_gpus,
    takes_itself_down,
)
from skyfleet.launch.secrets import (
    SecretNames,
    find_secret_names,
    reject_literal_secrets,
)
from skyfleet.launch.task_file import (
    DEFAULT_VARIABLES,
    MODALITIES,
    LaunchTask,
    build_task,
    check_run_name,
    generate_run_name,
    join_overrides,
    render_task,
)
from skyfleet.secret_names import looks_secret
from skyfleet.tracking.tracker import UNCONSTRAINED

PREPARED = "data/fleet/"
"""Where the task's set-up writes the dataset."""
DEFAULT_GPUS = "H200:1"
MAX_RECOVERIES = 10
"""How often a managed job is started again on a new machine after its own restarts are used up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    cloud: str = "any"
    gpus: str = ""
    """Empty: H200:1, or what the task file says."""
    nodes: int = 0
    """0: one, or what the task file says."""
    spot: bool = False
    modality: str = ""
    """Empty: that of the configuration's dataset, or what the task file says."""
    run_name: str = ""
    """Empty: a new name."""
    disk_gb: int = 0
    """0: estimated, or what the task file says; so is memory_gb."""
    memory_gb: int = 0
    wandb: bool = True
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables of the task file, such as DATA_VERSION."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    run_name: str
    modality: str
    text: str
    """The task file."""
    secret_names: SecretNames
    notes: tuple[str, ...]
    """What would happen, one sentence each."""


def plan_launch(
    config_name: str,
    overrides: Sequence[str],
    options: LaunchOptions,
    *,
    root: Path,
    commit: str = "",
) -> LaunchPlan:
    """Plan a configuration: check everything that can be checked before anything is paid for."""
    path = _locate_config(config_name, root)
    config = load_config_file(config_name, overrides)
    reject_literal_secrets(config)
    modality = options.modality or _find_modality(config)
    nodes = options.nodes or 1
    variables = {
        "MODALITY": modality,
        "CONFIG": path,
        "OVERRIDES": join_overrides(overrides),
        "DATASET": "fleet" if _reads_prepared(config) else "",
        "EXTRAS": _choose_extras(config, wandb=options.wandb, nodes=nodes),
        **({} if _accepts_constraints(config) else {"CONSTRAINTS": ""}),
    }
    uploads = bool({**DEFAULT_VARIABLES, **options.variables}["S3_CHECKPOINT_BUCKET"])
    task = LaunchTask(
        resources=build_resources(
            choose_clouds(options.cloud, spot=options.spot, num_nodes=nodes),
            parse_gpus(options.gpus or DEFAULT_GPUS),
            spot=options.spot,
            disk_gb=options.disk_gb or estimate_disk_gb(config, uploads=uploads),
            memory_gb=options.memory_gb or estimate_memory_gb(config),
        ),
        secret_names=find_secret_names(config, wandb=options.wandb),
        variables=variables,
        num_nodes=nodes,
    )
    return _finish(build_task(task), config_name, options, commit)


def plan_task_file(
    built: dict[str, Any],
    title: str,
    overrides: Sequence[str],
    options: LaunchOptions,
    *,
    root: Path,
    commit: str = "",
) -> LaunchPlan:
    """Plan a task file that exists: its resources and variables hold where no option is given."""
    _check_task_file(built, title)
    resources: dict[str, Any] = dict(built["resources"])
    nodes = options.nodes or built.get("num_nodes", 1)
    given = [entry["infra"] for entry in resources.get("any_of", ())]
    clouds = choose_clouds(options.cloud, spot=options.spot, num_nodes=nodes)
    if options.gpus or options.cloud != "any" or options.spot or options.nodes:
        first = resources["any_of"][0]["accelerators"].replace("-SXM", "")
        kept = [cloud for cloud in clouds if cloud in given or options.cloud != "any"]
        resources = build_resources(
            kept,
            parse_gpus(options.gpus or first),
            spot=options.spot,
            disk_gb=int(resources["disk_size"]),
            memory_gb=int(str(resources["memory"]).rstrip("+")),
        )
    if options.disk_gb:
        resources["disk_size"] = options.disk_gb
    if options.memory_gb:
        resources["memory"] = f"{options.memory_gb}+"
    envs = {**built["envs"], **({"MODALITY": options.modality} if options.modality else {})}
    if overrides:
        envs["OVERRIDES"] = join_overrides([*envs["OVERRIDES"].splitlines(), *overrides])
    _check_config({**envs, **options.variables}, root)
    if nodes > 1 and "ray" not in envs["EXTRAS"].split(","):
        envs["EXTRAS"] += ",ray"
    if not options.wandb:
        envs.pop("WANDB_API_KEY", None)
    changed = {**built, "resources": resources, "num_nodes": nodes, "envs": envs}
    return _finish(changed, title, options, commit)


def _check_task_file(built: Mapping[str, Any], title: str) -> None:
    resources, envs = built["resources"], built["envs"]
    entries = resources.get("any_of") or [{}]
    complete = all({"infra", "accelerators"} <= entry.keys() for entry in entries)
    if (
        not complete
        or not {"disk_size", "memory"} <= resources.keys()
        or DEFAULT_VARIABLES.keys() - envs
    ):
        raise ConfigError(
            f"{title} is not a task file of skyfleet, whose resources and variables it lacks; use "
            "`sky launch` for it, or one of tasks/"
        )
    for name, value in envs.items():
        if value and name not in DEFAULT_VARIABLES and looks_secret(name):
            raise ConfigError(
                f"{title} holds a value of {name}; write `{name}: null` and export the value"
            )


def _check_config(envs: Mapping[str, str], root: Path) -> None:
    """Find the mistakes that would otherwise end the run after its machine is paid for."""
    name = envs["CONFIG"] or f"fleet_{envs['MODALITY']}"
    path = root / name
    config = load_config_file(path if path.is_file() else name, envs["OVERRIDES"].splitlines())
    reject_literal_secrets(config)


def is_task_file(tree: object) -> bool:
    return isinstance(tree, dict) and {"resources", "envs", "run"} <= tree.keys()


def _finish(built: dict[str, Any], title: str, options: LaunchOptions, commit: str) -> LaunchPlan:
    envs: dict[str, str | None] = {**built["envs"], **options.variables}
    modality = envs["MODALITY"] or ""
    if modality not in MODALITIES:
        raise ConfigError(f"--modality {modality} is unknown; use {', '.join(MODALITIES)}")
    name = check_run_name(options.run_name or generate_run_name(modality))
    envs |= {"RUN_NAME": name, "GIT_COMMIT": commit}
    resources = dict(built["resources"])
    if options.spot:
        resources["job_recovery"] = {"max_restarts_on_errors": MAX_RECOVERIES}
    clouds = [entry["infra"] for entry in resources["any_of"]]
    secret_names = SecretNames(
        required=tuple(key for key, value in envs.items() if value is None),
        optional=tuple(
            key for key, value in envs.items() if value == "" and key not in DEFAULT_VARIABLES
        ),
    )
    gpus = resources["any_of"][0]["accelerators"].replace("-SXM", "")
    where = f"{built['num_nodes']} x {gpus}" if built["num_nodes"] > 1 else gpus
    notes = [
        f"would launch {name}: {title} on {where}, the cheapest of {', '.join(clouds)}",
        f"disk {resources['disk_size']} GB, memory {resources['memory']} GB, commit {commit or '?'}",
        f"secrets: {', '.join(secret_names.required) or 'none'}; if they are set: "
        f"{', '.join(secret_names.optional)}",
    ]
    if built["num_nodes"] > 1 or not gpus.endswith(":1"):
        notes.append("this version trains on one GPU; only vLLM engines use the others")
    if not takes_itself_down(clouds):
        notes.append(f"{clouds[0]} machines stay up after the run: skyfleet runs stop {name}")
    task = {**built, "name": name, "resources": resources, "envs": envs}
    return LaunchPlan(
        run_name=name,
        modality=modality,
        text=render_task(task, f"{title} on {where}"),
        secret_names=secret_names,
        notes=tuple(notes),
    )


def _locate_config(name: str, root: Path) -> str:
    """The preset's name, or the file's path in the clone, which is what the machine gets."""
    path = Path(name).resolve()
    if name in preset_names() and not path.is_file():
        return name
    if not path.is_file():
        return name  # the loader says what is wrong
    if not path.is_relative_to(root.resolve()):
        raise ConfigError(
            f"{name} is outside of {root}, which is what the machine gets; move it there"
        )
    return path.relative_to(root.resolve()).as_posix()


def _find_modality(config: RunConfig) -> str:
    sources = " ".join(config.data.train_data)
    found = [name for name in ("tool_use", "computer_use") if f"{PREPARED}{name}/" in sources]
    return "both" if len(found) == 2 else found[0] if found else "tool_use"


def _reads_prepared(config: RunConfig) -> bool:
    return uses_fleet(config) and any(
        source.startswith(PREPARED) for source in config.data.train_data
    )


def _accepts_constraints(config: RunConfig) -> bool:
    """vLLM pins the torch it was built with; MLflow and trackio need older packages."""
    return config.generator.backend != "vllm" and not set(UNCONSTRAINED) & set(
        config.trainer.logger
    )


def _choose_extras(config: RunConfig, *, wandb: bool, nodes: int) -> str:
    trainer = config.trainer
    extras = ["train", "s3", "slack"]  # Slack's client is small, and its token decides at the start
    extras += [name for name in ("tensorboard", *UNCONSTRAINED) if name in trainer.logger]
    if trainer.prometheus.port is not None:
        extras.append("prometheus")
    if trainer.tracing:
        extras.append("otel")
    if wandb:
        extras.append("wandb")
    if config.generator.backend == "vllm":
        extras.append("vllm")
    if config.environment.env_class in ("mcp", "openenv"):
        extras.append(config.environment.env_class)
    if nodes > 1:
        extras.append("ray")
    return ",".join(extras)
