"""Speaking: one turn of the engine for one choice, whole, or in slices as a stream wants it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from skyfleet.chat.completion import Completion
from skyfleet.chat.renderer import Renderer
from skyfleet.engines.engine import Engine
from skyfleet.engines.sampling import SamplingParams
from skyfleet.engines.stopping import finish_of
from skyfleet.serving.counters import Counters
from skyfleet.serving.sessions import Sessions

SLICE = 8
"""Tokens that a stream sends at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    prompt: list[int]
    sampling: SamplingParams
    session: str


class Speaking:
    def __init__(self, engine: Engine, renderer: Renderer, *, max_sessions: int) -> None:
        self._engine, self._renderer = engine, renderer
        self.sessions = Sessions(engine, most=max_sessions)
        self.counters = Counters()

    @property
    def version(self) -> int:
        return self._engine.policy_version

    async def whole(self, ask: Ask) -> Completion:
        with self.counters.turn(len(ask.prompt)):
            async with self.sessions.held(ask.session):
                said = await self._engine.generate(ask.prompt, ask.sampling, session=ask.session)
            self.counters.generated_tokens += len(said.token_ids)
        return said

    async def slices(self, ask: Ask) -> AsyncIterator[tuple[Completion, bool]]:
        """Each with whether it is the last. An engine need not know of streams for this.

        A seed draws other tokens than in one piece: every slice begins at a position of its own.
        """
        said: list[int] = []
        is_last = False
        with self.counters.turn(len(ask.prompt)):
            async with self.sessions.held(ask.session):
                while not is_last:
                    left = ask.sampling.max_generate_length - len(said)
                    sampling = replace(ask.sampling, max_generate_length=min(SLICE, left))
                    part = await self._engine.generate(
                        [*ask.prompt, *said], sampling, session=ask.session
                    )
                    part, is_last = self._heard(part, said, ask.sampling)
                    self.counters.generated_tokens += len(part.token_ids)
                    yield part, is_last

    def _heard(
        self, part: Completion, said: list[int], sampling: SamplingParams
    ) -> tuple[Completion, bool]:
        """`said` grows by the slice, up to where the turn ends.

        A stop string that began in an earlier slice ends it too, which the engine cannot see.
        """
        finish, n_before = None, len(said)
        for token in part.token_ids:
            said.append(token)
            finish = finish_of(sampling, said, self._renderer.text)
            if finish is not None:
                break
        n = len(said) - n_before
        kept = replace(
            part,
            token_ids=part.token_ids[:n],
            logprobs=part.logprobs[:n],
            finish=finish or part.finish,
        )
        return kept, kept.finish != "length" or finish is not None
