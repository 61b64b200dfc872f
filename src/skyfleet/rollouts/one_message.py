"""OneMessageConversation: all turns of an episode in one message of the assistant's.

What the world answers is written into that message, between what was sampled. It suits turns that
a stop string ends. A sampled stop token would end the message, so it is taken back: the transcript
that holds it stops there, and another goes on from all tokens before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from skyfleet.chat.message import Message
from skyfleet.chat.renderer import Renderer
from skyfleet.chat.text_only import text_only
from skyfleet.engines.engine import Engine
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs.env import Observation
from skyfleet.rollouts.conversation import CUT, ContextStatus, TokenConversation

TAKEN_BACK = "a stop token was taken back: the message goes on"


class OneMessageConversation(TokenConversation):
    def __init__(
        self,
        opening: Observation,
        *,
        engine: Engine,
        renderer: Renderer,
        sampling: SamplingParams,
        session: str,
        encode: Callable[[str], list[int]],
        status: ContextStatus | None = None,
    ) -> None:
        """`encode` gives the tokens of mere words."""
        super().__init__(
            opening,
            engine=engine,
            renderer=renderer,
            sampling=sampling,
            session=session,
            status=status,
        )
        self._encode = encode
        self._begins: list[int] = []
        """Where each turn that is still in context begins."""
        self._left_out = slice(0, 0)

    async def generate(self) -> Message:
        self._begins.append(self.prompt_length)
        return await super().generate()

    def truncate_history(self, *, keep_recent_turns: int) -> None:
        kept = self._begins[-1 - keep_recent_turns :]
        self._is_cut = len(kept) < len(self._begins)
        self._left_out = slice(self._begins[0], kept[0])
        self._begins = [at - kept[0] + self._begins[0] for at in kept]

    def restart(self, opening: Observation) -> None:
        super().restart(opening)
        self._begins, self._left_out = [], slice(0, 0)

    def _next(self, messages: Sequence[Message]) -> tuple[list[int], str]:
        transcript = self._transcripts[-1]
        words = self._encode("".join(map(_written, messages)))
        sampled_stop = (
            transcript.loss_mask[-1] and transcript.token_ids[-1] in self._renderer.stop_token_ids
        )
        if not (sampled_stop or self._is_cut):
            return words, ""
        kept = transcript.token_ids[: -1 if sampled_stop else None]
        if self._is_cut:
            del kept[self._left_out]
        return kept + words, CUT if self._is_cut else TAKEN_BACK


def _written(message: Message) -> str:
    text = text_only(message)
    if message.role == "tool":
        return f"\n<tool_response>\n{text}\n</tool_response>\n"
    return f"\n{text}\n"
