"""Find text of an agent that could be mistaken for a remote verifier's output.

A remote service returns a verifier's output as one text, in which a quoted answer looks like the
verifier's own lines. So if the agent wrote anything like a result line, plainly or escaped, none
of the lines count.
"""

from __future__ import annotations

import html
import json
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import unquote

QUOTED_NOTE = (
    "\n[skyfleet] The agent wrote something like a result line, so only the number that the "
    "verifier returned counts.\n"
)

# Each takes time linear in the text, whatever an agent writes.
_APP_LINE = re.compile(r"^[^\w\n]*app\b.*:\s*[01]", re.M)
_ESCAPE = re.compile(r"(?<!\\)\\+(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|([nrt]))")
_REFERENCE = re.compile(r"&#0*([0-9]+)")
_MAX_REFERENCE_DIGITS = 7
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t"}
_MAX_DECODINGS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Quoted:
    """Which result lines in a verifier's output may be the agent's."""

    checks: bool = False
    """Accumulators and `App mail: 1`."""
    judge_error: bool = False


def find_quoted(texts: Iterable[str], arguments: Iterable[object]) -> Quoted:
    """Search an agent's texts and the arguments of its calls for parts of result lines."""
    written = [*texts, *(json.dumps(each, default=str, ensure_ascii=False) for each in arguments)]
    versions = [version for text in written for version in _decode(text)]
    letters = [re.sub(r"[^a-z]", "", version) for version in versions]
    return Quoted(
        checks=any("accumulator" in text for text in letters)
        or any(_APP_LINE.search(version) for version in versions),
        judge_error=any("judgeerror" in text for text in letters),
    )


def _decode(text: str) -> list[str]:
    """Return the text in lower case, as it is and without one, two and three layers of escapes."""
    versions = [text]
    for _ in range(_MAX_DECODINGS):
        unquoted = unquote(_ESCAPE.sub(_decode_escape, versions[-1]))
        decoded = html.unescape(_REFERENCE.sub(_shorten_reference, unquoted))
        if decoded == versions[-1]:
            break
        versions.append(decoded)
    return [unicodedata.normalize("NFKC", version).casefold() for version in versions]


def _decode_escape(found: re.Match[str]) -> str:
    code = found[1] or found[2]
    return chr(int(code, 16)) if code else _CONTROLS[found[3]]


def _shorten_reference(found: re.Match[str]) -> str:
    """`html` reads a reference as a number, and Python refuses to read a very long one."""
    return f"&#{found[1]}" if len(found[1]) <= _MAX_REFERENCE_DIGITS else "\ufffd"
