"""How a policy speaks, from configuration: its engines are opened, and closed when it is done."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from skyfleet.chat.renderer import Renderer
from skyfleet.config.generator import Generator
from skyfleet.config.root import RunConfig
from skyfleet.config.turn_rules import is_native, lone_native_flag
from skyfleet.engines.chat_engine import ChatEngine
from skyfleet.engines.engine import Engine
from skyfleet.engines.engine_pool import ChatRouter, Router
from skyfleet.envs.registry import env_factory
from skyfleet.errors import ConfigError
from skyfleet.models.loading import load_tokenizer, save_model
from skyfleet.models.rope import carries_rope
from skyfleet.rollouts.conversation import ContextStatus
from skyfleet.trainer.assemble_engines import (
    embedded_engine,
    reach_servers,
    reach_vllm_servers,
    start_vllm,
)
from skyfleet.trainer.assemble_policy import (
    PolicyModel,
    build_renderer,
    load_policy_model,
    rope_changes,
)
from skyfleet.trainer.policy_client import PolicyClient

logger = logging.getLogger(__name__)


@asynccontextmanager
async def open_policy_client(
    config: RunConfig,
    policy_model: PolicyModel,
    *,
    folder: Path | None = None,
    learns: bool = False,
) -> AsyncIterator[PolicyClient]:
    """For weights in this process; `folder` is where they were loaded from, if it was one."""
    tokenizer, renderer = policy_model.loaded.tokenizer, policy_model.renderer
    async with AsyncExitStack() as opened:
        if config.generator.backend == "embedded":
            engines = [embedded_engine(config, policy_model.decoder, renderer)]
        elif config.generator.is_remote:
            engines = await reach_vllm_servers(config, policy_model.loaded.module, opened)
        else:
            with TemporaryDirectory() as scratch:
                path = _readable(config, folder)
                if path is None:
                    save_model(policy_model.loaded, Path(scratch))
                engines = await start_vllm(config, path or scratch, renderer, opened, learns=learns)
        yield _build_policy_client(config, tokenizer, renderer, engines)


@asynccontextmanager
async def open_inference_client(
    config: RunConfig, folder: Path | None
) -> AsyncIterator[PolicyClient]:
    """To play only: weights are nowhere but in the engine."""
    backend, path = config.generator.backend, _readable(config, folder)
    if not config.generator.is_remote and (backend == "embedded" or path is None):
        policy_model = await load_policy_model(
            config, [], env_factory(config), policy_folder=folder
        )
        async with open_policy_client(config, policy_model, folder=folder) as policy_client:
            yield policy_client
        return
    tokenizer = load_tokenizer(path or _words(config))
    renderer = build_renderer(config.generator, tokenizer)
    async with AsyncExitStack() as opened:
        chats: list[ChatEngine] = []
        if config.generator.is_remote:
            engines, chats = await reach_servers(config, opened)
        else:
            engines = await start_vllm(config, str(path), renderer, opened, learns=False)
        yield _build_policy_client(config, tokenizer, renderer, engines, chats)


def _readable(config: RunConfig, folder: Path | None) -> str | None:
    """Where an engine can load the weights by itself; None: only from this process."""
    policy = config.trainer.policy
    if folder is not None:
        return str(folder) if carries_rope(folder, rope_changes(config)) else None
    made_here = policy.model.path in ("tiny", "smollm2")
    changed = policy.model_config_kwargs or config.trainer.rope_scaling
    return None if made_here or changed else policy.model.path


def _words(config: RunConfig) -> str:
    """Whose tokenizer a server's model has."""
    path = config.trainer.policy.model.path
    if path == "tiny":
        raise ConfigError(
            f"trainer.policy.model.path='tiny' and generator.backend={config.generator.backend!r}: "
            "a tiny policy's vocabulary is its own; name the checkpoint that is served, such as "
            "trainer.policy.model.path=runs/mine/checkpoints/global_step_40/policy"
        )
    return path


def _build_policy_client(
    config: RunConfig,
    tokenizer: Any,
    renderer: Renderer,
    engines: Sequence[Engine],
    chats: Sequence[ChatEngine] = (),
) -> PolicyClient:
    generator = config.generator
    for sentence in lone_native_flag(config):
        logger.warning("%s", sentence)
    chat = ChatRouter(chats) if len(chats) > 1 else next(iter(chats), None)
    return PolicyClient(
        tokenizer=tokenizer,
        renderer=renderer,
        engine=engines[0] if len(engines) == 1 else Router(engines, decode_text=renderer.text),
        engines=tuple(engines),
        native=is_native(config),
        chat=chat,
        max_input_length=generator.max_input_length,
        status=_status(generator) if generator.inject_context_status else None,
        one_message=not generator.use_conversation_multi_turn,
    )


def _status(generator: Generator) -> ContextStatus:
    return ContextStatus(
        max_input_length=generator.max_input_length,
        max_turns=generator.max_turns,
        warning_threshold=generator.context_warning_threshold,
    )
