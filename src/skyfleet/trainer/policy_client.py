"""PolicyClient: the policy's engines and renderer as agents for episodes."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from skyfleet.chat.renderer import Renderer
from skyfleet.chat.renderers import build_renderer
from skyfleet.config.generator import Generator
from skyfleet.config.root import RunConfig
from skyfleet.config.validation import uses_native_tool_calling
from skyfleet.config.warnings import warn_native_tool_calling
from skyfleet.engines.chat_engine import ChatEngine
from skyfleet.engines.engine import Engine
from skyfleet.engines.engine_pool import ChatEnginePool, EnginePool
from skyfleet.engines.factory import (
    build_embedded_engine,
    connect_servers,
    connect_vllm_servers,
    start_vllm,
)
from skyfleet.engines.openai_engine import OpenAIEngine
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs.env import EnvFactory
from skyfleet.envs.registry import env_factory
from skyfleet.errors import ConfigError
from skyfleet.learner.policy_model import PolicyModel, rope_overrides
from skyfleet.models.loading import LoadedModel, load_tokenizer, read_vocab_size, save_model
from skyfleet.models.rope import has_rope_scaling
from skyfleet.rollouts.conversation import AgentFactory, ContextStatus
from skyfleet.rollouts.policy_agent import PolicyAgent
from skyfleet.rollouts.served_turns import ServedTurns
from skyfleet.tasks.task import Task
from skyfleet.trainer.fit_memory import fit_inference
from skyfleet.trainer.load_policy import load_policy_model

logger = logging.getLogger(__name__)

StartEngines = Callable[[str, AsyncExitStack], Awaitable[list[Engine]]]
"""Starts engines in other processes, closed with the stack. The path is that of weights like the
policy's, for an engine that loads some before it gets the policy's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyClient:
    tokenizer: Any
    """A Hugging Face tokenizer; its classes share no useful base type."""
    renderer: Renderer
    engine: Engine
    """One engine, or a pool over all `engines`."""
    engines: tuple[Engine, ...]
    max_input_length: int
    """Tokens; no turn starts after a longer prompt."""
    native: bool = False
    """Native tool calling: a ChatEngine takes messages and tools and returns tokens."""
    chat: ChatEngine | None = None
    """The servers' own chat endpoint; None renders messages and tools here."""
    status: ContextStatus | None = None
    """Appends the context usage to observations; None appends nothing."""
    max_num_seqs: int = 1024
    """Sequences that the engine runs at once; fewer than configured where memory is short."""
    one_message: bool = False
    """All turns of an episode are one assistant message."""
    session_prefix: str = ""
    """Keeps the sessions of two uses of the engine apart."""

    @property
    def served_name(self) -> str | None:
        """The name of the model on its server; None without a server."""
        first = self.engines[0]
        return first.model if isinstance(first, OpenAIEngine) else None

    def agent(self, sampling: SamplingParams) -> AgentFactory:
        return PolicyAgent(
            tokenizer=self.tokenizer,
            renderer=self.renderer,
            engine=self.engine,
            sampling=replace(sampling, stop_token_ids=self.renderer.stop_token_ids),
            max_input_length=self.max_input_length,
            native=self.native,
            chat=self.chat,
            status=self.status,
            one_message=self.one_message,
            session_prefix=self.session_prefix,
            served_turns=None if self.chat is None else ServedTurns(self.renderer),
        )


@asynccontextmanager
async def open_policy_client(
    config: RunConfig,
    policy_model: PolicyModel,
    *,
    folder: Path | None = None,
    learns: bool = False,
    learner_bytes: int = 0,
    memory_plan: str = "",
    actors: StartEngines | None = None,
) -> AsyncIterator[PolicyClient]:
    """A client for weights in this process; `folder` is the folder they were loaded from, if any.

    The engine leaves `learner_bytes` of a GPU to the learner. `actors` starts engines in other
    processes, in the place of those here.
    """
    tokenizer, renderer = policy_model.loaded.tokenizer, policy_model.renderer
    chats: Sequence[ChatEngine] = ()
    async with AsyncExitStack() as opened:
        if actors is not None:
            with TemporaryDirectory() as scratch:
                path = loadable_path(config, folder)
                if path is None and config.generator.backend == "vllm":
                    save_model(policy_model.loaded, Path(scratch))
                engines = await actors(path or scratch, opened)
        elif config.generator.backend == "embedded":
            engines = [
                build_embedded_engine(
                    config,
                    policy_model.decoder,
                    renderer,
                    learner_bytes=learner_bytes,
                    memory_plan=memory_plan,
                )
            ]
        elif config.generator.is_remote:
            engines, chats = await connect_vllm_servers(config, policy_model.loaded.module, opened)
        else:
            with TemporaryDirectory() as scratch:
                path = loadable_path(config, folder)
                if path is None:
                    save_model(policy_model.loaded, Path(scratch))
                engines = await start_vllm(config, path or scratch, renderer, opened, learns=learns)
        yield _build_policy_client(config, tokenizer, renderer, engines, chats)


@asynccontextmanager
async def open_inference_client(
    config: RunConfig,
    folder: Path | None,
    *,
    tasks: Sequence[Task] = (),
    open_env: EnvFactory | None = None,
    model: LoadedModel | None = None,
) -> AsyncIterator[PolicyClient]:
    """A client for inference only: the engine alone holds the weights.

    They come from `folder`, from `model`, or from the configured path. `tasks` and `open_env` are
    only used to build the tiny model.
    """
    backend = config.generator.backend
    path = loadable_path(config, folder) if model is None else None
    if not config.generator.is_remote and (backend == "embedded" or path is None):
        fitted = fit_inference(config, folder, model=model)
        fitted.log_changes()
        config = fitted.config
        policy_model = await load_policy_model(
            config, tasks, open_env or env_factory(config), policy_folder=folder, model=model
        )
        async with open_policy_client(
            config, policy_model, folder=folder, memory_plan=fitted.describe()
        ) as policy_client:
            yield policy_client
        return
    path, trusts = path or _tokenizer_path(config), config.trainer.policy.model.trust_remote_code
    tokenizer = load_tokenizer(path, trust_remote_code=trusts)
    renderer = build_renderer(config.generator, tokenizer)
    async with AsyncExitStack() as opened:
        chats: list[ChatEngine] = []
        if config.generator.is_remote:
            vocab_size = read_vocab_size(path, tokenizer, trust_remote_code=trusts)
            engines, chats = await connect_servers(config, opened, vocab_size=vocab_size)
        else:
            engines = await start_vllm(config, path, renderer, opened, learns=False)
        yield _build_policy_client(config, tokenizer, renderer, engines, chats)


def loadable_path(config: RunConfig, folder: Path | None) -> str | None:
    """A path from which an engine can load the weights itself; None: only this process has them."""
    policy = config.trainer.policy
    if folder is not None:
        is_scaled = has_rope_scaling(
            folder, rope_overrides(config), trust_remote_code=policy.model.trust_remote_code
        )
        return str(folder) if is_scaled else None
    made_here = policy.model.path in ("tiny", "smollm2")
    changed = policy.model_config_kwargs or config.trainer.rope_scaling
    return None if made_here or changed else policy.model.path


def _tokenizer_path(config: RunConfig) -> str:
    """The path of the tokenizer that a server's model uses."""
    path = config.trainer.policy.model.path
    if path == "tiny":
        raise ConfigError(
            f"trainer.policy.model.path='tiny' and generator.backend={config.generator.backend!r}: "
            "a tiny policy has its own vocabulary; set the path of the checkpoint that is served, such as "
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
    for sentence in warn_native_tool_calling(config):
        logger.warning("%s", sentence)
    chat = ChatEnginePool(chats) if len(chats) > 1 else next(iter(chats), None)
    return PolicyClient(
        tokenizer=tokenizer,
        renderer=renderer,
        engine=EnginePool(engines, decode_text=renderer.text)
        # A pool continues turns that an engine aborts for new weights.
        if len(engines) > 1
        or hasattr(engines[0], "is_restarting")
        or (config.trainer.fully_async.enabled and generator.backend == "vllm")
        else engines[0],
        engines=tuple(engines),
        native=uses_native_tool_calling(config),
        chat=chat,
        max_input_length=generator.max_input_length,
        max_num_seqs=generator.max_num_seqs,
        status=_context_status(generator) if generator.inject_context_status else None,
        one_message=not generator.use_conversation_multi_turn,
    )


def _context_status(generator: Generator) -> ContextStatus:
    return ContextStatus(
        max_input_length=generator.max_input_length,
        max_turns=generator.max_turns,
        warning_threshold=generator.context_warning_threshold,
    )
