"""NativeConversation: speaks through a ChatEngine, which renders the tools and reads the calls.

The tokens are the engine's own. Where its prompt does not begin with all tokens so far, because
its template writes the past anew, another transcript begins.
"""

from __future__ import annotations

from collections.abc import Sequence

from skyfleet.chat.completion import Finish
from skyfleet.chat.message import Message
from skyfleet.chat.transcript import Transcript
from skyfleet.engines.chat_engine import ChatEngine
from skyfleet.engines.sampling import SamplingParams
from skyfleet.envs.env import Opening


class NativeConversation:
    def __init__(
        self, opening: Opening, *, engine: ChatEngine, sampling: SamplingParams, session: str
    ) -> None:
        self._engine, self._sampling, self._session = engine, sampling, session
        self._messages: list[Message] = list(opening.messages)
        self._tools = opening.tools
        self._transcripts: list[Transcript] = []
        self.finish: Finish = "stop"

    @property
    def transcripts(self) -> tuple[Transcript, ...]:
        return tuple(self._transcripts)

    @property
    def prompt_length(self) -> int:
        """Without what was heard since the last turn: only the engine can tell its tokens."""
        return len(self._transcripts[-1]) if self._transcripts else 0

    async def speak(self) -> Message:
        spoken = await self._engine.speak(
            self._messages, self._tools, self._sampling, session=self._session
        )
        self.finish = spoken.completion.finish
        # Nothing sampled is nothing to learn from: an empty turn leaves no tokens.
        if spoken.completion.token_ids:
            transcript = self._continued(spoken.prompt_token_ids)
            transcript.say(spoken.completion)
        self._messages.append(spoken.message)
        return spoken.message

    def hear(self, messages: Sequence[Message]) -> None:
        self._messages.extend(messages)

    async def close(self) -> None:
        await self._engine.release(self._session)

    def _continued(self, prompt: Sequence[int]) -> Transcript:
        """The transcript that `prompt` continues, grown to it; a new one where it continues none."""
        if self._transcripts:
            transcript = self._transcripts[-1]
            so_far = len(transcript)
            if list(prompt[:so_far]) == transcript.token_ids:
                transcript.give(prompt[so_far:])
                return transcript
        transcript = Transcript()
        transcript.give(prompt)
        self._transcripts.append(transcript)
        return transcript
