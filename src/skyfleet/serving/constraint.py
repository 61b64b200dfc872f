"""TokenConstraint: only tokens that keep the text in a grammar can be sampled."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from skyfleet.chat.renderer import Renderer
from skyfleet.serving.json_grammar import JsonGrammar, State

if TYPE_CHECKING:
    from torch import Tensor


_TAG = re.compile(r"</?[^<>\s]+>|\[/?[A-Z_]+\]")


class Vocabulary:
    """The texts of all tokens, as a tree of their characters."""

    def __init__(self, renderer: Renderer, size: int) -> None:
        self.size, self.stop_token_ids = size, renderer.stop_token_ids
        self.texts = [renderer.text([token]) for token in range(size)]
        self._root = _Node()
        for token, text in enumerate(self.texts):
            # A tag or a special token inside a string would be read as one.
            if text and not _TAG.fullmatch(text) and token not in self.stop_token_ids:
                node = self._root
                for character in text:
                    node = node.children.setdefault(character, _Node())
                node.tokens.append(token)

    def find_allowed(self, grammar: JsonGrammar, state: State) -> list[int]:
        """The tokens whose whole text the grammar can read from `state` on."""
        allowed: list[int] = []
        pending = [(self._root, state)]
        while pending:
            node, at = pending.pop()
            allowed += node.tokens
            for character, child in node.children.items():
                if following := grammar.advance(at, character):
                    pending.append((child, following))
        return allowed


class _Node:
    __slots__ = ("children", "tokens")

    def __init__(self) -> None:
        self.children: dict[str, _Node] = {}
        self.tokens: list[int] = []


class TokenConstraint:
    """A logits processor for one request; the text must be one of the grammar's, then the turn ends."""

    def __init__(self, grammar: JsonGrammar, vocabulary: Vocabulary, *, n_prompt: int) -> None:
        self._grammar, self._vocabulary, self._n_prompt = grammar, vocabulary, n_prompt
        self._find_mask = lru_cache(maxsize=512)(self._build_mask)

    def __call__(self, token_ids: Sequence[int], logits_V: Tensor) -> Tensor:
        """`logits_V` with minus infinity for every token that the grammar excludes."""
        state = self._grammar.start
        for token in token_ids[self._n_prompt :]:
            for character in self._vocabulary.texts[token]:
                state = self._grammar.advance(state, character)
        mask_V = self._find_mask(state, logits_V.shape[-1]).to(logits_V.device)
        return logits_V.masked_fill(~mask_V, float("-inf"))

    def _build_mask(self, state: State, size: int) -> Tensor:
        import torch

        allowed: Collection[int] = self._vocabulary.find_allowed(self._grammar, state)
        if self._grammar.is_complete(state) or not allowed:
            allowed = [*allowed, *self._vocabulary.stop_token_ids]
        mask_V = torch.zeros(size, dtype=torch.bool)
        mask_V[torch.tensor(sorted(allowed), dtype=torch.long)] = True
        return mask_V


class TopLogprobs:
    """A logits processor that records the most likely tokens of every position and changes nothing."""

    def __init__(self, k: int, *, n_prompt: int, temperature: float) -> None:
        self._k, self._n_prompt = k, n_prompt
        self._temperature = temperature or 1.0
        self._by_position: dict[int, list[tuple[int, float]]] = {}

    def __call__(self, token_ids: Sequence[int], logits_V: Tensor) -> Tensor:
        top = (logits_V.float() / self._temperature).log_softmax(-1).topk(self._k)
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        # An excluded token has no logprob that JSON could hold.
        kept = [(token, logprob) for token, logprob in pairs if logprob > float("-inf")]
        self._by_position[len(token_ids) - self._n_prompt] = kept
        return logits_V

    def get(self, position: int) -> list[tuple[int, float]]:
        """The most likely tokens at a position of the completion, with their logprobs."""
        return self._by_position.get(position, [])
