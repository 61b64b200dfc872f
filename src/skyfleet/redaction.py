"""Redaction: passwords and tokens inside names, URLs, commands, headers and error texts.

Every text that leaves the process goes through `redact`: errors, log lines, records of failures,
the stored configuration. A secret becomes `<redacted sha256:1a2b3c4d>`, the start of its hash, so
that two values can be compared.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any
from urllib.parse import unquote

from skyfleet.terminal import sanitize_lines

MARK = re.compile(r"<redacted sha256:[0-9a-f]{8}>")
OLD_MARK = "**********"
"""What earlier versions wrote in place of a secret."""
MIN_KNOWN_CHARACTERS = 6
"""A shorter secret is redacted where its place shows it, and not wherever it occurs."""

Mask = Callable[[str], str]

_SECRET_WORDS = frozenset(
    [
        "password",
        "passwd",
        "pwd",
        "passphrase",
        "passcode",
        "secret",
        "secrets",
        "token",
        "apikey",
        "authtoken",
        "accesstoken",
        "secretkey",
        "authorization",
        "auth",
        "credential",
        "credentials",
        "cookie",
        "bearer",
        "signature",
        "sig",
        "jwt",
    ]
)
_LABEL_WORDS = frozenset(
    [
        "file",
        "path",
        "dir",
        "folder",
        "url",
        "uri",
        "id",
        "ids",
        "name",
        "names",
        "count",
        "limit",
        "length",
        "len",
        "size",
        "budget",
        "type",
        "ttl",
        "seconds",
        "mode",
        "index",
        "level",
        "method",
        "scheme",
        "sock",
        "socket",
        "variable",
        "var",
        "tokens",
    ]
)
"""The last word of a name that holds no secret, such as password_file."""
_TOKEN_OF_A_MODEL = frozenset(
    [
        "eos",
        "bos",
        "pad",
        "unk",
        "sep",
        "cls",
        "mask",
        "stop",
        "image",
        "video",
        "audio",
        "start",
        "end",
        "special",
        "think",
        "first",
        "last",
        "next",
        "new",
        "begin",
        "tool",
        "decoder",
        "prompt",
        "per",
    ]
)
_KEY_OF_DATA = frozenset(
    [
        "task",
        "env",
        "data",
        "group",
        "sort",
        "primary",
        "foreign",
        "partition",
        "lookup",
        "answer",
        "prompt",
        "label",
        "dict",
        "row",
        "cache",
        "index",
        "reward",
        "public",
        "value",
        "input",
        "output",
        "image",
        "target",
        "message",
        "metric",
        "column",
        "field",
        "set",
        "group",
    ]
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


@cache
def looks_secret(name: str) -> bool:
    """Whether a value of this name is a secret: api_key, DB_PASSWORD, X-Auth-Token."""
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or words[-1] in _LABEL_WORDS:
        return False
    before = words[-2] if len(words) > 1 else ""
    if words[-1] == "token":
        return before not in _TOKEN_OF_A_MODEL
    if words[-1] in ("key", "keys"):
        return before not in _KEY_OF_DATA
    return not _SECRET_WORDS.isdisjoint(words)


def hash_secret(secret: str) -> str:
    """`<redacted sha256:1a2b3c4d>`; a secret that is redacted already stays as it is."""
    if MARK.fullmatch(secret) or secret == OLD_MARK:
        return secret
    digest = hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
    return f"<redacted sha256:{digest[:8]}>"


_M = MARK.pattern
_END = r"[^\s\"'<>;]"
_RULES: tuple[tuple[re.Pattern[str], bool], ...] = (
    # Whether the group `name` must look secret.
    (
        re.compile(
            rf"(?i)(?P<a>[a-z][a-z0-9+.-]*://[^\s/?#:@]*:)(?P<s>(?:{_M}|[^\s/?#])+)(?P<z>@)"
        ),
        False,
    ),
    (
        re.compile(
            rf"(?i)(?P<a>[a-z][a-z0-9+.-]*://[^\s/?#:@]*:)(?!\d{{0,5}}(?:[/?#\s]|$))(?P<s>(?:{_M}|[^\s@<>\"'])+)(?P<z>@)"
        ),
        False,
    ),
    # user:password@host:80 without a scheme
    (
        re.compile(
            rf"(?P<a>(?<![\w/@.{{-])[\w.+-]+:)(?P<s>{_M}|[^\s/@:\"'<>]+)(?P<z>@[\w.-]+(?::\d|/))"
        ),
        False,
    ),
    (re.compile(rf"(?i)(?P<a>\b(?:https?|wss?)://)(?P<s>{_M}|[^\s/?#:@]+)(?P<z>@)"), False),
    (re.compile(rf"(?P<a>[?&;#](?P<name>[\w.%-]+)=)(?P<s>{_M}|[^&#\s\"'<>]+)(?P<z>)"), True),
    (
        re.compile(
            r"(?i)(?P<a>\b(?:proxy-)?(?:authorization|x-api-key|api-key|x-auth-token|cookie|set-cookie)"
            rf"[\"']?\s*[:=]\s*[\"']?(?:bearer\s+|basic\s+|token\s+)?)(?P<s>{_M}|{_END}+)(?P<z>)"
        ),
        False,
    ),
    (re.compile(r"(?i)(?P<a>\bbearer\s+)(?P<s>[\w.~+/=-]{6,})(?P<z>)"), False),
    (
        re.compile(
            rf"(?P<a>(?P<q>[\"'])(?P<name>[\w.-]+)(?P=q)\s*:\s*(?P<r>[\"']))(?P<s>{_M}|.*?)(?P<z>(?P=r))"
        ),
        True,
    ),
    (
        re.compile(
            rf"(?P<a>(?<!\S)--?(?P<name>[A-Za-z][\w-]*)(?:=|\s+)[\"']?)(?P<s>{_M}|{_END}+)(?P<z>)"
        ),
        True,
    ),
    (
        re.compile(
            rf"(?P<a>(?<![\w?&;#-])(?P<name>[A-Za-z_][\w.-]*)=[\"']?)(?P<s>{_M}|{_END}+)(?P<z>)"
        ),
        True,
    ),
    (
        re.compile(
            r"(?P<a>)(?P<s>\bsk-[\w-]{16,}|\bgh[pousr]_\w{20,}|\bgithub_pat_\w{20,}|\bhf_\w{16,}|"
            r"\bglpat-[\w-]{16,}|\bxox[abprs]-[\w-]{10,}|\bAKIA[0-9A-Z]{16}\b|\bAIza[\w-]{30,}|"
            r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END|\Z))(?P<z>)",
            re.DOTALL,
        ),
        False,
    ),
)
_HINTS = re.compile(
    r"://|=|:|(?i:bearer)|--|-----BEGIN|sk-|gh[pousr]_|github_pat_|hf_|glpat-|xox|AKIA|AIza|eyJ"
)
_PLAIN_NAMES = frozenset({"key", "keys", "signature", "auth"})
"""In prose `key=value` is an example and not a secret; in a query it is one."""


def redact_patterns(text: str, mask: Mask = hash_secret) -> str:
    """Replace the secrets that their place or their form shows."""
    if not _HINTS.search(text):
        return text
    for rule, named in _RULES:
        text = rule.sub(partial(_replace, is_named=named, mask=mask), text)
    return text


def _replace(found: re.Match[str], *, is_named: bool, mask: Mask) -> str:
    groups = found.groupdict()
    if is_named:
        name, in_query = unquote(groups["name"]).rsplit(".", 1)[-1], groups["a"][0] in "?&;#"
        if not looks_secret(name) or (name in _PLAIN_NAMES and not in_query):
            return found[0]
    if groups["s"].startswith("${"):
        return found[0]
    return f"{groups['a']}{mask(groups['s'])}{groups['z']}"


def redact_value(
    value: Any, mask: Mask = hash_secret, *, name: str = "", is_secret: bool = False
) -> Any:
    """Redact the strings of plain data: by the names of mappings, in commands, and inside texts."""
    is_secret = is_secret or looks_secret(name)
    if isinstance(value, Mapping):
        return {
            key: redact_value(item, mask, name=str(key), is_secret=is_secret)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return _redact_command(value, mask, is_secret=is_secret)
    if is_secret and isinstance(value, int) and not isinstance(value, bool) and abs(value) > 999:
        return mask(str(value))
    if not isinstance(value, str) or not value:
        return value
    return mask(value) if is_secret else redact_patterns(value, mask)


def _redact_command(words: Sequence[Any], mask: Mask, *, is_secret: bool) -> list[Any]:
    """A list may be a command: `--password X`, `-pX`, `-u user:X`, `TOKEN=X`."""
    redacted: list[Any] = []
    before = ""
    for word in words:
        if isinstance(word, str) and not is_secret and not word.startswith("${"):
            redacted.append(_redact_word(word, before, mask))
        else:
            redacted.append(redact_value(word, mask, is_secret=is_secret))
        before = word if isinstance(word, str) else ""
    return redacted


_PORT = re.compile(r"[\d.:\[\]/-]*(?:/tcp|/udp)?")


def _redact_word(word: str, before: str, mask: Mask) -> str:
    if before.startswith("-") and "=" not in before and not word.startswith("-"):
        if looks_secret(before):
            return mask(word)
        if before == "-p" and not _PORT.fullmatch(word):
            return mask(word)
        if before in ("-u", "--user") and ":" in word:
            user, _, password = word.partition(":")
            return f"{user}:{mask(password)}"
    if word.startswith("-p") and len(word) > 2 and word[2] != "=" and not _PORT.fullmatch(word[2:]):
        return f"-p{mask(word[2:])}"
    return redact_patterns(word, mask)


_known: dict[str, str] = {}
_known_pattern: re.Pattern[str] | None = None


def remember_secrets(secrets: Iterable[str]) -> None:
    """Redact these strings in every later text of this process, wherever they occur."""
    global _known_pattern
    new = {form for secret in secrets for form in (secret, unquote(secret))}
    new = {form for form in new if len(form) >= MIN_KNOWN_CHARACTERS and not MARK.search(form)}
    if new <= _known.keys():
        return
    _known.update({form: hash_secret(form) for form in new})
    longest_first = sorted(_known, key=len, reverse=True)
    _known_pattern = re.compile("|".join(map(re.escape, longest_first)))


def remember_environment(variables: Mapping[str, str]) -> None:
    """Remember the environment variables whose names look secret, such as OPENAI_API_KEY."""
    remember_secrets(
        value
        for name, value in variables.items()
        if len(value) >= 8 and name not in ("PWD", "OLDPWD") and looks_secret(name)
    )


def redact_known(text: str) -> str:
    """Redact the secrets of the configuration and the environment only."""
    if _known_pattern is None:
        return text
    return _known_pattern.sub(lambda found: _known[found[0]], text)


def redact(text: str) -> str:
    """Redact known secrets and what looks like one; for everything that leaves the process."""
    return redact_patterns(redact_known(text))


class RedactingFilter(logging.Filter):
    """Redacts log records and escapes their control characters; add it to a logging handler."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = sanitize_lines(redact(record.getMessage())), None
        if record.exc_info and not record.exc_text:
            text = logging.Formatter().formatException(record.exc_info)
            record.exc_text = sanitize_lines(redact(text))
        return True


@cache
def install_log_filter() -> None:
    """Filter what Python prints of log records if nobody has configured logging."""
    if logging.lastResort is not None:
        logging.lastResort.addFilter(RedactingFilter())
