"""Reference: a task's own solution, played through the same loop as any policy."""

from __future__ import annotations

from collections.abc import Sequence

from skyfleet.chat.completion import Completion
from skyfleet.chat.message import Message, ToolCall, ToolSpec
from skyfleet.chat.renderer import Renderer
from skyfleet.engines.sampling import SamplingParams
from skyfleet.envs.env import DONE, Opening
from skyfleet.rollouts.conversation import MessageConversation, Policy, TokenConversation
from skyfleet.tasks.task import RecordedCall, Task


def reference_policy(renderer: Renderer) -> Policy:
    """Speaks the solution in tokens, so that its transcripts can be learned from."""

    def start(task: Task, opening: Opening, session: str) -> TokenConversation:
        return TokenConversation(
            opening,
            engine=ReferenceEngine(task.solution, renderer),
            renderer=renderer,
            sampling=SamplingParams(),
            session=session,
        )

    return start


def oracle_policy(task: Task, opening: Opening, session: str) -> MessageConversation:
    """Speaks the solution in words: needs no tokenizer."""
    return MessageConversation(
        opening, model=ReferenceModel(task.solution), sampling=SamplingParams()
    )


def null_policy(task: Task, opening: Opening, session: str) -> MessageConversation:
    """Says it is done at once. A task it passes tells nothing."""
    return MessageConversation(opening, model=ReferenceModel(()), sampling=SamplingParams())


class ReferenceModel:
    """Makes the calls of a task's reference solution, then says it is done."""

    def __init__(self, calls: Sequence[RecordedCall]) -> None:
        self._left = list(calls)

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], sampling: SamplingParams
    ) -> Message:
        if not self._left:
            return Message(role="assistant", content=DONE)
        call = self._left.pop(0)
        said = ToolCall(id="call_0", name=call.name, arguments=call.arguments)
        return Message(role="assistant", tool_calls=(said,))


class ReferenceEngine:
    """The reference solution as tokens: what the policy would have to sample to say it."""

    policy_version = 0

    def __init__(self, calls: Sequence[RecordedCall], renderer: Renderer) -> None:
        self._model, self._renderer = ReferenceModel(calls), renderer

    async def generate(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, session: str
    ) -> Completion:
        said = tuple(self._renderer.write(await self._model.reply((), (), sampling)))
        return Completion(
            token_ids=said, logprobs=(0.0,) * len(said), finish="stop", policy_version=0
        )

    async def release(self, session: str) -> None: ...

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...
