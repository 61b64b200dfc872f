"""The grammar of each format: calls, content and malformed calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from skyfleet.chat.message import ToolCall
from skyfleet.chat.tool_calls.formats import FORMATS, detect_parser, get_parser
from skyfleet.errors import ConfigError

CallPair = tuple[str, dict[str, Any]]
LOOK: CallPair = ("look_up", {"word": "heron"})
STOP: CallPair = ("stop", {})

KIMI_LOOK = (
    "<|tool_call_begin|>functions.look_up:0"
    '<|tool_call_argument_begin|>{"word": "heron"}<|tool_call_end|>'
)
KIMI_STOP = "<|tool_call_begin|>stop:1 <|tool_call_argument_begin|> {}<|tool_call_end|>"
KIMI = f"<|tool_calls_section_begin|>{KIMI_LOOK}\n{KIMI_STOP}<|tool_calls_section_end|>"
QWEN_LOOK = "<function=look_up>\n<parameter=word>\nheron\n</parameter>\n</function>"
GLM_LOOK = "<tool_call>look_up\n<arg_key>word</arg_key>\n<arg_value>heron</arg_value>\n</tool_call>"
LLAMA_LOOK = '{"name": "look_up", "parameters": {"word": "heron"}}'
ARRAY = '[{"name": "look_up", "arguments": {"word": "heron"}}, {"name": "stop", "arguments": {}}]'
TWO_WAYS = [
    ("qwen3_coder", f"<tool_call>\n{QWEN_LOOK}\n</tool_call>\n<tool_call><function=stop></function>"),
    ("qwen3_coder", f"{QWEN_LOOK}\n<function=stop>\n</function></tool_call>"),
    ("llama3_json", f'{LLAMA_LOOK}; {{"name": "stop", "parameters": {{}}}};'),
    ("llama3_json", f'<|python_tag|>{LLAMA_LOOK}{{"type": "function", "name": "stop", "parameters": {{}}}}'),
    ("pythonic", '[look_up(word="heron"), stop()]'),
    ("pythonic", "<|tool_call_start|>[look_up(word='heron'), stop()]<|tool_call_end|>"),
    ("kimi_k2", KIMI),
    ("glm", f"{GLM_LOOK}\n<tool_call>stop</tool_call>"),
    ("glm", GLM_LOOK.replace("\n", "") + "<tool_call>stop\n</tool_call>"),
    ("mistral", f"[TOOL_CALLS] {ARRAY}"),
    ("mistral", '[TOOL_CALLS]look_up[ARGS]{"word": "heron"}[TOOL_CALLS]stop[CALL_ID]a1[ARGS]{}'),
    ("mistral", '[TOOL_CALLS]look_up{"word": "heron"}[TOOL_CALLS]stop{}'),
    ("json_object", '```json\n{"name": "look_up", "arguments": {"word": "heron"}}\n``` {"tool": "stop", "params": {}}'),
]  # fmt: skip


def calls_of(calls: Sequence[ToolCall]) -> list[CallPair]:
    return [(call.name, dict(call.arguments)) for call in calls]


@pytest.mark.parametrize(("name", "sampled"), TWO_WAYS)
def test_two_calls_in_one_turn_and_the_text_around_them_are_parsed(name: str, sampled: str) -> None:
    parsed = get_parser(name)(f"<think>{sampled}</think>I look.\n{sampled}")
    assert calls_of(parsed.tool_calls) == [LOOK, STOP]
    assert (parsed.content, parsed.reasoning) == ("I look.", sampled)
    assert (parsed.malformed_calls, parsed.repaired_calls) == ((), 0)


@pytest.mark.parametrize(("name", "sampled"), TWO_WAYS)
def test_reasoning_that_the_template_opened_contains_no_call(name: str, sampled: str) -> None:
    parsed = get_parser(name)(f"Perhaps {sampled}</think>Done.")
    assert (parsed.content, parsed.tool_calls, parsed.malformed_calls) == ("Done.", (), ())


@pytest.mark.parametrize(
    ("name", "sampled"),
    [
        ("qwen3_coder", "<tool_call>\n{}\n</tool_call>"),
        ("qwen3_coder", "<tool_call><function=f>so</function></tool_call>"),
        ("qwen3_coder", "<function=f><parameter=a>1</tool_call>"),
        ("qwen3_coder", "<function=f><parameter=a>1</parameter><parameter=a>1</parameter></function></tool_call>"),
        ("qwen3_coder", "<function=f><parameter=a>\ud800</parameter></function></tool_call>"),
        ("glm", "<tool_call></tool_call>"),
        ("glm", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
        ("glm", "<tool_call>f<arg_key>a</arg_key></tool_call>"),
        ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>1</tool_call>"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_calls_section_end|>"),
        ("kimi_k2", "<|tool_call_begin|>f<|tool_call_argument_begin|>{}<|tool_call_end|>"),
        ("kimi_k2", "<|tool_call_begin|>f:0<|tool_call_argument_begin|>[]<|tool_call_end|>"),
        ("kimi_k2", '<|tool_call_begin|>f:0<|tool_call_argument_begin|>{"a": 1, "a": 2}<|tool_call_end|>'),
        ("mistral", "[TOOL_CALLS][]"),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": 5, "arguments": {}}]'),
        ("mistral", "[TOOL_CALLS]f[ARGS]so"),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": NaN}'),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("llama3_json", '<|python_tag|>{"a": 1}'),
        ("llama3_json", '{"name": "f", "parameters": [1]}'),
        ("llama3_json", '{"name": "f", "parameters": {"a": %s}}' % ("9" * 5000)),
        ("json_object", '{"name": "f", "arguments": {"a": 1e999}}'),
        ("json_object", '{"name": "f", "arguments": {"a": %s}}' % ("[" * 101 + "]" * 101)),
        ("json_object", '{"name": "f", "arguments": %s' % ('{"a":' * 20_000)),
        ("pythonic", "[f(a=b)]"),
        ("pythonic", "[f(a=1, a=2)]"),
        ("pythonic", "[f(a=1), 2]"),
        ("pythonic", "[f(a=1), g(2)]"),
        ("pythonic", "[f(a=__import__('os'))]"),
        ("pythonic", "[f(a={1: 2})]"),
        ("pythonic", "[f(a={'b': 1, 'b': 2})]"),
        ("pythonic", "[f(a='\\d')]"),
        ("pythonic", "[f(a=1e999)]"),
        ("pythonic", "[f(a=0x%s)]" % ("f" * 5000)),
        ("pythonic", "[f(a=%s1)]" % ("-" * 100_000)),
        ("pythonic", "[f(ﬁ=1)]"),
        ("pythonic", "<|python_start|>print(1)<|python_end|>"),
    ],
)  # fmt: skip
def test_text_that_begins_a_call_and_is_none_is_malformed(name: str, sampled: str) -> None:
    parsed = get_parser(name)(f"Now. {sampled}")
    assert parsed.malformed_calls == (sampled,)
    assert (parsed.content, parsed.tool_calls) == ("Now.", ())


@pytest.mark.parametrize(
    ("name", "speech"),
    [
        ("json_object", 'The row is {"id": 5, "of": {"name": "f", "arguments": {}}}, see?'),
        ("json_object", '{"name": "Bob", "age": 5}'),
        ("json_object", "```json\n{}\n```"),
        ("llama3_json", "A set {1, 2} and {a: {b}}."),
        ("pythonic", "See [f(x)], [1] and [a link](x)."),
        ("mistral", "[ARGS] are arguments."),
        ("glm", "<function=f></function>"),
    ],
)
def test_text_that_only_looks_like_a_call_is_content(name: str, speech: str) -> None:
    parsed = get_parser(name)(speech)
    assert (parsed.content, parsed.tool_calls, parsed.malformed_calls) == (speech, (), ())


@pytest.mark.parametrize(
    ("name", "sampled"),
    [
        ("llama3_json", '{"name": "f", "parameters": {"a": 1}'),
        ("json_object", '{"name": "f", "arguments": {"a": 1}'),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}'),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}'),
        ("pythonic", "[f(a=1)"),
        ("pythonic", "<|tool_call_start|>[f(a=1<|tool_call_end|>"),
        ("kimi_k2", '<|tool_call_begin|>f:0<|tool_call_argument_begin|>{"a": 1<|tool_call_end|>'),
    ],
)
def test_only_missing_brackets_are_repaired(name: str, sampled: str) -> None:
    parsed = get_parser(name)(sampled)
    assert calls_of(parsed.tool_calls) == [("f", {"a": 1})]
    assert parsed.message.repaired_calls == 1


@pytest.mark.parametrize(
    ("name", "sampled"),
    [
        ("llama3_json", '{"name": "f", "parameters": {"a": 1'),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1'),
        ("pythonic", "[f(a=1"),
        ("kimi_k2", '<|tool_call_begin|>f:0<|tool_call_argument_begin|>{"a": 1'),
        ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>"),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>1</parameter>"),
    ],
)
def test_a_call_with_incomplete_arguments_is_not_repaired(name: str, sampled: str) -> None:
    assert get_parser(name)(sampled).malformed_calls == (sampled,)


def test_pythonic_values_are_python_or_json_literals() -> None:
    sampled = (
        "[a.b(from='x', n=-1.5, yes=True, no=false, nil=null, all=[(1, None)], o={'k': \"'\"})]"
    )
    (call,) = get_parser("pythonic")(sampled).tool_calls
    assert (call.name, call.arguments) == (
        "a.b",
        {"from": "x", "n": -1.5, "yes": True, "no": False, "nil": None, "all": [[1, None]], "o": {"k": "'"}},
    )  # fmt: skip


def test_mistrals_think_tags_are_reasoning() -> None:
    parsed = get_parser("mistral")("[THINK][TOOL_CALLS]f{}[/THINK]Done.")
    assert (parsed.content, parsed.reasoning, parsed.tool_calls) == ("Done.", "[TOOL_CALLS]f{}", ())


def test_call_ids_written_by_the_model_are_kept() -> None:
    calls = get_parser("kimi_k2")(KIMI.replace("look_up:0", "look_up:7")).tool_calls
    assert [call.id for call in calls] == ["functions.look_up:7", "stop:1"]
    assert "functions.look_up:7<|" in "".join(FORMATS["kimi_k2"].write(calls))
    assert [call.id for call in get_parser("mistral")("[TOOL_CALLS]f[CALL_ID]a1[ARGS]{}").tool_calls] == ["a1"]  # fmt: skip


def test_duplicate_call_ids_are_renumbered() -> None:
    calls = get_parser("kimi_k2")(KIMI_LOOK * 2).tool_calls
    assert [call.id for call in calls] == ["functions.look_up:0", "functions.look_up:1"]


def test_vllms_parser_names_are_aliases_and_unknown_ones_are_rejected() -> None:
    assert get_parser("glm47") is FORMATS["glm"].parse
    assert get_parser("openai") is FORMATS["harmony"].parse
    with pytest.raises(ConfigError, match=r"tool_call_parser='gml'; choose from \['glm', 'glm45'"):
        get_parser("gml")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ('<tool_call>\\n{"name": \' + name + \', "arguments": ', "hermes"),
        ("<tool_call>\\n<function=' + name + '>\\n<parameter=' + key", "qwen3_coder"),
        ("<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>", "glm"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ("{{- '[TOOL_CALLS]' + name + '[ARGS]' }}", "mistral"),
        ("{{- '<|channel|>commentary json<|message|>' }}", "harmony"),
        ("<|tool_call_start|>[", "pythonic"),
        ("[func_name1(params_name1=params_value1)]", "pythonic"),
        ('Respond in the format {"name": function name, "parameters": dictionary}', "llama3_json"),
        ("<seed:tool_call><function=' + name + '><parameter=", None),
        ("{{ messages }}", None),
    ],
)
def test_the_parser_of_a_template_is_detected(template: str, name: str | None) -> None:
    assert detect_parser(template) == name
