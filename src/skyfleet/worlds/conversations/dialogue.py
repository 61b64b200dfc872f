"""Dialogue: write the reference conversation of a task and the scenario of its user together."""

from __future__ import annotations

from typing import Any, Self

from skyfleet.envs.tool_turns import RESPOND_NAME
from skyfleet.envs.users.scenario import COLUMN, Fact, Scenario
from skyfleet.envs.verifiers.replies import RequiredReplies
from skyfleet.tasks.task import RecordedCall
from skyfleet.worlds.world import TaskDraft, call

CONFIRM = "Shall I go ahead?"
"""Ends the question that the policy demands before a change."""

REPLIES_COLUMN = "required_replies"


class Dialogue:
    """A conversation in the order in which it happens. Each method adds to it and returns it."""

    def __init__(self, opening: str, *, declines: tuple[Fact, ...] = ()) -> None:
        self._opening, self._declines = opening, declines
        self._calls: list[RecordedCall] = []
        self._facts: list[Fact] = []
        self._changes: list[str] = []
        self._objections: list[str] = []
        self._values: list[str] = []
        self._rules: list[str] = []

    def ask(self, question: str, *facts: Fact) -> Self:
        """The agent asks, and the user answers with the facts."""
        self._facts += facts
        return self._respond(question)

    def call(self, tool: str, /, **arguments: Any) -> Self:
        self._calls.append(call(tool, **arguments))
        return self

    def confirm(self, plan: str, *, change_of_mind: str | None = None) -> Self:
        """The agent says what it will do; the user agrees, or changes its mind."""
        if change_of_mind is not None:
            self._changes.append(change_of_mind)
        return self._respond(f"I will {plan}. {CONFIRM}")

    def report(self, text: str, *values: str) -> Self:
        """The agent says how it went; the `values` are required in a reply."""
        self._values += values
        return self._respond(text)

    def refuse(self, rule: str, text: str, *, objection: str | None = None) -> Self:
        """The agent refuses by a rule of the policy, twice if the user objects."""
        self._rules.append(rule)
        self._respond(f"{text} Rule {rule} does not allow it.")
        if objection is not None:
            self._objections.append(objection)
            self._respond(f"I am sorry, but rule {rule} has no exception.")
        return self

    def draft(self) -> TaskDraft:
        scenario = Scenario(
            opening=self._opening,
            facts=tuple(self._facts),
            changes_of_mind=tuple(self._changes),
            declines=self._declines,
            objections=tuple(self._objections),
        )
        scenario = scenario.model_copy(update={"secrets": self._find_secrets(scenario)})
        replies = RequiredReplies(values=tuple(self._values), rules=tuple(self._rules))
        user = scenario.model_dump(mode="json", exclude_defaults=True)
        columns = {COLUMN: user}
        if replies:
            columns[REPLIES_COLUMN] = {"values": list(replies.values), "rules": list(replies.rules)}
        return TaskDraft(
            prompts=[_describe(scenario)],
            calls=self._calls,
            replies=replies or None,
            columns=columns,
        )

    def _respond(self, content: str) -> Self:
        return self.call(RESPOND_NAME, content=content)

    def _find_secrets(self, scenario: Scenario) -> tuple[str, ...]:
        """What the agent has to look up, so a user that says it cannot know it."""
        shown = _describe(scenario)
        return tuple(value for value in self._values if value not in shown)


def _describe(scenario: Scenario) -> str:
    """The whole instruction in one text: the prompt of the task, which the agent does not see."""
    changes = [f"When asked to confirm: {text}" for text in scenario.changes_of_mind]
    objections = [f"When refused: {text}" for text in scenario.objections]
    return " ".join([scenario.statement, *changes, *objections])


def fact(text: str, *asked_by: str) -> Fact:
    """A sentence of the user, and the words of a question that asks for it."""
    return Fact(text=text, asked_by=asked_by)


def money(cents: int) -> str:
    """`money(123456)` is `$1234.56`."""
    return f"${cents // 100}.{cents % 100:02d}"
