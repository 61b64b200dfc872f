"""Users without a model: scripted ones tell everything at once, rule-based ones what they are asked."""

from __future__ import annotations

from skyfleet.envs.users.requests import (
    asks_for,
    asks_to_confirm,
    asks_to_wait,
    find_requests,
    offers_more,
)
from skyfleet.envs.users.scenario import Scenario
from skyfleet.envs.users.user import UserTurn

CONFIRMED = "Yes, please go ahead."
GOODBYE = "Thank you, that is all. Goodbye."
WAITING = "Okay, I will wait."
UNKNOWN = "I do not know that."


class RuleBasedUser:
    """Says its opening, and each fact only when a sentence asks for it.

    The order decides: a refused request, an unrevealed fact, a confirmation (first the next change
    of mind, then yes), a known fact again, an offer of more help. A message that asks nothing ends
    the conversation, after the scenario's objections.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._changes = list(scenario.changes_of_mind)
        self._objections = list(scenario.objections)
        self._revealed: set[int] = set()

    async def open(self) -> UserTurn:
        return UserTurn(text=self._scenario.opening)

    async def reply(self, agent_message: str) -> UserTurn:
        requests = find_requests(agent_message)
        declined = [one.text for one in self._scenario.declines if asks_for(one, requests)]
        asked = [i for i, fact in enumerate(self._scenario.facts) if asks_for(fact, requests)]
        new = [index for index in asked if index not in self._revealed]
        if declined or new:
            self._revealed.update(new)
            return UserTurn(text=" ".join([*declined, *self._texts(new)]))
        if asks_to_confirm(agent_message) and not offers_more(agent_message):
            return UserTurn(text=self._changes.pop(0) if self._changes else CONFIRMED)
        if asked:
            return UserTurn(text=" ".join(self._texts(asked)))
        if offers_more(agent_message):
            return UserTurn(text=GOODBYE, is_done=True)
        if asks_to_wait(agent_message):
            return UserTurn(text=WAITING)
        if requests:
            return self._answer_unknown()
        if self._objections:
            return UserTurn(text=self._objections.pop(0))
        return UserTurn(text=GOODBYE, is_done=True)

    async def aclose(self) -> None: ...

    def _texts(self, indices: list[int]) -> list[str]:
        return [self._scenario.facts[index].text for index in indices]

    def _answer_unknown(self) -> UserTurn:
        return UserTurn(text=UNKNOWN)


class ScriptedUser(RuleBasedUser):
    """Opens with the whole instruction, and repeats it when it does not understand a question."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self._revealed.update(range(len(scenario.facts)))

    async def open(self) -> UserTurn:
        return UserTurn(text=self._scenario.statement)

    def _answer_unknown(self) -> UserTurn:
        return UserTurn(text=self._scenario.statement)
