"""TinySpeaker: a random model with a real tokenizer, renderer and engine, and its server."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from transformers import PreTrainedTokenizerFast

from skyfleet.chat.renderer import Renderer
from skyfleet.chat.renderers import make_renderer
from skyfleet.chat.tokenizer import encode
from skyfleet.engines.embedded import EmbeddedEngine
from skyfleet.engines.engine import Engine
from skyfleet.models.decoder import Decoder
from skyfleet.models.tiny import build_tiny, train_tokenizer
from skyfleet.serving.server import serve_app

CAPACITY = 512
MODEL = "tiny"
DIMENSIONS = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CAPACITY,
    "initializer_range": 0.3,
}
"""Weights are large, so that a wrong logit is far from the right one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyPolicy:
    tokenizer: PreTrainedTokenizerFast
    decoder: Decoder
    renderer: Renderer

    def engine(self, *, rows: int = 16, capacity: int = CAPACITY) -> EmbeddedEngine:
        return EmbeddedEngine(
            self.decoder, decode_text=self.renderer.text, max_num_seqs=rows, capacity=capacity
        )

    def app(self, engine: Engine, *, max_model_len: int = CAPACITY, **options: Any) -> Any:
        """To be given to `serving`."""
        return serve_app(
            engine,
            self.renderer,
            encode=partial(encode, self.tokenizer),
            model=MODEL,
            max_model_len=max_model_len,
            **options,
        )


@cache
def tiny_policy() -> TinyPolicy:
    """One token a byte; whoever changes the weights must not."""
    tokenizer = train_tokenizer([], vocab_size=300)
    decoder = Decoder(build_tiny(tokenizer, DIMENSIONS, seed=0), max_positions=CAPACITY)
    return TinyPolicy(tokenizer=tokenizer, decoder=decoder, renderer=make_renderer(tokenizer))
