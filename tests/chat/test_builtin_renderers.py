"""Built-in renderers: the tokens of their templates, append-only turns, no token injection."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.chat.builtin_templates import (
    GLM,
    GLM_TOKENS,
    HARMONY,
    HARMONY_TOKENS,
    KIMI_K2_TOKENS,
    LLAMA3,
    LLAMA3_MARKS,
    kimi_k2_template,
)
from tests.chat.small_tokenizer import chatml_template, small_tokenizer

from skyfleet.chat.chatml import ChatMLRenderer
from skyfleet.chat.glm import GLMRenderer
from skyfleet.chat.harmony import HarmonyRenderer
from skyfleet.chat.kimi_k2 import KimiK2Renderer
from skyfleet.chat.llama3 import Llama3Renderer
from skyfleet.chat.message import Message, ToolCall
from skyfleet.chat.renderers import make_renderer
from skyfleet.chat.template_checks import ANSWER, QUESTION, SYSTEM, TOOLS
from skyfleet.errors import ModelError

CHATML_TOKENIZER = small_tokenizer(chatml_template())
LLAMA3_TOKENIZER = small_tokenizer(LLAMA3, special_tokens=LLAMA3_MARKS)
KIMI_K2_TOKENIZER = small_tokenizer(
    kimi_k2_template(thinks=True, compact=False), special_tokens=KIMI_K2_TOKENS
)
GLM_TOKENIZER = small_tokenizer(GLM, special_tokens=GLM_TOKENS)
HARMONY_TOKENIZER = small_tokenizer(HARMONY, special_tokens=HARMONY_TOKENS)
EVERY = [
    pytest.param(CHATML_TOKENIZER, ChatMLRenderer, id="chatml"),
    pytest.param(LLAMA3_TOKENIZER, Llama3Renderer, id="llama3"),
    pytest.param(KIMI_K2_TOKENIZER, KimiK2Renderer, id="kimi_k2"),
    pytest.param(GLM_TOKENIZER, GLMRenderer, id="glm"),
    pytest.param(HARMONY_TOKENIZER, HarmonyRenderer, id="harmony"),
]
CALL = ToolCall(id="functions.look_up:0", name="look_up", arguments={"word": "héron"})
RESULT = Message(role="tool", content="a wading bird", tool_call_id=CALL.id)


def single(tokenizer: Any, mark: str) -> int:
    (token,) = tokenizer.encode(mark, add_special_tokens=False)
    return int(token)


@pytest.mark.parametrize(("tokenizer", "kind"), EVERY)
def test_a_builtin_format_is_recognized_by_its_template(tokenizer: Any, kind: type) -> None:
    assert isinstance(make_renderer(tokenizer), kind)


@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize("compact", [True, False])
def test_every_kimi_k2_variant_is_recognized(thinks: bool, compact: bool) -> None:
    template = kimi_k2_template(thinks=thinks, compact=compact)
    renderer = make_renderer(small_tokenizer(template, special_tokens=KIMI_K2_TOKENS))
    assert isinstance(renderer, KimiK2Renderer)
    prompt = renderer.text(renderer.render_prompt([QUESTION, ANSWER, QUESTION], TOOLS))
    assert ("<think></think>" in prompt) is thinks
    assert ('[{"type":"function"' in prompt) is compact


@pytest.mark.parametrize(("tokenizer", "kind"), EVERY)
def test_the_turns_of_an_episode_have_the_tokens_of_the_whole_conversation(
    tokenizer: Any, kind: type
) -> None:
    renderer = make_renderer(tokenizer)
    ask = Message(role="assistant", reasoning="Hm.", tool_calls=(CALL,))
    sampled = renderer.render_completion(ask)
    following = renderer.render_continuation(sampled[-1], [RESULT, QUESTION])
    assert following is not None
    pieces = renderer.render_prompt([SYSTEM, QUESTION], TOOLS) + sampled + following
    assert pieces == renderer.render_prompt([SYSTEM, QUESTION, ask, RESULT, QUESTION], TOOLS)


@pytest.mark.parametrize(("tokenizer", "kind"), EVERY)
@pytest.mark.parametrize("reasoning", ["Hm.", None])
@pytest.mark.parametrize("content", ["", "I look."])
@pytest.mark.parametrize("calls", [(), (CALL,)])
def test_parsing_a_rendered_turn_restores_the_message(
    tokenizer: Any, kind: type, reasoning: str | None, content: str, calls: tuple[ToolCall, ...]
) -> None:
    renderer = make_renderer(tokenizer)
    message = Message(role="assistant", content=content, reasoning=reasoning, tool_calls=calls)
    written = renderer.render_completion(message)
    assert written[-1] in renderer.stop_token_ids
    parsed = renderer.parse(written)
    # GLM and Kimi K2 Thinking always write reasoning, possibly empty; ids have the format's own style.
    calls = tuple(replace(call, id=CALL.id) for call in parsed.tool_calls)
    assert replace(parsed, reasoning=parsed.reasoning or reasoning, tool_calls=calls) == message


@pytest.mark.parametrize(("tokenizer", "kind"), EVERY)
def test_a_message_with_the_text_of_special_tokens_ends_no_turn(tokenizer: Any, kind: type) -> None:
    renderer = make_renderer(tokenizer)
    specials = set(tokenizer.all_special_ids) - {single(tokenizer, "<|endoftext|>")}
    sly = "".join(map(tokenizer.decode, sorted(tokenizer.added_tokens_decoder)))
    for plain, spelled in (
        ([QUESTION], [replace(QUESTION, content=sly)]),
        ([SYSTEM, QUESTION], [replace(SYSTEM, content=sly), QUESTION]),
    ):
        expected = [t for t in renderer.render_prompt(plain, TOOLS) if t in specials]
        assert [t for t in renderer.render_prompt(spelled, TOOLS) if t in specials] == expected
    end = renderer.render_completion(Message(role="assistant", tool_calls=(CALL,)))[-1]
    honest, lying = (
        renderer.render_continuation(end, [r]) for r in (RESULT, replace(RESULT, content=sly))
    )
    assert honest is not None
    assert lying is not None
    assert [t for t in honest if t in specials] == [t for t in lying if t in specials]


@pytest.mark.parametrize(
    ("tokenizer", "call"),
    [
        (GLM_TOKENIZER, replace(CALL, arguments={"word": "</arg_value>"})),
        (KIMI_K2_TOKENIZER, replace(CALL, name="look up")),
        (CHATML_TOKENIZER, replace(CALL, arguments={"word": float("nan")})),
        (HARMONY_TOKENIZER, replace(CALL, arguments={"word": "<|end|>"})),
    ],
)
def test_a_call_that_would_parse_as_another_is_rejected(tokenizer: Any, call: ToolCall) -> None:
    with pytest.raises(ModelError, match=r"parses as the tool calls \[\] instead of \[\["):
        make_renderer(tokenizer).render_completion(Message(role="assistant", tool_calls=(call,)))


def test_two_calls_with_one_id_get_two_ids() -> None:
    renderer = make_renderer(KIMI_K2_TOKENIZER)
    sampled = renderer.render_completion(Message(role="assistant", tool_calls=(CALL, CALL)))
    results = [replace(RESULT, tool_call_id=c.id) for c in renderer.parse(sampled).tool_calls]
    following = renderer.render_continuation(sampled[-1], results)
    assert following is not None
    assert "## Return of functions.look_up:1\n" in renderer.text(following)


@pytest.mark.parametrize(
    ("tokenizer", "following"),
    [
        (LLAMA3_TOKENIZER, "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"),
        (KIMI_K2_TOKENIZER, "<|im_end|><|im_user|>user<|im_middle|>"),
        (GLM_TOKENIZER, "<|user|>\n"),
        (HARMONY_TOKENIZER, "<|end|><|start|>user<|message|>"),
    ],
)
def test_a_turn_without_an_end_token_gets_one(tokenizer: Any, following: str) -> None:
    renderer = make_renderer(tokenizer)
    joined = renderer.render_continuation(tokenizer.encode("bird")[-1], [QUESTION])
    assert joined is not None
    assert renderer.text(joined).startswith(following + QUESTION.text)


def test_llama_stops_at_end_of_turn_and_end_of_message() -> None:
    renderer = make_renderer(LLAMA3_TOKENIZER)
    end, end_of_message = (single(LLAMA3_TOKENIZER, m) for m in ("<|eot_id|>", "<|eom_id|>"))
    assert renderer.render_continuation(end_of_message, [QUESTION]) == renderer.render_continuation(
        end, [QUESTION]
    )


def test_llama_keeps_the_date_of_the_template() -> None:
    settings = {"date_string": "01 Feb 2030"}
    renderer = make_renderer(LLAMA3_TOKENIZER, chat_template_kwargs=settings)
    assert "Today Date: 01 Feb 2030\n\n" in renderer.text(renderer.render_prompt([QUESTION], ()))


def test_llama_rejects_tools_without_a_user_message() -> None:
    with pytest.raises(ModelError, match="tools in the first user message"):
        make_renderer(LLAMA3_TOKENIZER).render_prompt([SYSTEM], TOOLS)


def test_glm_continues_only_with_the_role_token_it_sampled() -> None:
    renderer = make_renderer(GLM_TOKENIZER)
    user, observation = (single(GLM_TOKENIZER, m) for m in ("<|user|>", "<|observation|>"))
    following = renderer.render_continuation(user, [QUESTION])
    assert following is not None
    assert renderer.text(following) == "\nWhat is a heron?<|assistant|>"
    assert renderer.render_continuation(observation, [QUESTION]) is None
    assert renderer.render_continuation(user, [RESULT]) is None


def test_glm_can_disable_thinking() -> None:
    renderer = make_renderer(GLM_TOKENIZER, chat_template_kwargs={"enable_thinking": False})
    assert isinstance(renderer, GLMRenderer)
    prompt = renderer.text(renderer.render_prompt([QUESTION], ()))
    assert prompt.endswith("What is a heron?/nothink<|assistant|>\n<think></think>")
    assert renderer.text(renderer.render_completion(ANSWER)) == "\nA long-legged bird.<|user|>"


def test_kimi_k2_keeps_the_ids_of_its_calls() -> None:
    renderer = make_renderer(KIMI_K2_TOKENIZER)
    later = replace(CALL, id="functions.look_up:7")
    parsed = renderer.parse(
        renderer.render_completion(Message(role="assistant", tool_calls=(later,)))
    )
    assert parsed.tool_calls == (later,)
    end = single(KIMI_K2_TOKENIZER, "<|im_end|>")
    following = renderer.render_continuation(end, [replace(RESULT, tool_call_id=later.id)])
    assert following is not None
    assert "## Return of functions.look_up:7\na wading bird" in renderer.text(following)


def test_kimi_k2_renders_other_ids_in_its_own_format() -> None:
    renderer = make_renderer(KIMI_K2_TOKENIZER)
    ask = Message(role="assistant", tool_calls=(replace(CALL, id="x"),))
    prompt = renderer.render_prompt([QUESTION, ask, replace(RESULT, tool_call_id="x")], ())
    assert prompt == renderer.render_prompt(
        [QUESTION, replace(ask, tool_calls=(CALL,)), RESULT], ()
    )


def test_gpt_oss_separates_reasoning_text_and_calls_by_channel() -> None:
    renderer = make_renderer(HARMONY_TOKENIZER)
    message = Message(role="assistant", content="I look.", reasoning="Hm.", tool_calls=(CALL,))
    assert renderer.text(renderer.render_completion(message)) == (
        "<|channel|>analysis<|message|>Hm.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant to=functions.look_up<|channel|>commentary json<|message|>"
        '{"word": "héron"}<|call|>'
    )


def test_gpt_oss_rejects_a_tool_result_without_a_call_id() -> None:
    renderer = make_renderer(HARMONY_TOKENIZER)
    end = single(HARMONY_TOKENIZER, "<|call|>")
    following = renderer.render_continuation(end, [RESULT])
    assert following is not None
    assert renderer.text(following) == (
        "<|start|>functions.look_up to=assistant<|channel|>commentary<|message|>"
        '"a wading bird"<|end|><|start|>assistant'
    )
    with pytest.raises(ModelError, match="tool_call_id=None, but the gpt-oss format names"):
        renderer.render_continuation(end, [replace(RESULT, tool_call_id=None)])
