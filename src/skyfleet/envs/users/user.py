"""The User protocol: who an agent talks to in a conversational environment, and how a user fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from skyfleet.envs.users.scenario import Scenario
from skyfleet.errors import EpisodeError

STOP = "###STOP###"
"""What a user says to end the conversation; tau-bench's word."""


class UserFailureKind(StrEnum):
    EMPTY_REPLY = "empty_reply"
    LOOP = "loop"
    LEAKED_ANSWER = "leaked_answer"
    BROKE_CHARACTER = "broke_character"
    TIMEOUT = "timeout"
    """No reply before environment.user.timeout_seconds."""
    ENDPOINT = "endpoint"
    """The model that plays the user could not be asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserFailure:
    """What a user did wrong, which says nothing about the agent."""

    kind: UserFailureKind
    detail: str


class UserFailedError(EpisodeError):
    """The simulated user failed, so the episode's grade is unknown; the metrics count it by kind."""

    @classmethod
    def of(cls, failure: UserFailure) -> UserFailedError:
        return cls(f"the simulated user failed ({failure.kind}): {failure.detail}")


@dataclass(frozen=True, slots=True, kw_only=True)
class UserTurn:
    """What a user says next."""

    text: str
    is_done: bool = False
    """The user ends the conversation; True after a failure as well."""
    failure: UserFailure | None = None
    n_prompt_tokens: int = 0
    """Tokens that the model behind the user read; 0 without a model."""
    n_sampled_tokens: int = 0

    @property
    def info(self) -> dict[str, float]:
        """The tokens, for `Step.info`; the metrics sum what starts with `user_`."""
        if not self.n_prompt_tokens and not self.n_sampled_tokens:
            return {}
        return {
            "user_prompt_tokens": float(self.n_prompt_tokens),
            "user_sampled_tokens": float(self.n_sampled_tokens),
        }


class User(Protocol):
    """One user in one conversation. Neither method raises for what a user does wrong: the turn
    holds the failure."""

    async def open(self) -> UserTurn:
        """Return the first message."""
        ...

    async def reply(self, agent_message: str) -> UserTurn:
        """Answer a message of the agent."""
        ...

    async def aclose(self) -> None:
        """Release what the user holds; may be called twice."""
        ...


UserFactory = Callable[[Scenario, str], User]
"""Makes the user of one episode; the string is unique among the open episodes."""
