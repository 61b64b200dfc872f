"""Templates that configuration brings: read, proven like any other, and meant as they are."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tests.chat.small_tokenizer import chatml_template, small_tokenizer

from skyfleet.chat.chatml import ChatMLRenderer
from skyfleet.chat.custom_templates import NAMED, read_template
from skyfleet.chat.jinja import JinjaRenderer
from skyfleet.chat.renderers import make_renderer
from skyfleet.chat.template import Template
from skyfleet.chat.template_checks import ANSWER, QUESTION, SYSTEM, TOOLS, WORK, thoughtful
from skyfleet.errors import ConfigError, ModelError

TOKENIZER = small_tokenizer(chatml_template())


def test_no_name_is_the_tokenizers_own_template() -> None:
    assert read_template("name", None) is None


def test_a_template_is_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "é.jinja").write_text("{{ 'é' }}", encoding="utf-8")
    assert read_template("file", str(tmp_path / "é.jinja")) == "{{ 'é' }}"


def test_an_unknown_name_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"name_or_path='qwen4'; choose from \['qwen3_with_th"):
        read_template("name", "qwen4")
    with pytest.raises(ConfigError, match=r"name_or_path='.*nowhere' cannot be read: .*Jinja file"):
        read_template("file", str(tmp_path / "nowhere"))


def test_a_template_that_keeps_thoughts_is_rendered_by_hand() -> None:
    template = NAMED["qwen3_with_thinking"]
    renderer = make_renderer(TOKENIZER, chat_template=template)
    assert isinstance(renderer, ChatMLRenderer)
    theirs = Template(tokenizer=TOKENIZER, source=template)
    conversation = (SYSTEM, *thoughtful(WORK))
    assert renderer.open(conversation, TOOLS) == theirs.tokens(conversation, TOOLS)


def test_a_template_that_drops_thoughts_drops_them() -> None:
    renderer = make_renderer(TOKENIZER, chat_template=NAMED["qwen3_without_thinking"])
    assert isinstance(renderer, JinjaRenderer)
    assert not renderer.append_only
    assert "I wonder." not in renderer.text(renderer.open(thoughtful(WORK), TOOLS))


@pytest.mark.parametrize("name", sorted(NAMED))
def test_our_templates_mark_what_is_sampled(name: str, caplog: pytest.LogCaptureFixture) -> None:
    template = Template(tokenizer=TOKENIZER, source=NAMED[name])
    token_ids, marks = template.marked([QUESTION, ANSWER])
    marked = [token for token, mark in zip(token_ids, marks, strict=True) if mark]
    assert TOKENIZER.decode(marked) == "A long-legged bird.<|im_end|>"
    with caplog.at_level(logging.WARNING):
        make_renderer(TOKENIZER, chat_template=NAMED[name])
    assert not [r for r in caplog.records if "marks" in r.getMessage()]


def test_marks_that_enclose_other_tokens_are_told(caplog: pytest.LogCaptureFixture) -> None:
    template = NAMED["qwen3_with_thinking"].replace(
        "{{- '<|im_end|>' }}\n        {%- endgeneration %}",
        "{%- endgeneration %}{{- '<|im_end|>' }}",
    )
    with caplog.at_level(logging.WARNING):
        make_renderer(TOKENIZER, chat_template=template)
    assert [record.getMessage() for record in caplog.records] == [
        "the chat template marks 'A long-legged bird.' as the model's own; "
        "trained on is what is sampled, 'A long-legged bird.<|im_end|>'"
    ]


def test_marks_that_cannot_be_compared_stop_nothing(caplog: pytest.LogCaptureFixture) -> None:
    template = NAMED["qwen3_with_thinking"].replace(
        "'<|im_start|>assistant\\n' if add", "'<|im_start|>assistant\\n<think>\\n' if add"
    )
    with caplog.at_level(logging.WARNING):
        assert isinstance(make_renderer(TOKENIZER, chat_template=template), JinjaRenderer)
    assert "marks cannot be compared with what is sampled" in caplog.text


def test_a_template_that_breaks_or_is_none_is_named() -> None:
    with pytest.raises(ModelError, match="breaks on a conversation of user, assistant: TypeErr"):
        make_renderer(TOKENIZER, chat_template="{{ messages[0].content + 1 }}<|im_end|>")
    with pytest.raises(ModelError, match=r"is not Jinja: line 1: .*; correct it"):
        make_renderer(TOKENIZER, chat_template="{% for %}")
