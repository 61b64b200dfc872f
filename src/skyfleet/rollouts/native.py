"""NativeConversation: speaks through a ChatEngine, which renders the tools and reads the calls.

The tokens are the engine's own. Where its prompt does not begin with all tokens so far, because
its template writes the past anew, another transcript begins.
"""

from __future__ import annotations

from collections.abc import Sequence

from skyfleet.chat.message import Message
from skyfleet.chat.transcript import Finish, Transcript
from skyfleet.engines.chat_engine import ChatEngine
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs.env import Observation
from skyfleet.errors import ContextFullError
from skyfleet.rollouts.conversation import BEGUN, CUT, REWRITTEN, History


class NativeConversation:
    def __init__(
        self,
        opening: Observation,
        *,
        engine: ChatEngine,
        sampling: SamplingParams,
        session: str,
        max_input_length: int,
    ) -> None:
        self._engine, self._sampling, self._session = engine, sampling, session
        self._max_input_length = max_input_length
        self._history, self._tools = History(opening), opening.tools
        self._is_cut = self._is_begun = False
        self._transcripts: list[Transcript] = []
        self.finish: Finish = "stop"

    @property
    def transcripts(self) -> tuple[Transcript, ...]:
        return tuple(self._transcripts)

    @property
    def prompt_length(self) -> int:
        """Without what was heard since the last turn: only the engine can tell its tokens."""
        anew = self._is_cut or self._is_begun or not self._transcripts
        return 0 if anew else len(self._transcripts[-1])

    async def generate(self) -> Message:
        spoken = await self._engine.chat(
            self._history.messages, self._tools, self._sampling, session=self._session
        )
        length = len(spoken.prompt_token_ids)
        if length > self._max_input_length:
            # Known only now; the turn is not one, and nobody learns from it.
            raise ContextFullError(f"the prompt has {length} tokens")
        self.finish = spoken.completion.finish
        # Nothing sampled is nothing to learn from: an empty turn leaves no tokens.
        if spoken.completion.token_ids:
            transcript = self._continued(spoken.prompt_token_ids)
            transcript.say(spoken.completion)
        self._history.say(spoken.message)
        return spoken.message

    def observe(self, messages: Sequence[Message]) -> None:
        self._history.messages.extend(messages)

    def truncate_history(self, *, keep_recent_turns: int) -> None:
        # A turn without tokens may stand between two cuts, and begins no transcript.
        self._is_cut |= self._history.cut(keep_recent_turns=keep_recent_turns)

    def restart(self, opening: Observation) -> None:
        self._history, self._tools = self._history.begun(opening), opening.tools
        self._is_begun = True

    async def close(self) -> None:
        await self._engine.release(self._session)

    def _continued(self, prompt: Sequence[int]) -> Transcript:
        """The transcript that `prompt` continues, grown to it; a new one where it continues none."""
        is_cut, self._is_cut = self._is_cut, False
        is_begun, self._is_begun = self._is_begun, False
        if self._transcripts and not is_begun:
            transcript = self._transcripts[-1]
            so_far = len(transcript)
            if list(prompt[:so_far]) == transcript.token_ids:
                transcript.append_prompt(prompt[so_far:])
                return transcript
        reason = BEGUN if is_begun else CUT if is_cut else REWRITTEN
        transcript = Transcript(reason=reason if self._transcripts else "")
        transcript.append_prompt(prompt)
        self._transcripts.append(transcript)
        return transcript
