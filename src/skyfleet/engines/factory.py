"""Build engines from the configuration: embedded, vLLM in this process, or remote servers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from skyfleet.chat.renderer import Renderer
from skyfleet.config.generator import SamplingParams as SamplingConfig
from skyfleet.config.redaction import reject_missing_secrets
from skyfleet.config.root import RunConfig
from skyfleet.config.validation import uses_native_tool_calling
from skyfleet.engines.chat_engine import ChatEngine, TrainedChat
from skyfleet.engines.cuda.engine import CudaEngine
from skyfleet.engines.embedded import EmbeddedEngine
from skyfleet.engines.engine import Engine
from skyfleet.engines.openai_chat import OpenAIChatEngine
from skyfleet.engines.openai_completion import MAX_VOCAB_SIZE
from skyfleet.engines.openai_engine import OpenAIEngine
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.engines.servers import Server, discover_servers, read_api_key
from skyfleet.engines.vllm_controller import VllmSettings
from skyfleet.engines.vllm_routes import VllmRoutes
from skyfleet.engines.vllm_server import open_vllm_server, reject_sleeping_server
from skyfleet.errors import ConfigError
from skyfleet.models.decoder import Decoder
from skyfleet.models.weights import read_model_sizes

MAX_CONNECTIONS = 512
"""To all servers together; a process may have about a thousand open files."""

RETRIES_SINGLE, RETRIES_POOLED = 8, 3
"""A pooled server is given up after seconds, not a minute: the others take over."""

TIMEOUT_SINGLE_SECONDS, TIMEOUT_POOLED_SHARE = 900.0, 0.25
"""Request timeout of a single server; of a pooled one, as a share of the trajectory timeout."""


def build_embedded_engine(
    config: RunConfig,
    decoder: Decoder,
    renderer: Renderer,
    *,
    learner_bytes: int = 0,
    memory_plan: str = "",
) -> Engine:
    """The CUDA engine for supported architectures on a GPU, otherwise the portable one.

    The KV cache of the CUDA engine leaves `learner_bytes` free.
    """
    generator, capacity = config.generator, config.max_episode_tokens
    rules = config.trainer.fully_async
    keeps_cache = rules.enabled and not rules.clear_kv_cache_on_weight_sync
    if decoder.device.type != "cuda" or not decoder.is_fused:
        return EmbeddedEngine(
            decoder,
            decode_text=renderer.text,
            max_num_seqs=generator.max_num_seqs,
            capacity=capacity,
            max_num_batched_tokens=generator.max_num_batched_tokens,
            memory_plan=memory_plan,
            keeps_cache=keeps_cache,
        )
    free_bytes, _ = torch.cuda.mem_get_info(decoder.device)
    return CudaEngine(
        decoder,
        decode_text=renderer.text,
        max_num_seqs=generator.max_num_seqs,
        capacity=capacity,
        max_num_batched_tokens=generator.max_num_batched_tokens,
        memory_bytes=max(
            0, min(int(free_bytes * generator.gpu_memory_utilization), free_bytes - learner_bytes)
        ),
        memory_plan=memory_plan,
        keeps_cache=keeps_cache,
    )


async def start_vllm(
    config: RunConfig, path: str, renderer: Renderer, opened: AsyncExitStack, *, learns: bool
) -> list[Engine]:
    """Start `num_inference_engines` engines, closed with `opened`. `learns`: a learner may share the GPU."""
    from skyfleet.engines.vllm_engine import open_vllm_engine

    check_gpus(config, learns=learns)
    settings = vllm_settings(config, learns=learns)
    engines: list[Engine] = []
    for _ in range(config.generator.num_inference_engines):
        engine = await open_vllm_engine(path, settings, decode_text=renderer.text)
        opened.push_async_callback(engine.close)
        engines.append(engine)
    return engines


def check_gpus(config: RunConfig, *, learns: bool) -> None:
    """Raise ConfigError if the configuration needs more than one GPU."""
    generator = config.generator
    engines, tensor = (
        generator.num_inference_engines,
        generator.inference_engine_tensor_parallel_size,
    )
    if torch.cuda.is_available() and (engines > 1 or (learns and tensor > 1)):
        raise ConfigError(
            f"generator.num_inference_engines={engines} with inference_engine_tensor_parallel_size="
            f"{tensor}: training uses one vLLM engine on one GPU; set both to 1, evaluate with "
            "one vLLM engine over several GPUs, or start vLLM servers and set "
            "generator.run_engines_locally=false"
        )


def vllm_settings(config: RunConfig, *, learns: bool) -> VllmSettings:
    generator = config.generator
    is_colocated = learns and config.trainer.placement.colocate_all and torch.cuda.is_available()
    return VllmSettings(
        max_model_len=config.max_episode_tokens,
        model_dtype=generator.model_dtype,
        tensor_parallel_size=generator.inference_engine_tensor_parallel_size,
        gpu_memory_utilization=generator.gpu_memory_utilization,
        enforce_eager=generator.enforce_eager,
        enable_prefix_caching=generator.enable_prefix_caching,
        enable_chunked_prefill=generator.enable_chunked_prefill,
        max_num_batched_tokens=generator.max_num_batched_tokens,
        max_num_seqs=generator.max_num_seqs,
        # Weights are pushed after every sleep, so the old ones need not be kept.
        sleep_level=2 if is_colocated else 0,
        seed=config.trainer.seed,
        trust_remote_code=config.trainer.policy.model.trust_remote_code,
        engine_init_kwargs=generator.engine_init_kwargs,
    )


async def connect_servers(
    config: RunConfig, opened: AsyncExitStack, *, vocab_size: int
) -> tuple[list[Engine], list[ChatEngine]]:
    """For each server an engine for tokens and an engine for chat messages with tools.

    `vocab_size` is that of the served model: another token id is an EngineError.
    """
    _reject_ignored_keys(config)
    reject_missing_secrets("generator", config.generator)
    servers, common = await _discover(config)
    engines: list[Engine] = []
    chats: list[ChatEngine] = []
    for server in servers:
        if config.generator.backend == "vllm":
            async with _routes(server, common["api_key"]) as routes:
                seconds = config.generator.probe_timeout_seconds
                await reject_sleeping_server(routes, timeout_seconds=seconds)
        named: dict[str, Any] = {
            "model": server.model,
            "model_names": server.model_names,
            "vocab_size": vocab_size,
        }
        engine = OpenAIEngine(server.url, max_model_len=server.max_model_len, **named, **common)
        engines.append(await opened.enter_async_context(engine))
        chat = OpenAIChatEngine(
            server.url,
            chat_template_kwargs=config.generator.chat_template_kwargs,
            **named,
            **common,
        )
        chats.append(await opened.enter_async_context(chat))
        engine.policy_version = chat.policy_version = server.policy_version or 0
    return engines, chats


async def connect_vllm_servers(
    config: RunConfig, module: nn.Module, opened: AsyncExitStack
) -> tuple[list[Engine], list[ChatEngine]]:
    """Trainable servers: each accepts the weights of `module`, or a ConfigError says why not.

    With native tool calling each has a chat engine too, unless this process has to render.
    """
    servers, common = await _discover(config)
    sizes = read_model_sizes(module.config)
    engines: list[Engine] = []
    chats: list[ChatEngine] = []
    for server in servers:
        named: dict[str, Any] = {
            "model": server.model,
            "model_names": server.model_names,
            "vocab_size": sizes.get("vocab_size", MAX_VOCAB_SIZE),
        }
        inner = OpenAIEngine(server.url, max_model_len=server.max_model_len, **named, **common)
        routes = _routes(server, common["api_key"])
        await opened.enter_async_context(inner)
        await opened.enter_async_context(routes)
        engine = await open_vllm_server(
            inner,
            routes,
            may_sleep=config.trainer.placement.colocate_all,
            sizes=sizes,
            timeout_seconds=config.generator.probe_timeout_seconds,
        )
        engines.append(engine)
        if _servers_render(config):
            chat = OpenAIChatEngine(
                server.url,
                chat_template_kwargs=config.generator.chat_template_kwargs,
                **named,
                **common,
            )
            chats.append(TrainedChat(await opened.enter_async_context(chat), engine))
    return engines, chats


def _servers_render(config: RunConfig) -> bool:
    """Whether trained servers render chats and parse calls.

    They cannot if this run names a parser or a template of its own, or continues turns that a weight
    update aborted, which only tokens can be.
    """
    generator = config.generator
    own = (generator.tool_call_parser, generator.chat_template.name_or_path)
    if not uses_native_tool_calling(config) or config.trainer.fully_async.enabled:
        return False
    return own == (None, None)


def _routes(server: Server, api_key: str | None) -> VllmRoutes:
    return VllmRoutes(server.url.removesuffix("/v1"), api_key=api_key)


async def _discover(config: RunConfig) -> tuple[list[Server], dict[str, Any]]:
    """The servers, and the client settings they share."""
    generator, api_key = config.generator, read_api_key()
    servers = await discover_servers(
        generator.remote_inference_engine_urls,
        model=generator.served_model_name,
        api_key=api_key,
        longest=config.max_episode_tokens,
        timeout_seconds=generator.probe_timeout_seconds,
    )
    alone, share = len(servers) == 1, generator.trajectory_timeout_seconds * TIMEOUT_POOLED_SHARE
    return servers, {
        "api_key": api_key,
        "max_concurrent": max(1, min(generator.max_num_seqs, MAX_CONNECTIONS // len(servers))),
        "tries": RETRIES_SINGLE if alone else RETRIES_POOLED,
        "timeout_seconds": TIMEOUT_SINGLE_SECONDS if alone or share == 0 else share,
    }


def _reject_ignored_keys(config: RunConfig) -> None:
    """Raise ConfigError for renderer settings that the server, which renders, would ignore."""
    generator, environments = config.generator, config.environment.skyrl_gym.tau_bench
    if not (generator.use_native_tool_calling and environments.use_native_tool_calling):
        return
    for key, value in (
        ("tool_call_parser", generator.tool_call_parser),
        ("chat_template.name_or_path", generator.chat_template.name_or_path),
    ):
        if value is not None:
            raise ConfigError(
                f"generator.{key}={value!r} with generator.use_native_tool_calling=true and "
                f"generator.backend={generator.backend!r}: the server renders chats and parses calls; "
                f"set it when starting the server, and set generator.{key}=null here"
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


EngineOffload = Callable[[], AbstractAsyncContextManager[None]]


def build_engine_offload(config: RunConfig, engine: Engine) -> EngineOffload:
    """A context for the learner's update: engines that share its memory sleep inside it."""
    if config.trainer.fully_async.enabled:
        return nullcontext  # it samples during the update, with weights of its own
    if isinstance(engine, EmbeddedEngine):
        # New weights drop its KV cache anyway; the learner can use that memory.
        return partial(_asleep, engine)
    if config.generator.backend == "embedded" or not config.trainer.placement.colocate_all:
        return nullcontext
    return partial(_asleep, engine)


@asynccontextmanager
async def _asleep(engine: Engine) -> AsyncIterator[None]:
    await engine.sleep()
    yield
    await engine.wake()
