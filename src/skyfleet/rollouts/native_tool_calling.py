"""NativeToolConversation: chats with a ChatEngine, which renders the tools and parses the calls.

The tokens are the engine's own. If its next prompt does not start with all tokens so far, because
its template rewrites earlier turns, a new transcript begins.
"""

from __future__ import annotations

from collections.abc import Sequence

from skyfleet.chat.message import Message
from skyfleet.chat.transcript import Finish, Transcript
from skyfleet.engines.chat_engine import ChatEngine
from skyfleet.engines.sampling_params import SamplingParams
from skyfleet.envs.env import Observation
from skyfleet.errors import ContextFullError
from skyfleet.rollouts.conversation import HISTORY_CUT, RESTARTED, REWRITTEN, History
from skyfleet.rollouts.served_turns import ServedTurns


class NativeToolConversation:
    def __init__(
        self,
        observation: Observation,
        *,
        engine: ChatEngine,
        sampling: SamplingParams,
        session: str,
        max_input_length: int,
        served_turns: ServedTurns | None = None,
    ) -> None:
        """`served_turns` checks what a server rendered and parsed; None: the engine did so here."""
        self._served_turns = served_turns
        self._engine, self._sampling, self._session = engine, sampling, session
        self._max_input_length = max_input_length
        self._history, self._tools = History(observation), observation.tools
        self._is_cut = self._is_restarted = False
        self._transcripts: list[Transcript] = []
        self.finish: Finish = "stop"

    @property
    def transcripts(self) -> tuple[Transcript, ...]:
        return tuple(self._transcripts)

    @property
    def prompt_length(self) -> int:
        """Without the observations since the last turn: only the engine knows their tokens."""
        is_new = self._is_cut or self._is_restarted or not self._transcripts
        return 0 if is_new else len(self._transcripts[-1])

    async def generate(self) -> Message:
        result = await self._engine.chat(
            self._history.messages, self._tools, self._sampling, session=self._session
        )
        length = len(result.prompt_token_ids)
        if length > self._max_input_length:
            # Known only after sampling; the turn does not count and is not trained on.
            raise ContextFullError(f"the prompt has {length} tokens")
        self.finish = result.completion.finish
        # An empty completion is a turn without tokens: there is nothing to train on.
        if result.completion.token_ids:
            transcript = self._continue_transcript(result.prompt_token_ids)
            transcript.append_completion(result.completion)
        message = result.message
        if self._served_turns is not None:
            message = self._served_turns.read_left_over(message, self._tools)
        self._history.add_turn(message)
        return message

    def observe(self, messages: Sequence[Message]) -> None:
        self._history.messages.extend(messages)

    def truncate_history(self, *, keep_recent_turns: int) -> None:
        # |=, because a turn without tokens between two cuts starts no transcript.
        self._is_cut |= self._history.cut(keep_recent_turns=keep_recent_turns)

    def restart(self, observation: Observation) -> None:
        self._history, self._tools = self._history.restart(observation), observation.tools
        self._is_restarted = True

    async def close(self) -> None:
        await self._engine.release(self._session)

    def _continue_transcript(self, prompt: Sequence[int]) -> Transcript:
        """Extend the last transcript to `prompt`, or start a new one if it is not a prefix."""
        is_cut, self._is_cut = self._is_cut, False
        is_restarted, self._is_restarted = self._is_restarted, False
        if self._transcripts and not is_restarted:
            transcript = self._transcripts[-1]
            so_far = len(transcript)
            if list(prompt[:so_far]) == transcript.token_ids:
                transcript.append_prompt(prompt[so_far:])
                return transcript
            if self._served_turns is not None and not is_cut:
                self._served_turns.compare_history(transcript.token_ids[:], prompt)
        elif self._served_turns is not None:
            self._served_turns.compare_prompt(prompt, self._history.messages, self._tools)
        reason = RESTARTED if is_restarted else HISTORY_CUT if is_cut else REWRITTEN
        transcript = Transcript(reason=reason if self._transcripts else "")
        transcript.append_prompt(prompt)
        self._transcripts.append(transcript)
        return transcript
