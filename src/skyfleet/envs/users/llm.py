"""A user played by a model: it gets the scenario as its instruction and ends with ###STOP###."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from skyfleet.chat.message import Message
from skyfleet.envs.users.failures import find_failure
from skyfleet.envs.users.scenario import Scenario
from skyfleet.envs.users.user import STOP, UserTurn

GREETING = "Hello, how can I help you today?"
"""What the model answers with the user's first message, as in tau-bench. The agent did not write it."""

_RULES = f"""\
You are a customer who talks to a support agent. Write only the customer's next message, in one or \
two short sentences.
{{instruction}}
Give a detail only when the agent asks for it. Invent nothing: say that you do not know what is not \
above. Do not repeat the same message. Never speak for the agent.
When the agent has done what you want, or finally refuses it, write {STOP} and nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReply:
    """What a model wrote, with the tokens that it took."""

    text: str
    n_prompt_tokens: int
    n_sampled_tokens: int


class UserModel(Protocol):
    async def reply(self, messages: list[Message]) -> ModelReply:
        """Continue the conversation; EngineError if the model cannot be asked."""
        ...

    async def aclose(self) -> None: ...


OpenModel = Callable[[str], Awaitable[UserModel]]
"""Opens the model of one conversation by its session."""


class LLMUser:
    """Asks a model for the user's messages; the rules of `failures` judge each of them."""

    def __init__(self, scenario: Scenario, open_model: OpenModel, *, session: str) -> None:
        self._scenario, self._open_model, self._session = scenario, open_model, session
        self._model: UserModel | None = None
        rules = _RULES.format(instruction=write_instruction(scenario))
        self._messages = [Message(role="system", content=rules)]
        self._agent_messages: list[str] = []
        self._user_messages: list[str] = []

    async def open(self) -> UserTurn:
        return await self._answer(GREETING)

    async def reply(self, agent_message: str) -> UserTurn:
        self._agent_messages.append(agent_message)
        return await self._answer(agent_message)

    async def aclose(self) -> None:
        if self._model is not None:
            model, self._model = self._model, None
            await model.aclose()

    async def _answer(self, agent_message: str) -> UserTurn:
        if self._model is None:
            self._model = await self._open_model(self._session)
        # For the model the roles are reversed: it is the assistant that answers the agent.
        self._messages.append(Message(role="user", content=agent_message))
        reply = await self._model.reply(self._messages)
        self._messages.append(Message(role="assistant", content=reply.text))
        failure = find_failure(
            self._scenario, self._agent_messages, self._user_messages, reply.text
        )
        text = reply.text.replace(STOP, "").strip()
        self._user_messages.append(text)
        return UserTurn(
            text=text,
            is_done=STOP in reply.text or failure is not None,
            failure=failure,
            n_prompt_tokens=reply.n_prompt_tokens,
            n_sampled_tokens=reply.n_sampled_tokens,
        )


def write_instruction(scenario: Scenario) -> str:
    """Describe the scenario to a model: what it wants, knows, refuses and changes its mind about."""
    return scenario.instruction or "\n".join(_list_instructions(scenario))


def _list_instructions(scenario: Scenario) -> Iterator[str]:
    yield f"You begin with: {scenario.opening}"
    if scenario.facts:
        yield "What you know:"
        yield from (f"- {fact.text}" for fact in scenario.facts)
    for text in scenario.changes_of_mind:
        yield f"When the agent asks you to confirm, you change your mind and say once: {text}"
    for refused in scenario.declines:
        yield f"If you are asked for {' or '.join(refused.asked_by)}, you say: {refused.text}"
    for text in scenario.objections:
        yield f"When the agent refuses, you insist once: {text}"
