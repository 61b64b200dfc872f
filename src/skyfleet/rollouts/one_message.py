"""OneMessageConversation: all turns of an episode form one assistant message.

Observations are inserted verbatim between the sampled texts, as in SkyRL with
`use_conversation_multi_turn=false`. It suits turns that a stop string ends. A sampled stop token
would end the message, so it is removed from the context: the transcript that holds it ends there,
and a new one continues from all tokens before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from skyfleet.chat.message import Message, extract_text
from skyfleet.chat.renderer import Renderer
from skyfleet.engines.engine import Engine
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs.env import Observation
from skyfleet.rollouts.conversation import HISTORY_CUT, ContextStatus, TokenConversation

STOP_REMOVED = "a sampled stop token was removed: the message continues"


class OneMessageConversation(TokenConversation):
    def __init__(
        self,
        observation: Observation,
        *,
        engine: Engine,
        renderer: Renderer,
        sampling: SamplingParams,
        session: str,
        encode: Callable[[str], list[int]],
        status: ContextStatus | None = None,
        max_input_length: int | None = None,
    ) -> None:
        """`encode` tokenises plain text without special tokens."""
        super().__init__(
            observation,
            engine=engine,
            renderer=renderer,
            sampling=sampling,
            session=session,
            status=status,
            max_input_length=max_input_length,
        )
        self._encode = encode
        self._turn_starts: list[int] = []
        """Token positions where the turns that are still in context begin."""
        self._removed = slice(0, 0)

    async def generate(self) -> Message:
        self._turn_starts.append(self.prompt_length)
        return await super().generate()

    def truncate_history(self, *, keep_recent_turns: int) -> None:
        starts = self._turn_starts
        kept = starts[-1 - keep_recent_turns :]
        self._is_cut = len(kept) < len(starts)
        self._removed = slice(starts[0], kept[0])
        self._turn_starts = [at - kept[0] + starts[0] for at in kept]

    def restart(self, observation: Observation) -> None:
        super().restart(observation)
        self._turn_starts, self._removed = [], slice(0, 0)

    def _render_next(self, messages: Sequence[Message]) -> tuple[list[int], str]:
        transcript = self._transcripts[-1]
        inserted = [token for message in messages for token in self._encode(extract_text(message))]
        sampled_stop = (
            transcript.loss_mask[-1] and transcript.token_ids[-1] in self._renderer.stop_token_ids
        )
        if not (sampled_stop or self._is_cut):
            return inserted, ""
        kept = list(transcript.token_ids[: -1 if sampled_stop else None])
        if self._is_cut:
            del kept[self._removed]
        return kept + inserted, HISTORY_CUT if self._is_cut else STOP_REMOVED
