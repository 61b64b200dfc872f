"""Load the policy model, or build the tiny one for the run's own tasks."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from skyfleet.chat.lenient_renderer import LenientRenderer
from skyfleet.chat.renderer import Renderer
from skyfleet.chat.renderers import make_renderer
from skyfleet.chat.template import load_template
from skyfleet.config.generator import Generator as GeneratorConfig
from skyfleet.config.root import RunConfig
from skyfleet.envs.env import EnvFactory
from skyfleet.errors import ConfigError
from skyfleet.learner.policy_model import PolicyModel, choose_device, choose_dtype, rope_overrides
from skyfleet.models.hf_decoder import make_decoder
from skyfleet.models.loading import LoadedModel, load_model
from skyfleet.models.tiny import DIMENSIONS, build_tiny, train_tokenizer
from skyfleet.rollouts.episode import Limits, collect
from skyfleet.rollouts.scripted_agents import reference_policy
from skyfleet.tasks.task import Task
from skyfleet.trainer.limits import build_limits

_VOCABULARY_TASKS = 500
"""Sampled tasks whose texts train the tokenizer."""


async def build_tiny_policy(
    tasks: Sequence[Task],
    open_env: EnvFactory,
    limits: Limits,
    overrides: Mapping[str, Any],
    *,
    seed: int,
) -> LoadedModel:
    """Train the tokenizer on the tasks' reference solutions; the weights are random."""
    by_bytes = train_tokenizer([], vocab_size=0)
    renderer = make_renderer(by_bytes)
    # Every byte is a token here, so the limit in tokens does not apply yet.
    unlimited = replace(limits, max_input_length=sys.maxsize)
    # Not `collect_demonstrations`: a solution that does not pass has usable text too.
    groups = await collect(
        Random(seed).sample(list(tasks), min(len(tasks), _VOCABULARY_TASKS)),
        open_env,
        reference_policy(renderer),
        unlimited,
        n_samples=1,
        max_concurrent=64,
    )
    attempts = [attempt for group in groups for attempt in group.trajectories]
    texts = [renderer.text(t.token_ids) for attempt in attempts for t in attempt.transcripts]
    vocab_size = int(overrides.get("vocab_size", DIMENSIONS["vocab_size"]))
    tokenizer = train_tokenizer(texts, vocab_size=vocab_size)
    return LoadedModel(module=build_tiny(tokenizer, overrides, seed=seed), tokenizer=tokenizer)


async def load_policy_model(
    config: RunConfig,
    train_tasks: Sequence[Task],
    open_env: EnvFactory,
    *,
    policy_folder: Path | None = None,
    model: LoadedModel | None = None,
) -> PolicyModel:
    """Load `policy_folder`, or take `model`, or load the configured path.

    `train_tasks` and `open_env` are only used to build the tiny model.
    """
    if model is not None and policy_folder is None:
        loaded = model
    else:
        loaded = await _load(config, train_tasks, open_env, policy_folder)
    return PolicyModel(
        loaded=loaded,
        decoder=make_decoder(loaded.module, max_positions=config.max_episode_tokens),
        renderer=build_renderer(config.generator, loaded.tokenizer),
    )


def build_renderer(generator: GeneratorConfig, tokenizer: Any) -> Renderer:
    template = generator.chat_template
    renderer = make_renderer(
        tokenizer,
        chat_template=load_template(template.source, template.name_or_path),
        chat_template_kwargs=generator.chat_template_kwargs,
        tool_call_parser=generator.tool_call_parser,
        close_turns=generator.append_eos_token_after_stop_str_in_multi_turn,
    )
    if generator.tool_call_parsing == "strict":
        return renderer
    return LenientRenderer(renderer, log=generator.log_tool_call_repairs)


async def _load(
    config: RunConfig, train_tasks: Sequence[Task], open_env: EnvFactory, folder: Path | None
) -> LoadedModel:
    path = str(folder) if folder else config.trainer.policy.model.path
    device = choose_device(config.trainer.device)
    dtype = choose_dtype(config.trainer.bf16, device)
    overrides = config.trainer.policy.model_config_kwargs
    if path == "tiny":
        if not train_tasks:
            raise ConfigError(
                "trainer.policy.model.path='tiny' builds a model for the run's own tasks: "
                "data.train_data is empty"
            )
        loaded = await build_tiny_policy(
            train_tasks, open_env, build_limits(config), overrides, seed=config.trainer.seed
        )
        loaded.module.to(device=device, dtype=dtype)
        return loaded
    # A saved policy has its dimensions in its own config.
    config_kwargs = rope_overrides(config) | ({} if folder else overrides)
    loaded = load_model(
        path,
        dtype=dtype,
        device=device,
        config_kwargs=config_kwargs,
        trust_remote_code=config.trainer.policy.model.trust_remote_code,
    )
    if folder:
        _forget_loading(loaded.tokenizer, folder)
    return loaded


def _forget_loading(tokenizer: Any, folder: Path) -> None:
    """Drop what transformers records about loading, so that a resumed run saves the same files."""
    saved = json.loads((folder / "tokenizer_config.json").read_text())
    for name in ("is_local", "local_files_only"):
        if name in saved:
            tokenizer.init_kwargs[name] = saved[name]
        else:
            tokenizer.init_kwargs.pop(name, None)
