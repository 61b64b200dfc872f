"""Completing: /v1/completions, from a request's body to an answer or its events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from skyfleet.serving.answers import plain_text, text_tokens, totals, without_stop
from skyfleet.serving.bodies import CompletionBody
from skyfleet.serving.served import Served
from skyfleet.serving.streaming import events, text_choices


async def complete(
    served: Served, raw: bytes, session: str | None
) -> dict[str, Any] | AsyncIterator[str]:
    body = served.read(raw, CompletionBody)
    prompts = _prompts(served, body.prompt)
    asks = served.asks(body, prompts, body.max_tokens, session=session)
    fields = served.fields("cmpl", "text_completion")
    if body.stream:
        (ask,) = asks
        choices = text_choices(body, served.renderer, served.speaking.slices(ask))
        return events(fields, body, ask.prompt, choices)
    completions = await served.whole(asks)
    told = []
    for index, (ask, said) in enumerate(zip(asks, completions, strict=True)):
        text = without_stop(body, plain_text(served.renderer, said.token_ids))
        choice = {"index": index, "text": text, "finish_reason": said.finish}
        choice |= text_tokens(body, served.renderer, said)
        if body.return_token_ids:
            choice["prompt_token_ids"] = ask.prompt
        told.append(choice)
    return {**fields, "choices": told, **totals(prompts, completions)}


def _prompts(
    served: Served, prompt: str | list[int] | list[str] | list[list[int]]
) -> list[list[int]]:
    if isinstance(prompt, str):
        return [served.encode(prompt)]
    several: list[list[int]] = []
    single: list[int] = []
    for one in prompt:
        if isinstance(one, int):
            single.append(one)
        else:
            several.append(served.encode(one) if isinstance(one, str) else one)
    return several or [single]
