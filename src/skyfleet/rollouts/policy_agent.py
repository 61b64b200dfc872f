"""PolicyAgent: an engine, a renderer and sampling parameters as an agent for episodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from skyfleet.chat.renderer import Renderer
from skyfleet.chat.tokenizer import encode_text
from skyfleet.engines.chat_engine import ChatEngine, RenderedChat
from skyfleet.engines.engine import Engine
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs.env import Observation
from skyfleet.rollouts.conversation import ContextStatus, Conversation, TokenConversation
from skyfleet.rollouts.native_tool_calling import NativeToolConversation
from skyfleet.rollouts.one_message import OneMessageConversation
from skyfleet.rollouts.served_turns import ServedTurns
from skyfleet.tasks.task import Task


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyAgent:
    """An `AgentFactory`. An object and not a closure, so that another process can run it."""

    tokenizer: Any
    """A Hugging Face tokenizer; its classes share no useful base type."""
    renderer: Renderer
    engine: Engine
    sampling: SamplingParams
    max_input_length: int
    native: bool = False
    """Native tool calling, where the environment does not say."""
    chat: ChatEngine | None = None
    """The servers' own chat endpoint; None renders messages and tools here."""
    status: ContextStatus | None = None
    one_message: bool = False
    session_prefix: str = ""
    served_turns: ServedTurns | None = None
    """Checks what `chat` returns."""

    def __call__(self, task: Task, observation: Observation, session: str) -> Conversation:
        session = f"{self.session_prefix}{session}"
        native = observation.use_native_tool_calling
        if self.native if native is None else native:
            return NativeToolConversation(
                observation,
                engine=self.chat
                or RenderedChat(self.engine, self.renderer, max_input_length=self.max_input_length),
                sampling=self.sampling,
                session=session,
                max_input_length=self.max_input_length,
                served_turns=self.served_turns,
            )
        conversation: Callable[..., Conversation] = TokenConversation
        if self.one_message:
            encode = partial(encode_text, self.tokenizer)
            conversation = partial(OneMessageConversation, encode=encode)
        return conversation(
            observation,
            engine=self.engine,
            renderer=self.renderer,
            sampling=self.sampling,
            session=session,
            status=self.status,
            max_input_length=self.max_input_length,
        )
