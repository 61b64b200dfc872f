"""Checks of this machine: versions, GPUs and their driver, memory, disk."""

from __future__ import annotations

import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from skyfleet.config.extras import list_extras
from skyfleet.config.root import RunConfig
from skyfleet.errors import require_torch
from skyfleet.preflight.check import CheckFailedError, NotCheckedError, Subject, check
from skyfleet.preflight.data import load_tasks_once
from skyfleet.storage.local import find_existing_folder
from skyfleet.tracking.prometheus_tracker import check_port
from skyfleet.trainer.available_memory import format_gib
from skyfleet.trainer.tasks import build_schedule

if TYPE_CHECKING:
    from skyfleet.models.shape import ModelShape

_SMI = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
_SMI_SECONDS = 30


@check("versions", "machine")
def check_versions(subject: Subject) -> str:
    """Python and every package that this configuration needs, against skyfleet's own requirements."""
    try:
        own = distribution("skyfleet")
    except PackageNotFoundError:
        raise NotCheckedError(
            "skyfleet runs from a source tree that is not installed; pip install -e . in it"
        ) from None
    wanted = SpecifierSet(own.metadata["Requires-Python"] or "")
    problems = []
    if platform.python_version() not in wanted:
        problems.append(f"Python {platform.python_version()} is not {wanted}; use another one")
    extras = ["", *list_extras(subject.config)]
    for text in own.requires or ():
        requirement = Requirement(text)
        extra = next((one for one in extras if _applies(requirement, one)), None)
        if extra is not None and (problem := _find_mismatch(requirement, extra)):
            problems.append(problem)
    if problems:
        raise CheckFailedError("\n".join(problems))
    return f"Python {platform.python_version()}, skyfleet {own.version}, {_describe_torch()}"


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _find_mismatch(requirement: Requirement, extra: str) -> str | None:
    remedy = f"pip install -c constraints.txt -e '.{f'[{extra}]' if extra else ''}'"
    try:
        found = version(requirement.name)
    except PackageNotFoundError:
        return f"{requirement.name} is not installed; {remedy}"
    if requirement.specifier.contains(found, prereleases=True):
        return None
    return f"{requirement.name} {found} is not {requirement.specifier}; {remedy}"


def _describe_torch() -> str:
    try:
        return f"torch {version('torch')}"
    except PackageNotFoundError:
        return "no torch"


@check("GPU and driver", "machine", timeout_seconds=120)
def check_gpu(subject: Subject) -> str | None:
    """Multiply on the GPU, which needs a driver that fits this build of torch."""
    config = subject.config
    starts_vllm = config.generator.backend == "vllm" and not config.generator.is_remote
    if config.trainer.device == "cpu" and not starts_vllm:
        return None
    require_torch()
    import torch

    if not torch.cuda.is_available():
        if config.trainer.device == "auto" and not starts_vllm:
            return "none: trainer.device=auto trains on the CPU"
        raise CheckFailedError(
            f"trainer.device={config.trainer.device} and generator.backend="
            f"{config.generator.backend} need a GPU, and torch {torch.__version__} finds none here "
            f"({_describe_driver()}); use a machine with one, install a driver that fits, or set "
            "trainer.device=cpu"
        )
    if starts_vllm:
        from skyfleet.engines.factory import check_gpus

        check_gpus(config, learns=True)
    try:
        ones = torch.ones(256, 256, device="cuda", dtype=torch.bfloat16)
        total = float((ones @ ones).sum().float())
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise CheckFailedError(
            f"the GPU does not compute: {reason}; {_describe_driver()}, torch was built for CUDA "
            f"{torch.version.cuda}: install a driver that fits"
        ) from None
    if total != 256.0**3:
        raise CheckFailedError(
            f"the GPU computes wrongly: a product of ones gives {total}; use another machine"
        )
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, {_describe_driver()}"


def _describe_driver() -> str:
    try:
        found = subprocess.run(
            _SMI, capture_output=True, text=True, timeout=_SMI_SECONDS, check=True
        )
    except FileNotFoundError:
        return "nvidia-smi is not installed"
    except (subprocess.SubprocessError, OSError) as error:
        return f"nvidia-smi failed: {error}"
    return f"driver {found.stdout.splitlines()[0].rpartition(', ')[2]}"


@check("trainer.prometheus.port", "machine")
def check_prometheus_port(subject: Subject) -> str | None:
    """Listen on it for a moment."""
    section = subject.config.trainer.prometheus
    if not section.port:  # none, or any that is free
        return None
    check_port(section.host, section.port)
    return f"{section.host}:{section.port} is free"


@check("memory", "machine", timeout_seconds=120, is_exclusive=True)
def check_memory(subject: Subject) -> str:
    """The memory plan of the run against what there is."""
    require_torch()
    from skyfleet.trainer.fit_memory import fit_training

    fitted = fit_training(subject.config)
    if fitted.plan is None:
        raise NotCheckedError("the model's shape is unknown, or its device is not on this machine")
    return "; ".join(fitted.notes())


@check("disk", "machine", timeout_seconds=120)
def check_disk(subject: Subject) -> str:
    """Room for the checkpoints and exports that the run keeps, and for one that is being written."""
    require_torch()
    config = subject.config
    needed, n_kept, size = estimate_disk_bytes(subject)
    root = find_existing_folder(Path(config.trainer.ckpt_path))
    held = _measure(Path(config.trainer.ckpt_path))
    free = shutil.disk_usage(root).free
    what = f"{n_kept} checkpoints of {format_gib(size)}"
    if needed > free + held:
        raise CheckFailedError(
            f"trainer.ckpt_path={config.trainer.ckpt_path} needs {format_gib(needed)} for {what}, and "
            f"{root} has {format_gib(free)} free; free some space, set trainer.ckpt_path to a larger "
            "disk, or lower trainer.max_ckpts_to_keep"
        )
    return f"{format_gib(needed)} for {what}, {format_gib(free)} free"


def estimate_disk_bytes(subject: Subject) -> tuple[int, int, int]:
    """Bytes that the run writes and keeps, the number of checkpoints, and the size of one."""
    from skyfleet.learner.policy_model import rope_overrides
    from skyfleet.models.shape import read_model_shape

    config = subject.config
    trainer, policy = config.trainer, config.trainer.policy
    changes = {**rope_overrides(config), **policy.model_config_kwargs}
    shape = read_model_shape(policy.model.path, changes, lora=policy.model.lora)
    if shape is None:
        raise NotCheckedError("the model's shape is unknown; see the row of the model")
    itemsize = _read_itemsize(config)
    weights = shape.n_parameters * itemsize
    size = weights + _count_optimizer_bytes(shape, itemsize)
    if (path := trainer.critic.model.path) is not None:
        same = path == policy.model.path
        critic = shape if same else read_model_shape(path, {})
        if critic is not None:
            size += critic.n_parameters * (itemsize + (8 if itemsize == 4 else 12))
    n_saves, n_exports = _count_saves(subject)
    limit = trainer.count_kept_checkpoints(uploads=trainer.ckpt_bucket is not None)
    n_kept = n_saves if limit is None else min(n_saves, limit)
    return (n_kept + 1) * size + n_exports * weights, n_kept, size


def _count_optimizer_bytes(shape: ModelShape, itemsize: int) -> int:
    """Adam's two moments, and float32 copies of weights that are not; adapters beside merged weights."""
    if shape.n_adapter_parameters:
        return 12 * shape.n_adapter_parameters
    return shape.n_parameters * (8 if itemsize == 4 else 12)


def _read_itemsize(config: RunConfig) -> int:
    """Bytes per weight, on the device that the configuration names, even if it is not here."""
    import torch

    from skyfleet.learner.policy_model import choose_dtype

    trainer = config.trainer
    on_gpu = trainer.device == "cuda" or (trainer.device == "auto" and torch.cuda.is_available())
    return choose_dtype(trainer.bf16, torch.device("cuda" if on_gpu else "cpu")).itemsize


def _count_saves(subject: Subject) -> tuple[int, int]:
    """Checkpoints and exports of the whole run."""
    try:
        n_tasks = len(load_tasks_once(subject))
    except NotCheckedError:
        n_tasks = subject.config.trainer.train_batch_size
    schedule = build_schedule(subject.config, n_tasks=n_tasks)
    steps = range(schedule.total_steps + 1)
    return sum(map(schedule.saves_at, steps)) + 1, sum(map(schedule.exports_at, steps))


def _measure(folder: Path) -> int:
    """Bytes of a resumed run's checkpoints, which take no new space."""
    return sum(path.stat().st_size for path in folder.glob("global_step_*/**/*") if path.is_file())
