"""The `tiny` model: a tokenizer trained from scratch and a small random transformer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from skyfleet.errors import ConfigError

MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
    "<done>",
)
"""Single tokens, as in Qwen's own vocabulary."""

# The syntax of a tool call, names, dates, pairs of digits, runs of punctuation, white space: a name or
# a small number is one token, so a tool call costs few tokens beside its content.
PIECES = Regex(
    r"""\{"name": "|", "arguments": \{|": "|", "|": |, "|\}\}| ?[A-Za-z_]+"""
    r"""| ?[0-9]{4}-[0-9]{2}-[0-9]{2}|[0-9]{1,2}| ?[^\sA-Za-z0-9_]+|\s+"""
)

DIMENSIONS: Mapping[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rope_theta": 10_000.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "vocab_size": 2048,
}
"""About a million parameters; `trainer.policy.model_config_kwargs` overrides each value."""


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """Train byte-level BPE on `texts`; without texts, one token per byte."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(PIECES, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*MARKS, *TAGS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=_with_plain_tags(backend),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        # make_renderer then shows tools as signatures: JSON schemas take too many tokens here.
        skyfleet_tools="signatures",
    )


def _with_plain_tags(backend: Tokenizer) -> Tokenizer:
    """Make tags plain text tokens, as in Qwen's vocabulary; only marks stay special."""
    described = json.loads(backend.to_str())
    for token in described["added_tokens"]:
        token["special"] = token["content"] not in TAGS
    return Tokenizer.from_str(json.dumps(described))


def build_tiny(
    tokenizer: PreTrainedTokenizerFast, overrides: Mapping[str, Any], *, seed: int
) -> Qwen3ForCausalLM:
    """Build a small Qwen3 model with random weights from `seed`."""
    unknown = sorted(set(overrides) - set(DIMENSIONS))
    if unknown:
        raise ConfigError(
            f"trainer.policy.model_config_kwargs.{unknown[0]} is not supported by the tiny model; "
            f"it takes {sorted(DIMENSIONS)}"
        )
    dimensions = {**DIMENSIONS, **overrides, "vocab_size": len(tokenizer)}
    theta = dimensions.pop("rope_theta")
    config = Qwen3Config(
        **dimensions,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)
