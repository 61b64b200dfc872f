"""Plan: from a configuration, or a task file, and the options of `skyfleet launch` to a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyfleet.checkpoints.bucket import BucketCheckpoints
from skyfleet.config.extras import list_extras
from skyfleet.config.loading import load_config_file, preset_names
from skyfleet.config.root import RunConfig
from skyfleet.errors import ConfigError, MissingExtraError
from skyfleet.launch.plan_checks import (
    find_modality,
    locate_dataset,
    reads_prepared,
    refuse_unreadable,
    reject_run_name,
    reject_secret_values,
)
from skyfleet.launch.resources import (
    Gpus,
    build_resources,
    check_disk_gb,
    check_gpu_memory,
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
    LaunchTask,
    build_task,
    check_run_name,
    generate_run_name,
    join_overrides,
    render_task,
)
from skyfleet.launch.variables import check_variables
from skyfleet.secret_names import looks_secret
from skyfleet.tracking.tracker import UNCONSTRAINED
from skyfleet.trainer.bucket_layout import locate_checkpoints

DEFAULT_GPUS = "H200:1"
OUTAGE_EXIT_CODE = 75
"""A managed job that ends with it, an outage that outlasted its own restarts, is started again."""


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
    has_aws_keys: bool = True
    """Of the environment that launches; without them the default buckets cannot be written to."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of this environment that hold where neither the task file nor `variables` says else."""
    resumes: bool = False
    """`run_name` is a run that was started before."""
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
    checkpoints: BucketCheckpoints | None
    """Where the run's checkpoints are, or will be."""
    gpus: Gpus
    """Of one machine."""
    num_nodes: int
    dataset: tuple[str, ...] = ()
    """The addresses in buckets that set-up reads."""
    problems: tuple[str, ...] = ()
    """What refuses the launch in this environment, one sentence each; a dry run shows them."""


def plan_launch(
    config_name: str,
    overrides: Sequence[str],
    options: LaunchOptions,
    *,
    root: Path,
    commit: str = "",
) -> LaunchPlan:
    """Plan a configuration: check everything that can be checked before anything is paid for."""
    reject_run_name([*overrides, *options.variables.get("OVERRIDES", "").splitlines()])
    if "CONFIG" in options.variables:
        raise ConfigError(
            f"--env CONFIG={options.variables['CONFIG']}: the configuration is the first argument of "
            "skyfleet launch"
        )
    path = _locate_config(config_name, root)
    config = load_config_file(config_name, overrides)
    reject_literal_secrets(config)
    modality = options.modality or find_modality(config)
    nodes = options.nodes or 1
    variables = {
        "MODALITY": modality,
        "CONFIG": path,
        "OVERRIDES": join_overrides(overrides),
        "LOGGER": ",".join(dict.fromkeys([*config.trainer.logger, "wandb"])),
        "DATASET": "fleet" if reads_prepared(config) else "",
        "EXTRAS": _choose_extras(config, wandb=options.wandb, nodes=nodes),
        **({} if _accepts_constraints(config) else {"CONSTRAINTS": ""}),
    }
    final = {**DEFAULT_VARIABLES, **variables, **_choose_buckets(config, options)}
    final |= options.variables
    uploads = bool(final["S3_CHECKPOINT_BUCKET"])
    check_variables(final, root)
    if options.variables.get("OVERRIDES"):
        _check_config(final, root)
    check_disk_gb(config, options.disk_gb)
    task = LaunchTask(
        resources=build_resources(
            choose_clouds(options.cloud, spot=options.spot, num_nodes=nodes),
            parse_gpus(options.gpus or DEFAULT_GPUS),
            spot=options.spot,
            disk_gb=options.disk_gb or estimate_disk_gb(config, uploads=uploads),
            memory_gb=options.memory_gb or estimate_memory_gb(config),
        ),
        secret_names=find_secret_names(config, wandb=options.wandb),
        variables={**variables, **_choose_buckets(config, options)},
        num_nodes=nodes,
    )
    return _finish(build_task(task), config_name, options, commit, config)


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
    reject_run_name([*overrides, *options.variables.get("OVERRIDES", "").splitlines()])
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
    check_variables({**envs, **options.variables}, root)
    config = _check_config({**envs, **options.variables}, root)
    check_disk_gb(config, options.disk_gb)
    envs |= _choose_buckets(config, options)
    if nodes > 1 and "ray" not in envs["EXTRAS"].split(","):
        envs["EXTRAS"] += ",ray"
    if not options.wandb:
        envs.pop("WANDB_API_KEY", None)
    changed = {**built, "resources": resources, "num_nodes": nodes, "envs": envs}
    return _finish(changed, title, options, commit, config)


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


def _choose_buckets(config: RunConfig, options: LaunchOptions) -> dict[str, str]:
    """The buckets of the configuration; else none where the defaults cannot be written to."""
    named = {
        "S3_CHECKPOINT_BUCKET": config.trainer.ckpt_bucket,
        "S3_TRAJECTORY_BUCKET": config.trainer.trajectory_bucket,
    }
    given = {name: bucket for name, bucket in named.items() if bucket is not None}
    given |= {name: options.variables[name] for name in named if name in options.variables}
    if options.has_aws_keys:
        return given
    if options.resumes and not given.get("S3_CHECKPOINT_BUCKET"):
        raise ConfigError(
            "--resume reads the run's checkpoints from S3, and there are no AWS keys here; export "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or set AWS_PROFILE"
        )
    # A bucket that was named may be one that the machine's own role can write to.
    return {**dict.fromkeys(named, ""), **given}


def _check_config(envs: Mapping[str, str], root: Path) -> RunConfig:
    """Find the mistakes that would otherwise end the run after its machine is paid for."""
    name = envs["CONFIG"] or f"fleet_{envs['MODALITY']}"
    path = root / name
    config = load_config_file(path if path.is_file() else name, envs["OVERRIDES"].splitlines())
    reject_literal_secrets(config)
    return config


def is_task_file(tree: object) -> bool:
    return isinstance(tree, dict) and {"resources", "envs", "run"} <= tree.keys()


def _finish(
    built: dict[str, Any], title: str, options: LaunchOptions, commit: str, config: RunConfig
) -> LaunchPlan:
    given = {
        name: value
        for name, value in options.environment.items()
        if built["envs"].get(name) == DEFAULT_VARIABLES[name] != value
        and name not in options.variables
    }
    envs: dict[str, str | None] = {**built["envs"], **given, **options.variables}
    reject_secret_values(envs)
    check_variables(given, Path())
    modality = envs["MODALITY"] or ""
    name = check_run_name(options.run_name or generate_run_name(modality))
    envs |= {"RUN_NAME": name, "GIT_COMMIT": commit}
    resources = dict(built["resources"])
    if options.spot:
        resources["job_recovery"] = {"recover_on_exit_codes": [OUTAGE_EXIT_CODE]}
    clouds = [entry["infra"] for entry in resources["any_of"]]
    secret_names = SecretNames(
        required=tuple(key for key, value in envs.items() if value is None),
        optional=tuple(
            key for key, value in envs.items() if value == "" and key not in DEFAULT_VARIABLES
        ),
    )
    gpus = resources["any_of"][0]["accelerators"].replace("-SXM", "")
    check_gpu_memory(config, parse_gpus(gpus))
    where = f"{built['num_nodes']} x {gpus}" if built["num_nodes"] > 1 else gpus
    notes = [
        f"would launch {name}: {title} on {where}, the cheapest of {', '.join(clouds)}",
        f"disk {resources['disk_size']} GB, memory {resources['memory']} GB, commit {commit or '?'}",
        f"secrets: {', '.join(secret_names.required) or 'none'}; if they are set: "
        f"{', '.join(secret_names.optional)}",
    ]
    notes += [f"{name}={value}, from this environment" for name, value in given.items()]
    if reads_prepared(config) and (own := find_modality(config)) != modality:
        notes.append(
            f"warning: {title} has the settings and data of {own}, and the run is one of {modality}; "
            f"fleet_{modality} is its configuration"
        )
    if not envs["S3_CHECKPOINT_BUCKET"]:
        notes.append("nothing is uploaded: checkpoints stay on the machine and are lost with it")
    if built["num_nodes"] > 1 or not gpus.endswith(":1"):
        notes.append("this version trains on one GPU; only vLLM engines use the others")
    if not takes_itself_down(clouds):
        notes.append(f"{clouds[0]} machines stay up after the run: skyfleet runs stop {name}")
    dataset = locate_dataset(envs, config)
    task = {**built, "name": name, "resources": resources, "envs": envs}
    return LaunchPlan(
        run_name=name,
        modality=modality,
        text=render_task(task, f"{title} on {where}"),
        secret_names=secret_names,
        notes=tuple(notes),
        checkpoints=_locate_checkpoints(config, name, envs["S3_CHECKPOINT_BUCKET"]),
        gpus=parse_gpus(gpus),
        num_nodes=built["num_nodes"],
        dataset=dataset,
        problems=() if options.has_aws_keys else refuse_unreadable(dataset),
    )


def _locate_checkpoints(
    config: RunConfig, run_name: str, bucket: str | None
) -> BucketCheckpoints | None:
    changes = {"run_name": run_name, "ckpt_bucket": bucket or None}
    trainer = config.trainer.model_copy(update=changes)
    return locate_checkpoints(config.model_copy(update={"trainer": trainer}))


def check_resumable(plan: LaunchPlan) -> str:
    """Say from where the run would go on; ConfigError if its bucket has no checkpoint of it."""
    if plan.checkpoints is None:
        raise ConfigError(f"--resume {plan.run_name}: no bucket has its checkpoints")
    try:
        step = plan.checkpoints.find_newest()
    except PermissionError as error:
        raise ConfigError(
            f"--resume {plan.run_name}: {error.filename}: {error.strerror}; use AWS keys that may read it"
        ) from None
    except (OSError, MissingExtraError) as error:
        return f"not checked whether {plan.run_name} has a checkpoint: {error}"
    if step is None:
        raise ConfigError(
            f"--resume {plan.run_name}: {plan.checkpoints.address} has no complete checkpoint; correct "
            "the name, or leave --resume out to start a new run"
        )
    return f"resumes from {plan.checkpoints.step_address(step)}"


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


def _accepts_constraints(config: RunConfig) -> bool:
    """vLLM pins the torch it was built with; MLflow and trackio need older packages."""
    return config.generator.backend != "vllm" and not set(UNCONSTRAINED) & set(
        config.trainer.logger
    )


def _choose_extras(config: RunConfig, *, wandb: bool, nodes: int) -> str:
    # Slack's client is small, and its token decides at the start.
    extras = ["train", "s3", "slack", *list_extras(config)]
    if wandb:
        extras.append("wandb")
    if nodes > 1:
        extras.append("ray")
    return ",".join(dict.fromkeys(extras))
