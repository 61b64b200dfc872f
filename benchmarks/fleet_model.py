"""A random Qwen3 that calls tools: its head continues a turn by words and one tool call.

The last token of a prompt or of a turn decides what follows, by fixed probabilities. So an engine
samples tool calls as it samples anything else, and a learner computes the same logprobs.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from itertools import pairwise
from typing import Any

import torch
from benchmarks.fleet_archive import PAGES, WORDS, make_tasks, write_page
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from skyfleet.chat.tool_prompt import QWEN_AFTER, QWEN_BEFORE
from skyfleet.config.root import RunConfig
from skyfleet.envs.fleet.env import make_prompt
from skyfleet.models.loading import LoadedModel
from skyfleet.models.rope import change_rope
from skyfleet.models.tiny import train_tokenizer

CALL = ('{"name": "', "read_page", '", "arguments": {', '"', "page", '": ')


def build_tokenizer() -> Any:
    """One token per word of the archive and per part of a call; Qwen's own is not on this machine."""
    system, _ = make_prompt(make_tasks(1)[0], today=date.today())
    texts = ["".join((*CALL, str(page), "}}")) for page in PAGES] * 3
    texts += [system.text, QWEN_BEFORE, QWEN_AFTER] * 3
    texts += [write_page(0, page, 2000) for page in PAGES]
    tokenizer = train_tokenizer(texts, vocab_size=6000)
    tokenizer.init_kwargs["skyfleet_tools"] = (
        "qwen"  # tools with their schemas, as Qwen3 shows them
    )
    return tokenizer


def plan_turns(tokenizer: Any) -> dict[int, dict[int, float]]:
    """The next token's probabilities after each token of a turn: words, then one tool call."""

    def token(text: str) -> int:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert len(ids) == 1, f"{text!r} has {len(ids)} tokens"
        return int(ids[0])

    words = [token(f" {word}") for word in WORDS[:64]]
    opening, closing = token("<tool_call>"), token("</tool_call>")
    parts, pages = [opening, *map(token, CALL)], [token(str(page)) for page in PAGES]
    chosen_word = dict.fromkeys(words, 1 / len(words))
    after_word = {word: p * 15 / 16 for word, p in chosen_word.items()} | {opening: 1 / 16}
    chain = {
        token("\n"): chosen_word,  # the end of the generation prompt
        **dict.fromkeys(words, after_word),
        **{before: {after: 1.0} for before, after in pairwise(parts)},
        parts[-1]: dict.fromkeys(pages, 1 / len(pages)),
        **{page: {token("}}"): 1.0} for page in pages},
        token("}}"): {closing: 1.0},
        closing: {tokenizer.eos_token_id: 1.0},
    }
    n_expected = 1 + len(words) + len(parts) + len(pages) + 2
    assert len(chain) == n_expected, "a token occurs twice in the plan of a turn"
    return chain


@torch.no_grad()
def build_model(
    shape: Mapping[str, Any], config: RunConfig, *, device: torch.device
) -> LoadedModel:
    """A random Qwen3 whose head continues a turn as planned."""
    tokenizer = build_tokenizer()
    model_config = Qwen3Config(
        **shape,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    if config.trainer.rope_scaling is not None:
        change_rope(model_config, config.trainer.rope_scaling.model_dump())
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    with device:
        module: Any = AutoModelForCausalLM.from_config(model_config, dtype=dtype)
    for layer in module.model.layers:  # so that the last token decides what follows
        layer.self_attn.o_proj.weight.mul_(0.01)
        layer.mlp.down_proj.weight.mul_(0.01)
    write_turns(
        module.model.embed_tokens.weight, module.lm_head.weight, plan_turns(tokenizer), logit=30.0
    )
    return LoadedModel(module=module, tokenizer=tokenizer)


def write_turns(
    embeddings_VE: Tensor, head_VE: Tensor, turns: dict[int, dict[int, float]], *, logit: float
) -> None:
    """Give planned tokens orthogonal embeddings, and the head rows that map each to its next ones."""
    generator, width = torch.Generator().manual_seed(1), embeddings_VE.shape[1]
    embeddings_VE.normal_()
    states = [*turns]
    basis_EN, _ = torch.linalg.qr(torch.randn(width, len(states), generator=generator))
    states_NE = (basis_EN.T * width**0.5).to(embeddings_VE)
    embeddings_VE[states] = states_NE
    following = sorted({token for after in turns.values() for token in after})
    logits_MN = torch.zeros(len(following), len(states))
    for column, after in enumerate(turns.values()):
        for token, probability in after.items():
            log_probability = float(torch.tensor(probability).log())
            logits_MN[following.index(token), column] = logit + log_probability
    rows_ME = logits_MN.to(states_NE.device) @ states_NE.float() / width
    head_VE[following] = rows_ME.to(head_VE.dtype)
