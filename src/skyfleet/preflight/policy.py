"""Checks of the policy: it loads, samples a token, and a checkpoint of it is written and read."""

from __future__ import annotations

import gc
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from skyfleet.chat.message import Message
from skyfleet.envs.event_loop import run_loop
from skyfleet.envs.registry import env_factory
from skyfleet.errors import EngineError, require_torch
from skyfleet.preflight.check import CheckFailedError, NotCheckedError, Subject, check
from skyfleet.preflight.data import load_tasks_once
from skyfleet.storage.local import find_existing_folder
from skyfleet.tasks.task import Task
from skyfleet.trainer.available_memory import format_gib

_SECONDS = 900
"""Loading a large model, or starting vLLM, takes minutes."""
_TINY_TASKS = 32
"""Enough to build the tiny model, whose vocabulary comes from tasks."""


@check("token sampled", "policy", timeout_seconds=_SECONDS, is_exclusive=True)
def check_sampling(subject: Subject) -> str:
    """Load the policy into its engine, or connect to its servers, and sample one token."""
    if not subject.config.generator.is_remote:
        _check_device(subject)
    start = perf_counter()
    n_prompt = run_loop(_sample(subject, _choose_tasks(subject)))
    _release()
    return f"after a prompt of {n_prompt} tokens, {perf_counter() - start:.1f} s with loading"


async def _sample(subject: Subject, tasks: list[Task]) -> int:
    from skyfleet.engines.factory import build_sampling_params
    from skyfleet.trainer.policy_client import open_inference_client

    config = subject.config
    async with open_inference_client(
        config, None, tasks=tasks, open_env=env_factory(config)
    ) as client:
        sampling = build_sampling_params(config.generator.sampling_params, seed=config.trainer.seed)
        prompt = client.renderer.render_prompt([Message(role="user", content="Say yes.")], ())
        try:
            completion = await client.engine.generate(
                prompt, replace(sampling, max_generate_length=1), session="preflight"
            )
        except EngineError as error:
            raise CheckFailedError(f"{error}; check the engine's server and its log") from None
        await client.engine.release("preflight")
        if not completion.token_ids:
            raise CheckFailedError(
                "the engine sampled no token; check that its server serves the configured model"
            )
    return len(prompt)


@check("checkpoint written and read", "policy", timeout_seconds=_SECONDS, is_exclusive=True)
def check_checkpoint(subject: Subject) -> str:
    """Save the policy and its optimizer beside the run's checkpoints, verify and load it, remove it."""
    _check_device(subject)
    found = run_loop(_write_and_read(subject, _choose_tasks(subject)))
    _release()
    return found


async def _write_and_read(subject: Subject, tasks: list[Task]) -> str:
    from skyfleet.checkpoints.resume import find_verified_checkpoint, load_checkpoint
    from skyfleet.checkpoints.saving import save_checkpoint
    from skyfleet.learner.factory import build_learner
    from skyfleet.trainer.load_policy import load_policy_model

    config = subject.config
    root = find_existing_folder(Path(config.trainer.ckpt_path))
    policy_model = await load_policy_model(config, tasks, env_factory(config))
    learner = build_learner(config, policy_model, lambda: Path(), total_steps=1)
    try:
        scratch = TemporaryDirectory(prefix=".preflight-", dir=root)
    except OSError:
        raise NotCheckedError(
            f"trainer.ckpt_path={config.trainer.ckpt_path} cannot be written; see the run folders"
        ) from None
    with scratch as folder:
        start = perf_counter()
        saved = save_checkpoint(Path(folder), 0, {"policy": learner})
        written = perf_counter()
        verified = find_verified_checkpoint(Path(folder), "latest", strict=True)
        if verified is None:
            raise CheckFailedError(
                f"{root}: the checkpoint was written and is not found again; use another disk"
            )
        load_checkpoint(verified, {"policy": learner})
        size = sum(record.size_bytes for record in saved.manifest.files.values())
        return (
            f"{format_gib(size)}, written in {written - start:.1f} s and read in "
            f"{perf_counter() - written:.1f} s"
        )


def _choose_tasks(subject: Subject) -> list[Task]:
    """Tasks for the tiny model, which is built from them; any other model needs none."""
    if subject.config.trainer.policy.model.path != "tiny":
        return []
    return load_tasks_once(subject)[:_TINY_TASKS]


def _check_device(subject: Subject) -> None:
    require_torch()
    import torch

    if subject.config.trainer.device == "cuda" and not torch.cuda.is_available():
        raise NotCheckedError("trainer.device=cuda, and there is no GPU; see the GPU's row")


def _release() -> None:
    """Free the device for the next check."""
    import torch

    gc.collect()
    with suppress(RuntimeError):
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
