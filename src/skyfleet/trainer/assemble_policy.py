"""The policy: weights, words and engine, from configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from skyfleet.chat.custom_templates import read_template
from skyfleet.chat.renderer import Renderer
from skyfleet.chat.renderers import make_renderer
from skyfleet.config.generator import Generator as GeneratorConfig
from skyfleet.config.generator import SamplingParams as SamplingConfig
from skyfleet.config.root import RunConfig
from skyfleet.engines.cuda.engine import CudaEngine
from skyfleet.engines.embedded import EmbeddedEngine
from skyfleet.engines.engine import Engine
from skyfleet.engines.sampling import SamplingParams
from skyfleet.envs.env import EnvFactory, Opening
from skyfleet.errors import ConfigError
from skyfleet.models.decoder import Decoder
from skyfleet.models.loading import Loaded, load_model
from skyfleet.rollouts.conversation import Policy, TokenConversation
from skyfleet.tasks.task import Task
from skyfleet.trainer.limits import limits_of
from skyfleet.trainer.scratch import make_policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Speaker:
    """Everything it takes to speak as the policy."""

    loaded: Loaded
    decoder: Decoder
    renderer: Renderer
    engine: Engine

    def policy(self, sampling: SamplingParams) -> Policy:
        sampling = replace(sampling, stop_token_ids=self.renderer.stop_token_ids)

        def start(task: Task, opening: Opening, session: str) -> TokenConversation:
            return TokenConversation(
                opening,
                engine=self.engine,
                renderer=self.renderer,
                sampling=sampling,
                session=session,
            )

        return start


async def assemble_speaker(
    config: RunConfig,
    train_tasks: Sequence[Task],
    open_env: EnvFactory,
    *,
    policy_folder: Path | None = None,
) -> Speaker:
    """`train_tasks` only matter to a policy that is made from scratch for them."""
    loaded = await _load(config, train_tasks, open_env, policy_folder)
    longest = longest_episode(config)
    decoder = Decoder(loaded.module, max_positions=longest)
    renderer = _renderer(config.generator, loaded)
    engine = _engine(config.generator, decoder, renderer, capacity=longest)
    return Speaker(loaded=loaded, decoder=decoder, renderer=renderer, engine=engine)


def sampling_of(section: SamplingConfig, *, seed: int) -> SamplingParams:
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


def _renderer(generator: GeneratorConfig, loaded: Loaded) -> Renderer:
    template = generator.chat_template
    return make_renderer(
        loaded.tokenizer,
        chat_template=read_template(template.source, template.name_or_path),
        chat_template_kwargs=generator.chat_template_kwargs,
        tool_call_parser=generator.tool_call_parser,
        close_turns=generator.append_eos_token_after_stop_str_in_multi_turn,
    )


def _engine(
    generator: GeneratorConfig, decoder: Decoder, renderer: Renderer, *, capacity: int
) -> Engine:
    """The embedded engine, as the device wants it."""
    if decoder.device.type != "cuda":
        return EmbeddedEngine(
            decoder,
            decode_text=renderer.text,
            max_num_seqs=generator.max_num_seqs,
            capacity=capacity,
            max_num_batched_tokens=generator.max_num_batched_tokens,
        )
    free_bytes, _ = torch.cuda.mem_get_info(decoder.device)
    return CudaEngine(
        decoder,
        decode_text=renderer.text,
        max_num_seqs=generator.max_num_seqs,
        capacity=capacity,
        max_num_batched_tokens=generator.max_num_batched_tokens,
        memory_bytes=int(free_bytes * generator.gpu_memory_utilization),
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
            train_tasks, open_env, limits_of(config), overrides, seed=config.trainer.seed
        )
        loaded.module.to(device=device, dtype=dtype)
        return loaded
    # A saved policy already has its dimensions.
    return load_model(path, dtype=dtype, device=device, config_kwargs={} if folder else overrides)


def _device(name: str) -> torch.device:
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ConfigError("trainer.device='cuda' and torch sees no CUDA device; set it to cpu")
    return torch.device("cuda" if name != "cpu" and available else "cpu")
