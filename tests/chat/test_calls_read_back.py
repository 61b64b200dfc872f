"""A template's calls: handed over as it takes them, and heard as it writes them, or no tools shown."""

from __future__ import annotations

import pytest
from tests.chat.small_tokenizer import chatml_template, small_tokenizer

from skyfleet.chat.call_ids import nine_characters
from skyfleet.chat.jinja import JinjaRenderer
from skyfleet.chat.message import Message, ToolCall
from skyfleet.chat.renderers import make_renderer
from skyfleet.chat.template_checks import ANSWER, CALL, QUESTION, TOOLS, WORK
from skyfleet.errors import ConfigError, ModelError

# As Mistral's and DeepSeek's, without their marks.
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
# Taken as an object, but written as Python writes it.
AS_PYTHON = AS_TEXT.replace("+ call.function.arguments +", "~ call.function.arguments ~")
GEMMA = _TURNS.replace(
    "CALL", "{{- '<|tool_call>call:' + call.function.name + '{}<tool_call|>' }}"
).replace("RESULT", "")
WRITES_NONE = _TURNS.replace("CALL", "").replace("RESULT", "")


def rendered_by(template: str, parser: str | None = None) -> JinjaRenderer:
    renderer = make_renderer(small_tokenizer(template), tool_call_parser=parser)
    assert isinstance(renderer, JinjaRenderer)
    return renderer


@pytest.mark.parametrize("template", [MISTRAL, AS_TEXT, AS_PYTHON])
def test_a_template_is_handed_calls_as_it_takes_them(template: str) -> None:
    renderer = rendered_by(template)
    assert renderer.append_only
    odd = ToolCall(id="call_0", name="look_up", arguments={"word": '"é"', "n": [1, None]})
    said = renderer.write(Message(role="assistant", tool_calls=(odd,)))
    (heard,) = renderer.parse(said, TOOLS).tool_calls
    assert (heard.name, heard.arguments) == (odd.name, odd.arguments)
    glue = renderer.join(said[-1], WORK[2:3])
    assert glue is not None
    assert renderer.open(WORK[:1], TOOLS) + renderer.write(CALL) + glue == renderer.open(
        [QUESTION, CALL, WORK[2]], TOOLS
    )


def test_a_call_and_its_result_have_the_same_nine_characters() -> None:
    text = rendered_by(MISTRAL).text(rendered_by(MISTRAL).open(WORK[:4], TOOLS))
    short = [nine_characters(call_id) for call_id in ("call_0", "call_1")]
    assert len({*short}) == 2
    assert all(f"{id}<|im_end|>" in text for id in short)
    assert nine_characters("a1B2c3D4e") == "a1B2c3D4e"
    assert len(nine_characters("call_0_0_")) == len(nine_characters("é" * 9)) == 9
    assert nine_characters("é" * 9).isascii()


def test_tools_are_not_shown_where_their_calls_would_be_speech() -> None:
    renderer = rendered_by(GEMMA)
    with pytest.raises(
        ModelError,
        match=r"writes a call as .*call:look_up.*, which would not be read; give "
        r"generator.chat_template one that writes calls as one of \['glm', ",
    ):
        renderer.open([QUESTION], TOOLS)
    assert renderer.append_only
    assert renderer.open([QUESTION], ())


@pytest.mark.parametrize("parser", ["qwen3_coder", "pythonic"])
def test_a_parser_that_does_not_read_the_template_is_answered_with_one_that_does(
    parser: str,
) -> None:
    renderer = rendered_by(chatml_template(), parser)
    with pytest.raises(ModelError, match=r"not be read; set generator.tool_call_parser=hermes"):
        renderer.open([QUESTION], TOOLS)


UNQUOTED = _TURNS.replace(
    "CALL", "{{- '[' + call.function.name + '(word=' + call.function.arguments.word + ')]' }}"
).replace("RESULT", "")


def test_a_parser_that_somebody_names_is_believed_where_nobody_reads_the_template(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As vLLM's template for Llama 3.2: it leaves out the quotes that it tells the model to write."""
    with pytest.raises(
        ModelError, match=r"\(word=heron\).*, or name in generator.tool_call_parser"
    ):
        rendered_by(UNQUOTED).open([QUESTION], TOOLS)
    assert rendered_by(UNQUOTED, "pythonic").open([QUESTION], TOOLS)
    assert "generator.tool_call_parser is believed, though the chat template" in caplog.text


def test_a_reader_is_named_that_reads_the_template_as_it_would_be_handed_calls() -> None:
    """As Phi-4's: a list of JSON objects, whose arguments are an object to it."""
    phi = _TURNS.replace(
        "CALL",
        """{{- 'functools[{"name": "' + call.function.name + '", "arguments": ' """
        """+ call.function.arguments + '}]' }}""",
    ).replace("RESULT", "")
    with pytest.raises(ModelError, match=r"set generator.tool_call_parser=json_object"):
        rendered_by(phi).open([QUESTION], TOOLS)


def test_where_a_template_writes_no_calls_somebody_has_to_say_how_they_are_read() -> None:
    with pytest.raises(ModelError, match=r"set generator.tool_call_parser to one of \['glm', "):
        rendered_by(WRITES_NONE).open([QUESTION], TOOLS)
    assert rendered_by(WRITES_NONE).open([QUESTION, ANSWER, QUESTION], ())
    renderer = rendered_by(WRITES_NONE, "pythonic")
    assert renderer.open([QUESTION], TOOLS)
    assert rendered_by("{#- <|tool_list_start|> #}" + WRITES_NONE).open([QUESTION], TOOLS)  # LFM2


@pytest.mark.parametrize(("template", "style"), [(None, None), (chatml_template(), "signatures")])
def test_where_tools_are_shown_in_our_way_the_parser_reads_it(
    template: str | None, style: str | None
) -> None:
    tokenizer = small_tokenizer(template)
    with pytest.raises(ConfigError, match=r"='pythonic' with tools shown as '\w+': the model is"):
        make_renderer(tokenizer, tool_call_parser="pythonic", tools_style=style)
    assert make_renderer(tokenizer, tool_call_parser="json_object", tools_style=style)
