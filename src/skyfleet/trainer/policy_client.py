"""Voice: how the policy speaks, wherever its weights are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from skyfleet.chat.renderer import Renderer
from skyfleet.chat.tokenizer import encode_text
from skyfleet.engines.chat_engine import ChatEngine, RenderedChat
from skyfleet.engines.engine import Engine
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs.env import Observation
from skyfleet.rollouts.conversation import (
    AgentFactory,
    ContextStatus,
    Conversation,
    TokenConversation,
)
from skyfleet.rollouts.native import NativeConversation
from skyfleet.rollouts.one_message import OneMessageConversation
from skyfleet.tasks.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyClient:
    tokenizer: Any
    """A Hugging Face tokenizer: its classes share no useful type."""
    renderer: Renderer
    engine: Engine
    """All of `engines` as one."""
    engines: tuple[Engine, ...]
    max_input_length: int
    """Tokens; a turn whose prompt is longer is not taken."""
    native: bool = False
    """Messages and tools go to a ChatEngine, and tokens come back."""
    chat: ChatEngine | None = None
    """The one that the engines bring along; without it tools are rendered here."""
    status: ContextStatus | None = None
    """None: the agent is not told how much context it has left."""
    one_message: bool = False
    """All turns of an episode are one message."""

    def policy(self, sampling: SamplingParams) -> AgentFactory:
        sampling = replace(sampling, stop_token_ids=self.renderer.stop_token_ids)
        chat = self.chat or RenderedChat(
            self.engine, self.renderer, max_input_length=self.max_input_length
        )
        in_tokens: Callable[..., Conversation] = TokenConversation
        if self.one_message:
            encode = partial(encode_text, self.tokenizer)
            in_tokens = partial(OneMessageConversation, encode=encode)

        def start(task: Task, opening: Observation, session: str) -> Conversation:
            if self.native:
                return NativeConversation(
                    opening,
                    engine=chat,
                    sampling=sampling,
                    session=session,
                    max_input_length=self.max_input_length,
                )
            return in_tokens(
                opening,
                engine=self.engine,
                renderer=self.renderer,
                sampling=sampling,
                session=session,
                status=self.status,
            )

        return start
