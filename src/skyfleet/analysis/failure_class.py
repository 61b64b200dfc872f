"""Failure classes, and the class that the text of a tool error points to."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class FailureClass(StrEnum):
    """Why an episode failed, in the order in which tables list the classes."""

    FALSE_COMPLETION = "false completion"
    """The policy ended the episode as finished, but the state or the answer is wrong."""
    GAVE_UP = "gave up"
    """The policy stopped without trying, or wrote that it cannot do the task."""
    LOOP = "loop or repetition"
    """The last calls, or the last text, repeat."""
    MALFORMED_CALL = "malformed call"
    """A call does not parse, or names a tool that does not exist."""
    WRONG_ARGUMENTS = "wrong arguments"
    """A tool rejected its arguments, by its schema or by a rule of the environment."""
    NOT_FOUND = "not found"
    """A call referred to an object that does not exist."""
    UNAUTHORISED = "unauthorised"
    """The agent lacks the permission."""
    LIMIT = "rate limit or time-out"
    """A rate limit, a service time-out, or the time limit of the episode."""
    CONTEXT_OVERFLOW = "context overflow"
    """The context, or the token limit of one response, was exhausted."""
    OUT_OF_TURNS = "out of turns"
    """The turn limit was reached without a loop."""
    ENVIRONMENT_FAULT = "environment fault"
    """The environment or the inference server failed, so the episode has no training signal."""
    VERIFIER_FAULT = "verifier fault"
    """The episode finished but could not be graded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    failure_class: FailureClass
    turn: int
    """Counted from 1; 0 is before the first turn."""
    excerpt: str
    """The text there, shortened."""


def _status(*codes: int) -> str:
    """Match an HTTP status at the start of a text, or after a word such as `status` or `code`."""
    numbers = "|".join(map(str, codes))
    return (
        rf"^\W*(?:error:?\s*)?(?:{numbers})\b"
        rf"|\b(?:status(?:[ _]code)?|code|http(?:/\S+)?|error)\b\W{{0,3}}(?:{numbers})\b"
    )


_PATTERNS = (
    (
        # Schema errors come first, because the names of arguments match other patterns.
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
        # Who is not allowed, or which action; not which value is not allowed.
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
_COMPILED = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _PATTERNS)

_ERROR_PREFIX = re.compile(
    r"\s*(?:error:|error (?:executing|calling) "
    r"|\{\s*['\"]error['\"]\s*:(?!\s*(?:null|none|false|\"\"|''|\{\s*\}|\[\s*\])))",
    re.IGNORECASE,
)


_QUOTED = re.compile(r"(?<!\w)(['\"`])[^\n]*?\1(?!\w)")


def classify_error_text(text: str) -> FailureClass:
    """`classify_error_text("Error: no issue 20; list_issues shows the numbers")` is NOT_FOUND.

    A text that matches no pattern counts as wrong arguments.
    """
    prose = _blank_quotes(text)
    return next(
        (kind for kind, pattern in _COMPILED if pattern.search(prose)),
        FailureClass.WRONG_ARGUMENTS,
    )


def _blank_quotes(text: str) -> str:
    """Blank quoted names, which must not match; keep JSON and a quoted sentence after a colon."""
    prose, brace, data = text.partition("{")

    def blank(quoted: re.Match[str]) -> str:
        ends = not brace and not prose[quoted.end() :].strip(" .")
        is_sentence = ends and prose[: quoted.start()].rstrip().endswith(":")
        return quoted[0] if is_sentence else quoted[1] * 2

    return _QUOTED.sub(blank, prose) + brace + data


def is_error_text(text: str) -> bool:
    """Whether a reply that is not flagged as an error starts like one, as in tau-bench."""
    return _ERROR_PREFIX.match(text) is not None
