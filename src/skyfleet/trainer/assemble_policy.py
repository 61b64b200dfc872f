"""The policy: weights, words and engine, from configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from skyfleet.chat.custom_templates import read_template
from skyfleet.chat.renderer import Renderer
from skyfleet.chat.renderers import make_renderer
from skyfleet.config.generator import Generator as GeneratorConfig
from skyfleet.config.generator import SamplingParams as SamplingConfig
from skyfleet.config.root import RunConfig
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs.env import EnvFactory
from skyfleet.errors import ConfigError
from skyfleet.models.decoder import Decoder
from skyfleet.models.hf_decoder import make_decoder
from skyfleet.models.loading import Loaded, load_model
from skyfleet.tasks.task import Task
from skyfleet.trainer.limits import build_limits
from skyfleet.trainer.tiny_model import make_policy


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyModel:
    """The policy in this process: its weights, and the words they were made for."""

    loaded: Loaded
    decoder: Decoder
    renderer: Renderer


async def load_policy_model(
    config: RunConfig,
    train_tasks: Sequence[Task],
    open_env: EnvFactory,
    *,
    policy_folder: Path | None = None,
) -> PolicyModel:
    """`train_tasks` only matter to a policy that is made from scratch for them."""
    loaded = await _load(config, train_tasks, open_env, policy_folder)
    return PolicyModel(
        loaded=loaded,
        decoder=make_decoder(loaded.module, max_positions=longest_episode(config)),
        renderer=build_renderer(config.generator, loaded.tokenizer),
    )


def build_sampling_params(section: SamplingConfig, *, seed: int) -> SamplingParams:
    return SamplingParams(
        max_generate_length=section.max_generate_length,
        temperature=section.temperature,
        top_p=section.top_p,
        top_k=section.top_k,
        min_p=section.min_p,
        stop=tuple(section.stop),
        seed=seed,
    )


def longest_episode(config: RunConfig) -> int:
    """Tokens: a prompt at its limit, and the turn that may still follow it."""
    generator = config.generator
    turn = max(
        generator.sampling_params.max_generate_length,
        generator.eval_sampling_params.max_generate_length,
    )
    return generator.max_input_length + turn


def build_renderer(generator: GeneratorConfig, tokenizer: Any) -> Renderer:
    template = generator.chat_template
    return make_renderer(
        tokenizer,
        chat_template=read_template(template.source, template.name_or_path),
        chat_template_kwargs=generator.chat_template_kwargs,
        tool_call_parser=generator.tool_call_parser,
        close_turns=generator.append_eos_token_after_stop_str_in_multi_turn,
    )


async def _load(
    config: RunConfig, train_tasks: Sequence[Task], open_env: EnvFactory, folder: Path | None
) -> Loaded:
    path = str(folder) if folder else config.trainer.policy.model.path
    device = _device(config.trainer.device)
    bf16 = config.trainer.bf16
    dtype = (
        torch.bfloat16
        if bf16 is True or (bf16 == "auto" and device.type == "cuda")
        else torch.float32
    )
    overrides = config.trainer.policy.model_config_kwargs
    if path == "tiny":
        if not train_tasks:
            raise ConfigError(
                "trainer.policy.model.path='tiny' makes a model for the run's own tasks: "
                "data.train_data is empty"
            )
        loaded = await make_policy(
            train_tasks, open_env, build_limits(config), overrides, seed=config.trainer.seed
        )
        loaded.module.to(device=device, dtype=dtype)
        return loaded
    # A saved policy already has its dimensions.
    changes = rope_changes(config) | ({} if folder else overrides)
    return load_model(path, dtype=dtype, device=device, config_kwargs=changes)


def rope_changes(config: RunConfig) -> dict[str, Any]:
    """What `trainer.rope_scaling` changes in the configuration of whatever reads an episode."""
    scaling = config.trainer.rope_scaling
    return {"rope_parameters": scaling.model_dump()} if scaling else {}


def _device(name: str) -> torch.device:
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ConfigError("trainer.device='cuda' and torch sees no CUDA device; set it to cpu")
    return torch.device("cuda" if name != "cpu" and available else "cpu")
