"""The cost of rendering a turn does not grow with the episode."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from tests.chat.small_tokenizer import chatml_template, small_tokenizer

from skyfleet.chat.message import Message
from skyfleet.chat.renderers import make_renderer
from skyfleet.chat.template_checks import QUESTION, TOOL_DIALOGUE, TOOLS
from skyfleet.chat.tokenizer import PromptEncoder

NOT_CHATML = "Hello." + chatml_template()


class CountingTokenizer:
    """Counts the characters that it encodes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.n_characters = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, /, **options: bool) -> list[int]:
        self.n_characters += len(text)
        token_ids: list[int] = self._tokenizer.encode(text, **options)
        return token_ids


@pytest.mark.parametrize("template", [chatml_template(), NOT_CHATML], ids=["by hand", "jinja"])
def test_a_hundred_turns_encode_each_character_once(template: str) -> None:
    tokenizer = CountingTokenizer(small_tokenizer(template))
    renderer = make_renderer(tokenizer)
    transcript = renderer.render_prompt([QUESTION], TOOLS)
    sampled = renderer.render_completion(TOOL_DIALOGUE[1])
    tokenizer.n_characters = 0
    for turn in range(100):
        result = Message(role="tool", content=f"{turn:04} " * 50, tool_call_id="call_0")
        following = renderer.render_continuation(sampled[-1], [result])
        assert following is not None
        transcript += sampled + following
    added = "\n<|im_start|>user\n<tool_response>\n" + "0000 " * 50
    added += "\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.n_characters <= 100 * (len(added) + len("<|im_end|>"))
    assert tokenizer.n_characters > 100 * len("0000 " * 50)
    assert len(transcript) > 100 * 50


def test_a_prompt_is_encoded_once_and_a_long_result_is_not_cached() -> None:
    tokenizer = CountingTokenizer(small_tokenizer())
    encode = PromptEncoder(tokenizer)
    prompt = "the task"
    for _ in range(8):
        assert encode([prompt]) == small_tokenizer().encode(prompt)
    assert tokenizer.n_characters == len(prompt)
    answer = "x" * 20_000
    assert encode([answer]) == encode([answer])
    assert tokenizer.n_characters == len(prompt) + 2 * len(answer)


def test_the_cache_stays_small_after_thousands_of_results() -> None:
    encode = PromptEncoder(small_tokenizer())
    tracemalloc.start()
    try:
        for n in range(1500):
            encode([f"{n:04} " * 200])  # one token per character
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # 512 texts at one byte per character and four per token.
    assert kept < 512 * 1000 * 6
