"""Templates from the configuration are loaded and tested like the tokenizer's own."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tests.chat.small_tokenizer import chatml_template, small_tokenizer

from skyfleet.chat.chatml import ChatMLRenderer
from skyfleet.chat.jinja import JinjaRenderer
from skyfleet.chat.renderers import make_renderer
from skyfleet.chat.template import NAMED_TEMPLATES, Template, load_template
from skyfleet.chat.template_checks import (
    ANSWER,
    QUESTION,
    SYSTEM,
    TOOL_DIALOGUE,
    TOOLS,
    with_reasoning,
)
from skyfleet.errors import ConfigError, ModelError

TOKENIZER = small_tokenizer(chatml_template())


def test_without_a_name_the_tokenizers_template_is_used() -> None:
    assert load_template("name", None) is None


def test_a_template_is_loaded_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "é.jinja").write_text("{{ 'é' }}", encoding="utf-8")
    assert load_template("file", str(tmp_path / "é.jinja")) == "{{ 'é' }}"


def test_the_error_for_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"name_or_path='qwen4'; choose from \['qwen3_with_th"):
        load_template("name", "qwen4")
    with pytest.raises(ConfigError, match=r"name_or_path='.*nowhere' cannot be read: .*Jinja file"):
        load_template("file", str(tmp_path / "nowhere"))


def test_a_template_that_keeps_reasoning_uses_a_builtin_renderer() -> None:
    template = NAMED_TEMPLATES["qwen3_with_thinking"]
    renderer = make_renderer(TOKENIZER, chat_template=template)
    assert isinstance(renderer, ChatMLRenderer)
    theirs = Template(tokenizer=TOKENIZER, source=template)
    conversation = (SYSTEM, *with_reasoning(TOOL_DIALOGUE))
    assert renderer.render_prompt(conversation, TOOLS) == theirs.tokenize(conversation, TOOLS)


def test_a_template_that_drops_reasoning_drops_it() -> None:
    renderer = make_renderer(TOKENIZER, chat_template=NAMED_TEMPLATES["qwen3_without_thinking"])
    assert isinstance(renderer, JinjaRenderer)
    assert not renderer.append_only
    assert "I wonder." not in renderer.text(
        renderer.render_prompt(with_reasoning(TOOL_DIALOGUE), TOOLS)
    )


@pytest.mark.parametrize("name", sorted(NAMED_TEMPLATES))
def test_our_templates_enclose_sampled_tokens_in_generation_blocks(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    template = Template(tokenizer=TOKENIZER, source=NAMED_TEMPLATES[name])
    token_ids, special_tokens = template.generation_mask([QUESTION, ANSWER])
    generation_mask = [token for token, mark in zip(token_ids, special_tokens, strict=True) if mark]
    assert TOKENIZER.decode(generation_mask) == "A long-legged bird.<|im_end|>"
    with caplog.at_level(logging.WARNING):
        make_renderer(TOKENIZER, chat_template=NAMED_TEMPLATES[name])
    assert not [r for r in caplog.records if "generation block" in r.getMessage()]


def test_generation_blocks_around_other_tokens_log_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    template = NAMED_TEMPLATES["qwen3_with_thinking"].replace(
        "{{- '<|im_end|>' }}\n        {%- endgeneration %}",
        "{%- endgeneration %}{{- '<|im_end|>' }}",
    )
    with caplog.at_level(logging.WARNING):
        make_renderer(TOKENIZER, chat_template=template)
    assert [record.getMessage() for record in caplog.records] == [
        "the chat template's generation block encloses 'A long-legged bird.'; "
        "the run trains on the sampled tokens, 'A long-legged bird.<|im_end|>'"
    ]


def test_generation_blocks_that_cannot_be_compared_log_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    template = NAMED_TEMPLATES["qwen3_with_thinking"].replace(
        "'<|im_start|>assistant\\n' if add", "'<|im_start|>assistant\\n<think>\\n' if add"
    )
    with caplog.at_level(logging.WARNING):
        assert isinstance(make_renderer(TOKENIZER, chat_template=template), JinjaRenderer)
    assert "generation blocks cannot be compared with a turn" in caplog.text


def test_a_template_that_raises_or_is_invalid_is_rejected() -> None:
    with pytest.raises(ModelError, match="fails on a conversation of user, assistant: TypeErr"):
        make_renderer(TOKENIZER, chat_template="{{ messages[0].content + 1 }}<|im_end|>")
    with pytest.raises(ModelError, match=r"is not valid Jinja: line 1: .*; correct it"):
        make_renderer(TOKENIZER, chat_template="{% for %}")
