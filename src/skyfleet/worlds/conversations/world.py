"""ConversationWorld: a world whose agent serves one user under a policy of numbered rules."""

from __future__ import annotations

from collections.abc import Mapping

from skyfleet.worlds.conversations.dialogue import CONFIRM
from skyfleet.worlds.world import World

_CONDUCT = f"""\
You talk with one customer at a time and use the tools below. A message with a tool call is not shown \
to the customer; write to the customer in a message of its own.
- Ask the customer for what you need. Never guess, and take ids from the tools.
- Before each change say what you will do and ask: "{CONFIRM}" Change something only after a yes. If \
the customer changes their mind, the last word counts.
- If a rule forbids what the customer asks, do not do it. Say why and name the rule, such as R2, and no \
other rule.
- Write amounts as $12.50 and dates as 2026-05-01.
- When nothing is left to do, tell the customer the result and stop."""


class ConversationWorld(World):
    composes = False

    def __init__(
        self, name: str, schema: str, *, company: str, rules: Mapping[str, str], background: str
    ) -> None:
        """`rules` are the policy by number, `background` what an agent of the company knows."""
        super().__init__(name, schema)
        self.rules = rules
        numbered = "\n".join(f"{number}. {text}" for number, text in rules.items())
        self.policy = (
            f"You are the support agent of {company}. {_CONDUCT}\n\n# Background\n{background}\n\n"
            f"# Rules\n{numbered}"
        )
