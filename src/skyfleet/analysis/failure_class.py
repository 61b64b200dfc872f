"""Failure classes, and the class that the text of a tool error points to."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class FailureClass(StrEnum):
    """One episode has one. They stand in the order in which tables show them."""

    FALSE_COMPLETION = "false completion"
    """It ended as finished, and the state or the answer is wrong."""
    GAVE_UP = "gave up"
    """It ended without trying, or said that it cannot."""
    LOOP = "loop or repetition"
    """Its last calls, or its last words, are the same again and again."""
    MALFORMED_CALL = "malformed call"
    """A call that cannot be read, or that names no tool."""
    WRONG_ARGUMENTS = "wrong arguments"
    """A tool refused what it was given: by its schema, or by a rule of its world."""
    NOT_FOUND = "not found"
    """A call named something that is not there."""
    UNAUTHORISED = "unauthorised"
    """Whoever acted may not do this."""
    LIMIT = "rate limit or time-out"
    """Too fast for a service, or too slow for its deadline or the episode's."""
    CONTEXT_OVERFLOW = "context overflow"
    """The tokens ran out: of the context, or of one answer."""
    OUT_OF_TURNS = "out of turns"
    """It was still at work, and not in a circle, when its turns were over."""
    ENVIRONMENT_FAULT = "environment fault"
    """What the policy acts in or speaks through broke: nothing to learn from."""
    VERIFIER_FAULT = "verifier fault"
    """It was played and could not be judged: the grade is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    failure_class: FailureClass
    turn: int
    """From 1; 0 is before the first."""
    excerpt: str
    """What was said there, shortened."""


def _status(*codes: int) -> str:
    """An HTTP status as complaints give it: first, or after a word that says it is one."""
    numbers = "|".join(map(str, codes))
    return (
        rf"^\W*(?:error:?\s*)?(?:{numbers})\b"
        rf"|\b(?:status(?:[ _]code)?|code|http(?:/\S+)?|error)\b\W{{0,3}}(?:{numbers})\b"
    )


_WORDS = (
    (
        # What a schema says, whatever the argument is called.
        FailureClass.WRONG_ARGUMENTS,
        r"; it takes |input should be|validation errors?|field required|unexpected keyword"
        r"|missing (?:\d+ )?required (?!scope|permission|privilege|role)"
        r"|additional propert|extra inputs|is not of type|not one of [\['\"(]|" + _status(422),
    ),
    (
        FailureClass.LIMIT,
        r"rate.?limit|too many (?:\S+ )?requests|too many in-flight|throttl|\bquotas?\b|slow ?down"
        r"|timed ?out\b|time[ -]out\b|timeout(?! (?:must|should|has to|cannot|may) )"
        r"|deadline (?:was |is |has )?(?:been )?(?:exceeded|expired|missed)|exceeded (?:its|the) deadline"
        r"|not (?:answered|finished) (?:in|after)|no answer after"
        r"|(?:instance|request|usage|call)s? limit|at capacity|capacity_reached"
        r"|temporarily unavailable|sessions are open|" + _status(408, 429, 503, 504),
    ),
    (
        FailureClass.ENVIRONMENT_FAULT,
        r"internal (?:server )?error|traceback \(|bad gateway|server error|service error"
        r"|connection (?:was )?(?:refused|reset|closed|aborted|lost)|broken pipe|unhandled"
        r"|disconnect|connect(?:ion)? error"
        r"|unexpected error|something went wrong|database is locked"
        r"|no space left on (?:the )?(?:device|disk|drive|volume)"
        r"|is not open; call reset|the env raised|" + _status(500, 502),
    ),
    (
        FailureClass.MALFORMED_CALL,
        r"\bno tool ['\"\w]|(?:unknown|invalid|no such|undefined) (?:tool|function|action|method)\b"
        r"|tool_not_found|method not found|not a (?:valid|known) tool"
        r"|\b(?:tool|function|action) \S+ (?:was |is |does )?not (?:found|exist|available|defined)"
        r"|not valid json|(?:invalid|malformed) json|json ?decode|parse error",
    ),
    (
        FailureClass.UNAUTHORISED,
        r"unauthori[sz]ed|not authori[sz]ed|forbidden|permission|access (?:was |is )?denied"
        r"|authenticat|credential|api key|privilege|insufficient (?:scope|right|access)"
        # Who may not, or what may not be done; not what a value may not be.
        r"|\b(?:you|users?|guests?|accounts?|apps?|this \w+) (?:may not\b"
        r"|(?:is |are |was |were )?(?:not|isn't|aren't) (?:allowed|permitted))"
        r"|not (?:allowed|permitted) to (?!be\b)|not_allowed|may not (?:access|edit|change|delete|see)"
        r"|(?:operation|action|access|method) (?:is )?not (?:allowed|permitted)"
        r"|(?:not|isn't|aren't) accessible|not (?:yours|your own)"
        r"|(?:not|must be|only|aren't|isn't) (?:a |an |the |its )?"
        r"(?:members?|owners?|admins?|administrators?|moderators?|organi[sz]ers?|collaborators?)\b"
        r"|has no account|\b(?:log|sign)(?:ged)? ?in\b|moderates .*where you do"
        r"|belongs to (?:another|someone)"
        r"|(?:don't|do not|doesn't|does not) (?:own|have (?:access|the rights?))"
        r"|(?:token|session) (?:is |has )?(?:invalid|expired)|(?:invalid|expired) token"
        r"|\bscopes?\b|" + _status(401, 403),
    ),
    (
        FailureClass.NOT_FOUND,
        r"not.?found|no such|(?:not|n't) exist|non-?existent"
        r"|(?:not|n't|unable to|failed to) (?:find|locate|resolve)"
        r"|\bno (?!(?:more|fewer|less|later|earlier|longer)\b|\w+ left\b)"
        r"[a-z][\w ]{0,40}?['\"(#\d]|\b(?:no|any) [\w ]{1,40} (?:with|named|called|matching)\b"
        r"|unknown [\w ]{0,30}\b(?:id|user|name|customer|order|repo\w*|channel|resource)\b"
        r"|no longer (?:exists?|available)|was deleted|no (?:results?|matches)|"
        + _status(404, 410),
    ),
)
_KINDS = tuple((kind, re.compile(words, re.IGNORECASE)) for kind, words in _WORDS)

_TOLD = re.compile(
    r"\s*(?:error:|error (?:executing|calling) "
    r"|\{\s*['\"]error['\"]\s*:(?!\s*(?:null|none|false|\"\"|''|\{\s*\}|\[\s*\])))",
    re.IGNORECASE,
)


_QUOTED = re.compile(r"(?<!\w)(['\"`])[^\n]*?\1(?!\w)")


def complaint_kind(text: str) -> FailureClass:
    """`complaint_kind("Error: no issue 20; list_issues shows the numbers")` is NOT_FOUND."""
    said = _without_names(text)
    return next(
        (kind for kind, words in _KINDS if words.search(said)), FailureClass.WRONG_ARGUMENTS
    )


def _without_names(text: str) -> str:
    """A name is quoted and says nothing; in braces, and after a colon to the end, a sentence is."""
    prose, brace, data = text.partition("{")

    def blanked(quoted: re.Match[str]) -> str:
        ends = not brace and not prose[quoted.end() :].strip(" .")
        told = ends and prose[: quoted.start()].rstrip().endswith(":")
        return quoted[0] if told else quoted[1] * 2

    return _QUOTED.sub(blanked, prose) + brace + data


def is_complaint(text: str) -> bool:
    """Whether a reply that nobody marked as an error begins as one, as tau-bench's do."""
    return _TOLD.match(text) is not None
