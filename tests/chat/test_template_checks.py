"""Tool calls are passed to a template as it accepts them, and rejected if they would not be parsed."""

from __future__ import annotations

import pytest
from tests.chat.small_tokenizer import chatml_template, small_tokenizer

from skyfleet.chat.call_ids import shorten_call_id
from skyfleet.chat.jinja import JinjaRenderer
from skyfleet.chat.message import Message, ToolCall
from skyfleet.chat.renderers import make_renderer
from skyfleet.chat.template_checks import ANSWER, CALL, QUESTION, TOOL_DIALOGUE, TOOLS
from skyfleet.errors import ConfigError, ModelError

# As Mistral's and DeepSeek's, without their special tokens.
_TURNS = (
    "{{- tools | map(attribute='function.name') | join if tools }}{%- for m in messages %}"
    "{{- m.role + ':' + m.content }}{%- for call in m.tool_calls or [] %}CALL{% endfor %}RESULT"
    "{{- '<|im_end|>' }}{% endfor %}{{- 'assistant:' if add_generation_prompt }}"
)
_NINE = "{%- if ID | length != 9 %}{{- raise_exception('IDs have length 9!') }}{% endif %}"
MISTRAL = _TURNS.replace(
    "CALL", _NINE.replace("ID", "call.id") + "{{- '[TOOL_CALLS][' + call.function | tojson + ']' }}"
).replace(
    "RESULT",
    "{%- if m.role == 'tool' %}"
    + _NINE.replace("ID", "m.tool_call_id")
    + "{{- m.tool_call_id }}{% endif %}",
)
AS_TEXT = _TURNS.replace(
    "CALL",
    """{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' """
    """+ call.function.arguments + '}</tool_call>' }}""",
).replace("RESULT", "")
# Accepts an object, but renders its Python repr.
AS_PYTHON = AS_TEXT.replace("+ call.function.arguments +", "~ call.function.arguments ~")
GEMMA = _TURNS.replace(
    "CALL", "{{- '<|tool_call>call:' + call.function.name + '{}<tool_call|>' }}"
).replace("RESULT", "")
WRITES_NONE = _TURNS.replace("CALL", "").replace("RESULT", "")


def build_renderer(template: str, parser: str | None = None) -> JinjaRenderer:
    renderer = make_renderer(small_tokenizer(template), tool_call_parser=parser)
    assert isinstance(renderer, JinjaRenderer)
    return renderer


@pytest.mark.parametrize("template", [MISTRAL, AS_TEXT, AS_PYTHON])
def test_calls_are_passed_in_the_encoding_that_the_template_accepts(template: str) -> None:
    renderer = build_renderer(template)
    assert renderer.append_only
    odd = ToolCall(id="call_0", name="look_up", arguments={"word": '"é"', "n": [1, None]})
    sampled = renderer.render_completion(Message(role="assistant", tool_calls=(odd,)))
    (parsed,) = renderer.parse(sampled, TOOLS).tool_calls
    assert (parsed.name, parsed.arguments) == (odd.name, odd.arguments)
    following = renderer.render_continuation(sampled[-1], TOOL_DIALOGUE[2:3])
    assert following is not None
    assert renderer.render_prompt(TOOL_DIALOGUE[:1], TOOLS) + renderer.render_completion(
        CALL
    ) + following == renderer.render_prompt([QUESTION, CALL, TOOL_DIALOGUE[2]], TOOLS)


def test_a_call_and_its_result_have_the_same_short_id() -> None:
    text = build_renderer(MISTRAL).text(
        build_renderer(MISTRAL).render_prompt(TOOL_DIALOGUE[:4], TOOLS)
    )
    short = [shorten_call_id(call_id) for call_id in ("call_0", "call_1")]
    assert len({*short}) == 2
    assert all(f"{id}<|im_end|>" in text for id in short)
    assert shorten_call_id("a1B2c3D4e") == "a1B2c3D4e"
    assert len(shorten_call_id("call_0_0_")) == len(shorten_call_id("é" * 9)) == 9
    assert shorten_call_id("é" * 9).isascii()


def test_tools_are_rejected_if_no_parser_reads_the_templates_calls() -> None:
    renderer = build_renderer(GEMMA)
    with pytest.raises(
        ModelError,
        match=r"renders a tool call as .*call:look_up.*, which would not be parsed; give "
        r"generator.chat_template a template that renders calls as one of \['glm', ",
    ):
        renderer.render_prompt([QUESTION], TOOLS)
    assert renderer.append_only
    assert renderer.render_prompt([QUESTION], ())


@pytest.mark.parametrize("parser", ["qwen3_coder", "pythonic"])
def test_the_error_for_a_wrong_parser_names_the_right_one(
    parser: str,
) -> None:
    renderer = build_renderer(chatml_template(), parser)
    with pytest.raises(ModelError, match=r"not be parsed; set generator.tool_call_parser=hermes"):
        renderer.render_prompt([QUESTION], TOOLS)


UNQUOTED = _TURNS.replace(
    "CALL", "{{- '[' + call.function.name + '(word=' + call.function.arguments.word + ')]' }}"
).replace("RESULT", "")


def test_a_configured_parser_is_used_if_no_parser_reads_the_template(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As vLLM's template for Llama 3.2, which omits the quotes that its prompt asks for."""
    with pytest.raises(ModelError, match=r"\(word=heron\).*, or set generator.tool_call_parser"):
        build_renderer(UNQUOTED).render_prompt([QUESTION], TOOLS)
    assert build_renderer(UNQUOTED, "pythonic").render_prompt([QUESTION], TOOLS)
    assert (
        "using the configured generator.tool_call_parser, although the chat template" in caplog.text
    )


def test_the_suggested_parser_is_tested_with_its_own_call_encoding() -> None:
    """As Phi-4's template: a list of JSON objects with arguments as text."""
    phi = _TURNS.replace(
        "CALL",
        """{{- 'functools[{"name": "' + call.function.name + '", "arguments": ' """
        """+ call.function.arguments + '}]' }}""",
    ).replace("RESULT", "")
    with pytest.raises(ModelError, match=r"set generator.tool_call_parser=json_object"):
        build_renderer(phi).render_prompt([QUESTION], TOOLS)


def test_a_template_that_renders_no_calls_needs_a_configured_parser() -> None:
    with pytest.raises(ModelError, match=r"set generator.tool_call_parser to one of \['glm', "):
        build_renderer(WRITES_NONE).render_prompt([QUESTION], TOOLS)
    assert build_renderer(WRITES_NONE).render_prompt([QUESTION, ANSWER, QUESTION], ())
    renderer = build_renderer(WRITES_NONE, "pythonic")
    assert renderer.render_prompt([QUESTION], TOOLS)
    assert build_renderer("{#- <|tool_list_start|> #}" + WRITES_NONE).render_prompt(
        [QUESTION], TOOLS
    )  # LFM2


@pytest.mark.parametrize(("template", "style"), [(None, None), (chatml_template(), "signatures")])
def test_a_tools_style_requires_a_parser_that_reads_hermes(
    template: str | None, style: str | None
) -> None:
    tokenizer = small_tokenizer(template)
    with pytest.raises(ConfigError, match=r"='pythonic' with tools_style='\w+': the prompt asks"):
        make_renderer(tokenizer, tool_call_parser="pythonic", tools_style=style)
    assert make_renderer(tokenizer, tool_call_parser="json_object", tools_style=style)
