"""The tiny model and its tokenizer are made from a seed and some texts, and nothing else."""

from __future__ import annotations

import pytest
import torch

from skyfleet.errors import ConfigError
from skyfleet.models.tiny import MARKS, TAGS, build_tiny, train_tokenizer

TEXTS = ['{"name": "close_issue", "arguments": {"id": 42}}', "aa bb ab ba aab bba abb baa"] * 3


def test_the_same_texts_give_the_same_tokenizer() -> None:
    made = {train_tokenizer(TEXTS, vocab_size=330).backend_tokenizer.to_str() for _ in range(5)}
    assert len(made) == 1


def test_any_text_survives_encoding_and_decoding() -> None:
    tokenizer = train_tokenizer(TEXTS, vocab_size=330)
    for text in ("déjà  vu\n\t 12345", "<tool_call>\n{}\n</tool_call>", "日本語 🐦", " }} ", ""):
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(token_ids, skip_special_tokens=False) == text


def test_marks_and_tags_are_one_token_each() -> None:
    tokenizer = train_tokenizer([], vocab_size=0)
    for mark in (*MARKS, *TAGS):
        assert len(tokenizer.encode(mark, add_special_tokens=False)) == 1
    assert len(tokenizer) == 256 + len(MARKS) + len(TAGS)


def test_the_seed_determines_the_weights_and_leaves_global_randomness_unchanged() -> None:
    tokenizer = train_tokenizer([], vocab_size=0)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one, same, other = (
        build_tiny(tokenizer, {"num_hidden_layers": 1}, seed=seed).lm_head.weight
        for seed in (1, 1, 2)
    )
    assert torch.rand(1) == expected
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_an_unknown_dimension_is_rejected_with_the_known_ones() -> None:
    tokenizer = train_tokenizer([], vocab_size=0)
    with pytest.raises(ConfigError, match=r"model_config_kwargs\.hiden_size .*'hidden_size'"):
        build_tiny(tokenizer, {"hiden_size": 8}, seed=0)
