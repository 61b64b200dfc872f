"""Which renderer a tokenizer gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from tests.chat.family_templates import HARMONY, HARMONY_MARKS
from tests.chat.small_tokenizer import chatml_template, small_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from skyfleet.chat.chatml import ChatMLRenderer
from skyfleet.chat.jinja import JinjaRenderer
from skyfleet.chat.renderers import make_renderer
from skyfleet.chat.template_checks import QUESTION, SYSTEM, TOOLS
from skyfleet.errors import ConfigError, ModelError

DEFAULT_SYSTEM = (
    "{%- if messages[0].role != 'system' and not tools %}"
    "{{- '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
)
NO_THOUGHT = "{%- if enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{% endif %}"
SAYS_HELLO = "Hello." + chatml_template()


def without_marks(chat_template: str | None) -> Any:
    tokenizer = small_tokenizer()
    model = tokenizer.backend_tokenizer.from_str(
        tokenizer.backend_tokenizer.to_str().replace("|im_", "|turn_")
    )
    return cast("Any", PreTrainedTokenizerFast)(
        tokenizer_object=model, eos_token="<|turn_end|>", chat_template=chat_template
    )


@pytest.mark.parametrize(
    "template", [None, chatml_template(), chatml_template(keeps_thoughts=False)]
)
def test_chatml_is_rendered_by_hand(template: str | None) -> None:
    assert isinstance(make_renderer(small_tokenizer(template)), ChatMLRenderer)


def test_another_format_is_rendered_by_its_template() -> None:
    template = chatml_template().replace("|im_", "|turn_")
    for tokenizer in (without_marks(template), small_tokenizer(SAYS_HELLO)):
        renderer = make_renderer(tokenizer)
        assert isinstance(renderer, JinjaRenderer)
        assert renderer.append_only


def test_the_template_decides_the_default_system_and_the_empty_thought() -> None:
    tokenizer = small_tokenizer(DEFAULT_SYSTEM + chatml_template() + NO_THOUGHT)
    renderer = make_renderer(
        tokenizer, chat_template_kwargs={"enable_thinking": False}, tools_style="qwen"
    )
    assert isinstance(renderer, ChatMLRenderer)
    assert renderer.text(renderer.open([QUESTION], ())) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nWhat is a heron?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_a_setting_the_template_ignores_changes_nothing_and_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenizer = small_tokenizer(chatml_template())
    told = make_renderer(tokenizer, chat_template_kwargs={"enable_thinking": False})
    assert told.open([QUESTION], TOOLS) == make_renderer(tokenizer).open([QUESTION], TOOLS)
    assert [record.getMessage() for record in caplog.records] == [
        "generator.chat_template_kwargs.enable_thinking=False does nothing: the chat template does "
        "not mention it; correct its name or leave it out"
    ]


@pytest.mark.parametrize("template", [None, chatml_template() + NO_THOUGHT])
def test_a_misspelled_setting_is_told_and_a_known_one_is_not(
    template: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"enable_thinking": False, "enable_thinkin": False}
    make_renderer(small_tokenizer(template), chat_template_kwargs=settings)
    (record,) = caplog.records
    assert ".enable_thinkin=False does nothing" in record.getMessage()


def test_a_setting_that_rendering_needs_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"chat_template_kwargs has \['tokenize'\], which"):
        make_renderer(small_tokenizer(), chat_template_kwargs={"tokenize": True})


def test_a_tokenizer_carries_its_wish_for_signatures(tmp_path: Path) -> None:
    small_tokenizer(chatml_template(), skyfleet_tools="signatures").save_pretrained(tmp_path)
    renderer = make_renderer(AutoTokenizer.from_pretrained(tmp_path))
    opening = renderer.text(renderer.open([SYSTEM, QUESTION], TOOLS))
    assert "You know birds.\n\nTools:\nlook_up(word) Looks a word up.\nTo call:" in opening


def test_an_unknown_tools_style_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"tools_style='tiny'; choose from \['qwen', 'sig"):
        make_renderer(small_tokenizer(), tools_style="tiny")


def test_a_tools_style_outside_chatml_is_refused() -> None:
    with pytest.raises(ConfigError, match="tools_style='qwen' needs a tokenizer whose template"):
        make_renderer(small_tokenizer(SAYS_HELLO), tools_style="qwen")


def test_a_tokenizer_without_any_format_is_refused() -> None:
    with pytest.raises(ModelError, match="neither a chat_template nor"):
        make_renderer(without_marks(None))


def test_calls_are_read_as_the_template_writes_them() -> None:
    template = SAYS_HELLO + "{#- <tool_call><function=name><parameter=key> #}"
    renderer = make_renderer(small_tokenizer(template))
    said = "<tool_call>\n<function=stop>\n</function>\n</tool_call>"
    message = renderer.parse(small_tokenizer().encode(said))
    assert [call.name for call in message.tool_calls] == ["stop"]


def test_a_parser_that_is_asked_for_reads_the_calls() -> None:
    renderer = make_renderer(small_tokenizer(chatml_template()), tool_call_parser="json_object")
    assert isinstance(renderer, JinjaRenderer)
    message = renderer.parse(small_tokenizer().encode('{"name": "stop", "arguments": {}}'))
    assert [call.name for call in message.tool_calls] == ["stop"]
    same = make_renderer(small_tokenizer(chatml_template()), tool_call_parser="hermes")
    assert isinstance(same, ChatMLRenderer)


@pytest.mark.parametrize("parser", [None, "harmony"])
def test_gpt_oss_by_another_template_is_refused(parser: str | None) -> None:
    """Through the template no call would end a turn, and none was ever read."""
    template = HARMONY.replace("# Tools", "# Tools available", 1)
    with pytest.raises(ModelError, match="other tokens than gpt-oss's own"):
        make_renderer(small_tokenizer(template, marks=HARMONY_MARKS), tool_call_parser=parser)


def test_a_template_of_yours_is_not_held_to_what_the_tokenizer_wishes() -> None:
    tokenizer = small_tokenizer(chatml_template(), skyfleet_tools="signatures")
    spaced = (
        "{{- tools | map(attribute='function.name') | join if tools }}{%- for m in messages %}"
        "{{- '[' + m.role + '] ' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{- '[assistant] ' }}{% endif %}"
    )
    assert isinstance(make_renderer(tokenizer, chat_template=spaced), JinjaRenderer)
