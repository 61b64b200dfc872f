"""What an agent has to say: values that a reply must state, and rules that the replies must cite.

`write_verifier` writes these checks into verifiers; this module holds the same rules for Python.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MAX_ALIKE = 6
"""A reply that lists more values of one shape, such as amounts, states none of them: a reply with
every amount would always be right."""

SOURCE = """\
    replies = [
        turn["content"].lower().replace(",", "")
        for turn in json.loads(conversation or "[]")
        if turn["role"] == "assistant"
    ]
    for value in {values!r}:
        wanted = value.lower().replace(",", "")
        shape = re.sub(r"\\d+", r"\\\\d+", re.escape(wanted)) if re.search(r"\\d", wanted) else ""
        exact = rf"(?<![\\w.]){{re.escape(wanted)}}(?!\\w|\\.\\d)"
        if any(
            re.search(exact, reply) and not (shape and len(set(re.findall(shape, reply))) > {most})
            for reply in replies
        ):
            success_accumulator.append("[C] A reply states " + value)
        else:
            error_accumulator.append("[X] No reply states " + value)
"""

CITATIONS = """\
    cited = sorted({{rule.upper() for reply in replies for rule in re.findall(r"\\br\\d+\\b", reply)}})
    if cited == {rules!r}:
        success_accumulator.append("[C] The refusal cites its rule")
    else:
        error_accumulator.append(f"[X] The replies cite {{cited}}, expected " + {rules_text!r})
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequiredReplies:
    """Information that the agent's replies must hold."""

    values: tuple[str, ...] = ()
    """Each is in some reply, in any case and without thousands separators."""
    rules: tuple[str, ...] = ()
    """Given any: the replies cite exactly these rules of the policy, such as R4."""

    def __bool__(self) -> bool:
        return bool(self.values or self.rules)

    def write_source(self) -> str:
        """Return the lines of a verifier that check a `conversation`."""
        source = SOURCE.format(values=list(self.values), most=MAX_ALIKE)
        if self.rules:
            rules = sorted(self.rules)
            source += CITATIONS.format(rules=rules, rules_text=" ".join(rules))
        return source

    def find_stated(self, replies: Iterable[str]) -> list[str]:
        """Return the values and the cited rules that the replies hold."""
        texts = [reply.lower().replace(",", "") for reply in replies]
        stated = [value for value in self.values if _states(value, texts)]
        if not self.rules:
            return stated
        cited = {rule.upper() for text in texts for rule in re.findall(r"\br\d+\b", text)}
        return [*stated, *sorted(cited)]


def _states(value: str, texts: Sequence[str]) -> bool:
    wanted = value.lower().replace(",", "")
    shape = re.sub(r"\d+", r"\\d+", re.escape(wanted)) if re.search(r"\d", wanted) else ""
    exact = rf"(?<![\w.]){re.escape(wanted)}(?!\w|\.\d)"
    return any(
        re.search(exact, text) and not (shape and len(set(re.findall(shape, text))) > MAX_ALIKE)
        for text in texts
    )
