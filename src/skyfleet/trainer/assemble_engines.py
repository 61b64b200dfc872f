"""The engines themselves, from configuration: in this process, by vLLM, or on servers."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import torch
from torch import nn

from skyfleet.chat.renderer import Renderer
from skyfleet.config.root import RunConfig
from skyfleet.engines.chat_engine import ChatEngine
from skyfleet.engines.cuda.engine import CudaEngine
from skyfleet.engines.embedded import EmbeddedEngine
from skyfleet.engines.engine import Engine
from skyfleet.engines.openai_chat import OpenAIChatEngine
from skyfleet.engines.openai_engine import OpenAIEngine
from skyfleet.engines.servers import Server, find_servers, read_key
from skyfleet.engines.vllm_controller import VllmSettings
from skyfleet.engines.vllm_server import VllmRoutes, open_vllm_server, refuse_asleep
from skyfleet.errors import ConfigError
from skyfleet.models.decoder import Decoder
from skyfleet.models.weights import sizes_of
from skyfleet.trainer.assemble_policy import longest_episode

MOST_CONNECTIONS = 512
"""To all servers together; a process may hold about a thousand files open."""

TRIES_ALONE, TRIES_AMONG_OTHERS = 8, 3
"""A server that others can stand in for is given up after seconds, not a minute."""

HANGS_ALONE_SECONDS, HANGS_AMONG_OTHERS = 900.0, 0.25
"""When a request's server is taken to hang; among others, the share of its episode's time."""


def embedded_engine(config: RunConfig, decoder: Decoder, renderer: Renderer) -> Engine:
    """As the device and the architecture want it."""
    generator, capacity = config.generator, longest_episode(config)
    if decoder.device.type != "cuda" or not decoder.is_fused:
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


async def start_vllm(
    config: RunConfig, path: str, renderer: Renderer, opened: AsyncExitStack, *, learns: bool
) -> list[Engine]:
    """As many as are asked for, closed with `opened`. `learns`: a learner may share their GPU."""
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
    """ConfigError for more than the one GPU can do: engines are not placed on others yet."""
    generator = config.generator
    engines, tensor = (
        generator.num_inference_engines,
        generator.inference_engine_tensor_parallel_size,
    )
    if torch.cuda.is_available() and (engines > 1 or (learns and tensor > 1)):
        raise ConfigError(
            f"generator.num_inference_engines={engines} with inference_engine_tensor_parallel_size="
            f"{tensor}: here one vLLM speaks, on one GPU while it is trained; set both to 1, play "
            "one vLLM over several GPUs, or start vLLM as servers and set "
            "generator.run_engines_locally=false"
        )


def vllm_settings(config: RunConfig, *, learns: bool) -> VllmSettings:
    generator = config.generator
    shares = learns and config.trainer.placement.colocate_all and torch.cuda.is_available()
    return VllmSettings(
        max_model_len=longest_episode(config),
        model_dtype=generator.model_dtype,
        tensor_parallel_size=generator.inference_engine_tensor_parallel_size,
        gpu_memory_utilization=generator.gpu_memory_utilization,
        enforce_eager=generator.enforce_eager,
        enable_prefix_caching=generator.enable_prefix_caching,
        enable_chunked_prefill=generator.enable_chunked_prefill,
        max_num_batched_tokens=generator.max_num_batched_tokens,
        max_num_seqs=generator.max_num_seqs,
        # A sync follows every sleep, so the old weights need not be kept.
        sleep_level=2 if shares else 0,
        seed=config.trainer.seed,
        engine_init_kwargs=generator.engine_init_kwargs,
    )


async def reach_servers(
    config: RunConfig, opened: AsyncExitStack
) -> tuple[list[Engine], list[ChatEngine]]:
    """Each server's two sides: tokens in and out, and messages with tools."""
    _refuse_unheard(config)
    servers, common = await _found(config)
    engines: list[Engine] = []
    chats: list[ChatEngine] = []
    for server in servers:
        if config.generator.backend == "vllm":
            async with _routes(server, common["api_key"]) as routes:
                await refuse_asleep(routes)
        engine = OpenAIEngine(server.url, model=server.model, **common)
        engines.append(await opened.enter_async_context(engine))
        chat = OpenAIChatEngine(
            server.url,
            model=server.model,
            chat_template_kwargs=config.generator.chat_template_kwargs,
            **common,
        )
        chats.append(await opened.enter_async_context(chat))
        engine.policy_version = chat.policy_version = server.policy_version or 0
    return engines, chats


async def reach_vllm_servers(
    config: RunConfig, module: nn.Module, opened: AsyncExitStack
) -> list[Engine]:
    """To be trained: each can be given the weights of `module`, or a ConfigError says why not."""
    servers, common = await _found(config)
    engines: list[Engine] = []
    for server in servers:
        policy_model = OpenAIEngine(server.url, model=server.model, **common)
        routes = _routes(server, common["api_key"])
        await opened.enter_async_context(policy_model)
        await opened.enter_async_context(routes)
        engine = await open_vllm_server(
            policy_model,
            routes,
            may_sleep=config.trainer.placement.colocate_all,
            sizes=sizes_of(module.config),
        )
        engines.append(engine)
    return engines


def _routes(server: Server, api_key: str | None) -> VllmRoutes:
    return VllmRoutes(server.url.removesuffix("/v1"), api_key=api_key)


async def _found(config: RunConfig) -> tuple[list[Server], dict[str, Any]]:
    """The servers, and how each is asked for turns."""
    generator, api_key = config.generator, read_key()
    servers = await find_servers(
        generator.remote_inference_engine_urls,
        model=generator.served_model_name,
        api_key=api_key,
        longest=longest_episode(config),
    )
    alone, share = len(servers) == 1, generator.trajectory_timeout_seconds * HANGS_AMONG_OTHERS
    return servers, {
        "api_key": api_key,
        "max_concurrent": max(1, min(generator.max_num_seqs, MOST_CONNECTIONS // len(servers))),
        "tries": TRIES_ALONE if alone else TRIES_AMONG_OTHERS,
        "timeout_seconds": HANGS_ALONE_SECONDS if alone or share == 0 else share,
    }


def _refuse_unheard(config: RunConfig) -> None:
    """Settings of a renderer, where the server is the one that renders."""
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
                f"generator.backend={generator.backend!r}: the server renders and reads by its own; "
                f"start it so, and set generator.{key}=null here"
            )
