"""Models that play users: a chat endpoint, or a model that this process loads."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyfleet.chat.message import Message
from skyfleet.config.root import RunConfig
from skyfleet.engines.http_client import RetryingClient, auth_header
from skyfleet.engines.openai_completion import invalid_completion, parse_choice
from skyfleet.engines.openai_messages import parse_openai_message, to_openai_message
from skyfleet.envs.users.llm import ModelReply
from skyfleet.errors import ConfigError, require_torch

if TYPE_CHECKING:
    from skyfleet.engines.chat_engine import ChatEngine
    from skyfleet.engines.sampling_params import SamplingParams

MAX_CONCURRENT = 64
"""Users that an embedded model answers at once; the others wait."""


class EndpointModel(RetryingClient):
    """One conversation with a chat completions endpoint, on a connection of its own."""

    def __init__(
        self,
        url: str,
        *,
        model: str,
        api_key: str | None = None,
        sampling: Mapping[str, Any],
        timeout_seconds: float,
    ) -> None:
        """`url` is the base URL, without /chat/completions; `sampling` is part of every request."""
        super().__init__(
            f"{url.rstrip('/')}/chat/completions",
            auth_header(api_key),
            timeout_seconds=timeout_seconds,
            max_concurrent=1,
            tries=3,
        )
        self._body = {"model": model, **sampling}

    async def reply(self, messages: list[Message]) -> ModelReply:
        answer = await self.post(
            {**self._body, "messages": [to_openai_message(message) for message in messages]}
        )
        with invalid_completion(self._url):
            message = parse_openai_message(parse_choice(answer)["message"])
            usage = answer.get("usage") or {}
            return ModelReply(
                text=message.text,
                n_prompt_tokens=int(usage.get("prompt_tokens") or 0),
                n_sampled_tokens=int(usage.get("completion_tokens") or 0),
            )

    async def aclose(self) -> None:
        await self.__aexit__(None, None, None)


class EngineModel:
    """One conversation with an engine of this process."""

    def __init__(self, engine: ChatEngine, sampling: SamplingParams, *, session: str) -> None:
        self._engine, self._sampling, self._session = engine, sampling, session

    async def reply(self, messages: list[Message]) -> ModelReply:
        turn = await self._engine.chat(messages, (), self._sampling, session=self._session)
        return ModelReply(
            text=turn.message.text,
            n_prompt_tokens=len(turn.prompt_token_ids),
            n_sampled_tokens=len(turn.completion.token_ids),
        )

    async def aclose(self) -> None:
        await self._engine.release(self._session)


class EmbeddedModels:
    """Loads one model when the first user needs it and never changes its weights: of the policy's own
    model this is a frozen copy."""

    def __init__(self, config: RunConfig) -> None:
        user, policy = config.environment.user, config.trainer.policy.model
        self._is_policy = user.user_provider == "policy"
        self._path = policy.path if self._is_policy else user.user_model or ""
        if self._path == "tiny":
            raise ConfigError(
                f"{self._key}='tiny' has random weights and cannot play a user; set "
                "environment.user.user_strategy=rule_based, or name another model"
            )
        if looks_missing(self._path):
            raise ConfigError(
                f"{self._key}={self._path!r} does not exist; name a folder with a model, a Hugging "
                "Face name or smollm2"
            )
        self._trusts, self._allows_cuda = policy.trust_remote_code, config.trainer.device != "cpu"
        self._max_input_length = user.max_input_length
        self._capacity = user.max_input_length + user.max_generate_length
        self._engine: ChatEngine | None = None
        self._lock = asyncio.Lock()

    async def open_model(self, session: str, sampling: SamplingParams) -> EngineModel:
        async with self._lock:
            if self._engine is None:
                self._engine = await asyncio.to_thread(self._load)
        return EngineModel(self._engine, sampling, session=session)

    @property
    def _key(self) -> str:
        return "trainer.policy.model.path" if self._is_policy else "environment.user.user_model"

    def _load(self) -> ChatEngine:
        require_torch()
        import torch

        from skyfleet.chat.renderers import make_renderer
        from skyfleet.engines.chat_engine import RenderedChat
        from skyfleet.engines.embedded import EmbeddedEngine
        from skyfleet.models.hf_decoder import make_decoder
        from skyfleet.models.loading import load_model

        on_gpu = self._allows_cuda and torch.cuda.is_available()
        loaded = load_model(
            self._path,
            dtype=torch.bfloat16 if on_gpu else torch.float32,
            device=torch.device("cuda" if on_gpu else "cpu"),
            config_kwargs={},
            key=self._key,
            trust_remote_code=self._trusts,
        )
        renderer = make_renderer(loaded.tokenizer)
        engine = EmbeddedEngine(
            make_decoder(loaded.module, max_positions=self._capacity),
            decode_text=renderer.text,
            max_num_seqs=MAX_CONCURRENT,
            capacity=self._capacity,
        )
        return RenderedChat(engine, renderer, max_input_length=self._max_input_length)


def looks_missing(path: str) -> bool:
    """Whether a path on this machine has nothing behind it; a Hugging Face name is not looked up."""
    return path.startswith((".", "/", "~")) and not Path(path).expanduser().exists()
