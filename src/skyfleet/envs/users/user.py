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
    """The simulated user failed, so the episode's grade is unknown."""

    def __init__(self, failure: UserFailure) -> None:
        super().__init__(f"the simulated user failed ({failure.kind}): {failure.detail}")


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
        """Numbers for `Step.info`; the metrics sum those that start with `user_`."""
        info: dict[str, float] = {}
        if self.n_prompt_tokens or self.n_sampled_tokens:
            info["user_prompt_tokens"] = float(self.n_prompt_tokens)
            info["user_sampled_tokens"] = float(self.n_sampled_tokens)
        if self.failure is not None:
            info |= {"user_failures": 1.0, f"user_failures_{self.failure.kind}": 1.0}
        return info


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
