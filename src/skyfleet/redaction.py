"""Redaction: passwords and tokens inside names, URLs, commands, headers and error texts.

Every text that leaves the process goes through `redact`: errors, log lines, records of failures,
the stored configuration. A secret becomes `<redacted sha256:1a2b3c4d>`, the start of its hash, so
that two values can be compared.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import unquote

from skyfleet.secret_names import looks_secret

MARK = re.compile(r"<redacted sha256:[0-9a-f]{8}>")
OLD_MARK = "**********"
"""What earlier versions wrote in place of a secret."""
MIN_KNOWN_CHARACTERS = 6
"""A shorter secret is redacted where its place shows it, and not wherever it occurs."""

MIN_TOKEN_CHARACTERS = 16
"""A part of a secret URL that is as long as this may be a token."""

Mask = Callable[[str], str]


def hash_secret(secret: str) -> str:
    """`<redacted sha256:1a2b3c4d>`; a secret that is redacted already stays as it is."""
    if MARK.fullmatch(secret) or secret == OLD_MARK:
        return secret
    digest = hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
    return f"<redacted sha256:{digest[:8]}>"


# Each pattern has the groups `a` (before), `s` (the secret) and `z` (after). Repetitions are bounded,
# so that the time for a long text is proportional to its length.
_M = MARK.pattern


def _word(stops: str) -> str:
    """Everything but spaces and `stops`; a semicolon ends it before a space and before `name=`."""
    part = rf"[^\s;{stops}]{{1,4096}}"
    return rf"{part}(?:;(?![\w.% -]{{1,64}}=){part}){{0,16}}"


_QUOTES = "\"'<>"
_VALUE = rf"(?P<s>{_M}|{_word(_QUOTES)})(?P<z>)"
_SCHEME = r"(?i)(?P<a>(?:(?<![a-z0-9+.-])[a-z][a-z0-9+.-]{0,30}:|(?<![\w:/]))//[^\s/?#:@]{0,256}:)"
_OPTION = r"[\s'\"]-{name}(?:['\"],)?\s{{0,4}}['\"]?"
_COMMAND = r"(?P<a>\b(?:{tools})\b[^\n|;&]{{0,200}}?{option})"
_ALWAYS = tuple(
    re.compile(pattern, re.DOTALL)
    for pattern in (
        # scheme://user:password@host, whose password may contain @, or else a slash
        rf"{_SCHEME}(?P<s>(?:{_M}|[^\s/?#]){{1,256}})(?P<z>@)",
        rf"{_SCHEME}(?!\d{{0,5}}(?:[/?#\s]|$))(?P<s>(?:[^\s@<>\"']{{1,256}}+|{_M}){{1,4}}+)(?P<z>@)",
        # user:password@host:80 without a scheme
        rf"(?P<a>(?<![\w/@.{{+-])[\w.+-]{{1,64}}:)(?P<s>{_M}|[^\s/@:\"'<>]{{1,256}})"
        r"(?P<z>@[\w.-]{1,256}(?::\d|/))",
        # https://token@host
        rf"(?i)(?P<a>\b(?:https?|wss?)://)(?P<s>{_M}|[^\s/?#:@]{{1,256}})(?P<z>@)",
        # Webhooks, whose path is the secret
        r"(?i)(?P<a>\b(?:hooks\.slack\.com/(?:services|workflows|triggers)|webhook\.office\.com|"
        rf"discord(?:app)?\.com/api/webhooks)/)(?P<s>{_M}|[\w%@/.-]{{1,512}})(?P<z>)",
        rf"(?i)(?P<a>\bapi\.telegram\.org/(?:file/)?bot)(?P<s>{_M}|[\w:%-]{{1,256}})(?P<z>)",
        r"(?i)(?P<a>\b(?:set-)?cookie[\"']?\s{0,8}[:=]\s{0,8}[\"']?)"
        rf"(?P<s>{_M}|[\w.!#$%&*+^|~-]{{1,64}}=[^\s;\"'<>]{{0,4096}}(?:;\s{{0,8}}[^\s;\"'<>]{{1,4096}}){{0,64}})"
        r"(?P<z>)",
        r"(?i)(?P<a>\b(?:proxy-)?(?:authorization|x-api-key|api-key|x-auth-token|cookie|set-cookie)"
        rf"[\"']?\s{{0,8}}[:=]\s{{0,8}}[\"']?(?:(?:bearer|basic|token)\s{{1,8}})?){_VALUE}",
        r"(?i)(?P<a>\bbearer\s{1,8})(?P<s>[\w.~+/=-]{6,4096})(?P<z>)",
        # mysql -pX, curl -u user:X, redis-cli -a X
        _COMMAND.format(
            tools=r"mysql\w{0,16}|mariadb[\w-]{0,16}|sshpass|mongo\w{0,16}",
            option=_OPTION.format(name="p"),
        )
        + rf"(?![\d.:/]{{1,32}}(?:/\w\w\w)?(?:[\s'\"]|$)){_VALUE}",
        _COMMAND.format(
            tools="curl|wget|lftp",
            option=r"[\s'\"](?:-u|-U|--user|--proxy-user)(?:['\"],)?[\s=]{0,4}['\"]?[^\s:,'\"]{1,128}[:,]",
        )
        + _VALUE,
        _COMMAND.format(tools="redis-cli", option=_OPTION.format(name="a")) + _VALUE,
        r"(?P<a>)(?P<s>\bsk-[\w-]{16,256}|\bgh[pousr]_\w{20,256}|\bgithub_pat_\w{20,256}|"
        r"\bhf_\w{16,256}|\bglpat-[\w-]{16,256}|\bxox[abprs]-[\w-]{10,256}|\bAKIA[0-9A-Z]{16}\b|"
        r"\bAIza[\w-]{30,256}|\beyJ[\w-]{8,999}+\.[\w-]{8,4096}+\.[\w-]{1,999})(?P<z>)",
    )
)
# In quotes, spaces belong to a value.
_IN_QUOTES = r"(?<=\")(?:[^\"\\\n]|\\.){1,999}(?=\")|(?<=')(?:[^'\\\n]|\\.){1,999}(?=')"
_NAMED_VALUE = re.compile(rf"{_M}|{_IN_QUOTES}|{_word(_QUOTES)}")
_NAMED = (
    # ?token=... and ;PWD=...
    (re.compile(r"[?&;#](?P<name>[\w.%-]{1,64})="), re.compile(rf"{_M}|{_word('&#' + _QUOTES)}")),
    # "password": "..."
    (
        re.compile(r"(?P<q>[\"'])(?P<name>[\w.-]{1,64})(?P=q)\s{0,8}:\s{0,8}[\"']"),
        re.compile(rf"{_M}|{_IN_QUOTES}"),
    ),
    # --password ..., and '--password', '...'
    (
        re.compile(
            r"(?<![^\s'\"])--?(?P<name>[A-Za-z][\w-]{0,63})"
            r"(?:=|\s{1,8}(?!--?[A-Za-z])|['\"],\s{1,8}(?!['\"]-))[\"']?"
        ),
        _NAMED_VALUE,
    ),
    # PASSWORD=...
    (re.compile(r"(?<![\w?&;#.-])(?P<name>[A-Za-z_][\w.-]{0,127})=[\"']?"), _NAMED_VALUE),
)
"""What shows a name, and the value after it."""
_HINTS = re.compile(
    r"://|=|:|(?i:bearer)|--|[\s'\"]-[pua]|sk-|gh[pousr]_|github_pat_|hf_|glpat-|xox|AKIA|AIza|eyJ|"
    r"hooks\.slack|webhook|telegram"
)
_PLAIN_NAMES = frozenset({"key", "keys", "signature", "auth"})
"""In prose `key=value` is an example and not a secret; in a query it is one."""
_COUNT = re.compile(r"(?i).{1,3}|[\d.,/%+-]*[./%][\d.,/%+-]*|true|false|none|null")
_PEM = re.compile(r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----")
_PEM_CHARACTERS = 9999


def redact_patterns(text: str, mask: Mask = hash_secret) -> str:
    """Replace the secrets that their place or their form shows."""
    if "-----BEGIN" in text:
        text = _redact_pem(text, mask)
    if not _HINTS.search(text):
        return text
    for rule in _ALWAYS:
        text = rule.sub(partial(_replace, mask=mask), text)
    for name_rule, value_rule in _NAMED:
        text = _redact_named(text, name_rule, value_rule, mask)
    return text


def _replace(found: re.Match[str], *, mask: Mask) -> str:
    before, secret, after = found["a"], found["s"], found["z"]
    return found[0] if secret.startswith("${") else f"{before}{mask(secret)}{after}"


def _redact_named(
    text: str, name_rule: re.Pattern[str], value_rule: re.Pattern[str], mask: Mask
) -> str:
    parts: list[str] = []
    done = 0
    for found in name_rule.finditer(text):
        name, in_query = unquote(found["name"]).rsplit(".", 1)[-1], found[0][0] in "?&;#"
        if found.start() < done or not looks_secret(name):
            continue
        value = value_rule.match(text, found.end())
        if value is None or value[0].startswith("${"):
            continue
        if not in_query and (name in _PLAIN_NAMES or _is_count(name, value[0])):
            continue
        parts += text[done : found.end()], mask(value[0])
        done = value.end()
    return "".join([*parts, text[done:]]) if parts else text


def _is_count(name: str, value: str) -> bool:
    """Whether `pass=` tells how many or whether, such as 0.43 or 12/20."""
    return name.lower().endswith("pass") and _COUNT.fullmatch(value) is not None


def _redact_pem(text: str, mask: Mask) -> str:
    """Private keys, up to their end or that of the text."""
    parts: list[str] = []
    done = 0
    while found := _PEM.search(text, done):
        start = found.start()
        limit = start + _PEM_CHARACTERS
        end = text.find("-----END", found.end(), limit)
        end = min(limit, len(text)) if end < 0 else end + len("-----END")
        parts += text[done:start], mask(text[start:end])
        done = end
    return "".join([*parts, text[done:]])


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
    before = tool = ""
    for word in words:
        if isinstance(word, str) and not is_secret and not word.startswith("${"):
            redacted.append(_redact_word(word, before, mask, tool=tool))
            tool = "redis-cli" if word.endswith("redis-cli") else tool
        else:
            redacted.append(redact_value(word, mask, is_secret=is_secret))
        before = word if isinstance(word, str) else ""
    return redacted


_PORT = re.compile(r"[\d.:\[\]/-]*(?:/tcp|/udp)?")
_LOGIN_OPTIONS = ("-u", "--user", "--proxy-user")
_LOGIN = re.compile(r"(-u|--user=|--proxy-user=|)([^:]*):(.+)", re.DOTALL)
"""`-uuser:X`, `--user=user:X`, and `user:X` after one of these options."""


def _redact_word(word: str, before: str, mask: Mask, *, tool: str) -> str:
    if before.startswith("-") and "=" not in before and not word.startswith("-"):
        if looks_secret(before) or (before == "-a" and tool == "redis-cli"):
            return mask(word)
        if before == "-p" and not _PORT.fullmatch(word):
            return mask(word)
        if before in ("-H", "--header") and looks_secret(word.partition(":")[0]):
            name, colon, value = word.partition(":")
            kept = re.match(r"\s*(?:(?:bearer|basic|token)\s+)?", value, re.IGNORECASE)
            start = kept.end() if kept else 0
            return f"{name}{colon}{value[:start]}{mask(value[start:])}"
    found = _LOGIN.fullmatch(word)
    if found and not found[1] and (word.startswith("-") or before not in _LOGIN_OPTIONS):
        found = None
    if found and not _PORT.fullmatch(f"{found[2]}:{found[3]}"):  # docker --user 1000:1000
        return f"{found[1]}{found[2]}:{mask(found[3])}"
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


def split_secret_url(url: str) -> list[str]:
    """A URL that is a secret, and the long parts after its host: a webhook's token is one of them."""
    _, *parts = re.split("[/?#]", url.partition("://")[2])
    return [url, *(part for part in parts if len(part) >= MIN_TOKEN_CHARACTERS)]


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
