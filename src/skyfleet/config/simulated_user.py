"""Simulated user: who an agent talks to in conversational environments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, SecretStr

from skyfleet.config.section import Section


class SimulatedUser(Section):
    """`user_strategy`, `user_model` and `user_provider` are tau-bench's names."""

    user_strategy: Literal["scripted", "rule_based", "llm"] = "scripted"
    """scripted tells everything at once; rule_based answers only what it is asked; llm is a model."""
    user_model: str | None = None
    """With llm: a name that the endpoint knows, or for embedded what trainer.policy.model.path takes; \
null with policy."""
    user_provider: Literal["openai", "embedded", "policy"] = "openai"
    """With llm: an OpenAI-compatible endpoint, a model that this process loads, or a frozen copy of the \
policy as trainer.policy.model.path has it."""
    base_url: str | None = None
    """The endpoint of the openai provider, without /chat/completions."""
    api_key: SecretStr | None = None
    """Write ${oc.env:OPENAI_API_KEY}; it is redacted in every output."""
    temperature: float = Field(0.7, ge=0)
    max_generate_length: int = Field(128, ge=1)
    """Tokens per message of the user."""
    max_input_length: int = Field(4096, ge=1)
    """Tokens that embedded and policy users read."""
    timeout_seconds: float = Field(60, gt=0)
    """For one message of any user; a later one is a failure of the user."""

    def find_problems(self) -> Iterator[str]:
        if self.user_strategy != "llm":
            return
        where = "environment.user."
        if self.user_provider == "policy" and self.user_model is not None:
            yield (
                f"{where}user_model={self.user_model!r} is not used by user_provider=policy; remove "
                "it, or set user_provider=embedded"
            )
        elif self.user_provider != "policy" and self.user_model is None:
            yield f"{where}user_model=null: user_strategy=llm needs a model; name one"
        if self.user_provider == "openai" and self.base_url is None:
            yield (
                f"{where}base_url=null: user_provider=openai needs an endpoint, such as "
                "http://localhost:8000/v1; or set user_provider=embedded"
            )
