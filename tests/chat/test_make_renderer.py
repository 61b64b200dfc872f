"""Which renderer a tokenizer gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from tests.chat.builtin_templates import HARMONY, HARMONY_TOKENS
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
EMPTY_REASONING = "{%- if enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{% endif %}"
BEGINS_WITH_HELLO = "Hello." + chatml_template()


def without_special_tokens(chat_template: str | None) -> Any:
    tokenizer = small_tokenizer()
    model = tokenizer.backend_tokenizer.from_str(
        tokenizer.backend_tokenizer.to_str().replace("|im_", "|turn_")
    )
    return cast("Any", PreTrainedTokenizerFast)(
        tokenizer_object=model, eos_token="<|turn_end|>", chat_template=chat_template
    )


@pytest.mark.parametrize(
    "template", [None, chatml_template(), chatml_template(keeps_reasoning=False)]
)
def test_chatml_uses_the_builtin_renderer(template: str | None) -> None:
    assert isinstance(make_renderer(small_tokenizer(template)), ChatMLRenderer)


def test_an_unknown_format_uses_its_jinja_template() -> None:
    template = chatml_template().replace("|im_", "|turn_")
    for tokenizer in (without_special_tokens(template), small_tokenizer(BEGINS_WITH_HELLO)):
        renderer = make_renderer(tokenizer)
        assert isinstance(renderer, JinjaRenderer)
        assert renderer.append_only


def test_default_system_and_empty_reasoning_come_from_the_template() -> None:
    tokenizer = small_tokenizer(DEFAULT_SYSTEM + chatml_template() + EMPTY_REASONING)
    renderer = make_renderer(
        tokenizer, chat_template_kwargs={"enable_thinking": False}, tools_style="qwen"
    )
    assert isinstance(renderer, ChatMLRenderer)
    assert renderer.text(renderer.render_prompt([QUESTION], ())) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nWhat is a heron?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_a_kwarg_that_the_template_ignores_logs_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenizer = small_tokenizer(chatml_template())
    configured = make_renderer(tokenizer, chat_template_kwargs={"enable_thinking": False})
    assert configured.render_prompt([QUESTION], TOOLS) == make_renderer(tokenizer).render_prompt(
        [QUESTION], TOOLS
    )
    assert [record.getMessage() for record in caplog.records] == [
        "generator.chat_template_kwargs.enable_thinking=False has no effect: the chat template does "
        "not mention it; correct its name or leave it out"
    ]


@pytest.mark.parametrize("template", [None, chatml_template() + EMPTY_REASONING])
def test_a_misspelled_kwarg_logs_a_warning(
    template: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"enable_thinking": False, "enable_thinkin": False}
    make_renderer(small_tokenizer(template), chat_template_kwargs=settings)
    (record,) = caplog.records
    assert ".enable_thinkin=False has no effect" in record.getMessage()


def test_a_reserved_kwarg_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"chat_template_kwargs has \['tokenize'\], which"):
        make_renderer(small_tokenizer(), chat_template_kwargs={"tokenize": True})


def test_the_tools_style_saved_with_the_tokenizer_is_used(tmp_path: Path) -> None:
    small_tokenizer(chatml_template(), skyfleet_tools="signatures").save_pretrained(tmp_path)
    renderer = make_renderer(AutoTokenizer.from_pretrained(tmp_path))
    prompt = renderer.text(renderer.render_prompt([SYSTEM, QUESTION], TOOLS))
    assert "You know birds.\n\nTools:\nlook_up(word) Looks a word up.\nTo call:" in prompt


def test_the_error_for_an_unknown_tools_style_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"tools_style='tiny'; choose from \['qwen', 'sig"):
        make_renderer(small_tokenizer(), tools_style="tiny")


def test_a_tools_style_requires_a_chatml_template() -> None:
    with pytest.raises(ConfigError, match="tools_style='qwen' requires a tokenizer with a ChatML"):
        make_renderer(small_tokenizer(BEGINS_WITH_HELLO), tools_style="qwen")


def test_a_tokenizer_without_a_chat_format_is_rejected() -> None:
    with pytest.raises(ModelError, match="neither a chat_template nor"):
        make_renderer(without_special_tokens(None))


def test_the_parser_is_detected_from_the_template() -> None:
    template = BEGINS_WITH_HELLO + "{#- <tool_call><function=name><parameter=key> #}"
    renderer = make_renderer(small_tokenizer(template))
    sampled = "<tool_call>\n<function=stop>\n</function>\n</tool_call>"
    message = renderer.parse(small_tokenizer().encode(sampled))
    assert [call.name for call in message.tool_calls] == ["stop"]


def test_a_configured_parser_parses_the_calls() -> None:
    renderer = make_renderer(small_tokenizer(chatml_template()), tool_call_parser="json_object")
    assert isinstance(renderer, JinjaRenderer)
    message = renderer.parse(small_tokenizer().encode('{"name": "stop", "arguments": {}}'))
    assert [call.name for call in message.tool_calls] == ["stop"]
    same = make_renderer(small_tokenizer(chatml_template()), tool_call_parser="hermes")
    assert isinstance(same, ChatMLRenderer)


@pytest.mark.parametrize("parser", [None, "harmony"])
def test_gpt_oss_with_another_template_is_rejected(parser: str | None) -> None:
    """Rendered by the template, a call would not end a turn."""
    template = HARMONY.replace("# Tools", "# Tools available", 1)
    with pytest.raises(ModelError, match="does not produce gpt-oss's tokens"):
        make_renderer(
            small_tokenizer(template, special_tokens=HARMONY_TOKENS), tool_call_parser=parser
        )


def test_a_configured_template_ignores_the_saved_tools_style() -> None:
    tokenizer = small_tokenizer(chatml_template(), skyfleet_tools="signatures")
    spaced = (
        "{{- tools | map(attribute='function.name') | join if tools }}{%- for m in messages %}"
        "{{- '[' + m.role + '] ' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{- '[assistant] ' }}{% endif %}"
    )
    assert isinstance(make_renderer(tokenizer, chat_template=spaced), JinjaRenderer)
